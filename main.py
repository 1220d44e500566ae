"""The training command: parse, build, loop.

`python main.py laptop` trains a preset; `python main.py laptop --model.n_experts 4 --run.steps 100` changes settings of
it. Everything a run leaves lies in runs/NAME: config.json, metrics.jsonl, checkpoints/, samples.txt, report.png.
"""

import time

START = time.perf_counter()  # before the imports below: their time is reported

import json
import math
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import checkpoint
import dataset
import generate
import optimizer
import pipeline
import planner
import report
import sharding
import utils
from data import tokenizers
from utils import Config, UserError, log

IMPORT_S = time.perf_counter() - START


def parse(argv: list[str]) -> Config:
    """Read `[PRESET] [--flags]`; the preset says what the flags' defaults are."""
    has_preset = argv and not argv[0].startswith("-")
    name, flags = (argv[0], argv[1:]) if has_preset else ("laptop", argv)
    presets = "\n".join(f"  {name:13} {what}" for name, (what, _) in utils.PRESETS.items())
    description = (
        f"Train a transformer. Usage: python main.py [PRESET] [--flags]\n\nPresets:\n{presets}\n\n"
        f"Flags change settings of the preset, here {name!r}; their defaults are its values. "
        "--help-verbose says what each does."
    )
    default = utils.preset(name)
    return tyro.cli(
        Config, prog="python main.py [PRESET]", description=description, default=default, args=flags,
        use_underscores=True, compact_help=True,
    )  # fmt: skip


# The run's directory --------------------------------------------------------------------------------------------------


def open_run(cfg: Config) -> Path:
    """Make the run's directory, and refuse to continue one that was started with other settings or tokens."""
    directory = Path(cfg.run.dir) / cfg.run.name
    if cfg.run.restart and directory.exists():
        shutil.rmtree(directory)
    about = describe(cfg)
    file = directory / "config.json"
    if file.exists():
        check_same(about, json.loads(file.read_text()), cfg)
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about, indent=1) + "\n")
    return directory


def describe(cfg: Config) -> dict:
    return {"config": cfg.to_dict(), "data": dataset.fingerprint(cfg)}


def check_same(ours: dict, theirs: dict, cfg: Config) -> None:
    """Raises: UserError naming the first setting that decides results and differs. How long, where and how often may."""

    def decisive(about):
        config = {part: values for part, values in about["config"].items() if part != "run"}
        config |= {"mesh": {}, "run": {"seed": about["config"]["run"]["seed"]}}
        config["data"] = config["data"] | {"path": "", "prefetch": 0}
        return {"config": config, "data": about["data"]}

    if difference := utils.first_difference(decisive(ours), decisive(theirs)):
        raise UserError(
            f"{cfg.run.dir}/{cfg.run.name} was started with other settings: {difference} (in its config.json); "
            "start another run with --run.name, or delete this one with --run.restart")  # fmt: skip


class Metrics:
    """metrics.jsonl: one JSON object a line, appended by process 0 and flushed at once."""

    def __init__(self, directory: Path, step: int):
        """Keep the rows up to `step`; those past it belong to steps that will be taken again."""
        self.path = directory / "metrics.jsonl"
        if utils.is_main_process():
            rows = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
            kept = [row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= step]
            self.path.write_text("".join(kept))

    def write(self, kind: str, step: int, **values) -> None:
        if utils.is_main_process():
            with self.path.open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")


# Start-up -------------------------------------------------------------------------------------------------------------


def announce(cfg: Config, mesh) -> planner.Plan:
    """Say what will run before the slow parts start."""
    plan = planner.plan(cfg)
    memory = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in plan.memory_bytes.items())
    device = mesh.devices.flat[0]
    log(f"model      {plan.params_total:,} parameters, {plan.params_active:,} active per token")
    log(f"mesh       {cfg.mesh} on {mesh.size} x {device.device_kind}")
    log(f"batch      {sharding.split_batch(cfg)}; {plan.tokens_per_step:,} tokens a step")
    log(f"memory     about {sum(plan.memory_bytes.values()) / 2**20:,.0f} MiB a device: {memory}")
    return plan


def peak_flops_per_s(device) -> float:
    """One device's peak: from the planner's table, or, for a CPU, what a 2048-wide float32 product reaches now."""
    if device.device_kind in planner.PEAK_FLOPS_PER_S:
        return planner.PEAK_FLOPS_PER_S[device.device_kind]
    n = 2048
    x = jax.device_put(jnp.ones((n, n), jnp.float32), device)
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def restore_or_init(cfg: Config, mesh, checkpoints: Path) -> optimizer.TrainState:
    """The newest checkpoint's state, placed on this mesh, or the state at step 0."""
    if checkpoint.latest_step(checkpoints) is None:
        return optimizer.init(cfg, mesh)
    target = checkpoint.target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    state = checkpoint.restore(checkpoints, target)
    log(f"resumed    at step {int(state.step)} from {checkpoints}")
    return state


# The loop -------------------------------------------------------------------------------------------------------------


def evaluate(cfg: Config, mesh, compiled, params, batches: int) -> dict:
    """Nats per token and bits per byte of the validation split (or of `batches` batches of it), weighted by tokens."""
    nats = tokens = 0.0
    for batch in dataset.evaluation_batches(cfg, batches):
        sums = compiled(params, sharding.put(batch, mesh))
        nats, tokens = nats + float(sums[0]), tokens + float(sums[1])
    bytes_per_token = dataset.bytes_per_token(dataset.load(cfg.data.path))
    return {
        "loss": nats / tokens,
        "bits_per_byte": nats / tokens / math.log(2) / bytes_per_token,
        "tokens": int(tokens),
        "full": batches == 0,
    }


def to_row(metrics: dict, losses: list) -> dict:
    """Metrics of the last step as JSON, the loss averaged over the steps since the row before."""
    row = {name: np.asarray(value).tolist() for name, value in metrics.items()}
    row["loss"] = float(np.mean([float(x) for x in losses]))  # cross-entropy alone, in nats per token
    if "balance_loss" in row:
        row["balance_loss"] = float(np.mean(row["balance_loss"]))
        row["tokens_per_expert"] = [[round(n) for n in layer] for layer in row["tokens_per_expert"]]
    return row


@contextmanager
def progress_bar(cfg: Config, start: int) -> Iterator:
    """Yield show(step, row): a bar on a terminal, a line a row elsewhere."""
    console = Console()
    words = "loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  MFU {mfu:.1%}"
    if not (console.is_terminal and utils.is_main_process()):
        yield lambda step, row: log(f"step {step:>5}/{cfg.run.steps}  " + words.format(**row))
        return
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("ETA"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("first step", total=cfg.run.steps, completed=start)
        yield lambda step, row: bar.update(task, completed=step, description=words.format(**row))


def train(cfg: Config) -> None:
    """Train until run.steps, from the newest checkpoint if there is one."""
    dataset.load(cfg.data.path, cfg.model.vocab_size, cfg.data.seq_len)
    directory = open_run(cfg)
    checkpoints = directory / "checkpoints"
    if (done := checkpoint.latest_step(checkpoints) or 0) >= cfg.run.steps:
        return say_complete(cfg, directory, done)

    mesh = sharding.make_mesh(cfg.mesh)
    plan = announce(cfg, mesh)
    begin = time.perf_counter()
    state = restore_or_init(cfg, mesh, checkpoints)
    first = int(state.step)
    restore_s = time.perf_counter() - begin

    begin = time.perf_counter()
    step_function = optimizer.train_step(cfg, mesh).lower(state, sharding.put(dataset.batch(cfg, first), mesh)).compile()
    compile_s = time.perf_counter() - begin
    log(f"start-up   import {IMPORT_S:.1f} s, restore {restore_s:.1f} s, compile {compile_s:.1f} s")

    metrics = Metrics(directory, first)
    manifest = dataset.load(cfg.data.path).manifest
    metrics.write("start", first, time=time.time(), params_total=plan.params_total, params_active=plan.params_active,
                  tokens_per_step=plan.tokens_per_step, unigram_nats=manifest["unigram_nats"],
                  bigram_nats=manifest["bigram_nats"], import_s=IMPORT_S, restore_s=restore_s, compile_s=compile_s)  # fmt: skip

    with checkpoint.open_directory(checkpoints, cfg.run.keep_checkpoints) as manager:
        state = loop(cfg, mesh, state, step_function, plan, metrics, manager)
        checkpoint.save(manager, cfg.run.steps, state, describe(cfg))
    finish(cfg, mesh, state, metrics, directory)


def loop(cfg: Config, mesh, state, step_function, plan: planner.Plan, metrics: Metrics, manager):
    """Take the steps from state.step to run.steps; write metrics, evaluations and checkpoints when they are due."""
    run, first = cfg.run, int(state.step)
    peak = peak_flops_per_s(mesh.devices.flat[0]) * mesh.size
    evaluation = pipeline.evaluate(cfg, mesh)
    losses, mark, steps_timed = [], time.perf_counter(), 0
    with progress_bar(cfg, first) as show:
        for step, batch in dataset.prefetch(cfg, first):
            if step == run.steps:
                return state
            state, values = step_function(state, sharding.put(batch, mesh))
            losses.append(values["cross_entropy"])
            taken, steps_timed = step + 1, steps_timed + 1
            if taken % run.log_every == 0 or taken == run.steps:
                row = to_row(values, losses)  # waits for the step
                step_s = (time.perf_counter() - mark) / steps_timed
                row |= {"tokens": taken * plan.tokens_per_step, "tokens_per_s": plan.tokens_per_step / step_s,
                        "mfu": plan.model_flops / step_s / peak}  # fmt: skip
                metrics.write("train", taken, **row)
                show(taken, row)
                losses, mark, steps_timed = [], time.perf_counter(), 0
            if run.eval_every and taken % run.eval_every == 0 and taken < run.steps:
                begin = time.perf_counter()
                metrics.write("eval", taken, **evaluate(cfg, mesh, evaluation, state.params, run.eval_batches))
                mark += time.perf_counter() - begin
            if taken % run.checkpoint_every == 0 and taken < run.steps:
                checkpoint.save(manager, taken, state, describe(cfg))


def finish(cfg: Config, mesh, state, metrics: Metrics, directory: Path) -> None:
    """Evaluate on the whole validation split, print a sample, draw the report."""
    step, manifest = int(state.step), dataset.load(cfg.data.path).manifest
    result = evaluate(cfg, mesh, pipeline.evaluate(cfg, mesh), state.params, batches=0)
    metrics.write("eval", step, **result)
    log(f"validation {result['loss']:.3f} nats/token, {result['bits_per_byte']:.3f} bits/byte over {result['tokens']:,} "
        f"tokens; the text's bigram entropy is {manifest['bigram_nats']:.3f} nats/token")  # fmt: skip

    encoding = tokenizers.load(manifest["tokenizer"]["name"])
    text = generate.sample(cfg, mesh, state.params, encoding, cfg.run.sample_prompt, cfg.run.sample_tokens)
    seconds = time.perf_counter() - START
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    metrics.write("end", step, seconds=seconds, peak_host_bytes=peak_bytes)
    if utils.is_main_process():
        with (directory / "samples.txt").open("a") as file:
            file.write(f"--- step {step}\n{text}\n")
        report.draw([directory], directory / "report.png")
    log(f"sample     {text!r}" if "\n" not in text else f"sample\n{text}\n")
    log(f"done       step {step} in {seconds:.0f} s, peak memory {peak_bytes / 2**30:.2f} GiB; see {directory}/report.png")


def say_complete(cfg: Config, directory: Path, step: int) -> None:
    flags = f"python main.py {cfg.run.name}"
    log(f"{directory} is complete: step {step} of {cfg.run.steps}.")
    log(f"  continue it:  {flags} --run.steps {2 * step}")
    log(f"  start again:  {flags} --run.restart    (deletes {directory})")


def use_compile_cache(cfg: Config) -> None:
    """Keep compiled programs between runs, so that the second start is faster."""
    directory = cfg.run.compile_cache
    if directory == "auto":
        directory = os.path.join(utils.cache_directory(), "xla")
    jax.config.update("jax_compilation_cache_dir", directory or None)


def main(argv: list[str] | None = None) -> int:
    try:
        cfg = parse(sys.argv[1:] if argv is None else argv)
        use_compile_cache(cfg)
        train(cfg)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
