"""The model card: the hub can read its header, and it states what is known about a run, and no more."""

import json

import pytest
import yaml

import model
import sharding
from config import preset
from utils import UserError
from weights import card

CFG = preset("tiny", **{"data.path": "/home/someone/tokens", "run.dir": "/home/someone/runs"})
TOKENS = {"source": "text:/home/someone/mine", "tokenizer": {"name": "bytes", "fingerprint": "5ha256"}}
ABOUT = {"config": CFG.to_dict(), "data": TOKENS}
ROWS = [{"kind": "train", "step": 4, "loss": 3.25, "tokens": 1152},
        {"kind": "train", "step": 8, "loss": 2.5, "tokens": 2304},
        {"kind": "eval", "step": 8, "loss": 2.75, "bits_per_byte": float("nan"), "tokens": 7}]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"kind": "tr')
    return tmp_path / "tiny"


def render(run, about=ABOUT, step=8, scores=None, hf=None):
    """Return the parsed YAML header and the rest of a card."""
    text = card.render_card(run, about, sharding.flatten_named(model.declare(CFG.model)), step, scores or {}, hf)
    _, header, rest = text.split("---\n", 2)
    return yaml.safe_load(header), rest


def test_the_card_matches_the_run(run):
    """Catches losses of a later step than the exported one, a number that is not one, and a local path."""
    header, text = render(run)
    assert header == {"library_name": "jax", "pipeline_tag": "text-generation", "tags": ["axis-by-axis"]}
    for line in ("| steps | 8 of 10 |", "| tokens seen | 2,304 |", "| training loss, step 8 | 2.5000 nats per token |",
                 "| validation loss, step 8 | 2.7500 nats per token |", "| data | text:mine |",
                 "| tokenizer | bytes |"):  # fmt: skip
        assert line in text.splitlines()
    assert "bits per byte" not in text and "/home/someone" not in text and "5ha256" not in text
    settings = json.loads(text.split("```json\n")[1].split("```")[0])
    assert (
        settings["model"] == json.loads(json.dumps(CFG.to_dict()["model"])) and settings["optim"]["lr"] == CFG.optim.lr
    )
    header, text = render(run, step=4)
    assert "| training loss, step 4 | 3.2500 nats per token |" in text and "validation" not in text


def test_the_card_of_an_exported_folder_is_as_complete(run, tmp_path):
    """Catches a card with less after a second conversion, because metrics.jsonl is not copied."""
    slim = ABOUT | {"slim": {"step": 8, "rows": card.last_rows(run, ABOUT, 8)}}
    assert render(tmp_path, about=slim, step=None) == render(run)


def test_the_card_of_a_hugging_face_folder_shows_how_to_load_it(run):
    """Catches a card that shows our commands for a folder that transformers loads."""
    header, text = render(run, hf={"model_type": "llama"})
    assert (header["library_name"], header["tags"]) == ("transformers", ["axis-by-axis", "llama"])
    assert "AutoModelForCausalLM.from_pretrained(DIR)" in text and "python -m generate" not in text
    _, text = render(run, hf={"model_type": "t5", "is_encoder_decoder": True})
    assert "AutoModelForSeq2SeqLM.from_pretrained(DIR)" in text


def test_scores_become_results_of_the_hub(run, tmp_path):
    """Catches results without the task, data set or number that the hub requires, and a number that is not finite."""
    (tmp_path / "s.json").write_text('{"copy": {"exact|match": 0.5, "n": 64, "ok": true}, "loss": 2.0, "bad": NaN}')
    scores = card.read_scores(str(tmp_path / "s.json"))
    assert scores == {("copy", "exact|match"): 0.5, ("copy", "n"): 64, ("", "loss"): 2.0}
    header, text = render(run, scores=scores)
    [entry] = header["model-index"]
    assert entry["name"] == "tiny" and len(entry["results"]) == 3
    first, _, last = entry["results"]
    assert first == {"task": {"type": "text-generation"}, "dataset": {"name": "copy", "type": "copy"},
                     "metrics": [{"type": "exact|match", "value": 0.5}]}  # fmt: skip
    assert last["dataset"]["name"] == "validation" and last["metrics"] == [{"type": "loss", "value": 2.0}]
    assert r"| copy | exact\|match | 0.5 |" in text.splitlines()


@pytest.mark.parametrize("text, message", [
    ("{", "not JSON: "), ("[" * 5000, "not JSON: "), ("9" * 5000, "not JSON: "),
    ('{"a": "b", "c": [true]}', "s.json has no number; "),
    (f'{{"a": 1{"0" * 400}}}', "s.json has no number; "),
])  # fmt: skip
def test_a_file_without_scores_is_refused(text, message, tmp_path):
    """Catches a card that is written without the requested scores."""
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(UserError, match=message):
        card.read_scores(str(tmp_path / "s.json"))
