"""Your own table converts in both directions, and a table that cannot be right is refused."""

import json
from pathlib import Path

import pytest
import safetensors.numpy

from weights import convert, families
from weights.__main__ import main

FIXTURE = Path(__file__).resolve().parent / "fixtures/llama"


def status_of(*argv) -> int:
    return main([str(word) for word in argv])


def tensors_of(folder) -> dict:
    return {name: x for file in folder.glob("*.safetensors") for name, x in safetensors.numpy.load_file(file).items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory, converted from a Llama."""
    directory = tmp_path_factory.mktemp("run") / "llama"
    assert status_of("from-hf", FIXTURE, "--out", directory) == 0
    return directory


FORK = """
import dataclasses
from weights.families import FAMILIES, OUTSIDE, register, row

outside = (*OUTSIDE[:2], row("unembed.weight", "V D", "unembedding_DV"))
register("fork", dataclasses.replace(FAMILIES["llama"], outside=outside, layer_name="decoder.{layer}."))
"""


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A file with a table, which is unregistered after the test."""
    monkeypatch.setattr(families, "FAMILIES", (known := dict(families.FAMILIES)))
    monkeypatch.setattr(convert, "FAMILIES", known)
    (tmp_path / "fork.py").write_text(FORK)
    return tmp_path / "fork.py"


def test_your_own_table_round_trips(fork, run, tmp_path, capsys):
    """Catches a table that only one direction finds, and a run that forgets its table."""
    words = "--table", fork
    assert status_of("to-hf", run, "--out", tmp_path / "hf", "--family", "fork", *words) == 0
    want, got = tensors_of(FIXTURE), tensors_of(tmp_path / "hf")
    renamed = {name.replace("model.layers.", "decoder.").replace("lm_head", "unembed"): x for name, x in want.items()}
    assert {name: x.tobytes() for name, x in got.items()} == {name: x.tobytes() for name, x in renamed.items()}
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "fork"
    del families.FAMILIES["fork"]
    assert status_of("from-hf", tmp_path / "hf", "--out", tmp_path / "run", *words) == 0
    del families.FAMILIES["fork"]
    assert status_of("to-hf", tmp_path / "run", "--out", tmp_path / "again", *words) == 0
    assert {name: x.tobytes() for name, x in tensors_of(tmp_path / "again").items()} == {
        name: x.tobytes() for name, x in got.items()
    }
    del families.FAMILIES["fork"]
    capsys.readouterr()
    assert status_of("to-hf", tmp_path / "run", "--out", tmp_path / "third") == 2
    assert "config.json: unknown model family 'fork'; known: " in capsys.readouterr().err


@pytest.mark.parametrize("text, message", [
    (FORK.replace('"fork"', '"llama"'), "a mapping for model_type='llama' exists; choose another name; known: llama"),
    (FORK.replace("(*OUTSIDE[:2], ", "(*OUTSIDE[:1], "), "the 'fork' mapping has no rows for norm_D"),
    (FORK.replace("(*OUTSIDE[:2], ", "(*OUTSIDE, "), "the 'fork' mapping has 2 rows for unembedding_DV"),
    (FORK.replace("decoder.{layer}.", "decoder."), "gives 3 tensors the name 'decoder.input_layernorm.weight'; "),
    (FORK.replace('"V D"', '"D D"'), "has layout 'D D' for 'unembed.weight', but unembedding_DV has dims 'DV'"),
    (FORK.replace('"V D"', '"V[D|K]"'), "has layout 'V[D|K]' for 'unembed.weight', but unembedding_DV has dims "),
    (FORK.replace('"unembedding_DV"', '"unembedding_DV", "bias_V"'), "has bias_V, but our model has no such"),
    ("x = 1", "the file registers no mapping; call weights.families.register(model_type, family) in it"),
    ("x = 1 / 0", "ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_an_invalid_table_is_refused(text, message, fork, run, tmp_path, capsys):
    """Catches parameters that are never written, or written twice, and a traceback for a mistake in the file."""
    fork.write_text(text)
    assert status_of("to-hf", run, "--out", tmp_path / "hf", "--family", "fork", "--table", fork) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
