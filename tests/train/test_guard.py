"""Steps that are not finite change only the counters, and ten in a row stop the run. Any step can be replayed
bit-identically, and gradient statistics can be written."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dataset
import main
import model
import optimizer
import pipeline
import sharding
from config import preset, replace
from data import prepare
from tests.helpers import random_batch
from tests.test_training import PowerCut, cut_at, restored, rows, run, snapshot, untimed
from train import checkpoint, guard, report
from train.directory import to_json
from utils import UserError

# Two blocks of one layer each, over two devices.
SMALL = {"model.n_layers": 2, "model.dense_prefix": 0, "model.moe_every": 1, "model.attention": "gqa",
         "model.n_shared": 0, "optim.weight_decay": 0.5, "mesh": "fsdp=2"}  # fmt: skip
STEPS = 16
BAD = "blocks.moe.attention.w_out_HKD"


def flags(home, *more):
    words = [f"--{name} {value}" for name, value in SMALL.items()]
    every = "--run.name small --run.log_every 3 --run.eval_every 0 --run.checkpoint_every 6 --run.keep_checkpoints 5"
    return ["tiny", *" ".join(words).split(), *every.split(), "--run.steps", str(STEPS), "--data.path",
            str(home / "tokens"), "--run.dir", str(home / "runs"), *more]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A corpus, and one training program for all tests, in which a marked batch makes the gradient of one matrix
    infinite, in block 1 only. The work after the last step is left out."""
    home = tmp_path_factory.mktemp("guard")
    for n in range(9):
        (home / f"{n}.txt").write_text("the quick brown fox " * (20 + n))
    prepare.prepare(prepare.Arguments(str(home / "tokens"), f"text:{home}/*.txt", val_share=0.3))
    honest = pipeline.loss_and_grads

    def loss_and_grads(cfg, mesh):
        inner = honest(cfg, mesh)

        def outer(params, batch, step):
            value, metrics, grads = inner(params, batch, step)
            extra = jnp.where(batch["weights_BT"][0, 0] == MARK, jnp.inf, 0)
            poison = lambda name, g: g.at[1, 0].add(extra) if name == BAD else g
            return value, metrics, sharding.map_named(poison, grads)

        return outer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "loss_and_grads", loss_and_grads)
        patched.setattr(main, "finish", lambda *args: args[4].write("end", int(args[2].step)))
        yield home


MARK = 3.0  # weight of the first target in a batch that must fail


def marked(batch):
    batch["weights_BT"][0, 0] = MARK
    return batch


def fail_at(monkeypatch, steps):
    honest = dataset.batch

    def batch(cfg, n, **rows):
        return marked(honest(cfg, n, **rows)) if n in steps else honest(cfg, n, **rows)

    monkeypatch.setattr(dataset, "batch", batch)


# The rule -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taken(home):
    """States before and after, and metrics, of four steps: good, bad, bad, good."""
    cfg = preset("tiny", **SMALL, **{"data.path": str(home / "tokens"), "run.steps": STEPS})
    mesh = sharding.make_mesh(cfg.mesh)
    state, step = optimizer.init(cfg, mesh), optimizer.train_step(cfg, mesh)
    host = lambda tree: jax.tree.map(np.asarray, tree)
    states, metrics = [host(state)], []
    for n in range(4):
        batch = dataset.batch(cfg, n)
        state, values = step(state, sharding.put(marked(batch) if n in (1, 2) else batch, mesh))
        states.append(host(state))
        metrics.append(host(values))
    assert len(step.programs) == 1, "a skipped step compiled another program"
    return cfg, states, metrics


def test_a_skipped_step_changes_only_the_counters(taken):
    """Catches NaN in a moment, weight decay or a selection bias that changes without an update, an optimizer that
    counts the step, and a data position that does not advance, so that the same batch would return forever."""
    _, states, _ = taken
    for n, same in enumerate([False, True, True, False]):
        before, after = sharding.flatten_named(states[n]), sharding.flatten_named(states[n + 1])
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        counters = {"step", "skipped_steps", "skipped_in_a_row"}
        if same:
            assert changed == counters, n
        else:
            assert "params.blocks.moe.feed_forward.bias_E" in changed and f"params.{BAD}" in changed, n
        assert all(np.all(np.isfinite(x)) for x in after.values()), n
    assert [int(s.step) for s in states] == [0, 1, 2, 3, 4]
    assert [int(s.skipped_steps) for s in states] == [0, 0, 1, 2, 2]
    assert [int(s.skipped_in_a_row) for s in states] == [0, 0, 1, 2, 0]


def test_metrics_report_skipped_steps(taken):
    """Catches a learning rate that belongs to another update than the one taken, and a parameter that is reported
    instead of its neighbor, or in block 0."""
    cfg, _, metrics = taken
    assert [int(m["skipped_steps"]) for m in metrics] == [0, 1, 2, 2]
    assert [int(m["skipped_in_a_row"]) for m in metrics] == [0, 1, 2, 0]
    rate = optimizer.learning_rate(cfg.optim, cfg.run.steps)
    assert [float(m["lr"]) for m in metrics] == pytest.approx([float(rate(n)) for n in (0, 1, 1, 1)])
    names = np.array(list(optimizer.layer_parameters(cfg)))
    bad = [f"{BAD}, block 1"]
    assert [names[m["not_finite"]].tolist() for m in metrics] == [[], bad, bad, []]
    assert [math.isfinite(m["grad_norm"]) for m in metrics] == [True, False, False, True]


def test_places_follow_the_forward_pass():
    """Catches an order by parameter, with block 1 before the feed-forward layer of block 0, and a wrong index."""
    cfg = preset("tiny", **{"model.n_layers": 8, "model.dense_prefix": 2, "model.moe_every": 3})
    places = optimizer.layer_parameters(cfg)
    names = list(places)
    assert len(names) == len(set(names)) and sorted(places.values()) == list(range(len(names)))
    assert names[0] == "embedding_VD" and names[-2:] == ["norm_D", "unembedding_DV"]
    # Two layers of the prefix, then twice: dense, dense, MoE.
    layers = [re.sub(r"\.(norm_attention_D|norm_feed_forward_D|attention\.\w+|feed_forward\.[\w.]+)", "", n)
              for n in names[1:-2]]  # fmt: skip
    order = list(dict.fromkeys(layers))
    assert order == ["prefix, layer 0", "prefix, layer 1",
                     *(f"blocks.{x}" for n in (0, 1) for x in
                       (f"dense, block {n}, layer 0", f"dense, block {n}, layer 1", f"moe, block {n}"))]  # fmt: skip
    assert layers == sorted(layers, key=order.index), "a layer is left and entered again"
    ends = np.cumsum([0] + [math.prod(d.shape[: sharding.stacked_dims(d)])
                            for d in sharding.flatten_named(model.declare(cfg.model)).values()])  # fmt: skip
    number = list(sharding.flatten_named(model.declare(cfg.model))).index("blocks.dense.attention.w_out_HUD")
    assert places["blocks.dense.attention.w_out_HUD, block 1, layer 0"] == ends[number] + 2


# A run ----------------------------------------------------------------------------------------------------------------


def test_a_run_reports_skipped_steps(home, monkeypatch):
    """Catches a skip that is not reported, or reported late, twice or out of order; NaN in a mean loss or a JSON file;
    and a count that is lost when the process restarts."""
    fail_at(monkeypatch, {7, 13})
    argv = flags(home, "--run.name", "skips")
    with monkeypatch.context() as patched:
        cut_at(patched, "skip", 14)
        with pytest.raises(PowerCut):
            run(argv)
    status, out, err = run(argv)
    assert (status, err) == (0, "") and "resumed    at step 12" in out
    why = f"skipped: the gradient norm is inf; first gradient that is not finite: {BAD}, block 1"
    assert f"step    14/{STEPS}  {why} (skipped so far: 2)\n" in out and out.count("skipped:") == 1

    directory = home / "runs" / "skips"
    not_json = lambda word: pytest.fail(f"{word} is not JSON")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    everything = [json.loads(line, parse_constant=not_json) for line in lines]
    steps = [row["step"] for row in everything]
    assert steps == sorted(steps)
    skips = [row for row in everything if row["kind"] == "skip"]
    assert [(row["step"], row["skipped_steps"], row["bad"]) for row in skips] == [(8, 1, 1), (14, 2, 1)]
    assert all(row["grad_norm"] is None and row["first"] == row["last"] == f"{BAD}, block 1" for row in skips)
    train = rows(directory, "train")
    assert [(row["step"], row["skipped_steps"]) for row in train] == [(3, 0), (6, 0), (9, 1), (12, 1), (15, 2), (16, 2)]
    assert all(math.isfinite(row["loss"]) for row in train)
    assert report.read_run(directory).series("loss")[0] == [3, 6, 9, 12, 15, 16]


def test_a_mean_loss_ignores_values_that_are_not_finite():
    """Catches one skipped step that hides the loss of nine others."""
    assert guard.mean_loss([np.float32(1), np.float32(np.nan), np.float32(4), np.float32(np.inf)]) == 2.5
    assert math.isnan(guard.mean_loss([np.float32(np.nan)]))
    assert to_json({"a": np.float32(np.nan), "b": [1.0, math.inf], "c": {"d": jnp.arange(2)}}) == {
        "a": None, "b": [1.0, None], "c": {"d": [0, 1]}}  # fmt: skip


def test_ten_skipped_steps_in_a_row_stop_the_run(home, monkeypatch):
    """Catches a run that wastes a night on a state that no longer changes, one that stops after nine steps, and advice
    that the trainer refuses."""
    fail_at(monkeypatch, {2, 3, *range(5, STEPS)})
    argv = flags(home, "--run.name", "stopped")
    status, out, err = run(argv)
    assert status == 2 and "Traceback" not in err
    assert err.startswith("error: steps 6 to 15 were skipped, 10 in a row. At step 15, the gradient norm is ")
    assert "The parameters have not changed since step 5. Inspect one with --replay 6; if the" in err
    directory = home / "runs" / "stopped"
    for advice in ("--data.skip", "another --run.name", "--optim.lr (now 0.003)", "--optim.warmup_steps (now 2)",
                   "--optim.clip_norm (now 1.0)", "--model.precision float32", f"--init-from {directory}"):  # fmt: skip
        assert advice in err
    for change in (("--optim.lr", "0.001"), ("--model.precision", "mixed")):
        argv_of_check = [*argv, "--run.check", "only", *change]
        status, _, err = run(argv_of_check)
        assert status == 2 and f"was started with other settings: {change[0][2:]} is " in err
        status, out, _ = run([*argv_of_check, "--run.name", "next", "--init-from", str(directory)])
        assert status == 0 and "starts at step 0" in out
    assert [row["step"] for row in rows(directory, "skip")] == [3, 4, *range(6, 16)]
    assert not rows(directory, "end") and "done" not in out


def values_of(in_a_row):
    return {"skipped_in_a_row": in_a_row, "skipped_steps": 1, "loss": np.nan, "grad_norm": np.nan,
            "not_finite": np.array(WATCHED) != "norm_D"}  # fmt: skip


CFG = preset("tiny", **SMALL)
WATCHED = list(optimizer.layer_parameters(CFG))


def test_the_watch_looks_back_ten_steps_and_names_both_ends():
    """Catches a watch that waits for the newest step, which stalls the devices, or that never checks before a row is
    due; and a message without the place where the backward pass first failed."""
    written = []
    watch = guard.SkipWatch(CFG, lambda kind, step, **values: written.append((kind, step, values)))
    for taken in range(1, 12):
        watch.add_step(taken, values_of(1) if taken == 1 else {"skipped_in_a_row": Unready()})
        assert len(written) == (taken == 11)
    (kind, step, values), last = written[0], WATCHED[-1]
    assert (kind, step, values["first"], values["last"]) == ("skip", 1, "embedding_VD", last)
    assert values["bad"] == len(WATCHED) - 1
    why = f"the loss is nan; first gradient that is not finite: embedding_VD; {len(WATCHED) - 2} more, the last: {last}"
    with pytest.raises(UserError, match=f"in a row. At step 30, {why}. The parameters have not changed since step 20."):
        guard.SkipWatch(CFG, lambda *_, **__: None)._report(30, values_of(10), 10)


class Unready:
    def __int__(self):
        raise AssertionError("the watch waited for a step that the devices have not finished")


# Gradient statistics and replay ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(home):
    """A run that writes gradient statistics, and one that does not."""
    asked = flags(home, "--run.gradient_stats_every", "5", "--run.name", "asked")
    plain = flags(home)
    for argv in (asked, plain):
        status, _, err = run(argv)
        assert (status, err) == (0, "")
    return asked, plain, home / "runs"


def test_gradient_statistics_change_no_result(finished):
    """Catches a step that compiles to another program, with other rounding, when statistics are written."""
    asked, plain, runs = finished
    assert untimed(rows(runs / "asked", "train")) == untimed(rows(runs / "small", "train"))
    a, b = (sharding.flatten_named(restored(argv, runs / name)) for argv, name in ((asked, "asked"), (plain, "small")))
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


def test_norms_are_those_of_the_step(finished):
    """Catches norms of the previous or next step or of another layer, an update without the learning rate or weight
    decay, and a missing square root."""
    asked, _, runs = finished
    norms = rows(runs / "asked", "norms")
    assert [row["step"] for row in norms] == [5, 10, 15] and not rows(runs / "small", "norms")
    cfg = main.parse(asked)
    mesh = sharding.make_mesh(cfg.mesh)
    state, step = optimizer.init(cfg, mesh), optimizer.train_step(cfg, mesh)
    host = lambda tree: {n: np.asarray(x, np.float64) for n, x in sharding.flatten_named(tree).items()}
    for n in range(5):
        before = host(state.params)
        state, values = step(state, sharding.put(dataset.batch(cfg, n), mesh))
    after, row = host(state.params), norms[0]
    assert list(row["gradient"]) == list(row["update"]) == list(row["parameter"]) == list(before)
    for name, x in before.items():
        d = sharding.flatten_named(model.declare(cfg.model))[name]
        over = tuple(range(len(d.dims) - len(d.dims.strip("LJP")), x.ndim))
        # float32 sums of a few thousand squares; a difference of parameters near 1 keeps 1e-7 of them, updates are 1e-3
        norm = lambda x, over=over: np.sqrt(np.sum(x**2, axis=over))
        np.testing.assert_allclose(row["parameter"][name], norm(x), rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(row["update"][name], norm(after[name] - x), rtol=1e-3, atol=1e-6, err_msg=name)
    assert set(map(np.ndim, row["gradient"].values())) == {0, 1}
    total = math.sqrt(sum(np.sum(np.square(x)) for x in row["gradient"].values()))
    assert total == pytest.approx(float(values["grad_norm"]), rel=1e-5)


@pytest.mark.parametrize("step, logged", [(8, "mean loss of steps 7 to 9"), (16, "loss of step 16")])
def test_a_replayed_step_is_bit_identical(finished, step, logged):
    """Catches a replay that starts from a later checkpoint, sees other data, or writes into the run."""
    _, plain, runs = finished
    before = snapshot(runs / "small")
    status, out, err = run([*plain, "--replay", step])
    assert (status, err) == (0, "") and snapshot(runs / "small") == before
    assert f"replaying step {step} of {runs}/small, from step {6 if step == 8 else 12}\n" in out
    (row,) = [row for row in rows(runs / "small", "train") if row["step"] == (9 if step == 8 else 16)]
    assert f"logged: the {logged} is {row['loss']!r}, bit-identical\n" in out
    assert re.search(rf"^step {step}: loss [\d.]+, gradient norm [\d.]+$", out, re.MULTILINE)
    table = re.findall(r"^(\w[\w.]+_[A-Z]+(?:, \w+ \d)*) +([\d.e+-]+) +([\d.e+-]+) +([\d.e+-]+)$", out, re.MULTILINE)
    assert [name for name, *_ in table] == list(optimizer.layer_parameters(main.parse(plain)))
    if step == 16:  # a row of one step: its norm is in the record
        total = math.sqrt(sum(float(gradient) ** 2 for _, gradient, *_ in table))
        assert total == pytest.approx(row["grad_norm"], rel=1e-4)  # six digits are printed
    gains = {float(parameter) for name, _, _, parameter in table if name.startswith("blocks.moe.norm")}
    assert gains and all(abs(gain - math.sqrt(24)) < 0.5 for gain in gains), "the names do not match the lines"


def test_a_replay_that_differs_says_so(finished, tmp_path):
    """Catches a comparison that always agrees."""
    _, plain, runs = finished
    cfg = replace(main.parse(plain), **{"run.replay": 16})
    (honest,) = [row for row in rows(runs / "small", "train") if row["step"] == STEPS]
    record = [row for row in rows(runs / "small") if row is not honest and row["step"] < STEPS]
    wrong = np.nextafter(honest["loss"], 0).item()
    state = restored([*plain, "--run.dir", str(runs)], runs / "small")
    mesh = sharding.make_mesh(cfg.mesh)
    target = checkpoint.make_target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    for loss, said in ((wrong, f"was {wrong!r}, but is {honest['loss']!r} now"), (honest["loss"], "bit-identical")):
        state = checkpoint.restore(runs / "small" / "checkpoints", target, 12)
        lines = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(guard, "log", lambda line, lines=lines: lines.append(line))
            guard.replay(cfg, mesh, state, [*record, honest | {"loss": loss}])
        assert said in lines[-1]


@pytest.mark.parametrize("more, message", [
    ("--replay 17", "run.replay=17: run.steps=16; use a step from 1 to 16"),
    ("--replay -1", "run.replay=-1: must be at least 0"),
    ("--replay 3 --run.name nobody", "nobody has no run, so there is no step 3 to replay; select"),
    ("--replay 3 --optim.lr 1", "was started with other settings: optim.lr is 1.0 here and 0.003 there"),
])  # fmt: skip
def test_invalid_replays_are_refused(finished, more, message):
    """Catches a traceback, a directory created for nothing, and a replay of another run's step."""
    _, plain, runs = finished
    status, _, err = run([*plain, *more.split()])
    assert status != 0 and message in err and "Traceback" not in err
    assert not (runs / "nobody").exists()


# Noise ----------------------------------------------------------------------------------------------------------------


def test_the_noise_scale_of_known_noise():
    """Catches swapped sizes, a mean taken for a sum, and per-piece norms used as they are: gradients g + noise, 7 and
    21 tokens a batch, g^2 = 4, and noise of variance 9 in each of 50 directions for a single token."""
    rng = np.random.default_rng(0)
    mean = np.full(50, np.sqrt(4 / 50))
    sums = {}
    for _ in range(4000):
        pieces = mean + rng.normal(size=(3, 50)) * 3 / np.sqrt(7)
        found = optimizer.noise_scale_of([float(p @ p) for p in pieces], [7.0] * 3, float(np.sum(pieces.mean(0) ** 2)))
        for name, value in found.items():
            sums[name] = sums.get(name, 0) + value / 4000
    # 4000 draws: the standard error of each is below 2 %
    assert sums["gradient_square"] == pytest.approx(4, rel=0.06)
    assert sums["noise_square"] == pytest.approx(9 * 50, rel=0.06)
    exact = optimizer.noise_scale_of([10.0, 14.0], [8.0, 8.0], 9.0)
    assert exact == pytest.approx({"gradient_square": 6.0, "noise_square": 48.0, "noise_scale_tokens": 8.0})
    assert optimizer.noise_scale_of([4.0, 4.0], [8.0, 8.0], 1.0)["noise_scale_tokens"] == math.inf


def test_a_run_writes_its_noise_scale(finished):
    """Catches a row at another step, and a scale that is not the ratio of the row's two parts."""
    _, _, runs = finished
    found = rows(runs / "asked", "noise")
    assert [row["step"] for row in found] == [5, 10, 15] and not rows(runs / "small", "noise")
    for row in found:
        assert row["noise_square"] > 0 or row["gradient_square"] > 0
        if row["noise_scale_tokens"] is not None:
            assert row["noise_scale_tokens"] == pytest.approx(row["noise_square"] / row["gradient_square"])


@pytest.mark.parametrize("limit, pieces", [(2, 8), ("auto", 2)])
def test_noise_is_measured_on_pieces_of_the_batch(monkeypatch, limit, pieces):
    """Catches pieces that overlap or leave something out, a total that is not their mean, and a number of pieces that
    differs from the number of passes. Here the gradient is the weighted mean of the tokens minus the parameter."""
    cfg = preset("tiny", **{"work.device_batch": limit})
    batch, w = random_batch(cfg, 0), np.float32(100)

    def loss_and_grads(cfg, mesh):
        def of(params, batch, step):
            weight = jnp.sum(batch["weights_BT"])
            mean = jnp.sum(batch["tokens_BT"] * batch["weights_BT"]) / weight
            return 0.0, {"tokens": weight}, {"w": mean - params["w"]}

        return of

    monkeypatch.setattr(pipeline, "loss_and_grads", loss_and_grads)
    got = optimizer.noise_scale(cfg, sharding.make_mesh("data=1"))({"w": w}, batch, 3)
    weights = np.array([part.sum() for part in np.split(batch["weights_BT"].astype(float), pieces)])
    sums = [part.sum() for part in np.split(batch["weights_BT"].astype(float) * batch["tokens_BT"], pieces)]
    small = np.average((sums / weights - w) ** 2, weights=weights)
    big = (np.sum(sums) / np.sum(weights) - w) ** 2
    b, B = weights.mean(), weights.sum()
    want = ((B * big - b * small) / (B - b), (small - big) / (1 / b - 1 / B))
    assert (got["gradient_square"], got["noise_square"]) == pytest.approx(want, rel=1e-3)  # float32, differences


def test_a_batch_that_cannot_be_cut_has_no_noise_scale(capsys):
    """Catches half of three sequences, and norms that are refused as well."""
    cfg = preset("tiny", **{"data.batch_size": 3, "run.gradient_stats_every": 4})
    questions = guard.GradientStats(cfg, sharding.make_mesh("data=1"), None)
    assert questions.norms and questions.noise is None
    said = r"noise      gradient noise scale not logged: the 3 sequences per batch shard .* cannot be split into 2 .*\n"
    assert re.fullmatch(said, capsys.readouterr().out)
