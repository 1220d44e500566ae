"""Claims about `python -m bench.gpu`: both train the same model, in turn, and what is printed is what was measured.

Those that need torch are skipped where it is missing: `make extra-torch` installs it.
"""

import functools
import itertools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import model
import optimizer
import parameters
import sharding
from bench import gpu
from bench.step import random_batch
from config import Config, preset
from pipeline import fit
from plan.chips import hardware
from plan.count import costs
from utils import UserError

needs_torch = pytest.mark.extra("torch")

# Every dimension another size. A row of bfloat16 fills multiples of 16 bytes: grouped_mm asks for it.
SHAPE = {"model.vocab_size": 56, "model.d_model": 32, "model.n_layers": 3, "model.n_heads": 6, "model.n_kv_heads": 2,
         "model.d_head": 10, "model.d_ff": 40, "model.d_expert": 24, "model.precision": "float32",
         "data.seq_len": 18, "data.batch_size": 5, "run.steps": 4}  # fmt: skip


def small(name, **more) -> Config:
    return preset("dense_124m", **gpu.COMMON_SETTINGS | gpu.MODELS[name] | SHAPE | more)


def said(**fields) -> dict:
    """What one measurement says."""
    return dict(tokens_per_s=1000.0, compile_s=3.0, peak_bytes=3 * 2**30, losses=[9.5, 9.25, 9.125], params=700,
                flops_per_token=2e6, device="NVIDIA H200", version="jax 0") | fields  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """Measurements by a stub: a process that says what it is told. Returns the list of (trainer, spec) in turn."""
    speeds, calls = itertools.count(1), []

    def command(side, spec, python):
        calls.append((side, spec))
        words = said(tokens_per_s=1e6 * next(speeds), version={"ours": "jax 0", "torch": "torch 1"}[side])
        return [sys.executable, "-c", f"print('a line of the library'); print('{json.dumps(words)}')"]

    monkeypatch.setattr(gpu, "command", command)
    monkeypatch.setattr(gpu, "check_torch", lambda python: None)
    return calls


def run(capsys, *argv):
    status = gpu.main([*argv])
    return status, *capsys.readouterr()


# What is measured, and said -------------------------------------------------------------------------------------------


def test_trainers_take_turns(measured, capsys):
    """Catches all rounds of one trainer before those of the other, on a GPU that is warm by then, and trainers that are
    given other settings or another batch."""
    status, out, err = run(capsys, "--rounds", "3", "--steps", "7", "--json")
    assert status == 0 and [side for side, _ in measured] == ["ours", "torch"] * 6
    assert [measured[i][1] for i in range(0, 12, 2)] == [measured[i][1] for i in range(1, 12, 2)]
    found = json.loads(out)
    assert list(found["models"]) == ["dense_124m", "moe"]
    assert found["models"]["moe"]["ours"]["rounds"] == [7e6, 9e6, 11e6]
    assert found["models"]["moe"]["torch"]["tokens_per_s"] == {"min": 8e6, "median": 10e6, "max": 12e6}
    assert found["models"]["dense_124m"]["ratio"] == 3 / 4
    assert "moe, round 3 of 3: torch ...\n  12,000,000 tokens/s\n" in err


def test_the_table_says_what_was_measured(measured, capsys):
    """Catches a column of the other trainer, the best round taken for the median, and an MFU by another peak."""
    status, out, _ = run(capsys, "--models", "moe", "--rounds", "3", "--steps", "7")
    head, blank, of, columns, ours, torchs, ratio = out.splitlines()
    assert status == 0 and not blank
    assert head.startswith("NVIDIA H200, 20") and head.endswith(", jax 0, torch 1; 3 rounds of 7 steps")
    assert of == "moe: 700 parameters, 2.0 MFLOP per token"
    assert columns.split() == "tokens/s least median most MFU peak GiB compile s loss, first and last".split()
    mfu = lambda tokens_per_s: f"{tokens_per_s * 2e6 / hardware.PEAK_FLOPS_PER_S['NVIDIA H200']:.1%}"
    assert ours.split() == ["ours", "1,000,000", "3,000,000", "5,000,000", mfu(3e6), "3.00", "3.0", "9.500", "9.125"]
    assert torchs.split()[:5] == ["torch", "2,000,000", "4,000,000", "6,000,000", mfu(4e6)]
    assert ratio == "ours / torch, of medians: 0.750"


def test_what_is_not_known_is_not_made_up():
    """Catches an MFU by the peak of some other chip, and the memory of a CPU process as 0."""
    args = gpu.parse(["--rounds", "1"])
    found = gpu.summary(args, {"moe": {"ours": [said(device="NVIDIA X", peak_bytes=None)]}})
    text = gpu.table(found)
    assert "no MFU: the peak FLOP/s of this device is unknown; pass its dense bf16 peak as --peak_tflops\n" in text
    assert text.splitlines()[-1].split()[4:6] == ["-", "-"]
    found = gpu.summary(gpu.parse(["--peak_tflops", "100"]), {"moe": {"ours": [said(tokens_per_s=2e7)]}})
    assert "no MFU" not in gpu.table(found) and "40.0%" in gpu.table(found)


def test_both_models_take_the_settings_that_are_given():
    """Catches a comparison whose settings have been renamed, a small model with more parameters a token than the other,
    and a batch that is not taken in one pass."""
    found = gpu.model_configs(gpu.parse(["--batch_size", "48", "--set", "work.remat=none", "data.seq_len=512"]))
    dense, moe = found["dense_124m"], found["moe"]
    for cfg in (dense, moe):
        assert fit.split_batch(cfg).accumulation == 1 and cfg.data.tokens_per_step == 48 * 512
        assert cfg.work.remat == "none" and cfg.model.compute_dtype == "bfloat16"
    assert costs.parameters(dense.model)[0] == preset_parameters("dense_124m")
    router = 12 * 768 * 8
    assert costs.parameters(moe.model)[1] == costs.parameters(dense.model)[1] + router


def preset_parameters(name):
    return costs.parameters(preset(name).model)[0]


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED = {
    "--models mo": "--models mo: unknown model; did you mean 'moe'? known: dense_124m, moe",
    "--set work.remet=none": "unknown setting 'work.remet'; did you mean 'work.remat'?",
    "--set work.remat": "--set work.remat: should be NAME=VALUE, like work.remat=none",
    "--set mesh=fsdp=2": "mesh fsdp=2: this benchmark uses a single device; drop the mesh",
    "--rounds 0": "rounds=0: must be at least 1",
}


@pytest.mark.parametrize("argv", REFUSED)
def test_a_mistake_is_named(argv, measured, capsys):
    """Catches a run of minutes that ends in a traceback, or measures something else than was asked for."""
    status, out, err = run(capsys, *argv.split())
    assert (status, out) == (2, "") and err.startswith(f"error: {REFUSED[argv]}") and err.count("\n") == 1
    assert not measured


def test_a_failure_says_whose_it_is(measured, monkeypatch, capsys):
    """Catches a trainer that failed, and a table made of the others; and what it said, swallowed."""
    monkeypatch.setattr(gpu, "command", lambda *_: [sys.executable, "-c", "import sys\nprint('why', file=sys.stderr)\n"
                                                    "sys.exit('error: out of memory')"])  # fmt: skip
    status, out, err = run(capsys, "--models", "moe")
    assert (status, out) == (2, "")
    assert err == "moe, round 1 of 5: ours ...\nwhy\nerror: ours: out of memory (exit status 1)\n"


def test_other_parameters_are_no_comparison(measured, monkeypatch, capsys):
    """Catches a torch trainer that has lost a matrix, and is fast."""
    stub = lambda side, *_: [sys.executable, "-c", f"print('{json.dumps(said(params=len(side)))}')"]
    monkeypatch.setattr(gpu, "command", stub)
    status, _, err = run(capsys, "--models", "moe", "--rounds", "1")
    assert status == 2 and "error: moe: the trainers have 4 and 5 parameters, but must have the same number; " in err


def test_without_torch_it_says_how(tmp_path, capsys):
    """Catches an ImportError after the first measurement, and advice that is no command."""
    fake = tmp_path / "python"
    for text, why in ((None, "No such file or directory"), ("echo ModuleNotFoundError: No module >&2", "ModuleNotF")):
        if text:
            fake.write_text(f"#!/bin/sh\n{text}\nexit 1\n")
            fake.chmod(0o755)
        status, out, err = run(capsys, "--torch_python", str(fake))
        assert (status, out) == (2, "") and err.startswith(f"error: {fake}: {why}") and err.count("\n") == 1
        assert "--torch_python t/bin/python" in err and "--ours_only" in err


def test_without_a_gpu_it_says_so(tmp_path):
    """Catches numbers of a CPU that pass for a GPU's."""
    with pytest.raises(UserError, match=r"finds no GPU, only 'cpu'; .* make extra-gpu; without a GPU, pass"):
        gpu.measure(dict(config=small("moe").to_dict(), device="gpu", batch="", warmup=0, steps=1))


# Our trainer ----------------------------------------------------------------------------------------------------------


def spec_of(cfg, folder, steps=2, warmup=1):
    np.savez(folder / "batch.npz", **random_batch(cfg))
    return dict(config=cfg.to_dict(), device="cpu", batch=str(folder / "batch.npz"), warmup=warmup, steps=steps)


def test_our_trainer_trains(tmp_path):
    """Catches a measurement of a step that changes nothing, or of other steps than are said."""
    cfg = small("moe", **{"optim.lr": 0.01})
    found = gpu.measure(spec_of(cfg, tmp_path))
    assert len(found["losses"]) == 4 and found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][0] - found["losses"][-1] > 0.1
    assert found["params"] == costs.parameters(cfg.model)[0] and found["peak_bytes"] is None
    assert set(found) == set(said())


# Both -----------------------------------------------------------------------------------------------------------------


def our_losses(cfg, params, batch):
    mesh = sharding.make_mesh(cfg.mesh)
    step, state = optimizer.train_step(cfg, mesh), optimizer.init(cfg, mesh, params)
    losses = []
    for _ in range(cfg.run.steps):
        state, metrics = step(state, sharding.put(batch, mesh))
        losses.append(float(metrics["cross_entropy"]))
    return losses


def their_losses(cfg, params, batch):
    import torch

    from bench import torch_trainer

    c, o = torch_trainer.settings(cfg.to_dict())
    theirs = torch_trainer.Transformer(c)
    theirs.load_state_dict(torch_trainer.from_ours(c, jax.tree.map(np.asarray, sharding.flatten_named(params))))
    assert sum(p.numel() for p in theirs.parameters()) == costs.parameters(cfg.model)[0]
    step = torch_trainer.trainer(theirs, o, compile=False)
    tokens = [torch.tensor(batch[name], dtype=torch.int64) for name in ("tokens_BT", "targets_BT")]
    return [float(step(*tokens)) for _ in range(cfg.run.steps)]


@needs_torch
@pytest.mark.parametrize("name, precision, seeds, rtol", [
    ("dense_124m", "float32", 1, 1e-5), ("dense_124m", "mixed", 1, 3e-3),
    ("moe", "float32", 1, 1e-5), ("moe", "mixed", 5, 5e-3),
])  # fmt: skip
def test_both_train_the_same_model(name, precision, seeds, rtol):
    """Catches a comparison with another model or optimizer: a head less, gates not divided, a balance loss of another
    size, decay of the embedding, no clipping. From the same weights both have the losses of four steps. bfloat16 rounds
    to 1/256; and of an MoE it may send a token to another expert, which moves a loss either way: so on average."""
    cfg = small(name, **{"model.precision": precision, "model.balance_loss": 0.5, "optim.lr": 2e-3,
                         "optim.weight_decay": 3.0, "optim.clip_norm": 0.5})  # fmt: skip
    batch, mesh, declarations = random_batch(cfg), sharding.make_mesh(cfg.mesh), model.declare(cfg.model)
    started = [parameters.init(declarations, mesh, seed) for seed in range(3, 3 + seeds)]
    theirs, ours = (np.array([losses(cfg, params, batch) for params in started])
                    for losses in (their_losses, our_losses))  # fmt: skip
    np.testing.assert_allclose(np.mean(theirs / ours, axis=0), 1, rtol=rtol)
    assert np.all(theirs[:, 0] - theirs[:, -1] > 0.1)


@needs_torch
@pytest.mark.parametrize("name", gpu.MODELS)
def test_both_start_alike(name):
    """Catches a torch model that starts from larger weights, and so another loss at the same step. 10%: the smallest
    matrix has 256 entries, whose deviation is known to 1/sqrt(512)."""
    from bench import torch_trainer

    cfg = small(name)
    c, _ = torch_trainer.settings(cfg.to_dict())
    filled = lambda d: np.full(d.shape, d.mean + d.std, np.float32)
    wanted = torch_trainer.from_ours(c, sharding.flatten_named(jax.tree.map(filled, model.declare(cfg.model))))
    found = torch_trainer.Transformer(c).state_dict()
    assert found.keys() == wanted.keys()
    for place, value in found.items():
        size = value.std() if value.ndim > 1 else value.mean()
        assert float(size) == pytest.approx(float(wanted[place].mean()), rel=0.1), place


@needs_torch
@pytest.mark.parametrize("setting, has", [("model.z_loss=0.1", "0.0"), ("model.router=sigmoid", "'softmax'"),
                                          ("optim.warmup_steps=3", "0")])  # fmt: skip
def test_a_setting_that_torch_has_not_is_refused(setting, has):
    """Catches a comparison of two models, each with its own loss."""
    from bench import torch_trainer

    cfg = gpu.model_configs(gpu.parse(["--models", "moe", "--set", setting]))["moe"]
    name, value = setting.split("=")
    with pytest.raises(ValueError, match=rf"{name}='?{value}'?: the torch trainer supports only {has}; use that, or"):
        torch_trainer.settings(cfg.to_dict())


@needs_torch
def test_it_runs_from_end_to_end():
    """Catches trainers that do not understand what they are told, and a child that inherits another platform."""
    words = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--rounds", "1", "--steps", "2", "--json",
             "--batch_size", "2", "--models", "moe", "--set", "model.n_layers=1"]  # fmt: skip
    done = subprocess.run(words, cwd=gpu.ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == "cpu" and [word.split()[0] for word in found["versions"]] == ["jax", "torch"]
    ours, theirs = found["models"]["moe"]["ours"], found["models"]["moe"]["torch"]
    assert ours["losses"][-1] < ours["losses"][0] and theirs["losses"][-1] < theirs["losses"][0]
    assert found["models"]["moe"]["ratio"] == ours["rounds"][0] / theirs["rounds"][0]


@needs_torch
@pytest.mark.parametrize("name", gpu.MODELS)
def test_torch_compiles_it_whole(name, monkeypatch):
    """Catches a line that breaks the graph in two, or that compiled torch refuses: on CPU it is not compiled otherwise.
    Traced forward and backward, in bfloat16 as on a GPU, but not made into kernels, which takes a C compiler."""
    import torch

    from bench import torch_trainer

    cfg = small(name, **{"model.precision": "mixed"})
    c, o = torch_trainer.settings(cfg.to_dict())
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    losses = {}
    for compiled in (True, False):
        torch.manual_seed(3)
        step, batch = torch_trainer.trainer(torch_trainer.Transformer(c), o, compiled), random_batch(cfg)
        tokens = [torch.tensor(batch[name], dtype=torch.int64) for name in ("tokens_BT", "targets_BT")]
        losses[compiled] = [float(step(*tokens)) for _ in range(3)]
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-2)
