"""Compare this project's trainer with a torch trainer on one GPU: tokens/s, MFU, memory.

`python -m bench.gpu` trains dense_124m and a small MoE with both trainers in turn, five times. Each measurement is a
separate process, so only one framework uses the GPU at a time, and neither reuses compiled programs. In all steps both
train on the same batch, which is already on the device. The torch trainer is `torch_trainer.py`.

Without a GPU, `--device cpu` tests the benchmark itself on small shapes; its numbers say nothing about a GPU.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from bench.step import random_batch, say
from config import Config, NotNegative, Size, check, preset
from devices import compile_cache
from plan.chips.hardware import PEAK_FLOPS_PER_S
from utils import UserError, exit_status, suggest

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 3  # untimed steps after the first

# Overrides of the preset: fixed execution settings, and a constant learning rate, so that all steps do the same work.
COMMON_SETTINGS = {"work.remat": "dots", "optim.warmup_steps": 0, "optim.schedule": "cosine:1"}
MODELS = {
    "dense_124m": {},
    # A token uses two of eight experts, each half as wide: as many active parameters as dense_124m, plus a router.
    "moe": {"model.n_experts": 8, "model.top_k": 2, "model.d_expert": 1536, "model.router": "softmax",
            "model.balance_loss": 0.01},
}  # fmt: skip
SMALL = {"model.vocab_size": 512, "model.d_model": 64, "model.n_layers": 2, "model.n_heads": 4, "model.d_ff": 256,
         "model.d_expert": 128, "model.precision": "float32", "data.seq_len": 64}  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    models: tuple[str, ...] = tuple(MODELS)  # models to train
    rounds: Size = 5  # number of measurements of each trainer, in turn
    steps: Size = 20  # timed steps, after the first four
    batch_size: Size = 16  # sequences per step
    # settings of main.py as NAME=VALUE, for both trainers, such as work.remat=none data.seq_len=2048
    set: tuple[str, ...] = ()
    device: Literal["gpu", "cpu"] = "gpu"  # cpu: small shapes, to test the benchmark
    torch_python: str = sys.executable  # a Python with torch installed, if this one does not have it
    ours_only: bool = False  # measure only this project's trainer, without torch
    peak_tflops: NotNegative = 0.0  # peak TFLOP/s of the GPU, bf16 dense, for MFU; 0: from plan/chips/hardware.py
    json: bool = False  # print one line of JSON instead of a table


HELP = """e.g. python -m bench.gpu --rounds 5                                # dense_124m and a small MoE
     python -m bench.gpu --device cpu --rounds 1                   # without a GPU: test the benchmark
     python -m bench.gpu --models moe --set work.remat=none       # settings of main.py, for both trainers

Compare this project's trainer with a torch trainer on one GPU, in turn: tokens/s, MFU, memory."""


def parse(argv: list[str]) -> Arguments:
    args = tyro.cli(Arguments, args=argv, prog="python -m bench.gpu", description=HELP, use_underscores=True)
    check(args)
    model_configs(args)
    return args


def model_configs(args: Arguments) -> dict[str, Config]:
    """Return the configuration of each model. Raises: UserError for an unknown model or setting."""
    given = {}
    for word in args.set:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--set {word}: should be NAME=VALUE, like work.remat=none")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    found = {}
    for name in args.models:
        if name not in MODELS:
            raise UserError(f"--models {name}: unknown model; {suggest(name, MODELS)}")
        small = SMALL if args.device == "cpu" else {}
        size = {"data.batch_size": args.batch_size, "run.steps": 1 + WARMUP + args.steps}
        found[name] = preset("dense_124m", **COMMON_SETTINGS | MODELS[name] | small | size | given)
        if found[name].mesh.devices > 1:
            raise UserError(f"mesh {found[name].mesh}: this benchmark uses a single device; drop the mesh")
    return found


# One measurement ------------------------------------------------------------------------------------------------------


def measure(spec: dict, then=lambda step, state, batch: None) -> dict:
    """Train on one device, with the training step of main.py; must run in a new process.

    peak_bytes covers the whole process, including compilation and initialization, like torch's. On CPU it is None.
    After the timed steps, `then` is called with the compiled step, its state and the batch.
    Raises: UserError if there is no such device.
    """
    import jax

    import optimizer
    import sharding
    from plan.count import costs
    from plan.trace import compiled

    cfg = Config.from_dict(spec["config"])
    device = jax.devices()[0]
    if device.platform != spec["device"]:
        raise UserError(f"JAX {jax.__version__} finds no {spec['device'].upper()}, only {device.device_kind!r}; "
                        "install JAX's CUDA plugin with: make extra-gpu; without a GPU, pass --device cpu")  # fmt: skip
    mesh = sharding.make_mesh(cfg.mesh)
    begin = time.perf_counter()
    with compile_cache(""):
        step = optimizer.train_step(cfg, mesh).lower(*compiled.shapes(cfg, mesh)).compile()
    compile_s = time.perf_counter() - begin
    state, batch, losses = optimizer.init(cfg, mesh), sharding.put(dict(np.load(spec["batch"])), mesh), []
    for number in range(cfg.run.steps):
        if number == 1 + spec["warmup"]:
            jax.block_until_ready(state)
            begin = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(metrics["cross_entropy"])
    jax.block_until_ready(state)
    seconds = time.perf_counter() - begin
    then(step, state, batch)
    return {
        "tokens_per_s": spec["steps"] * cfg.data.tokens_per_step / seconds,
        "compile_s": compile_s,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "losses": [float(loss) for loss in losses],
        "params": costs.parameters(cfg.model)[0],
        "flops_per_token": costs.model_flops_per_token(cfg),
        "device": device.device_kind,
        "version": f"jax {jax.__version__}",
    }


def command(side: str, spec: dict, python: str) -> list[str]:
    """Return the command of one measurement. It prints one line of JSON, or ends with an error message."""
    words = {"ours": [sys.executable, "-m", "bench.gpu", "--one"], "torch": [python, "-m", "bench.torch_trainer"]}
    return [*words[side], json.dumps(spec)]


def run(side: str, spec: dict, python: str) -> dict:
    """Run one measurement in a separate process.

    Raises: UserError with the last line of the process's standard error if it fails; the other lines are printed.
    """
    # No trainer reuses compiled programs.
    fresh = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    if side == "ours" and spec["device"] == "cpu":
        fresh["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(command(side, spec, python), cwd=ROOT, env=os.environ | fresh, capture_output=True, text=True)
    if done.returncode:
        *before, last = done.stderr.strip().splitlines() or ["no error message"]
        sys.stderr.write("".join(f"{line}\n" for line in before))
        raise UserError(f"{side}: {last.removeprefix('error: ')} (exit status {done.returncode})")
    return json.loads(done.stdout.splitlines()[-1])


# All of them ----------------------------------------------------------------------------------------------------------


def check_torch(python: str) -> None:
    """Check that this Python can import torch and NumPy. Raises: UserError, with the fix, if it cannot."""
    try:
        done = subprocess.run([python, "-c", "import numpy, torch"], capture_output=True, text=True)
        wrong = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    except OSError as error:
        wrong = error.strerror
    if wrong:
        raise UserError(f"{python}: {wrong}; install torch in a separate environment (python3 -m venv t; "
                        "t/bin/pip install torch numpy) and pass --torch_python t/bin/python, or "
                        "skip torch with --ours_only")  # fmt: skip


def compare(args: Arguments) -> dict:
    """Measure the trainers of each model in turn, and summarize them.

    Raises: UserError if a measurement fails, or if the trainers' parameter counts differ.
    """
    sides = ("ours",) if args.ours_only else ("ours", "torch")
    if "torch" in sides:
        check_torch(args.torch_python)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, cfg in model_configs(args).items():
            batch = Path(folder) / f"{name}.npz"
            np.savez(batch, **random_batch(cfg))
            spec = dict(config=cfg.to_dict(), batch=str(batch), device=args.device, warmup=WARMUP, steps=args.steps)
            found[name] = {side: [] for side in sides}
            for number in range(args.rounds):
                for side in sides:
                    say(f"{name}, round {number + 1} of {args.rounds}: {side} ...")
                    found[name][side].append(run(side, spec, args.torch_python))
                    say(f"  {found[name][side][-1]['tokens_per_s']:,.0f} tokens/s")
            params = [found[name][side][0]["params"] for side in sides]
            if len(set(params)) > 1:
                raise UserError(f"{name}: the trainers have {' and '.join(map(str, params))} parameters, but must have "
                                "the same number; use only --set options that both support")  # fmt: skip
    return summary(args, found)


def summary(args: Arguments, found: dict) -> dict:
    """Summarize the rounds of each trainer: minimum, median and maximum tokens/s, and the largest peak memory."""
    first = next(iter(found.values()))
    device = first["ours"][0]["device"]
    peak = args.peak_tflops * 1e12 or PEAK_FLOPS_PER_S.get(device)
    models = {}
    for name, sides in found.items():
        about = sides["ours"][0]
        models[name] = {"params": about["params"], "flops_per_token": about["flops_per_token"]}
        for side, rounds in sides.items():
            speeds = [one["tokens_per_s"] for one in rounds]
            median = statistics.median(speeds)
            models[name][side] = {
                "tokens_per_s": {"min": min(speeds), "median": median, "max": max(speeds)},
                "mfu": median * about["flops_per_token"] / peak if peak else None,
                "peak_bytes": max(one["peak_bytes"] for one in rounds) if rounds[0]["peak_bytes"] else None,
                "compile_s": statistics.median(one["compile_s"] for one in rounds),
                "losses": rounds[0]["losses"],
                "rounds": speeds,
            }
        if "torch" in sides:
            medians = [models[name][side]["tokens_per_s"]["median"] for side in ("ours", "torch")]
            models[name]["ratio"] = medians[0] / medians[1]
    return {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "versions": [rounds[0]["version"] for rounds in first.values()],
        "peak_flops_per_s": peak,
        "rounds": args.rounds,
        "steps": args.steps,
        "set": args.set,
        "models": models,
    }


def table(found: dict) -> str:
    lines = [f"{found['device']}, {found['date']}, {', '.join(found['versions'])}; {found['rounds']} rounds of "
             f"{found['steps']} steps"]  # fmt: skip
    if not found["peak_flops_per_s"]:
        lines.append("no MFU: the peak FLOP/s of this device is unknown; pass its dense bf16 peak as --peak_tflops")
    for name, one in found["models"].items():
        lines += ["", f"{name}: {one['params']:,} parameters, {one['flops_per_token'] / 1e6:,.1f} MFLOP per token",
                  f"{'tokens/s':8} {'least':>11} {'median':>11} {'most':>11} {'MFU':>7} {'peak GiB':>9} "
                  f"{'compile s':>10}  loss, first and last"]  # fmt: skip
        lines += [row(side, one[side]) for side in ("ours", "torch") if side in one]
        if "ratio" in one:
            lines.append(f"ours / torch, of medians: {one['ratio']:.3f}")
    return "\n".join(lines)


def row(side: str, of: dict) -> str:
    speeds = "".join(f" {of['tokens_per_s'][which]:>11,.0f}" for which in ("min", "median", "max"))
    mfu = f"{of['mfu']:.1%}" if of["mfu"] else "-"
    peak = f"{of['peak_bytes'] / 2**30:.2f}" if of["peak_bytes"] else "-"
    return (f"{side:8}{speeds} {mfu:>7} {peak:>9} {of['compile_s']:>10.1f}  {of['losses'][0]:.3f} "
            f"{of['losses'][-1]:.3f}")  # fmt: skip


@exit_status
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--one"]:  # a measurement started by `run`
        print(json.dumps(measure(json.loads(argv[1]))))
        return
    args = parse(argv)
    found = compare(args)
    print(json.dumps(found) if args.json else table(found))


if __name__ == "__main__":
    sys.exit(main())
