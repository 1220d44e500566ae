"""The training command: parse, build, loop.

`python main.py laptop` trains a preset; `python main.py laptop --model.n_experts 4 --run.steps 100` changes settings of
it. Everything a run leaves lies in runs/NAME: config.json, metrics.jsonl, checkpoints/, samples.txt, report.png.
"""

import time

START = time.perf_counter()  # before the imports below: their time is reported

import dataclasses
import fcntl
import itertools
import json
import math
import os
import resource
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import dataset
import generate
import model
import optimizer
import pipeline
import sharding
import utils
from config import PRESETS, Config, ModelConfig, first_difference, preset
from data import tokenizers
from plan import hardware, planner
from train import checkpoint, guard, report, tracking
from utils import UserError, log
from weights import convert
from xla import ordered

IMPORT_S = time.perf_counter() - START


def parse(argv: list[str]) -> Config:
    """Read `[PRESET] [--flags]`; the preset says what the flags' defaults are."""
    has_preset = argv and not argv[0].startswith("-")
    name, flags = (argv[0], argv[1:]) if has_preset else ("laptop", argv)
    too_big = [name for name, (what, _) in PRESETS.items() if what.startswith("planner only")]
    presets = {name: what for name, (what, _) in PRESETS.items() if name not in too_big}
    lines = [f"  {name:13} {what}" for name, what in (presets | {"planner only": ", ".join(too_big)}).items()]
    description = "\n".join((
        "Train a transformer. Presets:", *lines, "",
        f"Flags change settings of the preset, here {name!r}; their defaults are its values. "
        "--help-verbose says what each does."))  # fmt: skip
    default = preset(name)
    if source := init_from(flags):
        theirs = convert.read_config(Path(source))
        if not isinstance(theirs, ModelConfig):
            raise UserError(f"{source} holds another model ({type(theirs).__name__}); main.py trains model.py's")
        default = dataclasses.replace(default, model=theirs)
    return tyro.cli(
        Config, prog="python main.py [PRESET]", description=description, default=default, args=flags,
        use_underscores=True, compact_help=True,
    )  # fmt: skip


def init_from(flags: list[str]) -> str:
    """The run whose parameters to start from: its model's settings become the flags' defaults."""
    names = ("--init-from", "--init_from", "--run.init_from", "--run.init-from")
    words = [word for flag in flags for word in flag.split("=", 1)]
    return next((value for name, value in itertools.pairwise(words) if name in names), "")


# The run's directory --------------------------------------------------------------------------------------------------

OWN_FILES = ("config.json", "metrics.jsonl", "checkpoints", "samples.txt", "report.png")
# Settings of a run that may change when it goes on: they decide where, how fast and how long, not what comes out.
FREE = ("run", "mesh", "pipeline", "data.path", "data.prefetch", "optim.max_device_batch", "model.remat",
        "model.gather", "model.context_attention", "model.loss_chunk")  # fmt: skip


def describe(cfg: Config) -> dict:
    """What config.json holds: every setting, and which tokens they met."""
    config = cfg.to_dict()
    config["run"]["restart"] = False  # said once, not a property of the run
    return {"config": config, "data": dataset.fingerprint(cfg)}


def decisive(about: dict) -> dict:
    """The part of `describe` that decides results: a run goes on only where it is the same."""
    config = json.loads(json.dumps(about["config"]))
    run = {name: config["run"].get(name) for name in ("seed", "init_from")}
    for name in FREE:
        part, _, setting = name.partition(".")
        (config[part] if setting else config).pop(setting or part, None)
    return config | {"run": run, "tokens": about["data"]}


def check_same(cfg: Config, directory: Path) -> None:
    """Raises: UserError if the directory holds a run with other settings, naming the first that decides results."""
    if cfg.run.restart:
        return
    ours, file, checkpoints = decisive(describe(cfg)), directory / "config.json", directory / "checkpoints"
    try:
        theirs = decisive(json.loads(file.read_text())) if file.exists() else ours
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error!r}); choose another --run.name, or --run.restart") from None
    if difference := first_difference(ours, theirs):
        raise UserError(
            f"{directory} was started with other settings: {difference} (in its config.json); "
            "start another run with --run.name, or delete this one with --run.restart")  # fmt: skip
    if (step := checkpoint.latest_step(checkpoints)) is not None:
        checkpoint.check_about(checkpoints, step, ours)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of a run's directory. The kernel lets go when this one dies, however it dies.

    Raises: UserError naming who is in there, or why nothing can be written.
    """
    if not utils.is_main_process():
        yield
        return
    made, path = [one for one in (directory, *directory.parents) if not one.exists()], directory / ".lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error}; choose another --run.dir") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError  # the run that held it ended just now and removed it
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise UserError(
                f"{directory} is in use by {who}; wait until that ends, or start another run with --run.name"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # something came into it
                for one in made:
                    one.rmdir()


def open_run(cfg: Config, directory: Path) -> None:
    """Make the run's directory and write its config.json; under run.restart delete what an earlier run wrote there."""
    for name in (*OWN_FILES, *tracking.FILES) if cfg.run.restart else ():
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / "config.json", json.dumps(describe(cfg), indent=1) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def steps_done(cfg: Config, directory: Path) -> int | None:
    """Steps a finished run has taken; None if some of run.steps, or the report after the last, is still to do."""
    rows = [json.loads(row) for row in read_rows(directory)]
    ended = max((row["step"] for row in rows if row["kind"] == "end"), default=0)
    reached = checkpoint.latest_step(directory / "checkpoints") or 0
    return max(ended, reached) if ended >= cfg.run.steps or reached > cfg.run.steps else None


def read_rows(directory: Path) -> list[str]:
    """Lines of metrics.jsonl, without a last one that is half written."""
    path = directory / "metrics.jsonl"
    return [row for row in path.read_text().splitlines(keepends=True) if row.endswith("\n")] if path.exists() else []


class Metrics:
    """metrics.jsonl: one JSON object a line, appended by process 0 and flushed at once."""

    def __init__(self, directory: Path, step: int, last_step: int):
        """Keep the rows up to `step`; what is past it is done again, and so is an evaluation at the last step."""
        self.path = directory / "metrics.jsonl"
        if utils.is_main_process():

            def keep(row):
                return row["step"] <= step and (row["kind"], row["step"]) != ("eval", last_step)

            replace_file(self.path, "".join(row for row in read_rows(directory) if keep(json.loads(row))))

    def write(self, kind: str, step: int, **values) -> None:
        if utils.is_main_process():
            with self.path.open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **to_json(values)}) + "\n")


def to_json(value):
    """Arrays as lists, and null for what is not finite: JSON knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: to_json(x) for name, x in value.items()}
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, list):
        return [to_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Start-up -------------------------------------------------------------------------------------------------------------


def announce(cfg: Config, mesh) -> planner.Plan:
    """Say what will run before the slow parts start."""
    plan = planner.plan(cfg)
    parts = ((name, f"{size / 2**20:,.0f}") for name, size in plan.memory_bytes.items())
    memory = ", ".join(f"{name} {size}" for name, size in parts if size != "0")
    device = mesh.devices.flat[0]
    log(f"model      {plan.params_total:,} parameters, {plan.params_active:,} active per token")
    log(f"mesh       {cfg.mesh} on {mesh.size} x {device.device_kind}")
    log(f"batch      {sharding.split_batch(cfg)}; {plan.tokens_per_step:,} tokens a step")
    log(f"memory     about {sum(plan.memory_bytes.values()) / 2**20:,.0f} MiB a device: {memory}")
    return plan


def peak_flops_per_s(device) -> float:
    """One device's peak: from the table of chips, or, for a CPU, what a 2048-wide float32 product reaches now."""
    if device.device_kind in hardware.PEAK_FLOPS_PER_S:
        return hardware.PEAK_FLOPS_PER_S[device.device_kind]
    n = 2048
    x = jax.device_put(jnp.ones((n, n), jnp.float32), device)
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def trace_step(cfg: Config, mesh):
    """Trace the training step, without arrays: what the settings forbid is refused here, before anything is changed."""
    sharding.check_divides(model.declare(cfg.model), mesh)
    state = checkpoint.target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    return optimizer.train_step(cfg, mesh).lower(state, sharding.put(dataset.batch(cfg, 0), mesh))


def given_params(cfg: Config, mesh):
    """Parameters of the run that run.init_from names, converted or trained; None if it names none."""
    if not cfg.run.init_from:
        return None
    source, declarations = Path(cfg.run.init_from), model.declare(cfg.model)
    log(f"parameters from {source}")
    if (source / "weights").is_dir():
        return convert.load_weights(source, declarations, mesh)
    return checkpoint.restore_params(source / "checkpoints", sharding.shapes(declarations, mesh))


def restore_or_init(cfg: Config, mesh, checkpoints: Path) -> optimizer.TrainState:
    """The newest checkpoint's state, placed on this mesh, or the state at step 0."""
    if (step := checkpoint.latest_step(checkpoints, log)) is None:
        return optimizer.init(cfg, mesh, given_params(cfg, mesh))
    target = checkpoint.target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    state = checkpoint.restore(checkpoints, target, step)
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
    """Metrics of the last step as JSON; only the loss is averaged, over the steps since the row before."""
    not_here = ("cross_entropy", "skipped_in_a_row", "not_finite")
    row = {name: np.asarray(value).tolist() for name, value in metrics.items() if name not in not_here}
    row["loss"] = guard.mean_loss(losses)  # cross-entropy alone, in nats per token
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
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
               TextColumn("ETA"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("taking the first steps", total=cfg.run.steps, completed=start)
        yield lambda step, row: bar.update(task, completed=step, description=words.format(**row))


def train(cfg: Config, argv: list[str], interruptions: "Interruptions") -> None:
    """Train until run.steps, from the newest checkpoint if there is one. `argv` is what to type to do so again."""
    corpus = dataset.load(cfg.data.path, cfg.model.vocab_size, cfg.data.seq_len)
    encoding = tokenizers.load(corpus.manifest["tokenizer"]["name"])
    generate.prompt_ids(encoding, cfg.run.sample_prompt, cfg.data.seq_len)  # refused now, not when all steps are taken
    directory = Path(cfg.run.dir) / cfg.run.name
    check_same(cfg, directory)
    if not cfg.run.restart and (done := steps_done(cfg, directory)):
        return say_complete(cfg, directory, done, argv)

    mesh = sharding.make_mesh(cfg.mesh)
    plan = announce(cfg, mesh)
    begin = time.perf_counter()
    traced = trace_step(cfg, mesh)
    open_run(cfg, directory)
    trace_s, begin = time.perf_counter() - begin, time.perf_counter()
    state = restore_or_init(cfg, mesh, directory / "checkpoints")
    first = int(state.step)
    restore_s, begin = time.perf_counter() - begin, time.perf_counter()
    step_function = ordered.compile(traced, mesh)
    compile_s = trace_s + time.perf_counter() - begin
    begun = "restore" if first else "initialise"
    log(f"start-up   import {IMPORT_S:.1f} s, {begun} {restore_s:.1f} s, compile {compile_s:.1f} s")

    metrics = Metrics(directory, first, cfg.run.steps)
    manifest = dataset.load(cfg.data.path).manifest
    metrics.write("start", first, time=time.time(), params_total=plan.params_total, params_active=plan.params_active,
                  tokens_per_step=plan.tokens_per_step, unigram_nats=manifest["unigram_nats"],
                  bigram_nats=manifest["bigram_nats"],
                  import_s=IMPORT_S, restore_s=restore_s, compile_s=compile_s)  # fmt: skip

    evaluation = pipeline.evaluate(cfg, mesh)
    keep = cfg.run.keep_checkpoints, cfg.run.keep_every, cfg.run.keep_best
    with tracking.Tracker(cfg, directory):
        with interruptions.saved(), checkpoint.open_directory(directory / "checkpoints", *keep) as manager:
            state = loop(cfg, mesh, state, step_function, evaluation, plan, metrics, manager, interruptions)
            if first < int(state.step) == cfg.run.steps:
                checkpoint.save(manager, cfg.run.steps, state, decisive(describe(cfg)))
        finish(cfg, mesh, state, evaluation, metrics, directory)


def loop(
    cfg: Config, mesh, state, step_function, evaluation, plan: planner.Plan, metrics: Metrics, manager, interruptions
):
    """Take the steps from state.step to run.steps; write metrics, evaluations and checkpoints when they are due."""
    run, first, about = cfg.run, int(state.step), decisive(describe(cfg))
    peak = peak_flops_per_s(mesh.devices.flat[0])
    losses, mark = [], time.perf_counter()
    skips, questions = guard.SkipWatch(cfg, metrics.write), guard.Questions(cfg, mesh, metrics.write)
    with progress_bar(cfg, first) as show:
        for step, batch in dataset.prefetch(cfg, first):
            if step == run.steps:
                return state
            manager.check()  # a save in the background that failed stops the run here, not at the next save
            taken = step + 1
            questions.ask(taken, state, batch, skips)
            state, values = step_function(state, sharding.put(batch, mesh))
            losses.append(values["cross_entropy"])
            skips.see(taken, values)
            last, stopping = taken == run.steps, interruptions.asked
            evaluation_due = run.eval_every and taken % run.eval_every == 0 and not last
            checkpoint_due = (taken % run.checkpoint_every == 0 or stopping) and not last
            # Either ends a row too: an evaluation so that it is not timed as a step, a checkpoint so that the loss
            # averaged from there on is the same after a resume.
            if taken % run.log_every == 0 or evaluation_due or checkpoint_due or last:
                skips.settle()  # waits for the step
                row = to_row(values, losses)
                step_s = (time.perf_counter() - mark) / len(losses)
                row |= {"tokens": taken * plan.tokens_per_step, "tokens_per_s": plan.tokens_per_step / step_s,
                        "mfu": plan.model_flops / step_s / peak}  # fmt: skip
                metrics.write("train", taken, **row)
                show(taken, row)
                losses, mark = [], time.perf_counter()
            if evaluation_due:
                result = evaluate(cfg, mesh, evaluation, state.params, run.eval_batches)
                metrics.write("eval", taken, **result)
                log(f"step {taken:>5}/{run.steps}  validation {in_words(result)}")
            if checkpoint_due:
                checkpoint.save(manager, taken, state, about, result["loss"] if evaluation_due else None)
            if stopping:
                return state
            if evaluation_due or checkpoint_due:
                mark = time.perf_counter()


def replay(cfg: Config) -> None:
    """Take one step of a run again, from the newest good checkpoint before it, or from the start. Writes nothing."""
    directory, step = Path(cfg.run.dir) / cfg.run.name, cfg.run.replay
    if not (directory / "config.json").exists():
        raise UserError(f"{directory}: no run there, so there is no step {step} to replay; name one with --run.name")
    if step > cfg.run.steps:
        raise UserError(f"run.replay={step}: the run has run.steps={cfg.run.steps}; use a number from 1 to that")
    check_same(cfg, directory)
    mesh, checkpoints = sharding.make_mesh(cfg.mesh), directory / "checkpoints"
    earlier = [one.step for one in checkpoint.found(checkpoints) if one.step < step and not one.fault()]
    if start := max(earlier, default=0):
        target = checkpoint.target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
        state = checkpoint.restore(checkpoints, target, start)
    else:
        state = optimizer.init(cfg, mesh, given_params(cfg, mesh))
    log(f"replaying step {step} of {directory}, from step {start}")
    guard.replay(cfg, mesh, state, [json.loads(row) for row in read_rows(directory)])


def in_words(result: dict) -> str:
    return f"{result['loss']:.3f} nats/token, {result['bits_per_byte']:.3f} bits/byte over {result['tokens']:,} tokens"


def finish(cfg: Config, mesh, state, evaluation, metrics: Metrics, directory: Path) -> None:
    """Evaluate on the whole validation split, print a sample, draw the report."""
    step, manifest = int(state.step), dataset.load(cfg.data.path).manifest
    log("evaluating on the whole validation split ..")
    result = evaluate(cfg, mesh, evaluation, state.params, batches=0)
    metrics.write("eval", step, **result)
    log(f"validation {in_words(result)}; entropy of the text: unigram {manifest['unigram_nats']:.3f}, "
        f"bigram {manifest['bigram_nats']:.3f} nats/token")  # fmt: skip

    encoding = tokenizers.load(manifest["tokenizer"]["name"])
    text = generate.sample(cfg, state.params, encoding, mesh, cfg.run.sample_prompt, cfg.run.sample_tokens)
    if utils.is_main_process():
        with (directory / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}\n{text}\n")
        report.draw([directory], directory / "report.png")
    seconds = time.perf_counter() - START
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    metrics.write("end", step, seconds=seconds, peak_host_bytes=peak_bytes)  # last: without it the run is not complete
    log(f"sample     {text!r}" if "\n" not in text else f"sample\n{text}\n")
    peak = f"peak memory {peak_bytes / 2**30:.2f} GiB"
    log(f"done       step {step} in {seconds:.0f} s, {peak}; see {directory}/report.png")


def say_complete(cfg: Config, directory: Path, done: int, argv: list[str]) -> None:
    log(f"{directory} is complete: {done} of {cfg.run.steps} steps taken.")
    log(f"  continue it:  {command(argv, steps=2 * done)}")
    log(f"  start again:  {command(argv, restart=True)}    # deletes its results")


def command(argv: list[str], steps: int | None = None, restart: bool = False) -> str:
    """The user's own command, ready for a shell, with another number of steps, or starting again."""
    kept, words = [], iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name == "--run.steps" and steps:
            _ = equals or next(words)  # its value goes with it
        elif name not in ("--run.restart", "--run.no_restart"):
            kept.append(word)
    kept += ["--run.steps", str(steps)] if steps else []
    kept += ["--run.restart"] if restart else []
    python = os.path.relpath(sys.executable)  # .venv/bin/python: it holds the packages, the shell's may not
    return shlex.join([sys.executable if python.startswith("..") else python, os.path.relpath(__file__), *kept])


def compile_cache(cfg: Config):
    """Meanwhile keep compiled programs, so that the next start is faster."""
    automatic = os.path.join(utils.cache_directory(), "xla")
    directory = automatic if cfg.run.compile_cache == "auto" else cfg.run.compile_cache
    return utils.compile_cache(directory, enabled=cfg.mesh.devices == 1 or jax.default_backend() != "cpu")


class Stopped(KeyboardInterrupt):
    """The user or the system asked the run to stop, and nothing is lost."""


class Interruptions:
    """Ctrl-C and SIGTERM. The first asks the loop to save and stop; outside the loop there is nothing to save, and it
    raises Stopped. A second one ends the process at once, with the exit status a shell gives it."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, argv: list[str]):
        self.argv, self.asked, self.saving, self.before = argv, False, False, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.reads, self.writes = os.pipe()
            os.set_blocking(self.writes, False)
            self.before = {number: signal.signal(number, self.handle) for number in self.SIGNALS}
            self.wakeup = signal.set_wakeup_fd(self.writes)
            threading.Thread(target=self.watch, args=(self.reads,), daemon=True).start()
        return self

    def __exit__(self, *_):
        if self.before:
            signal.set_wakeup_fd(self.wakeup)
            for number, handler in self.before.items():
                signal.signal(number, handler)
            os.close(self.writes)  # ends the thread

    def handle(self, number, frame) -> None:
        self.asked = True
        if not self.saving:
            raise Stopped

    def watch(self, reads: int) -> None:
        """Sees a signal at once, in a thread: the main one may be inside XLA for a minute, where `handle` waits."""
        seen = 0
        while number := os.read(reads, 1):
            seen += number[0] in self.SIGNALS
            if seen == 1:
                end = "stopping after this step, and saving it" if self.saving else "stopping"
                print(f"\n{end}; once more stops at once", file=sys.stderr, flush=True)
            elif seen > 1:
                cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # the progress bar hides it
                print(f"{cursor}stopped at once; this goes on from the newest checkpoint:  {command(self.argv)}",
                      file=sys.stderr, flush=True)  # fmt: skip
                os._exit(128 + number[0])
        os.close(reads)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Within, a signal only sets `asked`; what is within saves. Raises: Stopped at the end if there was one."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False
        if self.asked:
            raise Stopped


@utils.exit_status
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        cfg = parse(argv)
        utils.use_devices(cfg.run.devices)
        with compile_cache(cfg):
            if cfg.run.replay:
                replay(cfg)
                return 0
            with Interruptions(argv) as interruptions, locked(Path(cfg.run.dir) / cfg.run.name):
                train(cfg, argv, interruptions)
    except Stopped:
        log(f"stopped    nothing is lost; this goes on:  {command(argv)}")
    except KeyboardInterrupt:
        print(f"\ninterrupted; this resumes from the last checkpoint:  {command(argv)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
