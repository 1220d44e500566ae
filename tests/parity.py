"""Compare training on a mesh with one device, in float32: loss, metrics, gradients and updates must agree.

    python -m tests.parity tiny --mesh fsdp=2,tensor=2
    python -m tests.parity tiny --mesh stage=2,fsdp=2,tensor=2 --model.n_heads 6 --json

Devices are simulated. Exit status 0: the mesh agrees with one device; 1: it does not; 2: the settings are invalid.
"""

import dataclasses
import functools
import json
import sys
from typing import NamedTuple

from config import Affects, Config, affecting, replace
from config.flags import command_line
from devices import use_devices
from progress import print_to_stderr, show_busy
from utils import exit_status, parse_early


@dataclasses.dataclass(frozen=True)
class Arguments(Config):
    json: bool = False  # print one line of JSON instead of a table


def parse(argv: list[str]) -> tuple[Config, Arguments]:
    """Parse `[PRESET | --config FILE] [--flags]`; the default precision is float32."""
    float32 = lambda start, flags: replace(start, **{"model.precision": "float32"})
    return command_line(argv, "python -m tests.parity", __doc__, "tiny", Arguments, float32)


EARLY = parse_early(parse) if __name__ == "__main__" else None

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import optimizer
import sharding
from compile import ordered
from pipeline import fit
from tests import helpers, quick

STEPS, TRIES = 3, 3

# One device with the simplest execution settings, and a larger loss chunk than any preset's.
ONE_DEVICE = affecting(Affects.SPEED) | {"work.loss_chunk": 1024}

# Adam divides by sqrt(v) + eps, so with a small eps, rounding noise in v would become a full step. Clipped to norm
# 0.05, most entries of the gradient are below 1e-3, and a step is nearly proportional to them. The learning rate is
# high, so that three steps are thousands of times a parameter's last bit.
OPTIMIZER = {"optim.clip_norm": 0.05, "optim.adamw": "eps=1e-3", "optim.lr": 0.01, "optim.warmup_steps": 1}

# Tolerance of each kind of value. Sums in another order differ in the last of float32's 24 bits.
ALLOWED = {
    "initial": 0.0,  # share of a parameter's entries that differ before the first step
    "loss": 1e-5,  # of each step, relative
    "count": 0.0,  # share of the entries that differ: tokens per expert, dropped share
    "metric": 1e-5,  # relative to the largest entry, first step
    "gradient": 1e-4,  # relative to the parameter's largest entry, first step
    "update": 1e-3,  # change of a parameter in all steps, relative to its largest; rounding of parameters adds up
    "replica": 0.0,  # share of the entries that differ between replicas
}
COUNTS = ("tokens_per_expert", "drop_fraction")

# What a mesh computes -------------------------------------------------------------------------------------------------


def random_batch(cfg: Config, seed: int):
    """Draw rows with different documents, padding and weights, and one row (maybe one device) without any target."""
    batch = helpers.random_batch(cfg, seed)
    batch["weights_BT"][-1] = 0
    if "unmasked" in cfg.data.packing:
        batch["positions_BT"] = np.broadcast_to(np.arange(cfg.data.seq_len, dtype=np.int32), batch["tokens_BT"].shape)
    return batch


def compiled_step(cfg: Config, mesh):
    """Compile fn(state, batch) -> (state, metrics, grads), which is `optimizer.train_step` plus its gradients."""
    updates = optimizer.compute_updates_fn(cfg, mesh)

    def step(state, batch):
        metrics, grads, changes, moments = updates(state, batch)
        params = optax.apply_updates(state.params, changes)
        return state.replace(params=params, optimizer=moments, step=state.step + 1), metrics, grads

    state = optimizer.state_shardings(cfg, mesh)
    return ordered.jit(step, mesh, out_shardings=(state, NamedSharding(mesh, P()), state.params))


def to_host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in sharding.flatten_named(tree).items()}


def differing_share(got, want) -> float:
    """Return the share of the entries that are not equal."""
    return float(np.mean(got != want))


def relative_error(got, want) -> float:
    """Return the largest difference, relative to the largest entry of `want`."""
    share = np.abs(got - want).max() / max(np.abs(want).max(), 1e-20)
    return float(share) if np.isfinite(share) else np.inf


def differing_replicas(array: jax.Array) -> float:
    """Return the largest share of entries in which two replicas of a shard differ."""
    first = {}
    return max(
        differing_share(np.asarray(shard.data), first.setdefault(str(shard.index), np.asarray(shard.data)))
        for shard in array.addressable_shards
    )


@functools.lru_cache(maxsize=2)  # the mesh and one device, for another attempt
def compiled(cfg: Config):
    mesh = sharding.make_mesh(cfg.mesh)
    return mesh, compiled_step(cfg, mesh), optimizer.init(cfg, mesh)


def run(cfg: Config, first_batch: int = 0) -> dict[str, dict]:
    """Run STEPS steps. Return the values to compare, {kind: {name: values}}, with the kinds of ALLOWED."""
    cfg = replace(cfg, **OPTIMIZER)
    mesh, step, initial = compiled(cfg)
    state, results = initial, []
    for seed in range(first_batch, first_batch + STEPS):
        state, metrics, grads = step(state, sharding.put(random_batch(cfg, seed), mesh))
        results.append((to_host(metrics), grads))
    norms = [float(metrics["grad_norm"]) for metrics, _ in results]
    assert not min(norms) <= cfg.optim.clip_norm, f"clipping was not active: {norms}"

    metrics, grads = results[0]
    before, after = to_host(initial.params), to_host(state.params)
    replicas = sharding.flatten_named({"initial": initial, "gradient": grads, "final": state})
    return {
        "initial": before,
        "loss": {f"step {n}": metrics["loss"] for n, (metrics, _) in enumerate(results)},
        "count": {name: value for name, value in metrics.items() if name in COUNTS},
        "metric": {name: value for name, value in metrics.items() if name not in COUNTS},
        "gradient": to_host(grads),
        "update": {name: after[name] - before[name] for name in before},
        "replica": {name: differing_replicas(x) for name, x in replicas.items()},
    }


@functools.cache
def run_on_one_device(cfg: Config, first_batch: int = 0) -> dict[str, dict]:
    return run(cfg, first_batch)


# Comparison -----------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    kind: str  # as in ALLOWED
    name: str
    error: float

    @property
    def ok(self) -> bool:
        return self.error <= ALLOWED[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} of {self.name} is off by {self.error:.1e}, allowed {ALLOWED[self.kind]:.0e}"


MEASURES = dict.fromkeys(ALLOWED, relative_error) | {
    "initial": differing_share,
    "count": differing_share,
    "replica": lambda got, want: max(got, want),
}


class Comparison(NamedTuple):
    loss: float  # first step, on the mesh
    loss_on_one_device: float
    differences: list[Difference]
    tries: int = 1  # attempts with different batches; more than one if the first differed

    def worst(self, *kinds: str) -> Difference:
        """Return the largest difference of some kinds, or of all; differences beyond tolerance come first."""
        kinds = kinds or tuple(ALLOWED)
        among = [d for d in self.differences if d.kind in kinds]
        return max(among, key=lambda d: (not d.ok, d.error), default=Difference(kinds[0], "nothing", 0.0))

    def to_dict(self) -> dict:
        gradient, update = self.worst("gradient"), self.worst("update")
        return {
            "ok": self.worst().ok,
            "loss": self.loss,
            "loss_on_one_device": self.loss_on_one_device,
            "loss_rel": self.worst("loss").error,
            "grad_rel": gradient.error,
            "worst_param": gradient.name,
            "metrics_equal": self.worst("metric", "count").ok,
            "initial_equal": self.worst("initial").ok,
            "replicas_equal": self.worst("replica").ok,
            "update_rel": update.error,
            "worst_update": update.name,
            "params_equal": self.worst("initial", "replica", "update").ok,
            "tries": self.tries,
        }


def differences(got: dict[str, dict], want: dict[str, dict]) -> Comparison:
    """Compare two results of `run`."""
    results = []
    for kind, measure in MEASURES.items():
        assert set(got[kind]) == set(want[kind]), f"{kind}: the names differ"
        results += [Difference(kind, name, measure(got[kind][name], want[kind][name])) for name in want[kind]]
    return Comparison(float(got["loss"]["step 0"]), float(want["loss"]["step 0"]), results)


def compare(cfg: Config) -> Comparison:
    """Compare cfg.mesh and the execution settings of cfg with one device and the simplest settings.

    If the scores of two experts differ only in the last bit, a sum in another order may choose the other expert, and
    then the third step's update differs in the second digit. This is rare and not a bug. So an MoE model that differs
    is compared again with other batches, in at most TRIES attempts: a bug differs in all of them.
    Raises: UserError if cfg cannot be run on its mesh.
    """
    for attempt in range(TRIES if cfg.model.n_experts else 1):
        first = attempt * STEPS
        comparison = differences(run(cfg, first), run_on_one_device(replace(cfg, **ONE_DEVICE), first))
        if comparison.worst().ok:
            break
    return comparison._replace(tries=attempt + 1)


def table(cfg: Config, comparison: Comparison) -> str:
    """Format the comparison as a table: one line per kind, and the five worst gradients."""
    n_devices = f"{cfg.mesh.devices} devices" if cfg.mesh.devices > 1 else "1 device"
    lines = [
        f"mesh {cfg.mesh} ({n_devices}) against one device, {cfg.model.compute_dtype}, {STEPS} steps",
        f"loss {comparison.loss:.7f}, on one device {comparison.loss_on_one_device:.7f}",
        "",
        f"{'largest difference of each kind':66} {'off by':>8} {'allowed':>8}",
    ]
    row = lambda d, kind: f"{kind:9} {d.name:56} {d.error:8.1e} {ALLOWED[d.kind]:8.0e} {'' if d.ok else ' <- differs'}"
    for kind in ALLOWED:
        worst = sorted((d for d in comparison.differences if d.kind == kind), key=lambda d: -d.error)
        lines += [row(d, "" if n else kind) for n, d in enumerate(worst[: 5 if kind == "gradient" else 1])]
    verdict = "matches" if comparison.worst().ok else "DIFFERS from"
    tries = f" (after {comparison.tries} attempts with other batches; see `compare`)" if comparison.tries > 1 else ""
    return "\n".join([*lines, "", f"The mesh {verdict} a single-device run{tries}."])


@exit_status
def main(argv: list[str]) -> int:
    cfg, args = EARLY or parse(argv)
    quick.compile_quickly()
    jax.config.update("jax_platforms", "cpu")
    use_devices(cfg.mesh.devices)
    fit.check(cfg.model, cfg.mesh, cfg.work), fit.split_batch(cfg)
    what = f"comparing {cfg.mesh} with one device: about a minute for a small model"
    with show_busy(what, print_to_stderr):
        comparison = compare(cfg)
    print(json.dumps(comparison.to_dict()) if args.json else table(cfg, comparison))
    return 0 if comparison.worst().ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
