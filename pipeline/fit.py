"""Check that a model and a batch split over a mesh, and suggest settings that do."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import sharding
from architectures import architecture, declare
from config import AUTO, PRESETS, Config, MeshConfig, ModelConfig, WorkConfig, preset
from config.fields import REMAT, parse_remat
from utils import UserError, require_multiple

# Letter of a parameter's dim -> the setting that holds its size. For Q (query latent), see `setting_of`.
SETTINGS = dict(V="vocab_size", D="d_model", H="n_heads", G="n_kv_heads", K="d_head", R="d_rope", U="d_value",
                C="d_kv_latent", F="d_ff", E="n_experts", M="d_expert", I="encoder_layers", L="n_layers")  # fmt: skip
WORDS = dict(vocab_size="vocabulary tokens", d_model="model dimensions", n_heads="query heads", d_ff="hidden units",
             n_kv_heads="key/value heads", d_head="head dimensions", d_rope="rotary dimensions", n_experts="experts",
             d_value="value dimensions", d_kv_latent="key/value latent dimensions", d_expert="expert dimensions",
             encoder_layers="encoder layers", n_layers="layer blocks",
             d_query_latent="query latent dimensions")  # fmt: skip


def check(c: ModelConfig, mesh: MeshConfig, work: WorkConfig = ModelConfig.work) -> None:
    """Check that every parameter splits over the mesh and, with work.context_attention=all_to_all, the heads do too.

    Raises: UserError that shows the failed division, and suggests settings and presets that split.
    """
    try:
        sharding.check_divides(declare(c), SimpleNamespace(shape=mesh.sizes))
    except sharding.DoesNotSplit as error:
        others = ", ".join(name for name in PRESETS if fits(name, mesh)) or "none"
        raise UserError(f"{in_words(c, error)}; use a smaller {'*'.join(error.axes)}, or {remedy(c, error)}; "
                        f"presets that split over {mesh}: {others}") from None  # fmt: skip

    if work.context_attention == "all_to_all":
        check_heads(c, mesh)
    if parse_remat(work.remat) and not architecture(c).lists_remat:
        raise UserError(f"work.remat={work.remat!r}: {architecture(c).name} has no such list; use one of "
                        f"{', '.join(REMAT)}")  # fmt: skip


def check_heads(c: ModelConfig, mesh: MeshConfig) -> None:
    """Raises: UserError if the number of heads is not divisible by TENSOR * CONTEXT."""
    name, heads = ("n_heads", c.n_heads) if c.attention == "mla" else ("n_kv_heads", c.n_kv_heads)
    left = heads % (devices := mesh.tensor * mesh.context)
    if mesh.context > 1 and left:
        smaller = max((n for n in range(1, mesh.context) if heads % (mesh.tensor * n) == 0), default=1)
        raise UserError(
            f"work.context_attention=all_to_all: model.{name}={heads} does not split over tensor*context = "
            f"{mesh.tensor}*{mesh.context} = {devices} devices ({heads} % {devices} = {left}); use "
            f"{name}={heads + devices - left}, mesh context={smaller}, or work.context_attention=ring, which does not "
            "split heads")  # fmt: skip


@functools.cache
def declare_preset(name: str) -> dict:
    return sharding.flatten_named(declare(preset(name).model))


def fits(name: str, mesh: MeshConfig) -> bool:
    """Return whether a preset splits over a mesh."""
    try:
        return sharding.check_divides(declare_preset(name), SimpleNamespace(shape=mesh.sizes)) is None
    except sharding.DoesNotSplit:
        return False


def in_words(c: ModelConfig, error: sharding.DoesNotSplit) -> str:
    """Return the failed division with words for the letter of the dim."""
    words = WORDS[setting_of(c, error)].removesuffix("s" * (error.size == 1))
    return error.what.replace(f"{error.letter}={error.size}", f"{error.size} {words}", 1)


def setting_of(c: ModelConfig, error: sharding.DoesNotSplit) -> str:
    return SETTINGS.get(error.letter, "d_query_latent" if c.d_query_latent else "d_model")


def remedy(c: ModelConfig, error: sharding.DoesNotSplit) -> str:
    """Return the flag that sets the dim's size, with the nearest values that split."""
    parts, less = error.parts, error.size // error.parts
    sizes = [n * parts for n in (less, less + 1) if n]
    if error.letter == "L":
        sizes = [c.dense_prefix + n * c.layers_per_block for n in sizes]
    return f"--model.{setting_of(c, error)} {' or '.join(map(str, sizes))}"


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How the global batch is split: batch_size = shards * device_batch * microbatches * accumulation."""

    batch_size: int  # sequences in the global batch
    shards: int  # groups of devices that hold different sequences
    device_batch: int  # sequences a device works on at once
    microbatches: int  # microbatches per accumulation pass, which follow each other through the stages
    accumulation: int  # gradient accumulation passes per step

    def __str__(self) -> str:
        microbatches = f"x {self.microbatches} microbatches " * (self.microbatches > 1)
        return (f"{self.batch_size} sequences a step = {self.shards} batch shards x {self.device_batch} sequences "
                f"{microbatches}x {self.accumulation} accumulation passes")  # fmt: skip


def split_batch(cfg: Config) -> BatchSplit:
    """Derive microbatches and gradient accumulation passes from the global batch, the mesh and `cfg.work`.

    work.microbatches=auto means 1 with one stage, else as many as divide the sequences, up to 4 per stage.
    work.device_batch=auto means all sequences of a microbatch at once.
    Raises: UserError if sequences or positions do not split over the mesh; it gives the nearest numbers that do.
    """
    B, shards, work = cfg.data.batch_size, cfg.mesh.batch_shards, cfg.work
    parts = cfg.mesh.position_shards
    used = f", on {cfg.mesh.devices} of {n} devices" if (n := cfg.run.devices) > cfg.mesh.devices else ""
    require_multiple("data.batch_size", B, shards, f"sequences over data*fsdp*expert = {shards} batch shards{used}",
                     "data*fsdp*expert")  # fmt: skip
    require_multiple("data.seq_len", cfg.data.seq_len, parts, f"positions over context*tensor = {parts} devices",
                     "context*tensor")  # fmt: skip
    require_multiple("data.input_len", cfg.data.input_len, parts, f"positions over tensor = {parts} devices", "tensor")
    if (context := cfg.mesh.context) > 1:
        chunks = f"positions into 2 chunks for each of context={context} devices"
        require_multiple("data.seq_len", cfg.data.seq_len, math.lcm(2 * context, parts), chunks)
    local, stages, M = B // shards, cfg.mesh.stage, work.microbatches
    if M == AUTO:
        M = max(n for n in range(1, (4 * stages if stages > 1 else 1) + 1) if local % n == 0)
    require_multiple("data.batch_size", B, shards * M, f"sequences over {shards} batch shards * {M} microbatches")
    each = local // M
    most = each if work.device_batch == AUTO else min(work.device_batch, each)
    device_batch = max(n for n in range(1, most + 1) if each % n == 0)
    return BatchSplit(B, shards, device_batch, M, each // device_batch)
