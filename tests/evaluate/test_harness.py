"""The adaptor to lm-evaluation-harness gives the results of the harness's own Hugging Face adaptor.

The model is a tiny random Llama, created here and converted. There is one task for each kind of request.
"""

import functools
import json
import os

import jax
import numpy as np
import pytest

from tests import extras

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# Ignore warnings of torch, transformers, datasets and the harness (November 2026).
pytestmark = [pytest.mark.filterwarnings("ignore"), extras.require("evaluate", "parity", "torch")]

import tokenizers
import torch
import transformers
from lm_eval.api.registry import get_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from evaluate import harness
from evaluate.answering import Answerer
from generate.runs import open_run
from tests.evaluate.test_command import command, refused
from weights import convert

END, POSITIONS = "<|endoftext|>", 48
TEXTS = ["the cat sat on the mat and the dog sat on the cat", "a log, a dog; a hat — a mat",
         "over the hill and far away " * 4, "x ", "over " * 70]  # fmt: skip
DOCS = [{"text": text, "begin": text[: 5 * n], "choices": ["a", " dog", "b", " the mat sat", "c", "d"], "right": n % 3}
        for n, text in enumerate(TEXTS)]  # fmt: skip
TASKS = {
    "choices": ("multiple_choice", ["acc", "acc_norm"], {"doc_to_text": "{{begin}}", "doc_to_choice": "{{choices}}",
                                                         "doc_to_target": "{{right}}", "target_delimiter": ""}),
    "word": ("loglikelihood", ["perplexity", "acc"], {"doc_to_text": "{{text.split(' ')[:-1] | join(' ')}}",
                                                      "doc_to_target": "{{' ' + text.split(' ')[-1]}}"}),
    "rolling": ("loglikelihood_rolling", ["word_perplexity", "byte_perplexity", "bits_per_byte"],
                {"doc_to_text": "", "doc_to_target": "{{text}}"}),
    "written": ("generate_until", ["exact_match"], {"doc_to_text": "{{begin}}", "doc_to_target": "{{text}}",
                                                    "generation_kwargs": {"until": ["cc", "e"], "max_gen_toks": 9}}),
}  # fmt: skip


def write_model(folder):
    """Write a tokenizer with bytes and a few merges, and a model that often prefers one of the first letters."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=268, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens([END])
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 268)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END, eos_token=END)
    tokenizer.save_pretrained(folder)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=272, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, max_position_embeddings=POSITIONS, pad_token_id=None,
        bos_token_id=268, eos_token_id=268))  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn(x.shape) * (1.5 * x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3) + (x.ndim == 1))
        model.lm_head.weight[tokenizer.convert_tokens_to_ids([*"abcd"])] *= 6
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A Hugging Face folder, the run converted from it, and a folder of tasks."""
    home = tmp_path_factory.mktemp("harness")
    write_model(home / "hf")
    convert.from_hf(home / "hf", home / "run")
    (home / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    docs = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(home / "docs.jsonl")}}}
    (home / "tasks").mkdir()
    for name, (kind, metrics, texts) in TASKS.items():
        task = {"task": name, **docs, "test_split": "test", "output_type": kind, **texts,
                "metric_list": [{"metric": metric} for metric in metrics], "metadata": {"version": 1}}  # fmt: skip
        (home / "tasks" / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    # The code of this task imports the package that shares its name with our evaluate.
    own = json.dumps(json.loads((home / "tasks/choices.yaml").read_text()) | {"task": "own", "doc_to_target": "CODE"})
    (home / "tasks" / "own.yaml").write_text(own.replace('"CODE"', "!function own.right"))
    (home / "tasks" / "own.py").write_text("from evaluate import load\n\ndef right(doc):\n    return doc['right']\n")
    return home


def ask_tasks(lm, home, names):
    manager = TaskManager(include_path=str(home / "tasks"), include_defaults=False)
    return simple_evaluate(lm, tasks=names, task_manager=manager, torch_random_seed=None, bootstrap_iters=0)


def hf_scores(home, names, begins):
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "hf", dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "hf")
    lm = HFLM(model, tokenizer=tokenizer, max_length=POSITIONS, batch_size=3, add_bos_token=begins, device="cpu")
    return ask_tasks(lm, home, names)


def our_scores(home, names, begins, mesh):
    run = open_run(str(home / "run"), mesh, str(home / "hf" / "tokenizer.json"))
    return ask_tasks(harness.Adaptor(Answerer(run, 6, END if begins else "")), home, names)


def answers(found, task):
    """Return the answers in the order of the examples: scores with their is-greedy flags, or texts."""
    rows = sorted(found["samples"][task], key=lambda row: row["doc_id"])
    number = lambda x: {"True": 1.0, "False": 0.0}.get(str(x)) if str(x) in ("True", "False") else float(x)
    leaves = jax.tree.leaves([row["resps"] for row in rows])
    return leaves if TASKS[task][0] == "generate_until" else [number(x) for x in leaves]


@pytest.mark.parametrize("begins, mesh", [(False, "data=1"), (True, "fsdp=2,context=2,tensor=2")])
def test_the_adaptor_equals_that_of_the_harness(begins, mesh, home):
    """Catches other tokens or windows, a cut on the right, a sum over other positions, a prefix that is missing or
    added wrongly, other stops, and answers in another order."""
    # Our prompts always begin with end of text.
    names = [*TASKS] if begins else ["choices", "word", "rolling"]
    want, got = hf_scores(home, names, begins), our_scores(home, names, begins, mesh)
    for name in names:
        if name == "written":
            assert answers(got, name) == answers(want, name) and len({*answers(want, name)}) >= 4
            continue
        np.testing.assert_allclose(answers(got, name), answers(want, name), atol=1e-4, rtol=1e-6)
        values, wanted = ({key: x for key, x in found["results"][name].items() if isinstance(x, float)}
                          for found in (got, want))  # fmt: skip
        assert values == pytest.approx(wanted, rel=1e-4) and len(values) >= 2
    assert 1.0 in answers(want, "choices")[1::2], "no answer is the most likely one, so its flag is not tested"


def test_the_command_runs_tasks_and_stores_answers(home, capfd):
    """Catches prints of the harness among the results, an answer that is computed again after a kill, metrics without
    their task, and a task whose code imports our evaluate instead of the package."""
    argv = [home / "run", "--tokenizer", home / "hf/tokenizer.json", "--include_path", home / "tasks", "--batch", "6",
            "--cache", home / "answers"]  # fmt: skip
    status, out, _ = command(*argv, "--tasks", "word,own")
    assert status == 0
    header, *lines = out.splitlines()
    assert header.split() == ["task", "metric", "value", "stderr", "shots", "examples"]
    assert [line.split()[:2] for line in lines] == [
        ["word", "perplexity"], ["word", "acc"], ["own", "acc"], ["own", "acc_norm"]]  # fmt: skip
    before = (home / "answers").read_text()
    status, out, _ = command(*argv, "--tasks", "own", "--json")
    found = json.loads(out)
    assert (home / "answers").read_text() == before
    assert f"{found['results']['own']['acc,none']:.4f}" == lines[2].split()[2]
    assert found["n-samples"]["own"]["effective"] == len(TEXTS) and found["step"] is None


def test_the_harness_finds_what_it_needs_to_ask_a_server(home):
    """Catches a package that is missing for `lm_eval --model local-completions`, the command of docs/evaluate.md."""
    asker = get_model("local-completions")(model="run", base_url="http://127.0.0.1:9/v1/completions",
                                           tokenizer=str(home / "hf"), max_length=POSITIONS)  # fmt: skip
    assert asker.tok_encode("the cat") == asker.tokenizer.encode("the cat", add_special_tokens=False)


def test_missing_tasks_data_and_tokenizers_are_errors(home, monkeypatch):
    """Catches an unknown task without its nearest name, a traceback for a missing data set, and texts without a
    tokenizer."""
    tasks = "--include_path", home / "tasks"
    assert refused(home / "run", *tasks, "--tasks", "own").startswith(f"{home}/run has no tokenizer, which text ")
    assert refused(home / "run", "--tasks", "own", "--include_path", home / "none").endswith("no such directory")
    local = functools.partial(TaskManager, include_defaults=False)  # reading the harness's own takes 10 s
    monkeypatch.setattr(harness, "TaskManager", lambda include_path, **_: local(include_path=include_path))
    asked = [home / "run", "--tokenizer", home / "hf/tokenizer.json", *tasks, "--tasks"]
    assert refused(*asked, "rollin").startswith("--tasks rollin: no such task; did you mean 'rolling'? known: ")
    hub = json.loads((home / "tasks/word.yaml").read_text()) | {"task": "hub", "dataset_path": "some/where"}
    (home / "tasks" / "hub.yaml").write_text(json.dumps(hub | {"dataset_kwargs": {}}))
    why = "ConnectionError: Couldn't reach 'some/where' on the Hub (OfflineModeIsEnabled)"
    assert refused(*asked, "hub") == (
        f"--tasks hub: cannot load its data set or code ({why}); run it once on a machine with a network and "
        "copy its HF_HOME here, or use a task with local files")  # fmt: skip
