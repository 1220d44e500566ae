"""The training command: parse the flags, compile the step, run the training loop and write the report.

`python main.py laptop` trains a preset; `python main.py laptop --model.n_experts 4 --run.steps 100` overrides some of
its settings. A run writes everything to runs/NAME, or gs://BUCKET/DIR/NAME: config.json, parameters.txt,
metrics.jsonl, checkpoints/, samples.txt, report.png.
"""

import time

START = time.perf_counter()  # before the imports below, because the run prints how long they take

from config import PRESETS, Config, flags
from utils import UserError, cache_directory, exit_quietly_on_ctrl_c, exit_status, is_main_process, log, parse_early
from weights import init_from

if __name__ == "__main__":
    exit_quietly_on_ctrl_c()

HELP = """\
e.g. python main.py laptop --run.steps 100
     python main.py Qwen3-0.6B/config.json   # a model of Hugging Face, or its folder, from random parameters

Train a transformer. --config reads the settings of an earlier run, and resumes it if run.name is the same. Presets:"""


def parse(argv: list[str]) -> Config:
    """Parse `[PRESET | FOLDER | config.json | --config FILE] [--flags]`. The first word sets the flags' defaults."""
    lines = [f"  {name:13} {what}" for name, (what, _) in PRESETS.items()]
    start = init_from.read_architecture(file) if (file := flags.model_file(argv)) else None
    cfg, args = flags.command_line(argv, "python main.py", "\n".join((HELP, *lines)), "laptop",
                                   flags.Arguments, init_from.apply_init_from, start)  # fmt: skip
    return flags.batch_of_tokens(cfg, args.batch_tokens)


EARLY = parse_early(parse) if __name__ == "__main__" else None

import os
import sys

import jax

import dataset
import devices
import generate
import optimizer
import sharding
from compile import ordered
from data import tokenizers
from evaluate.validation import Validation, open_tasks
from plan.answer import parameter_list
from plan.chips import hardware
from progress import show_busy
from startup import preflight
from startup.start import load_state_before, restore_or_init, trace_step
from train import checkpoint, directory as runs, guard, recorder, report, storage, tracking
from train.hosts.processes import Processes, end_together, exit_process, join, write_cache_on_every_process
from train.interruptions import Interruptions
from train.progress import format_result, print_complete, progress_bar, to_row

IMPORT_S = time.perf_counter() - START
SAMPLE_TOKENS = 200  # maximum length of the sample at the end, which also stops at the end of the context


def train(cfg: Config, directory, argv: list[str], interruptions: Interruptions, together: Processes) -> None:
    """Train until run.steps, starting from the latest checkpoint if there is one. `argv`: the flags of this command."""
    encoding = preflight.check_tokens(cfg)
    together.agreement.check_same(**runs.describe(cfg))
    if done := together.board.call_on_first("done", lambda: runs.check_resumable(cfg, directory)):
        return print_complete(cfg, directory, done, argv)

    mesh = sharding.make_mesh(cfg.mesh)
    plan = preflight.log_plan(cfg, mesh, together.board.message.saved)
    requested, cfg = cfg, plan.cfg
    begin = time.perf_counter()
    traced = trace_step(cfg, mesh)
    runs.open_run(requested, directory, together, parameter_list.lines(cfg))
    trace_s, begin = time.perf_counter() - begin, time.perf_counter()
    state = restore_or_init(cfg, mesh, directory, init_from.load_init_params, together)
    first = int(state.step)
    restore_s, begin = time.perf_counter() - begin, time.perf_counter()
    with show_busy("compiling  the training step (seconds to minutes)"):
        program = ordered.compile(traced, mesh)
    profile = runs.profile_directory(directory, together)
    step_function = recorder.Recorder(program, cfg.run.profiled_steps, first, profile, plan.topology)
    compile_s = trace_s + time.perf_counter() - begin
    action = "restore" if first else "initialize"
    log(f"start-up   import {IMPORT_S:.1f} s, {action} {restore_s:.1f} s, compile {compile_s:.1f} s")

    metrics = runs.Metrics(directory, first, cfg.run.steps)
    manifest = dataset.open_corpus(cfg).manifest
    metrics.write("start", first, time=time.time(), params_total=plan.params_total, params_active=plan.params_active,
                  tokens_per_step=plan.tokens_per_step, unigram_nats=manifest["unigram_nats"], import_s=IMPORT_S,
                  bigram_nats=manifest["bigram_nats"], restore_s=restore_s, compile_s=compile_s)  # fmt: skip

    evaluation = Validation(cfg, mesh, encoding, directory, together.watchdog.record_progress)
    send = lambda: storage.upload(directory)

    def saved(step: int) -> None:
        runs.record_saved_step(directory, step)
        send()
        together.board.message.saved = step

    with tracking.Tracker(cfg, storage.local_folder(directory)):
        places = directory / "checkpoints", cfg.run.keep_checkpoints, together.agreement.saving_host, send, saved
        with interruptions.defer_signals(), checkpoint.Saver(*places) as manager:
            if interruptions.should_start_after(first):
                state = loop(cfg, mesh, state, step_function, evaluation, plan, metrics, manager, interruptions)
            if first < int(state.step) == cfg.run.steps:
                # Use the batches of all earlier evaluations, so that the losses of checkpoints are comparable.
                loss = evaluation.loss(optimizer.gathered_params(cfg, mesh, state), cfg.run.eval_batches)["loss"]
                checkpoint.save(manager, cfg.run.steps, state, runs.result_settings(runs.describe(cfg)), loss)
        finish(cfg, mesh, state, evaluation, metrics, directory, together)


# Loop -----------------------------------------------------------------------------------------------------------------


def loop(cfg: Config, mesh, state, step_function, evaluation, plan, metrics: runs.Metrics, manager, interruptions):
    """Train from state.step to run.steps. Write metrics, evaluations and checkpoints when they are due."""
    run, first, about = cfg.run, int(state.step), runs.result_settings(runs.describe(cfg))
    peak = hardware.PEAK_FLOPS_PER_S.get(mesh.devices.flat[0].device_kind)  # None for a CPU
    evaluate = lambda step: evaluation.write(metrics, optimizer.gathered_params(cfg, mesh, state), step)
    if run.init_from and run.eval_every and not first:
        evaluate(0)
    losses, mark, watchdog = [], time.perf_counter(), interruptions.together.watchdog
    skips, questions = guard.SkipWatch(cfg, metrics.write), guard.GradientStats(cfg, mesh, metrics.write)
    size, rows = cfg.data.batch_size, sharding.own_rows(mesh, cfg.data.batch_size)
    with progress_bar(cfg, first) as show:
        for step, batch in dataset.prefetch(cfg, first, rows):
            if step == run.steps:
                return state
            manager.check()  # a background save that failed stops the run here, not at the next save
            taken = step + 1
            watchdog.begin_step(taken)
            placed = sharding.put(batch, mesh, size)
            questions.write_due(taken, state, placed, skips)
            state, values = step_function(state, placed)
            losses.append(values["cross_entropy"])
            show.add_step(taken, values["cross_entropy"])
            skips.add_step(taken, values)
            last, stopping = taken == run.steps, interruptions.stops_after(taken)
            evaluation_due = run.eval_every and taken % run.eval_every == 0 and not last
            checkpoint_due = (taken % run.checkpoint_every == 0 or stopping) and not last
            # A row also ends before an evaluation, so that step times exclude it, and at a checkpoint, so that after a
            # resume the loss is averaged over the same steps.
            if taken % run.log_every == 0 or evaluation_due or checkpoint_due or last:
                skips.check_pending()  # blocks until the step is finished
                row = to_row(values, losses)
                step_s = (time.perf_counter() - mark) / len(losses)
                row |= {"tokens": taken * plan.tokens_per_step, "tokens_per_s": plan.tokens_per_step / step_s}
                row |= {"mfu": plan.model_flops / step_s / peak} if peak else {}
                metrics.write("train", taken, **row)
                show.add_row(taken, row)
                watchdog.show(run.steps, row, pauses=evaluation_due or checkpoint_due or last)
                losses, mark = [], time.perf_counter()
            if evaluation_due:
                result = evaluate(taken)
            if checkpoint_due:
                checkpoint.save(manager, taken, state, about, result["loss"] if evaluation_due else None)
            if stopping:
                return state
            if evaluation_due or checkpoint_due:
                mark = time.perf_counter()


def finish(cfg: Config, mesh, state, evaluation, metrics: runs.Metrics, directory, together: Processes) -> None:
    """Evaluate on the whole validation split, print a sample and plot the report."""
    step, manifest = int(state.step), dataset.open_corpus(cfg).manifest
    params = optimizer.gathered_params(cfg, mesh, state)
    result = evaluation(params, step, batches=0)
    metrics.write("eval", step, **result)
    log(f"validation {format_result(result)}; entropy of the text: unigram {manifest['unigram_nats']:.3f}, "
        f"bigram {manifest['bigram_nats']:.3f} nats/token")  # fmt: skip

    encoding, prompt, text = tokenizers.from_manifest(manifest), cfg.run.sample_prompt, None
    if encoding and prompt:
        text = generate.sample(cfg, params, encoding, mesh, prompt, SAMPLE_TOKENS)
    if is_main_process():
        if text is not None:
            with (directory / "samples.txt").open("a", encoding="utf-8") as file:
                file.write(f"--- step {step}\n{text}\n")
        report.draw([storage.local_folder(directory)], directory / "report.png")
    seconds, peak = time.perf_counter() - START, devices.peak_host_bytes()
    metrics.write("end", step, seconds=seconds, peak_host_bytes=peak)  # last: this row marks the run as complete
    together.agreement.complete = True
    if text is not None:
        log(f"sample     {text!r}" if "\n" not in text else f"sample\n{text}\n")
    log(f"done       step {step} in {seconds:.0f} s, peak memory {peak / 2**30:.2f} GiB; see {directory}/report.png")


def replay(cfg: Config) -> None:
    """Repeat step run.replay, from the latest good checkpoint before it or from step 0, without writing any file."""
    step = cfg.run.replay
    with storage.temporary_copy(storage.run_directory(cfg)) as directory:
        if not (directory / "config.json").exists():
            raise UserError(f"{directory} has no run, so there is no step {step} to replay; "
                            "select a run with --run.name")  # fmt: skip
        if step > cfg.run.steps:
            raise UserError(f"run.replay={step}: run.steps={cfg.run.steps}; use a step from 1 to {cfg.run.steps}")
        runs.check_same_settings(cfg, directory)
        mesh = sharding.make_mesh(cfg.mesh)
        cfg = preflight.make_plan(cfg, mesh).cfg
        state = load_state_before(step, cfg, mesh, directory / "checkpoints", init_from.load_init_params)
        log(f"replaying step {step} of {directory}, from step {int(state.step)}")
        guard.replay(cfg, mesh, state, runs.read_rows(directory))


def cache_setting() -> str:
    """Return the setting of the compilation cache: a directory; "auto": the user's cache folder; "": no cache."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR", "auto")


def compile_cache(cfg: Config, name: str = ""):
    """Inside this context, cache compiled programs to speed up the next start. `name`: this process's subdirectory."""
    if (directory := cache_setting()) == "auto":
        directory = os.path.join(cache_directory(), "xla", name)
    return devices.compile_cache(directory, enabled=cfg.mesh.devices == 1 or jax.default_backend() != "cpu")


@end_together
@exit_status
def main(argv: list[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    cfg = EARLY or parse(argv)
    if cfg.run.devices > 1 == cfg.mesh.devices:
        raise UserError(f"--devices {cfg.run.devices}: without --mesh only one device would be used; set a mesh, "
                        f"e.g. --mesh fsdp={cfg.run.devices}")  # fmt: skip
    open_tasks(cfg)
    if cfg.run.check == "only":
        return preflight.check(cfg)
    together = join(cfg.run)
    board, agreement = together.board, together.agreement
    devices.use_devices(cfg.run.devices, board.count)
    own_cache = f"process-{board.rank:02}" if board.count > 1 and cache_setting() == "auto" else ""
    with compile_cache(cfg, own_cache), write_cache_on_every_process(bool(own_cache)):
        if cfg.run.replay:
            return replay(cfg)
        storage.check(directory := storage.run_directory(cfg))
        interruptions = Interruptions(argv, directory / "checkpoints", together)
        try:
            writes = lambda: agreement.share_disk or board.rank == 0
            synced = storage.synced(directory)
            with interruptions, runs.lock_directory(directory), synced, storage.raise_disk_lost(directory, writes):
                train(cfg, directory, argv, interruptions, together)
        except KeyboardInterrupt:
            return interruptions.end()


if __name__ == "__main__":
    exit_process(main())
