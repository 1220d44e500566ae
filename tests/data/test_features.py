"""One task feeds a decoder, a prefix LM and an encoder-decoder; packed examples do not see each other."""

import json

import numpy as np
import pytest

from config import preset
from data import tasks
from data.reading import features, objectives
from data.reading.objectives import Example
from utils import UserError

EOT = 256
CAPITALS = [("France", "Paris"), ("Peru", "Lima"), ("Laos", "")]


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The examples of a registered task: a question and an answer of bytes."""
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    texts = [f"{country}:{city}" for country, city in CAPITALS]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def divide(document):
        prompt, _, answer = document["text"].partition(":")
        yield {"prompt": prompt + "?", "answer": answer}

    monkeypatch.setattr(tasks.units, "split_of", lambda name, share: "train")
    task = tasks.add(tasks.Task("capitals", "of a test", f"jsonl:{tmp_path}/own.jsonl", (divide,)))
    return [objectives.split_text("task", tokens[1:], (), 300, weights[1:])
            for tokens, weights in tasks.examples(task, "train")]  # fmt: skip


def of_segment(batch, row, segment, encoder=False):
    """The tokens of one segment, and its targets that count."""
    B = batch["segments_BT"][row] == segment
    tokens = batch["tokens_BT"][row][B].tolist()
    counted = batch["targets_BT"][row][B & (batch["weights_BT"][row] > 0)].tolist()
    return tokens, counted


def test_a_decoder_reads_inputs_and_targets_but_predicts_only_targets(examples):
    """Catches a question that counts, an answer off by one, and an end of text that is never learned."""
    batch = features.decoder([examples[:2], examples[2:], []], EOT, 30)
    assert sorted(batch) == ["positions_BT", "segments_BT", "targets_BT", "tokens_BT", "weights_BT"]
    assert of_segment(batch, 0, 1) == ([EOT, *b"France?Paris"], [*b"Paris", EOT])
    assert of_segment(batch, 0, 2) == ([EOT, *b"Peru?Lima"], [*b"Lima", EOT])
    assert of_segment(batch, 1, 1) == ([EOT, *b"Laos?"], [EOT])
    assert batch["positions_BT"][0].tolist() == [*range(13), *range(10), *[0] * 7]
    assert batch["segments_BT"].tolist() == [[1] * 13 + [2] * 10 + [0] * 7, [1] * 6 + [0] * 24, [0] * 30]
    assert np.array_equal(batch["tokens_BT"][0][1:13], batch["targets_BT"][0][:12])
    assert not batch["weights_BT"][batch["segments_BT"] == 0].any()
    assert {x.dtype.name for name, x in batch.items() if name != "weights_BT"} == {"int32"}
    assert batch["weights_BT"].dtype == np.float32


def test_a_prefix_lm_marks_the_inputs_of_each_example(examples):
    """Catches a target that attention may read early, and an input that it may not."""
    causal, batch = (features.decoder([examples], EOT, 30, prefix_lm) for prefix_lm in (False, True))
    prefix_T = batch.pop("prefix_BT")[0]
    assert all(np.array_equal(batch[name], causal[name]) for name in causal) and batch.keys() == causal.keys()
    assert prefix_T.tolist() == [*[1] * 8, *[0] * 5, *[1] * 6, *[0] * 4, *[1] * 6, 0] and prefix_T.dtype == np.int32
    first = prefix_T.astype(bool) & (batch["segments_BT"][0] == 1)
    assert bytes(batch["tokens_BT"][0][first][1:].tolist()) == b"France?"


def test_an_encoder_reads_the_inputs_and_a_decoder_predicts_the_targets(examples):
    """Catches a segment of the decoder that belongs to other inputs, and targets that are not shifted."""
    batch = features.encoder_decoder([examples, examples[1:2]], EOT, 24, 17)
    assert sorted(batch) == ["encoder_positions_BS", "encoder_segments_BS", "encoder_tokens_BS", "positions_BT",
                             "segments_BT", "targets_BT", "tokens_BT", "weights_BT"]  # fmt: skip
    tokens_S, segments_S = batch["encoder_tokens_BS"][0], batch["encoder_segments_BS"][0]
    assert [tokens_S[segments_S == n].tolist() for n in (1, 2, 3)] == [[*one, EOT] for one in
                                                                      (b"France?", b"Peru?", b"Laos?")]  # fmt: skip
    assert batch["encoder_positions_BS"][0].tolist() == [*range(8), *range(6), *range(6), 0, 0, 0, 0]
    assert [of_segment(batch, 0, n) for n in (1, 2, 3)] == [
        ([EOT, *b"Paris"], [*b"Paris", EOT]), ([EOT, *b"Lima"], [*b"Lima", EOT]), ([EOT], [EOT])]  # fmt: skip
    assert batch["positions_BT"][0].tolist() == [*range(6), *range(5), 0, *[0] * 5]
    assert of_segment(batch, 1, 1) == of_segment(batch, 0, 2)
    assert [batch[name].shape for name in ("encoder_tokens_BS", "weights_BT")] == [(2, 24), (2, 17)]


@pytest.mark.parametrize("kind", ["decoder", "prefix", "encoder"])
def test_an_example_appears_only_in_its_own_segment(examples, kind):
    """Catches tokens, targets, positions or weights that leak into another example."""
    convert = {
        "decoder": lambda rows: features.decoder(rows, EOT, 40),
        "prefix": lambda rows: features.decoder(rows, EOT, 40, True),
        "encoder": lambda rows: features.encoder_decoder(rows, EOT, 30, 20),
    }[kind]
    other = Example(examples[1].inputs[::-1], examples[1].targets + 1)  # of the same length
    before, after = (convert([[examples[0], one, examples[2]], examples]) for one in (examples[1], other))
    changed = {name: before[name] != after[name] for name in before}
    assert sum(map(np.count_nonzero, changed.values())) > 8
    for name, is_changed in changed.items():
        segments = before["encoder_segments_BS" if name.startswith("encoder") else "segments_BT"]
        assert not np.any(is_changed & (segments != 2)) and not is_changed[1].any(), name


def test_the_settings_choose_the_converter(examples):
    """Catches a model that gets the arrays of another."""
    encoder = {"model.encoder_layers": 2, "model.attention": "gqa", "model.n_experts": 0, "model.dense_prefix": 0,
               "data.input_len": 21}  # fmt: skip
    names = [set(features.convert([examples[:1]], EOT, preset("tiny", **settings)))
             for settings in ({}, {"model.prefix_lm": True}, encoder)]  # fmt: skip
    assert names[1] - names[0] == {"prefix_BT"} and "encoder_tokens_BS" in names[2] and "prefix_BT" not in names[2]


def test_examples_longer_than_a_row_are_refused(examples):
    """Catches an example that is cut without a word."""
    with pytest.raises(UserError, match=r"need 13 positions or more, but data\.seq_len=12"):
        features.decoder([examples], EOT, 12)
    with pytest.raises(UserError, match=r"need 14 positions or more, but data\.input_len=13"):
        features.encoder_decoder([examples], EOT, 13, 40)
    with pytest.raises(UserError, match=r"need 6 positions or more, but data\.seq_len=5"):
        features.encoder_decoder([examples], EOT, 40, 5)


@pytest.mark.parametrize("name", ["span", "prefix", "span:0.5:32"])
@pytest.mark.parametrize("room", [(64,), (512, 114), (40, 300)])
def test_the_longest_text_fits_and_a_longer_one_does_not(name, room):
    """Catches rows that are not full, and examples that do not fit."""
    longest = features.longest_text(name, room)
    fitting = [features.fits(objectives.lengths(name, n), room) for n in range(2, 900)]
    assert fitting == [n <= longest for n in range(2, 900)]


def test_rows_are_as_long_as_those_of_t5():
    """Catches another formula than `compute_input_and_target_lengths` of T5, whose tests have these numbers."""
    assert features.longest_text("span", (512, 114)) == 568
    inputs, targets, _ = objectives.lengths("span", 568)
    assert (inputs + 1, targets + 1) == (512, 114) and features.longest_text("span", (3, 2)) < objectives.LEAST


def test_examples_whose_shares_fit_into_a_row_fit_into_both_parts():
    """Catches rounding that packs one example too many."""
    draw = np.random.default_rng(0)
    for room in ((30, 17), (17, 30), (64, 64)):
        lengths = objectives.Lengths(*draw.integers(0, 16, (2, 5000)), None)
        shares = features.row_share(lengths, room)
        row, free = [], max(room)
        for n, share in enumerate(shares):
            if share > free:
                used = np.array([lengths.inputs[row] + 1, lengths.targets[row] + 1]).sum(axis=1)
                assert row and np.all(used <= room)
                row, free = [], max(room)
            row.append(n)
            free -= share
