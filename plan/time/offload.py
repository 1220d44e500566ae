"""Predict the cost of activations that a step stores in the host's memory (`work.remat` with `@host`)."""

from config.fields import parse_remat
from plan.chips import hardware
from plan.count import costs, memory
from plan.count.costs import Sizes
from plan.count.step import Step

# Bytes per second between a device and its host, in one direction. TPUs: 1.5e10 per chip, v6e 3.2e10:
# https://jax-ml.github.io/scaling-book/tpus, "TPU Specs" (v4: 1.6e10). tpu7x is not published, so v6e's number is
# assumed. GPUs: 16 lanes of PCIe, generation 4 for A100 (3.2e10) and 5 for H100, H200 and B200 (6.4e10), of NVIDIA's
# data sheets; GB200: NVLink-C2C, 900 GB/s in both directions for two GPUs.
TPU_BYTES_PER_S, GPU_BYTES_PER_S = 1.5e10, 6.4e10
BYTES_PER_S = {"v6e": 3.2e10, "tpu7x": 3.2e10 / 2, "v3": 1.5e10 / 2, "a100": 3.2e10, "gb200": 2.25e11}


CAUSE = "host"  # of waiting for these copies


def bytes_per_s(chip: hardware.Chip) -> float:
    return BYTES_PER_S.get(chip.key, TPU_BYTES_PER_S if chip.torus_dims else GPU_BYTES_PER_S)


def step_bytes(step: Step) -> float:
    """Return the bytes that a device copies to its host in a step; it copies as many back."""
    if not any((parse_remat(step.cfg.work.remat) or {}).values()):
        return 0.0
    c, z = step.cfg.at_work, Sizes.from_config(step.cfg, step.platform)
    groups = costs.layer_groups(c, step.cfg.mesh.stage)
    return sum(many * memory.listed_bytes(one, z, kind, on_host=True) for many, kind, one in groups)


def host_bytes(step: Step) -> float:
    """Return the bytes that a host stores at most, for all of its devices."""
    return step_bytes(step) * (step.topology.devices // step.topology.hosts)


def exposed_seconds(step: Step, compute_s: float) -> float:
    """Return the seconds by which copies take longer than the compute that they overlap with.

    compute_s  of a step. Copies to the host overlap with forward passes, and copies back with backward passes.
    """
    if not (copied := step_bytes(step)):
        return 0.0
    one_way = copied / bytes_per_s(step.topology.chip)
    run = costs.passes(step.cfg, step.sched)
    forward_s = compute_s * run.forward / (run.forward + run.again + run.inputs + run.weights)
    return max(one_way - forward_s, 0.0) + max(one_way - (compute_s - forward_s), 0.0)
