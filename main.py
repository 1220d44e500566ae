"""The training command: parse, build, loop, finish.

`python main.py laptop` trains a preset; `python main.py laptop --model.n_experts 4 --run.steps 100` changes settings of
it. Everything a run leaves lies in runs/NAME, or gs://BUCKET/DIR/NAME: config.json, metrics.jsonl, checkpoints/,
samples.txt, report.png.
"""

import time

from devices import log

START = time.perf_counter()  # before the imports below: their time is reported

from errors import UserError, end_quietly, exit_status

if __name__ == "__main__":
    end_quietly()

import json
import os
import resource
import sys

import jax

import dataset
import devices
import generate
import pipeline
import sharding
from config import PRESETS, Config
from config.flags import command_line
from data import tokenizers
from plan import hardware, planner
from train import checkpoint, guard, preflight, report, storage, tracking
from train.directory import Metrics, check_same, decisive, describe, locked, look, note_saved, open_run, read_rows
from train.interruptions import Interruptions
from train.processes import Processes, end_together, join, write_own_programs
from train.progress import evaluate, in_words, progress_bar, say_complete, to_row
from train.start import restore_or_init, state_before, trace_step
from weights import init_from
from xla import ordered

IMPORT_S = time.perf_counter() - START
SAMPLE_TOKENS = 200  # at most, of the sample at the end; it ends with the context
HELP = """\
e.g. python main.py laptop --run.steps 100

Train a transformer. --config takes the settings a run left; under the same run.name that run goes on. Presets:"""


def parse(argv: list[str]) -> Config:
    """Read `[PRESET | --config FILE] [--flags]`; the former says what the flags' defaults are."""
    too_big = [name for name, (what, _) in PRESETS.items() if what.startswith("planner only")]
    presets = {name: what for name, (what, _) in PRESETS.items() if name not in too_big}
    lines = [f"  {name:13} {what}" for name, what in (presets | {"planner only": ", ".join(too_big)}).items()]
    return command_line(argv, "python main.py", "\n".join((HELP, *lines)), "laptop", change=init_from.apply_init_from)[
        0
    ]


def train(cfg: Config, directory, argv: list[str], interruptions: Interruptions, together: Processes) -> None:
    """Train until run.steps, from the newest checkpoint if there is one. `argv` is what to type to do so again."""
    encoding = preflight.tokens(cfg)
    together.agreement.same(**describe(cfg))
    if done := together.board.first("done", lambda: look(cfg, directory)):
        return say_complete(cfg, directory, done, argv)

    mesh = sharding.make_mesh(cfg.mesh)
    plan = preflight.announce(cfg, mesh)
    asked, cfg = cfg, plan.cfg
    if not encoding:
        log(f"sample     none at the end: {cfg.data.path} holds ids of no known tokenizer")
    begin = time.perf_counter()
    traced = trace_step(cfg, mesh)
    open_run(asked, directory, together)
    trace_s, begin = time.perf_counter() - begin, time.perf_counter()
    state = restore_or_init(cfg, mesh, directory, init_from.load_init_params, together)
    first = int(state.step)
    restore_s, begin = time.perf_counter() - begin, time.perf_counter()
    step_function = ordered.compile(traced, mesh)
    compile_s = trace_s + time.perf_counter() - begin
    begun = "restore" if first else "initialise"
    log(f"start-up   import {IMPORT_S:.1f} s, {begun} {restore_s:.1f} s, compile {compile_s:.1f} s")

    metrics = Metrics(directory, first, cfg.run.steps)
    manifest = dataset.opened(cfg).manifest
    metrics.write("start", first, time=time.time(), params_total=plan.params_total, params_active=plan.params_active,
                  tokens_per_step=plan.tokens_per_step, unigram_nats=manifest["unigram_nats"],
                  bigram_nats=manifest["bigram_nats"],
                  import_s=IMPORT_S, restore_s=restore_s, compile_s=compile_s)  # fmt: skip

    evaluation = pipeline.evaluate(cfg, mesh)
    send = lambda: storage.send(directory)

    def saved(step: int) -> None:
        note_saved(directory, step)
        send()
        together.board.message.saved = step

    with tracking.Tracker(cfg, storage.here(directory)):
        places = directory / "checkpoints", cfg.run.keep_checkpoints, together.agreement.keeper, send, saved
        with interruptions.saved(), checkpoint.open_directory(*places) as manager:
            if interruptions.begins_after(first):
                state = loop(cfg, mesh, state, step_function, evaluation, plan, metrics, manager, interruptions)
            if first < int(state.step) == cfg.run.steps:
                # Over the batches of every evaluation on the way: losses of checkpoints are compared.
                result = evaluate(cfg, mesh, evaluation, state.params, cfg.run.eval_batches, together.watchdog.touch)
                checkpoint.save(manager, cfg.run.steps, state, decisive(describe(cfg)), result["loss"])
        finish(cfg, mesh, state, evaluation, metrics, directory, together)


# Loop -----------------------------------------------------------------------------------------------------------------


def loop(
    cfg: Config, mesh, state, step_function, evaluation, plan: planner.Plan, metrics: Metrics, manager, interruptions
):
    """Take the steps from state.step to run.steps; write metrics, evaluations and checkpoints when they are due."""
    run, first, about = cfg.run, int(state.step), decisive(describe(cfg))
    peak = hardware.PEAK_FLOPS_PER_S.get(mesh.devices.flat[0].device_kind)  # a CPU's nobody knows
    losses, mark, together = [], time.perf_counter(), interruptions.together
    skips, questions = guard.SkipWatch(cfg, metrics.write), guard.Questions(cfg, mesh, metrics.write)
    size, rows = cfg.data.batch_size, sharding.own_rows(mesh, cfg.data.batch_size)
    with progress_bar(cfg, first) as show:
        for step, batch in dataset.prefetch(cfg, first, rows):
            if step == run.steps:
                return state
            manager.check()  # a save in the background that failed stops the run here, not at the next save
            taken = step + 1
            together.watchdog.begin_step(taken)
            placed = sharding.put(batch, mesh, size)
            questions.ask(taken, state, placed, skips)
            state, values = step_function(state, placed)
            losses.append(values["cross_entropy"])
            skips.see(taken, values)
            last, stopping = taken == run.steps, interruptions.stops_after(taken)
            evaluation_due = run.eval_every and taken % run.eval_every == 0 and not last
            checkpoint_due = (taken % run.checkpoint_every == 0 or stopping) and not last
            # Either ends a row too: an evaluation so that it is not timed as a step, a checkpoint so that the loss
            # averaged from there on is the same after a resume.
            if taken % run.log_every == 0 or evaluation_due or checkpoint_due or last:
                skips.settle()  # waits for the step
                row = to_row(values, losses)
                step_s = (time.perf_counter() - mark) / len(losses)
                row |= {"tokens": taken * plan.tokens_per_step, "tokens_per_s": plan.tokens_per_step / step_s}
                row |= {"mfu": plan.model_flops / step_s / peak} if peak else {}
                metrics.write("train", taken, **row)
                show(taken, row)
                together.watchdog.show(run.steps, row)
                losses, mark = [], time.perf_counter()
            if evaluation_due:
                result = evaluate(cfg, mesh, evaluation, state.params, run.eval_batches, together.watchdog.touch)
                metrics.write("eval", taken, **result)
                log(f"step {taken:>5}/{run.steps}  validation {in_words(result)}")
            if checkpoint_due:
                checkpoint.save(manager, taken, state, about, result["loss"] if evaluation_due else None)
            if stopping:
                return state
            if evaluation_due or checkpoint_due:
                mark = time.perf_counter()


def finish(cfg: Config, mesh, state, evaluation, metrics: Metrics, directory, together: Processes) -> None:
    """Evaluate on the whole validation split, print a sample, draw the report."""
    step, manifest = int(state.step), dataset.opened(cfg).manifest
    log("evaluating on the whole validation split ..")
    result = evaluate(cfg, mesh, evaluation, state.params, batches=0, moves=together.watchdog.touch)
    metrics.write("eval", step, **result)
    log(f"validation {in_words(result)}; entropy of the text: unigram {manifest['unigram_nats']:.3f}, "
        f"bigram {manifest['bigram_nats']:.3f} nats/token")  # fmt: skip

    encoding, prompt, text = tokenizers.from_manifest(manifest), cfg.run.sample_prompt, None
    if encoding and prompt:
        text = generate.sample(cfg, state.params, encoding, mesh, prompt, SAMPLE_TOKENS)
    if devices.is_main_process():
        if text is not None:
            with (directory / "samples.txt").open("a", encoding="utf-8") as file:
                file.write(f"--- step {step}\n{text}\n")
        report.draw([storage.here(directory)], directory / "report.png")
    seconds = time.perf_counter() - START
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    metrics.write("end", step, seconds=seconds, peak_host_bytes=peak_bytes)  # last: without it the run is not complete
    together.agreement.complete = True
    if text is not None:
        log(f"sample     {text!r}" if "\n" not in text else f"sample\n{text}\n")
    peak = f"peak memory {peak_bytes / 2**30:.2f} GiB"
    log(f"done       step {step} in {seconds:.0f} s, {peak}; see {directory}/report.png")


def replay(cfg: Config) -> None:
    """Take one step of a run again, from the newest good checkpoint before it, or from the start. Writes nothing."""
    with storage.copied(storage.of(cfg)) as directory:
        _replay(cfg, directory, cfg.run.replay)


def _replay(cfg: Config, directory, step: int) -> None:
    if not (directory / "config.json").exists():
        raise UserError(f"{directory}: no run there, so there is no step {step} to replay; name one with --run.name")
    if step > cfg.run.steps:
        raise UserError(f"run.replay={step}: the run has run.steps={cfg.run.steps}; use a number from 1 to that")
    check_same(cfg, directory)
    mesh = sharding.make_mesh(cfg.mesh)
    cfg = preflight.planned(cfg, mesh).cfg
    state = state_before(step, cfg, mesh, directory / "checkpoints", init_from.load_init_params)
    log(f"replaying step {step} of {directory}, from step {int(state.step)}")
    guard.replay(cfg, mesh, state, [json.loads(row) for row in read_rows(directory)])


def programs() -> str:
    """The directory of compiled programs; auto: the user's cache folder; empty: none."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR", "auto")


def compile_cache(cfg: Config, name: str = ""):
    """Meanwhile keep compiled programs, so that the next start is faster; `name`: of several processes, this one's."""
    directory = os.path.join(devices.cache_directory(), "xla", name) if (asked := programs()) == "auto" else asked
    return devices.compile_cache(directory, enabled=cfg.mesh.devices == 1 or jax.default_backend() != "cpu")


@end_together
@exit_status
def main(argv: list[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    cfg = parse(argv)
    if cfg.run.devices > 1 == cfg.mesh.devices:
        raise UserError(f"--devices {cfg.run.devices}: say how they share the work, or one does it all, "
                        f"e.g. --mesh fsdp={cfg.run.devices}")  # fmt: skip
    if cfg.run.check == "only":
        return preflight.check(cfg)
    together = join(cfg.run)
    board, agreement = together.board, together.agreement
    devices.use_devices(cfg.run.devices, board.count)
    own_cache = f"process-{board.rank:02}" if board.count > 1 and programs() == "auto" else ""
    with compile_cache(cfg, own_cache), write_own_programs(bool(own_cache)):
        if cfg.run.replay:
            return replay(cfg)
        storage.check(directory := storage.of(cfg))
        interruptions = Interruptions(argv, directory / "checkpoints", together)
        try:
            writes = lambda: agreement.share_disk or board.rank == 0
            with interruptions, locked(directory), storage.fetched(directory), storage.watched(directory, writes):
                train(cfg, directory, argv, interruptions, together)
        except KeyboardInterrupt:
            return interruptions.end()


if __name__ == "__main__":
    sys.exit(main())
