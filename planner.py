"""What a configuration costs, by arithmetic on the declarations; no device is touched.

So far: parameters, model FLOPs and a memory estimate. Formulas are on integers, one line each, the source beside it.
"""

import dataclasses
import math

import model
import sharding
from utils import PRESETS, Config, ModelConfig, preset

# Dense peak of one device in FLOP/s, by jax's device_kind; source beside it.
PEAK_FLOPS_PER_S = {
    "TPU v4": 275e12,  # bf16, Google Cloud "TPU v4"
    "TPU v5 lite": 197e12,  # bf16, Google Cloud "TPU v5e"
    "TPU v5": 459e12,  # bf16, Google Cloud "TPU v5p"
    "TPU v6 lite": 918e12,  # bf16, Google Cloud "TPU v6e"
    "NVIDIA H100 80GB HBM3": 989e12,  # bf16 without sparsity, NVIDIA H100 data sheet, SXM
    "NVIDIA H200": 989e12,  # bf16 without sparsity, NVIDIA H200 data sheet, SXM
}


def parameters(c: ModelConfig) -> tuple[int, int]:
    """Count parameters: all of them, and those one token passes through (top_k of the n_experts routed ones).

    The selection bias is not counted: it is not trained by a gradient, and published counts leave it out.
    """
    declared = sharding.named(model.declare(c)).values()
    total = sum(d.size for d in declared if d.trainable)
    routed = sum(d.size for d in declared if d.trainable and "E" in d.dims and d.dims[-1] != "E")
    return total, total - routed + routed * c.top_k // max(c.n_experts, 1)


def model_flops_per_token(cfg: Config) -> int:
    """FLOPs of forward and backward for one token, multiply and add counted apart, recomputation not counted.

    6 per active parameter that multiplies (the embedding only looks up), and for attention 6 per pair of positions it
    may look at, on average (T + 1)/2, and per width of scores and values. Source: PaLM, arXiv:2204.02311, appendix B,
    with causal attention counted as causal.
    """
    c = cfg.model
    _, active = parameters(c)
    lookup = 0 if c.tie_embeddings else c.vocab_size * c.d_model
    width = c.d_head + c.d_rope + c.d_value if c.attention == "mla" else 2 * c.d_head
    return 6 * (active - lookup) + 3 * c.n_layers * c.n_heads * width * (cfg.data.seq_len + 1)


def memory_bytes(cfg: Config) -> dict[str, int]:
    """Estimate one device's memory: exact for parameters and moments, a sketch for activations."""
    c, split = cfg.model, sharding.split_batch(cfg)
    mesh = cfg.mesh.sizes

    def on_device(d) -> int:
        axes = [axis for entry in d.spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
        return d.size * d.dtype.itemsize // math.prod(mesh[axis] for axis in axes)

    params = sum(on_device(d) for d in sharding.named(model.declare(c)).values())
    tokens = split.device_batch * cfg.data.seq_len // (mesh["context"] * mesh["tensor"])
    width_bytes = 2 if c.precision.compute == "bfloat16" else 4
    hidden = c.d_ff if not c.n_experts else (c.top_k + c.n_shared) * c.d_expert
    everything = 10 * c.d_model + 4 * hidden + 4 * c.n_heads * cfg.data.seq_len  # values a layer makes for one token
    kept = {"full": c.d_model, "dots": 6 * c.d_model + 2 * hidden, "none": everything}[c.remat]
    layers = -(-c.n_layers // mesh["stage"])
    return {
        "parameters": params,
        "gradients": params,
        "optimizer": 2 * params,
        # Twice everything for the layer at work: its values and their gradients.
        "activations": tokens * (layers * kept + 2 * everything) * width_bytes,
        "logits": 2 * min(c.loss_chunk, tokens) * c.vocab_size // mesh["tensor"] * 4,
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    params_total: int
    params_active: int
    tokens_per_step: int
    model_flops: int  # one step, all devices
    memory_bytes: dict[str, int]  # one device

    def to_json(self) -> dict:
        return dataclasses.asdict(self)


def plan(cfg: Config) -> Plan:
    """Predict what a step of this configuration costs."""
    total, active = parameters(cfg.model)
    tokens = cfg.data.tokens_per_step
    return Plan(total, active, tokens, tokens * model_flops_per_token(cfg), memory_bytes(cfg))


def main() -> None:
    """Print every preset's size as a Markdown table."""
    for name, (what, _) in PRESETS.items():
        total, active = parameters(preset(name).model)
        print(f"| `{name}` | {what.removeprefix('planner only: ')} | {total:,} | {active:,} |")


if __name__ == "__main__":
    main()
