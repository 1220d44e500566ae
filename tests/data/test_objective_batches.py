"""Batches of an objective: a function of seed and step on any number of hosts, and nothing of the text is lost."""

from collections import Counter

import numpy as np
import pytest

import dataset
from config import preset
from data import prepare
from data.reading import examples, objectives
from startup import preflight
from tests.data import test_hosts
from utils import UserError

EOT, VOCAB_SIZE, B, T, S = 900, 940, 6, 33, 41
ENCODER = {"model.encoder_layers": 2, "model.attention": "gqa", "model.n_experts": 0, "model.dense_prefix": 0,
           "data.input_len": S}  # fmt: skip
MODELS = {"decoder": {}, "prefix LM": {"model.prefix_lm": True}, "encoder-decoder": ENCODER}
UL2 = "span=0.5,span:0.5:8=0.25,prefix=0.25"
DOCUMENTS = np.split(np.arange(880), np.cumsum([3, 1, 90, 2, 40, 200, 7, 5, 31, 120, 22, 60, 9]))  # ids are unique


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A token directory of few documents; every token has a unique id."""
    out = str(tmp_path_factory.mktemp("tokens") / "own")
    prepare.from_ids(DOCUMENTS, out, vocab_size=EOT, validation_ids=DOCUMENTS[2:6], shard_tokens=150)
    return out


@pytest.fixture(scope="module")
def task_path(tmp_path_factory):
    """Questions of 1 to 20 tokens, with answers of 1 to 12 tokens; every token has a unique id."""
    draw, ids, weights = np.random.default_rng(1), [], []
    for number in range(60):
        prompt, answer = draw.integers(1, 21), draw.integers(1, 13)
        ids.append(np.arange(prompt + answer) + 14 * number)
        weights.append(np.arange(prompt + answer) >= prompt)
    out = str(tmp_path_factory.mktemp("tokens") / "task")
    prepare.from_ids(ids, out, vocab_size=EOT, validation_ids=ids[:9], shard_tokens=150, train_weights=weights,
                     validation_weights=weights[:9])  # fmt: skip
    return out


def config(path, objective, **more):
    return preset("tiny", **{"data.path": path, "data.objective": objective, "data.seq_len": T, "data.batch_size": B,
                             "model.vocab_size": VOCAB_SIZE, **more})  # fmt: skip


def rows_of(batch):
    """The examples of each row of a batch, read from its arrays."""
    for row in range(len(batch["tokens_BT"])):
        found = []
        for segment in range(1, batch["segments_BT"][row].max() + 1):
            here = batch["segments_BT"][row] == segment
            counted = batch["weights_BT"][row] > 0
            targets = batch["targets_BT"][row][here & counted]
            assert targets[-1] == EOT and batch["tokens_BT"][row][here][0] == EOT
            if "encoder_tokens_BS" in batch:
                inputs = batch["encoder_tokens_BS"][row][batch["encoder_segments_BS"][row] == segment]
                assert inputs[-1] == EOT
                inputs = inputs[:-1]
            else:
                inputs = batch["targets_BT"][row][here & ~counted]
            if "prefix_BT" in batch:
                assert batch["prefix_BT"][row][here].tolist() == [1] * (len(inputs) + 1) + [0] * (len(targets) - 1)
            found.append(objectives.Example(inputs, targets[:-1]))
        yield found


def epoch(cfg):
    """The examples of one epoch."""
    steps = range(dataset.epoch_steps(cfg)[""])
    rows = [row for step in steps for row in rows_of(dataset.batch(cfg, step))]
    return [one for row in rows[: dataset.rows_of(dataset.open_corpus(cfg).splits["train"], cfg.data)] for one in row]


@pytest.mark.parametrize("packing", ["documents", "windows"])
@pytest.mark.parametrize("objective", ["span", "prefix", "span:0.5:8"])
@pytest.mark.parametrize("model", MODELS)
def test_an_epoch_has_every_token_once(path, model, objective, packing):
    """Catches a token at the edge of a row or document that is lost or doubled, and a text mixed with another."""
    cfg = config(path, objective, **MODELS[model], **{"data.packing": packing})
    texts = [objectives.restore(one, EOT + 1) for one in epoch(cfg)]
    counts = Counter(token for text in texts for token in text.tolist())
    assert counts.keys() <= {*range(880)} and set(counts.values()) == {1}
    assert all(np.all(np.diff(text) == 1) for text in texts)
    assert all(any(text[0] in one and text[-1] in one for one in DOCUMENTS) for text in texts)
    # A text of one token is not an example. Windows also drop what does not fit.
    assert 880 - sum(counts.values()) <= (8 if packing == "documents" else 30)


def test_windows_without_document_masks_are_those_of_t5(path):
    """Catches a token that is lost between windows: a text is everything in a window, also ends of text."""
    cfg = config(path, "span", **ENCODER, **{"data.packing": "windows,ordered,unmasked"})
    texts = [objectives.restore(one, EOT + 1) for one in epoch(cfg)]
    stream = dataset.open_corpus(cfg).splits["train"]
    assert np.array_equal(np.concatenate(texts), stream.read(0, stream.tokens))
    assert {len(text) for text in texts[:-1]} == {45}  # 7 are masked in 2 spans: 38 + 2 + 1 inputs


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("objective", ["span", UL2, "task"])
def test_any_number_of_hosts_makes_the_same_global_batches(path, task_path, objective, model):
    """Catches examples whose random numbers depend on the host, and a row of another objective."""
    cfg = config(task_path if objective == "task" else path, objective, **MODELS[model], **{"data.batch_size": 16})
    for step in (0, 3, 1000):
        whole = test_hosts.as_lists(dataset.batch(cfg, step))
        for hosts in (1, 2, 8):
            assert test_hosts.parts(cfg, step, hosts) == whole


def test_a_host_reads_only_its_own_rows(path, monkeypatch):
    """Catches a host that reads the whole batch and discards most of it."""
    read, honest = [], dataset.Split.read
    monkeypatch.setattr(dataset.Split, "read", lambda split, a, b: read.append((a, b)) or honest(split, a, b))
    dataset.batch(config(path, UL2, **ENCODER), 2, rows=[1, 4])
    assert len(read) == 2
    nothing, whole = (dataset.batch(config(path, UL2, **ENCODER), 2, rows=rows) for rows in ([], None))
    assert {name: (0, *x.shape[1:]) for name, x in whole.items()} == {name: x.shape for name, x in nothing.items()}


def test_a_batch_is_a_function_of_seed_and_step(path):
    """Catches examples that repeat in the next epoch, or that another seed does not change."""
    cfg = config(path, "span:0.5:2", **{"data.packing": "windows,ordered"})
    count = dataset.rows_of(dataset.open_corpus(cfg).splits["train"], cfg.data)
    rows = [row for step in range(2 * count // B + 1) for row in rows_of(dataset.batch(cfg, step))]
    texts = [[objectives.restore(one, EOT + 1).tolist() for one in row] for row in rows]
    assert texts[:count] == texts[count : 2 * count]
    same = [str(one) == str(two) for one, two in zip(rows[:count], rows[count : 2 * count], strict=True)]
    assert sum(same) < 5  # very short texts have few divisions into spans
    other = [
        *rows_of(dataset.batch(config(path, "span:0.5:2", **{"data.packing": "windows,ordered", "run.seed": 1}), 0))
    ]
    assert str(other) != str(rows[:B])


def test_texts_of_a_row_have_different_random_numbers():
    """Catches the same mask in each text of a row."""
    text = (np.concatenate([[EOT], np.arange(10), [EOT], np.arange(10)]), 1)
    one, other = examples.make("span:0.5:2", (1, 2), [text], EOT, config("", "span:0.5:2"))
    assert len(one.inputs) == len(other.inputs) and str(one) != str(other)


def test_rates_of_a_mixture_are_exact(path):
    """Catches a rate that holds only on average, and an objective that always gets the same windows."""
    cfg = config(path, "span:0.5:8=0.125,causal=0.375,prefix=0.5")
    numbers = [dataset._objective_and_index(cfg.data, number) for number in range(1000)]
    assert Counter(name for name, _ in numbers) == {"span:0.5:8": 125, "causal": 375, "prefix": 500}
    split = dataset.open_corpus(cfg).splits["train"]
    rows = [dataset._row(split, cfg.data, 0, number) for number in range(200)]
    for name in ("causal", "prefix"):
        of = [row.pieces for row in rows if row.objective == name]
        count = dataset._rows_of_objective(split, cfg.data, name)
        assert len({str(one[0][1:]) for one in of[:count]}) == count  # every window once
    assert rows[3].key[0] != rows[4].key[0]


def test_causal_rows_of_a_mixture_are_those_of_a_causal_run(path):
    """Catches an end of text in the middle of a document, and masked targets."""
    cfg, causal = config(path, "causal=0.5,span=0.5", **MODELS["prefix LM"]), config(path, "causal")
    split = dataset.open_corpus(cfg).splits["train"]
    batch, found = dataset.batch(cfg, 1), 0
    for place in range(B):
        row = dataset._row(split, cfg.data, 0, B + place)
        if row.objective == "causal":
            alone = dataset._make_causal_batch([row.pieces], EOT, causal)
            assert all(np.array_equal(batch[name][place], alone[name][0]) for name in alone)
            assert not batch["prefix_BT"][place].any()
            found += 1
    assert found == 3


def test_without_an_objective_a_prefix_lm_is_causal(path):
    """Catches inputs where there are none, and arrays of a causal run that change."""
    plain, prefix = (dataset.batch(config(path, "causal", **of), 2) for of in (MODELS["decoder"], MODELS["prefix LM"]))
    assert not prefix.pop("prefix_BT").any()
    assert plain.keys() == prefix.keys() and all(np.array_equal(plain[name], prefix[name]) for name in plain)


@pytest.mark.parametrize("objective", ["span", UL2, "task"])
def test_every_run_evaluates_the_same_examples(path, task_path, objective):
    """Catches a validation loss that depends on the seed or on the batch size, and validation text that is left out."""
    where = task_path if objective == "task" else path
    rows = lambda batches=0, **more: [str(row) for batch in dataset.evaluation_batches(
        config(where, objective, **ENCODER, **more), batches) for row in rows_of(batch)]  # fmt: skip
    everything = [row for row in rows() if row != "[]"]
    assert [row for row in rows(**{"run.seed": 4, "data.batch_size": 5}) if row != "[]"] == everything
    some = rows(1)
    assert len(some) == B and rows(1, **{"run.seed": 4}) == some
    if objective != UL2:
        assert set(some) <= {*everything, "[]"}
        cfg = config(where, objective, **ENCODER)
        texts = [objectives.restore(one, EOT + 1) for batch in dataset.evaluation_batches(cfg)
                 for row in rows_of(batch) for one in row]  # fmt: skip
        assert sum(map(len, texts)) >= 0.9 * (dataset.open_corpus(cfg).splits["val"].tokens - 9)


@pytest.mark.parametrize("model", MODELS)
def test_a_task_has_every_document_once(task_path, model):
    """Catches a document that is lost or cut, and an answer that is read."""
    cfg = config(task_path, "task", **MODELS[model])
    made = sorted((one.inputs.tolist(), one.targets.tolist()) for one in epoch(cfg))
    draw = np.random.default_rng(1)
    sizes = [(draw.integers(1, 21), draw.integers(1, 13)) for _ in range(60)]
    wanted = [(range(14 * n, 14 * n + a), range(14 * n + a, 14 * n + a + b)) for n, (a, b) in enumerate(sizes)]
    assert made == sorted(([*inputs], [*targets]) for inputs, targets in wanted)


def test_every_source_of_a_mixture_has_the_objectives(path, task_path, tmp_path):
    """Catches a source with other rates, and tokens of one source in an example of another."""
    for name, first in (("one", 0), ("two", 400)):
        ids = np.arange(300) + first
        prepare.from_ids(ids, str(tmp_path / name), vocab_size=EOT, validation_ids=ids)
    cfg = config(str(tmp_path), "span=0.5,prefix=0.5", **{"data.mixture": "one=0.5,two=0.5"})
    corpus = dataset.open_corpus(cfg)
    rows = [dataset._mixture_row(corpus, cfg.data, 0, number) for number in range(400)]
    names = {id(source.splits["train"]): name for name, source in corpus.sources.items()}
    counts = Counter((names[id(row.pieces[0][0])], row.objective) for row in rows)
    assert counts == {(name, objective): 100 for name in ("one", "two") for objective in ("span", "prefix")}
    assert len({row.key[0] for row in rows}) == 4
    for row in rows_of(dataset.batch(cfg, 3)):
        texts = np.concatenate([objectives.restore(one, EOT + 1) for one in row])
        assert texts.max() < 300 or texts.min() >= 400


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("objective", ["span", "span:0.5:8"])
def test_start_up_counts_the_truncated_rows(path, model, objective):
    """Catches a fraction that counts other rows than those that drop text."""
    cfg = config(path, objective, **MODELS[model], **{"data.packing": "windows,ordered"})
    split = dataset.open_corpus(cfg).splits["train"]
    count, cut = dataset.rows_of(split, cfg.data), 0
    rows = [row for step in range(dataset.epoch_steps(cfg)[""]) for row in rows_of(dataset.batch(cfg, step))]
    for number, row in enumerate(rows[:count]):
        [(_, start, stop)] = dataset._pieces(split, cfg.data, objective, number)
        texts = np.split(ids := split.read(start, stop), np.flatnonzero(ids == EOT))
        lengths = [np.count_nonzero(text != EOT) for text in texts]
        used = sum(len(objectives.restore(one, EOT + 1)) for one in row)
        cut += sum(length for length in lengths if length > 1) > used
    assert cut and dataset.describe_epoch(split, cfg.data) == f"{count} rows, {cut / count:.1%} of them truncated"


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED = [  # objective, settings -> what is said of them
    (
        "span",
        {"model.vocab_size": 901},
        r"30 tokens need 1 sentinels besides the 901 ids .* --model\.vocab_size 904 \(",
    ),
    ("causal", ENCODER, "causal has no inputs for the encoder; use span, prefix or task"),
    ("span=0.5,causal=0.5", ENCODER, "causal has no inputs for the encoder"),
    ("span", {"data.seq_len": 3}, "no text fits into data.seq_len=3 and data.input_len=0; use larger values"),
    ("task", {}, "have no target weights, so they have no prompts; write a task with python -m data.tasks"),
]


@pytest.mark.parametrize("objective, changes, why", REFUSED)
def test_unsuitable_tokens_are_refused_before_a_run_starts(path, tmp_path, objective, changes, why, capsys):
    """Catches a run that fails at its first evaluation, or that trains on sentinels which are also text."""
    cfg = config(path, objective, **changes | {"run.dir": str(tmp_path / "runs")})
    with pytest.raises(UserError, match=why):
        preflight.check_tokens(cfg)
    with pytest.raises(UserError, match=why):
        dataset.batch(cfg, 0)


WEIGHTS = [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
KEEP = r"or leave them out of the task with `tasks\.keep`"
TASKS = [  # weights of two documents of 5 tokens, settings -> what is said of them
    ([[0] * 5] * 2, {"data.seq_len": 9}, "all target weights are 0, so no document has targets"),
    (WEIGHTS, {"data.seq_len": 5}, rf"2 of 2 .* too long for data\.seq_len=5; use --data\.seq_len 6, {KEEP}"),
    (WEIGHTS, ENCODER | {"data.seq_len": 9, "data.input_len": 4}, rf"1 of 2 .*; use --data\.input_len 5, {KEEP}"),
    (WEIGHTS, ENCODER | {"data.seq_len": 2}, rf"1 of 2 .* for data\.seq_len=2; use --data\.seq_len 3, {KEEP}"),
]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("weights, changes, why", TASKS)
def test_a_task_that_does_not_fit_is_refused_before_a_run_starts(tmp_path, split, weights, changes, why):
    """Catches documents that are cut, and a validation split that stops a run after hours."""
    good = {"ids": [np.arange(2)] * 4, "weights": [np.array([0, 1])] * 4}
    bad = {"ids": [np.arange(5)] * 2, "weights": [np.array(one) for one in weights]}
    train, val = (bad, good) if split == "train" else (good, bad)
    prepare.from_ids(train["ids"], str(tmp_path / "own"), vocab_size=EOT, validation_ids=val["ids"],
                     train_weights=train["weights"], validation_weights=val["weights"])  # fmt: skip
    cfg = config(str(tmp_path / "own"), "task", **changes, **{"run.sample_prompt": ""})
    with pytest.raises(UserError, match=why):
        preflight.check_tokens(cfg)


TASK, SPAN = {"data.objective": "task"}, {"data.objective": "span"}
NOT_TOGETHER = [
    (TASK | {"data.packing": "windows,ordered"}, r"task' packs documents by length, so it cannot keep the order"),
    (TASK | {"data.packing": "windows,unmasked"}, r"task' packs several examples into a row, and none may attend to"),
    (SPAN | {"data.packing": "documents,unmasked"}, r"data\.objective='span' packs several examples"),
]


@pytest.mark.parametrize("changes, why", NOT_TOGETHER)
def test_settings_that_do_not_go_together_are_refused(changes, why):
    """Catches examples of one row that attend to each other."""
    with pytest.raises(UserError, match=why):
        preset("tiny", **changes)


def test_the_end_of_text_before_a_document_is_not_one_of_its_tokens():
    """Catches a target too many, where tokens without target weights are among those of a task: all count there."""
    weights, edges = np.array([1, 0, 1, 1, 1, 0, 0, 1]), np.array([0, 4, 8])
    inputs, targets, both = examples.task_lengths(weights, edges, (9,))
    assert (inputs.tolist(), targets.tolist(), both.tolist()) == ([1, 2], [2, 1], [3, 3])
