"""Check before a run starts whether it can start: its tokens, memory, mesh and directory.

`python main.py .. --run.check only` prints the result and exits. It uses no device, writes nothing and does not wait
for other processes, so you can first run it on every host, even while another run is training there.
"""

import os

import jax

import dataset
import generate
import sharding
from compile import options
from config import Config
from config.fields import parse_skips
from config.needs import unmet
from data import tokenizers
from data.reading import examples
from devices import devices_per_process, memory_bytes, only_cpu, share_of_memory
from pipeline import documents, fit
from plan import planner
from plan.answer import auto
from plan.chips import hardware
from train import checkpoint, storage
from train.directory import check_resumable, check_saving_host, check_writable
from utils import UserError, log
from weights.convert import has_weights_only

LATE_S = 15  # when a process is lost, the others exit within run.peer_timeout_s + LATE_S


def check_tokens(cfg: Config):
    """Return the tokenizer of a run's tokens, or None if unknown. Raises: UserError if tokens or prompt don't fit."""
    corpus = dataset.open_corpus(cfg)
    # These raise if the documents of a task do not fit into rows.
    dataset.epoch_steps(cfg), dataset.rows_of(corpus.splits["val"], dataset.evaluation_data(cfg))
    encoding = tokenizers.from_manifest(corpus.manifest)
    if encoding and cfg.run.sample_prompt:  # fail now, not after the last step
        encoding = generate.with_sentinels(encoding, cfg)
        generate.prompt_ids(encoding, cfg.run.sample_prompt, cfg.data.seq_len, cfg.data.input_len)
    return encoding


def make_plan(cfg: Config, mesh) -> planner.Plan:
    """Return the planner's result for the devices of the mesh, with every `auto` setting resolved."""
    return planner.plan(cfg, hardware.topology_of_devices(devices := [*mesh.devices.flat]), memory_bytes(devices))


def refuse_too_large(plan: planner.Plan) -> None:
    """Raises: UserError if the run needs more memory than the devices have."""
    if plan.fits is False and plan.cfg.run.check != "no":
        raise UserError(f"{plan.refusal()}; --run.check no starts it anyway")


def log_plan(cfg: Config, mesh, saved: int | None = None) -> planner.Plan:
    """Log what will run, before the slow parts start. Raises: UserError if it needs more memory than available.

    saved   step of the latest checkpoint, if there is one
    """
    refuse_too_large(plan := make_plan(cfg, mesh))
    if saved and cfg.run.restart != "scratch":
        log(f"resuming   {cfg.run.name} from step {saved} of {cfg.run.steps}")
    parts = ((name, f"{size / 2**20:,.0f}") for name, size in plan.memory_bytes.items())
    memory = ", ".join(f"{name} {size}" for name, size in parts if size != "0")
    log(f"model      {plan.params_total:,} parameters, {plan.params_active:,} active per token")
    kind, idle = mesh.devices.flat[0].device_kind, jax.device_count() - mesh.size
    log(f"mesh       {cfg.mesh} on {mesh.size} x {kind}" + f"; idle devices: {idle}" * bool(idle))
    log(f"batch      {fit.split_batch(plan.cfg)}; {plan.tokens_per_step:,} tokens per step")
    corpus = dataset.open_corpus(cfg)
    steps = dataset.epoch_steps(cfg)
    for name, one in (corpus.sources or {"": corpus}).items():
        epoch = f"; an epoch is {steps[name]:,} steps" if name in steps else ""
        log(f"rows       {dataset.describe_epoch(one.splits['train'], cfg.data)}" + f", of {name}" * bool(name) + epoch)
    if unmet(cfg, "work.context_layout") is None:
        rows = sharding.own_rows(mesh, cfg.data.batch_size)[:4]
        log(f"context    {documents.describe(dataset.batch(cfg, 0, rows=rows)['segments_BT'], cfg.mesh.context)}")
    for line in examples.describe(cfg.data) if cfg.data.objective != "causal" else ():
        log(f"objective  {line}")
    log(f"settings   {auto.settings_text(plan)}")
    for first, count in parse_skips(cfg.data.skip):
        log(f"skip       from step {first + 1} on, each step uses the batch of the step {count} steps later")
    if not tokenizers.from_manifest(corpus.manifest):
        log(f"sample     none at the end, because the tokenizer of {cfg.data.path} is unknown")
    log(f"memory     about {sum(plan.memory_bytes.values()) / 2**20:,.0f} MiB per device: {memory}")
    return plan


# Checks that need no device -------------------------------------------------------------------------------------------


def check(cfg: Config) -> None:
    """Print one line if no check finds a reason why this run would fail at start-up.

    Raises: the same UserErrors as the run itself, for settings, tokens, mesh and, on the host of process 0, the run's
    directory; also a UserError if a restart would begin before the other processes have noticed a failure.
    """
    check_tokens(cfg)
    options.parse(cfg.run.compiler_options)
    count, wait = read_env_number("JAX_NUM_PROCESSES", "AXIS_PROCESSES"), read_env_number("AXIS_RESTART_WAIT")
    if wait is not None:
        check_restarts(cfg, wait)
    plan = check_mesh(cfg, count or 1)
    steps = dataset.epoch_steps(cfg).items()
    epochs = ", ".join(f"an epoch{f' of {name}' * bool(name)} is {n:,} steps" for name, n in steps)
    where = "only process 0 knows where it resumes"
    if os.environ.get("JAX_PROCESS_ID", "0") == "0":
        where = check_directory(cfg)
    print(f"checked    {cfg.run.name}: {plan.params_total:,} parameters on mesh {cfg.mesh}, {count or 1} "
          f"process{'es' * ((count or 1) > 1)}; {epochs}; {where}")  # fmt: skip


def read_env_number(*names: str) -> int | None:
    """Return the number in the first of these environment variables that is set. Raises: UserError for other text."""
    for name in names:
        if value := os.environ.get(name):
            if not value.isdecimal() or (name != "AXIS_RESTART_WAIT" and value == "0"):
                raise UserError(f"{name}={value}: should be a whole number")
            return int(value)
    return None


def check_restarts(cfg: Config, wait: int) -> None:
    """Raises: UserError if a restart after a failure would begin too early, or would delete the run's results."""
    silent, most = cfg.run.peer_timeout_s, wait - LATE_S
    if wait < (least := silent + LATE_S):
        raise UserError(
            f"RESTART_WAIT={wait}: the other processes detect a lost one after run.peer_timeout_s={silent} s and exit "
            f"within {LATE_S} s more ({silent} + {LATE_S} = {least}); set RESTART_WAIT={least}"
            + (f", or --run.peer_timeout_s {most}" if most > 0 else ""))  # fmt: skip
    if cfg.run.restart == "scratch":
        raise UserError("--run.restart scratch with --restarts: each restart after a failure would delete the run's "
                        "results; drop one of the two flags, or use another --run.name")  # fmt: skip


def check_mesh(cfg: Config, processes: int) -> planner.Plan:
    """Return the planner's result, as far as it can be computed without devices.

    Raises: UserError if the mesh cannot shard the model, or if there are too few devices or too little memory.
    """
    on_cpu, of_each = cfg.run.devices or only_cpu(), 1
    if cfg.run.devices:
        of_each = devices_per_process(cfg.run.devices, processes)
    elif on_cpu:
        of_each = jax.config.jax_num_cpu_devices if jax.config.jax_num_cpu_devices > 0 else 1
    if on_cpu:
        sharding.check_enough(cfg.mesh, of_each * processes, "cpu")
    here = min(of_each, cfg.mesh.devices)
    plan = planner.plan(cfg, limit_bytes=share_of_memory(here) if on_cpu else None)
    refuse_too_large(plan)
    return plan


def check_directory(cfg: Config) -> str:
    """Describe where a run would start. Raises: UserError if its directory is not writable or has another run."""
    check_writable(kept := storage.run_directory(cfg))
    with storage.temporary_copy(kept) as directory:
        return describe_start(cfg, directory)


def describe_start(cfg: Config, directory) -> str:
    if done := check_resumable(cfg, directory, "none"):
        return f"already complete with {done} steps"
    step = None if cfg.run.restart == "scratch" else checkpoint.latest_step(directory / "checkpoints", print, "none")
    if step is None:
        if ours := os.environ.get("AXIS_HOST"):  # the launcher's name for this host
            check_saving_host(directory, [checkpoint.read_saving_host(directory / "checkpoints")], ours)
        source = cfg.run.init_from
        if source and not has_weights_only(source) and not checkpoint.list_steps(f"{source}/checkpoints"):
            raise UserError(f"no checkpoint in {source}/checkpoints")
        return "starts at step 0"
    return f"resumes from step {step} of {cfg.run.steps}"
