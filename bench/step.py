"""Measure one training step on simulated devices: seconds, memory, bytes sent, FLOPs.

`python -m bench.step` measures a small MoE on fsdp=2,stage=2,tensor=2. A preset, `--mesh` and any setting of main.py
choose another step. `--json` prints one line instead of a table. No tokens are needed.

Simulated devices share this machine's cores, so use their times only to compare programs, not machines. Bytes and FLOPs
are from the compiled program, for the busiest device, without a stage's idle ticks. `temp_bytes` is XLA's
temp_size_in_bytes. It is per device on CPU too: the same function of local shards has the same value on 1, 2 and 8
devices.
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass

import numpy as np

from config import Config, DataConfig, MeshConfig, ModelConfig, WorkConfig
from config.flags import command_line
from devices import simulate_devices
from utils import UserError, exit_status

MOST_DEVICES = 64  # simulated devices are threads of one process
DEFAULT = Config(
    model=ModelConfig(
        vocab_size=512, d_model=128, n_layers=8, n_heads=4, d_head=32, d_rope=32, d_value=32, d_query_latent=32,
        d_kv_latent=32, d_ff=512, activation="gelu", n_experts=4, top_k=2, n_shared=1, d_expert=512, moe_every=2,
        balance_loss=0.01, precision="float32"),
    mesh=MeshConfig(fsdp=2, stage=2, tensor=2),
    data=DataConfig(seq_len=128, batch_size=16),
    work=WorkConfig(remat="full", gather="step", microbatches=4),
)  # fmt: skip


@dataclass(frozen=True)
class Arguments(Config):
    json: bool = False  # print one line of JSON instead of a table
    steps: int = 5  # timed steps, after one warm-up step; the fastest counts


HELP = """e.g. python -m bench.step --mesh stage=2,fsdp=4

Measure one training step on simulated devices: seconds, memory, bytes sent, FLOPs."""


def parse(argv: list[str]) -> tuple[Config, Arguments]:
    """Parse `[PRESET | --config FILE] [--flags]`; the preset or the file sets the defaults of the flags."""
    cfg, args = command_line(argv, "python -m bench.step", HELP, DEFAULT, Arguments)
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: must be at least 1")
    if args.mesh.devices > MOST_DEVICES:
        raise UserError(
            f"mesh {args.mesh} needs {args.mesh.devices} devices, but at most {MOST_DEVICES} can be simulated; "
            "use smaller axes"
        )
    return cfg, args


def say(*words) -> None:
    print(*words, file=sys.stderr, flush=True)


def random_batch(cfg: Config) -> dict[str, np.ndarray]:
    """Return a random batch in the format of dataset.batch: one document per sequence, a target at every position."""
    rng, shape = np.random.default_rng(cfg.run.seed), (cfg.data.batch_size, cfg.data.seq_len)
    tokens = lambda: rng.integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    return {
        "tokens_BT": tokens(),
        "targets_BT": tokens(),
        "positions_BT": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
        "segments_BT": np.ones(shape, np.int32),
        "weights_BT": np.ones(shape, np.float32),
    }


def measure(cfg: Config, steps: int) -> dict:
    """Compile and run the training step. Imports JAX only now, after the number of simulated devices is set."""
    import optimizer
    import sharding
    from pipeline import fit
    from plan.trace import compiled

    mesh, split = sharding.make_mesh(cfg.mesh), fit.split_batch(cfg)
    say(f"mesh {cfg.mesh}: {split}")
    program = compiled.compile_step(cfg, mesh, say)
    if cfg.mesh.stage > 1 and "forward_slot" not in program.shares:
        say("warning: the program has no conditional in scope forward_slot, so a stage's idle ticks count as work")
    say(f"running {steps + 1} steps ...")
    batch = sharding.put(random_batch(cfg), mesh)
    step_s = best_seconds(program.step, optimizer.init(cfg, mesh), batch, steps)
    seconds = dict(lower_s=program.lower_s, compile_s=program.compile_s, step_s=step_s)
    return seconds | dict(temp_bytes=program.temp_bytes) | ledger_numbers(cfg, program.ledger)


def best_seconds(step, state, batch, steps: int) -> float:
    """Return the fastest step's time in seconds, from the call until all results are ready, after one warm-up step."""
    import jax

    seconds = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def ledger_numbers(cfg: Config, found) -> dict:
    """Return the bytes that one device sends in a step, and the ratio of executed FLOPs to model FLOPs."""
    from plan import planner

    rows = lambda field: {name: dataclasses.asdict(total) for name, total in found.totals_by(field).items()}
    return {
        "wire_bytes": round(found.total.wire_bytes),
        "flops_ratio": found.flops / planner.plan(cfg).model_flops,
        "collectives": round(found.total.count),
        **{f"collectives_by_{field}": rows(field) for field in ("kind", "axes", "source")},
    }


def table(found: dict) -> str:
    mib = lambda size: f"{size / 2**20:,.2f} MiB"
    lines = [
        f"lower {found['lower_s']:.2f} s, compile {found['compile_s']:.2f} s, step {found['step_s']:.3f} s",
        f"temporary memory {mib(found['temp_bytes'])} per device",
        f"sent {mib(found['wire_bytes'])} per device and step, in {found['collectives']:,} collectives",
        f"FLOPs {found['flops_ratio']:.3f} x model FLOPs",
    ]
    for field in ("kind", "axes", "source"):
        lines += ["", f"{'by ' + field:48} {'executed':>9}  {'sent':>13}"]
        for name, total in found[f"collectives_by_{field}"].items():
            lines.append(f"  {name:46} {total['count']:>9,.0f}  {mib(total['wire_bytes']):>13}")
    return "\n".join(lines)


@exit_status
def main(argv: list[str] | None = None) -> None:
    cfg, args = parse(sys.argv[1:] if argv is None else argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    simulate_devices(cfg.mesh.devices)
    found = measure(cfg, args.steps)
    print(json.dumps(found) if args.json else table(found))


if __name__ == "__main__":
    sys.exit(main())
