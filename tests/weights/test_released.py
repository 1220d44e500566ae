"""The steps of docs/finetune.md from a released model to a tuned one, with a small stand-in for the download."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from config import preset
from data import tokenizers
from tests.data.test_sentencepiece import EXACT, train_model
from tests.weights.test_convert import command, tensors_of, write_run

ROOT = Path(__file__).parents[2]
SMALL = {"model.d_model": 32, "model.n_layers": 2, "model.n_heads": 4, "model.n_kv_heads": 2, "model.d_head": 8,
         "model.d_ff": 44, "model.window": "12", "model.tie_embeddings": False}  # fmt: skip


def steps() -> list[list[str]]:
    """Return the words of the page's commands, with shorter sequences, fewer steps and one device."""
    page = (ROOT / "docs/finetune.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## From a released model")
    lines = section.split("```")[1].strip().splitlines()
    shorter = {"2048": "40", "--run.steps 20": "--run.steps 2", "--mesh fsdp=16 ": ""}
    return [shlex.split(functools.reduce(lambda line, old: line.replace(old, shorter[old]), shorter, line))
            for line in lines]  # fmt: skip


@pytest.mark.extra("sentencepiece")
def test_the_steps_from_a_download_to_tuned_weights_work(tmp_path):
    """Catches a step whose output the next one can't read, texts that begin with another token than the model's, a
    window or a tokenizer that is lost on the way, and weights that training does not change."""
    shutil.copytree(ROOT / "weights", tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__"))
    hf = tmp_path / "mistral"
    train_model(tmp_path / "tokenizer.model", model_type="bpe", **EXACT)
    vocab_size = tokenizers.load(f"sp:{tmp_path}/tokenizer.model").n_vocab
    write_run(preset("llama3_8b", **SMALL, **{"model.vocab_size": vocab_size}), tmp_path / "start")
    assert command("to-hf", tmp_path / "start", "--out", hf) == 0
    (tmp_path / "tokenizer.model").rename(hf / "tokenizer.model")
    about = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(about | {"bos_token_id": 1, "max_position_embeddings": 64}))

    outputs = []
    for words in steps():
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        words = [str(ROOT / "main.py") if word == "main.py" else word for word in words[1:]]
        done = subprocess.run([sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        outputs.append(done.stdout)
    assert "on v5p:2x2x4" in outputs[0] and re.search(r"mistral in \d+ arrays", outputs[1])
    assert outputs[2].startswith("def ")
    tuned = json.loads((tmp_path / "mistral-tuned" / "config.json").read_text())
    assert (tuned["model_type"], tuned["sliding_window"], tuned["vocab_size"]) == ("mistral", 12, vocab_size)
    assert (tuned["bos_token_id"], tuned["max_position_embeddings"]) == (1, 64)
    before, after = tensors_of(hf), tensors_of(tmp_path / "mistral-tuned")
    assert before.keys() == after.keys() and all((before[name] != after[name]).any() for name in before)
