"""Plan the cost of inference: prefill reads the prompts, then decode generates one token per sequence and step.

`plan(cfg, topology, request)` adds up `rows`: each `Row` is the cost of one part of the model in a forward pass on one
device. The FLOPs and collectives of layers come from their trace with a KV cache (`traced_layer.cached_rows`).
Parameters are sharded as in training, but replicated along CONTEXT; shards over FSDP and EXPERT are gathered for every
pass. Sequences are sharded over data, fsdp and expert. Their cache is sharded by heads over TENSOR (MLA latents are
replicated there) and by position over CONTEXT. Tokens are sharded over CONTEXT, and in the residual stream also over
TENSOR. Stages run one after another. Prompts are read in chunks, one sequence after another. Every device gathers the
logits and samples tokens.

The time of a pass is a roofline: each part takes the longer of its FLOPs at the chip's peak and its memory reads. Its
collectives and their latency are added, because nothing overlaps with them. All slots of a cache are read, filled or
not. Activations are ignored, both as memory and as reads: those of few tokens are negligible, and with many tokens the
FLOPs take longer.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from architectures import architecture
from config import AUTO, AXES, Config, ModelConfig
from config.fields import DTypeOrAuto, parse_window
from generate.cache import decoding_config
from pipeline import fit
from plan.answer import planning
from plan.answer.auto import SPARE
from plan.chips import hardware, hiding
from plan.count import costs, traced_layer
from plan.count.costs import Weights
from plan.count.networks import Collective
from sharding import BATCH, CONTEXT, EXPERT, STAGE, TENSOR, drop_axis
from utils import UserError

WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1}  # bytes; ignores int8 scales, one per column or position
CAUSES = ("weights", "cache", "FLOPs", "links", "hops")  # what can limit a pass


@dataclass(frozen=True)
class Request:
    """The length of each sequence, and the dtypes of weights and cache."""

    prompt: int  # tokens per prompt
    answer: int  # generated tokens per sequence
    weights_dtype: DTypeOrAuto = AUTO  # auto: the dtype of activations
    cache_dtype: DTypeOrAuto = AUTO
    piece: int = 64  # prompt tokens per prefill chunk; the default of `generate.engine`
    shared: int = 0  # first tokens of every prompt, equal in all of them and already in a prefix cache

    def __post_init__(self):
        for name in ("prompt", "answer", "piece"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"--{name} {value}: must be at least 1 token")
        if not 0 <= self.shared < self.prompt:
            raise UserError(
                f"--shared {self.shared}: must be below --prompt {self.prompt}; raise --prompt or drop --shared"
            )

    @property
    def slots(self) -> int:
        return self.prompt + self.answer


def check_batches(sizes: tuple[int, ...]) -> None:
    if min(sizes, default=1) < 1:
        raise UserError(f"--batch {min(sizes)}: must be at least 1 sequence")


@dataclass
class Row:
    """The cost of one part of the model in a pass on one device, over the layers of all stages."""

    part: str
    flops: float = 0.0
    weight_bytes: float = 0.0  # read; for gathered weights also the bytes that the all-gather writes
    cache_bytes: float = 0.0  # read and written
    exchanges: list[Collective] = field(default_factory=list)

    def times(self, n: int) -> "Row":
        exchanges = [replace(one, count=n * one.count) for one in self.exchanges]
        return Row(self.part, n * self.flops, n * self.weight_bytes, n * self.cache_bytes, exchanges)


# Rows -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """A forward pass of s new tokens for each of b sequences per device, with a full cache."""

    cfg: Config
    request: Request
    b: int  # sequences
    s: int  # new tokens per sequence
    padded: bool = False  # pad the experts' inputs, as simulated CPU devices do

    @functools.cached_property
    def n(self) -> dict[str, int]:
        return self.cfg.mesh.sizes

    @property
    def tokens(self) -> int:
        return self.b * self.s

    @property
    def local_tokens(self) -> int:
        """Tokens per device in the residual stream: sharded over CONTEXT and TENSOR, rounded up."""
        return -(-self.tokens // (self.n[CONTEXT] * self.n[TENSOR]))

    @property
    def feed_forward_tokens(self) -> int:
        """Tokens per device in a feed-forward layer, after the all-gather over TENSOR."""
        return self.local_tokens * self.n[TENSOR]

    @property
    def width(self) -> int:
        return WIDTHS[self.cfg.model.compute_dtype]

    def stream(self, tokens: int) -> int:
        return tokens * self.cfg.model.d_model * self.width

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits of all sequences. Every device has a full copy."""
        return 4 * self.b * math.prod(self.n[axis] for axis in BATCH) * self.cfg.model.vocab_size

    @property
    def slots(self) -> int:
        """Number of positions per sequence in a device's shard of the cache."""
        return math.ceil(cached_positions(self.cfg, self.request.slots) / self.n[CONTEXT])

    @property
    def own_slots(self) -> int:
        """Number of `slots` that a sequence does not share. With sliding windows, its tokens replace shared ones."""
        return math.ceil(cached_positions(self.cfg, self.request.slots - self.request.shared) / self.n[CONTEXT])


def cached_positions(cfg: Config, tokens: int) -> float:
    """Return the positions of a sequence in the cache. With sliding windows, it is the mean over the layers."""
    return tokens - costs.windowed_share(cfg.model) * max(tokens - parse_window(cfg.model.window).size, 0)


def weights(cfg: Config) -> list[Weights]:
    """List the weights as `generate.cache.unstack` shards them: replicated along CONTEXT."""
    replicated = lambda w: replace(w.d, spec=drop_axis(w.d.spec, CONTEXT))
    return [replace(w, d=replicated(w)) for w in costs.weights(cfg)]


def width(w: Weights, dtype: str) -> int:
    """Return the bytes per entry: those of `dtype` for matrices, of the model's dtype for gains, biases, routers."""
    vector = len(w.d.dims.lstrip("PLJ")) == 1
    return w.d.dtype.itemsize if vector or w.d.exact else WIDTHS[dtype]


def part_of(w: Weights) -> str:
    """Return the name of the row that includes a weight."""
    if w.name == "embedding_VD":
        return "embedding"
    if "attention" in w.name:
        return "attention"
    if "feed_forward" not in w.name:
        return "logits"
    return "shared experts" if ".shared." in w.name else "experts" if ".moe." in w.name else "feed-forward"


def share_read(w: Weights, at: Pass) -> float:
    """Return the fraction of a weight that is read. An expert is read if at least one token chose it.

    This assumes that all E experts are equally likely. One token, which chooses k experts, does not choose a given
    expert with probability 1 - k/E, and N tokens all do not choose it with probability (1 - k/E)^N.
    """
    if part_of(w) == "embedding":
        return 0
    if not w.d.dims.lstrip("PLJ").startswith("E") or w.d.dims.endswith("E"):
        return 1
    c = at.cfg.model
    return 1 - (1 - c.top_k / c.n_experts) ** (at.tokens / at.n[CONTEXT] * at.n[EXPERT])


def weight_costs(at: Pass):
    """Yield (part, FLOPs, bytes read and written, all-gathers) for each weight.

    The FLOPs are those of the logits; `layer_costs` has the FLOPs of all other parts.
    """
    c = at.cfg.model
    for w in weights(at.cfg):
        stages = at.n[STAGE] if "L" in w.d.dims else 1
        entries, layers = w.gathered_size * stages, w.layers * stages
        each = width(w, at.request.weights_dtype)
        gather = Collective("all-gather", w.gathered_over, w.gathered_size / w.layers * each, layers)
        gathered = w.num_shards > 1
        flops = 2 * at.b * entries if w.name == "unembedding_DV" else 0
        yield part_of(w), flops, each * entries * (share_read(w, at) + gathered), [gather] * gathered
        if w.name == "embedding_VD" and c.tie_embeddings:
            yield "logits", 2 * at.b * entries, each * entries * (1 + gathered), [gather] * gathered


def letters(at: Pass) -> dict:
    """Return the sizes, on one device, of the letters in `traced_layer.PRIMES`."""
    c, n = decoding_config(at.cfg.at_work), at.n
    g, r = (c.n_heads, 1) if c.attention == "mla" else (c.n_kv_heads, c.n_heads // c.n_kv_heads)
    g, z = g // n[TENSOR], costs.Sizes(at.b, 0, 0, 0, at.width, 0, n, "cpu")
    return costs.letters(c, z) | {
        "g": g, "s": at.s, "n": at.local_tokens, "S": at.slots, "(r + 2)": r + 2, "(K + 1)": c.d_head + 1,
        "(U + 1)": c.d_value + 1, "(C + R)": c.d_kv_latent + c.d_rope,
        "(g (K + R) + C + R)": g * (c.d_head + c.d_rope) + c.d_kv_latent + c.d_rope,
    }  # fmt: skip


def layer_costs(at: Pass):
    """Yield (part, FLOPs, collectives) for each operation of the layers, from their trace: see `traced_layer`.

    For the experts' matmuls this assumes a balanced load.
    """
    c, sizes = decoding_config(at.cfg.at_work), letters(at)
    of_moe = c.n_blocks if c.n_experts else 0
    for is_moe, layers in ((False, c.n_layers - of_moe), (True, of_moe)):
        for row in traced_layer.cached_layer_rows(c, "moe" if is_moe else "dense") if layers else ():
            part, count = traced_layer.part_of(row.scopes), layers * row.count.at(sizes)
            if is_moe and part in ("router", "feed-forward"):
                part = "experts"
            if row.axes:
                yield part, 0, [Collective(row.kind, row.axes, row.payload.at(sizes), count)]
            elif row.dims:
                (A, _), (e, D, m), *_ = ([dim.at(sizes) for dim in dims] for dims in row.dims)
                rows = costs.grouped_rows(A, e, "cpu") if at.padded else A / at.n[EXPERT]
                yield part, 2 * count * rows * D * m, []
            else:
                yield part, count * row.flops.at(sizes), []


def cache_entries(c: ModelConfig, tensor: int = 1) -> int:
    """Count a layer's cache entries per position on a device: keys and values of its heads, or MLA's latent and
    rotary key."""
    return c.d_kv_latent + c.d_rope if c.attention == "mla" else 2 * c.n_kv_heads // tensor * c.d_head


def cache_moved(at: Pass) -> float:
    """Return the bytes of the cache that a forward pass reads and writes. Its positions are sharded over CONTEXT."""
    c = at.cfg.model
    each = WIDTHS[at.request.cache_dtype] * cache_entries(c, at.n[TENSOR])
    return c.n_layers * at.b * (at.slots + -(-at.s // at.n[CONTEXT])) * each


def exchanges(at: Pass):
    """Yield (part of the model, collective) for the collectives of activations outside the layers."""
    c = at.cfg.model
    yield "embedding", Collective("reduce-scatter", (TENSOR,), at.stream(at.feed_forward_tokens), 1)
    yield "logits", Collective("all-gather", (TENSOR,), at.stream(at.feed_forward_tokens), 1)
    yield "logits", Collective("all-reduce", (STAGE, CONTEXT), 4 * at.b * c.vocab_size / at.n[TENSOR], 1)
    yield "drawing", Collective("all-gather", (*BATCH, TENSOR), at.logits_bytes, 1)
    yield "stages", Collective("collective-permute", (STAGE,), at.stream(at.local_tokens), at.n[STAGE])


def rows(at: Pass) -> list[Row]:
    """List the costs of a forward pass by part of the model; the part "drawing" is the sampling of tokens."""
    names = ("embedding", "attention", "cache", "feed-forward", "experts", "shared experts", "stages", "logits",
             "drawing")  # fmt: skip
    parts = {name: Row(name) for name in names}
    parts["cache"].cache_bytes = cache_moved(at)
    for part, flops, sent in layer_costs(at):
        parts[part].flops += flops
        parts[part].exchanges += sent
    for part, flops, weight_bytes, gathers in weight_costs(at):
        parts[part].flops += flops
        parts[part].weight_bytes += weight_bytes
        parts[part].exchanges += gathers
    for part, one in exchanges(at):
        parts[part].exchanges.append(one)
    for row in parts.values():
        axes = lambda one: tuple(axis for axis in AXES if axis in one.axes and at.n[axis] > 1)
        row.exchanges = [replace(one, axes=axes(one)) for one in row.exchanges if axes(one)]
    return [row for row in parts.values() if row.flops or row.weight_bytes or row.cache_bytes or row.exchanges]


# Seconds --------------------------------------------------------------------------------------------------------------


def seconds(row: Row, cfg: Config, topology: hardware.Topology) -> dict[str, float]:
    """Return the seconds that a part spends on each of CAUSES. "links" is transfer time, "hops" is latency."""
    chip, times, sizes = topology.chip, dict.fromkeys(CAUSES, 0.0), cfg.mesh.sizes
    compiled_away = chip.torus_dims and chip.devices_per_chip == 1 and topology.hosts > 1  # see `hardware.check`
    computing = row.flops / chip.peak_flops_per_s
    reading = {"weights": row.weight_bytes / chip.hbm_bytes_per_s, "cache": row.cache_bytes / chip.hbm_bytes_per_s}
    times |= {"FLOPs": computing} if computing > sum(reading.values()) else reading
    for one in row.exchanges:
        link, n = hardware.link(cfg.mesh, topology, one.axes), math.prod(sizes[axis] for axis in one.axes)
        kind = hiding.compiled_kind(one.kind, one.axes, sizes, "tpu" if compiled_away else "")
        times["links"] += one.count * hardware.collective_seconds(kind, one.size, n, link)
        times["hops"] += one.count * hardware.latency_seconds(kind, link)
    return times


def sent_bytes(row: Row, cfg: Config) -> float:
    """Return the bytes that a device sends for a part of the model."""
    n = lambda axes: math.prod(cfg.mesh.sizes[axis] for axis in axes)
    return sum(one.count * hardware.wire_bytes(one.kind, one.size, n(one.axes)) for one in row.exchanges)


def sum_by_cause(parts: list[dict[str, float]]) -> dict[str, float]:
    return {cause: sum(one[cause] for one in parts) for cause in CAUSES}


def dominant_cause(times: dict[str, float]) -> str:
    """Return the bottleneck: the key with the most seconds."""
    return max(times, key=times.get)


# Plan -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A plan of inference on a mesh. Bytes are per device; batches and tokens are totals over all devices."""

    cfg: Config
    topology: hardware.Topology | None
    request: Request
    limit_bytes: int | None  # memory of a device

    @property
    def unit(self) -> int:
        """The number of batch shards (data * fsdp * expert); a batch is padded to a multiple of it."""
        return math.prod(self.cfg.mesh.sizes[axis] for axis in BATCH)

    @property
    def speed_known(self) -> bool:
        return bool(self.topology and self.topology.chip.peak_flops_per_s)

    def rows(self, batch: int, phase: str) -> list[Row]:
        """List the costs of a decode step, or of all prefill passes together.

        In a prefill pass, each group of devices with the same sequences reads one chunk of one prompt. Only the last
        chunk of a prompt samples a token.
        """
        b, padded = -(-batch // self.unit), not self.speed_known
        if phase == "decode":
            return rows(Pass(self.cfg, self.request, b, 1, padded))
        piece = min(self.request.piece, self.request.prompt - self.request.shared)
        pieces = -(-(self.request.prompt - self.request.shared) // piece)
        parts = rows(Pass(self.cfg, self.request, 1, piece, padded))
        return [row.times(b if row.part == "drawing" else b * pieces) for row in parts]

    def seconds(self, batch: int, phase: str) -> dict[str, float] | None:
        """Return the seconds by cause of prefilling all prompts, or of a decode step; None if the speed is unknown."""
        if not self.speed_known:
            return None
        return sum_by_cause([self.row_seconds(row) for row in self.rows(batch, phase)])

    def row_seconds(self, row: Row) -> dict[str, float]:
        return seconds(row, self.cfg, self.topology)

    # Memory

    @property
    def token_bytes(self) -> int:
        """Bytes of cache per token in all layers; replicas on several devices count once."""
        c = self.cfg.model
        return c.n_layers * cache_entries(c) * WIDTHS[self.request.cache_dtype]

    @property
    def sequence_bytes(self) -> int:
        """Bytes of cache of one sequence in all layers."""
        return round(self.token_bytes * cached_positions(self.cfg, self.request.slots))

    def cache_bytes(self, batch: int) -> int:
        """Return the bytes of a device's cache. Every stage caches the dense_prefix layers, see `generate`."""
        c, at = self.cfg.model, Pass(self.cfg, self.request, -(-batch // self.unit), 1)
        layers = c.dense_prefix + (c.n_layers - c.dense_prefix) // self.cfg.mesh.stage
        slots = at.b and at.slots + (at.b - 1) * at.own_slots
        return layers * slots * cache_entries(c, self.cfg.mesh.tensor) * WIDTHS[self.request.cache_dtype]

    def weights_bytes(self, dtype: str = "") -> int:
        return sum(w.local_size * width(w, dtype or self.request.weights_dtype) for w in weights(self.cfg))

    @functools.cached_property
    def gathered_bytes(self) -> float:
        """Bytes of the largest set of weights that is gathered at once: one layer, or an embedding table."""
        sizes: dict[str, float] = {}
        for w in (w for w in weights(self.cfg) if w.num_shards > 1):
            group = ".".join(w.name.split(".")[:2])  # prefix, blocks.dense, blocks.moe, or the name of a table
            sizes[group] = sizes.get(group, 0) + w.gathered_size / w.layers * width(w, self.request.weights_dtype)
        return max(sizes.values(), default=0)

    def memory_bytes(self, batch: int) -> dict[str, float]:
        at = Pass(self.cfg, self.request, -(-batch // self.unit), 1)
        logits = at.logits_bytes * 5 / 4  # plus one byte per token that marks its presence in a sequence
        return {"weights": self.weights_bytes(), "gathered": self.gathered_bytes, "cache": self.cache_bytes(batch),
                "logits": logits}  # fmt: skip

    @property
    def usable_bytes(self) -> float | None:
        """Bytes that may be used; a tenth of the memory (SPARE) stays free."""
        return self.limit_bytes and (1 - SPARE) * self.limit_bytes

    @property
    def largest_batch(self) -> int | None:
        """The largest batch that fits. None if the memory is unknown."""
        if not self.usable_bytes:
            return None
        one, two = (sum(self.memory_bytes(batch).values()) for batch in (self.unit, 2 * self.unit))
        return max(int((self.usable_bytes - one) // (two - one)) + 1, 0) * self.unit

    def refusal(self) -> str:
        """Return an error message for a mesh on which no batch fits, with sizes and remedies."""
        request, room, held = self.request, self.usable_bytes, self.memory_bytes(self.unit)
        parts = ", ".join(f"{part} {size / 2**30:.3f} GiB" for part, size in held.items() if size >= 2**20)
        fits = lambda dtype: sum(held.values()) - held["weights"] + self.weights_bytes(dtype) <= room
        now = WIDTHS[request.weights_dtype]
        ways = [f"--weights_dtype {dtype}" for dtype, each in WIDTHS.items() if each < now and fits(dtype)]
        total = sum(w.d.size * width(w, request.weights_dtype) for w in weights(self.cfg))
        total += self.unit * self.sequence_bytes
        devices = max(math.ceil(total / room), self.cfg.mesh.devices + 1)
        ways.append(f"a mesh that shards everything over at least {1 << (devices - 1).bit_length()} devices")
        return (
            f"{self.unit} x {request.slots:,} tokens do not fit on {self.cfg.mesh}: each device needs {parts}, "
            f"but may use only 90% of {self.limit_bytes / 2**30:.3f} GiB; use {' or '.join(ways)}"
        )

    # Batches

    def batches(self, asked: tuple[int, ...] = ()) -> list[int]:
        """Return the requested batch sizes, or powers of two up to the largest batch that fits."""
        check_batches(asked)
        if asked:
            return sorted(set(asked))
        most = (256 * self.unit if self.largest_batch is None else self.largest_batch) or self.unit
        doubled = [self.unit << n for n in range((most // self.unit).bit_length())]
        return sorted({*doubled, most})

    def flops_bound(self, parts: Callable[[Row], bool]) -> int | None:
        """Return the smallest batch for which FLOPs, not memory reads, limit decode; None if there is none.

        parts  fn(Row) -> whether to count this part
        """
        chip = self.topology.chip

        def bound(units: int) -> bool:
            chosen = [row for row in self.rows(units * self.unit, "decode") if parts(row)]
            reading = sum(row.weight_bytes + row.cache_bytes for row in chosen) / chip.hbm_bytes_per_s
            return sum(row.flops for row in chosen) / chip.peak_flops_per_s >= reading

        low, high = 0, 1
        while not bound(high):
            low, high = high, 2 * high
            if high > 2**24:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if bound(middle) else (middle, high)
        return high * self.unit

    @functools.cached_property
    def bounds(self) -> dict[str, int | None]:
        """The smallest batch sizes for which FLOPs limit decode: in matmuls with weights, and in the whole step."""
        if not self.speed_known:
            return {}
        return {
            "matmuls": self.flops_bound(lambda row: row.part != "cache"),
            "step": self.flops_bound(lambda row: True),
        }

    def batch_summary(self, batch: int) -> dict:
        """Return the memory, times and throughput of a batch."""
        memory_bytes = sum(self.memory_bytes(batch).values())
        result = {"batch": batch, "memory_bytes": memory_bytes,
                  "fits": None if self.usable_bytes is None else memory_bytes <= self.usable_bytes}  # fmt: skip
        if not self.speed_known:
            return result
        by_cause, first = self.seconds(batch, "decode"), self.seconds(batch, "prefill")
        step_s = sum(by_cause.values())
        return result | {"first_token_s": sum(first.values()), "step_s": step_s, "seconds": by_cause,
                         "prefill_seconds": first, "tokens_per_s": batch / step_s, "sequence_tokens_per_s": 1 / step_s,
                         "with_prefill_tokens_per_s": batch * self.request.answer / (
                             sum(first.values()) + (self.request.answer - 1) * step_s),
                         "bound_by": dominant_cause(by_cause)}  # fmt: skip

    def notes(self) -> list[str]:
        """List unexpected conditions that the numbers depend on, one line each."""
        cfg, lines = self.cfg, []
        if (slots := self.request.slots) > (T := cfg.data.seq_len):
            lines.append(f"prompt and answer are {slots:,} tokens, but generation stops at data.seq_len={T:,}; "
                         f"if the model was trained on longer sequences, pass --data.seq_len {slots}")  # fmt: skip
        if self.gathered_bytes:
            axes = "*".join(axis for axis in ("fsdp", "expert") if cfg.mesh.sizes[axis] > 1)
            sent = sum(sent_bytes(Row("", exchanges=gathers), cfg)
                       for *_, gathers in weight_costs(Pass(cfg, self.request, 1, 1)))  # fmt: skip
            lines.append(f"weights are sharded over {axes} and gathered for every token: a device sends "
                         f"{sent / 2**30:.3f} GiB per token; shards over tensor or stage need no gather")  # fmt: skip
        if (context := cfg.mesh.context) > 1:
            lines.append(f"each of the context={context} devices stores and reads the same weights; context shards the "
                         "cache and the tokens")  # fmt: skip
        enough = -(-(self.bounds.get("matmuls") or 0) // self.unit)  # tokens of a chunk
        piece = min(self.request.piece, self.request.prompt - self.request.shared)
        if piece < enough:
            lines.append(f"prefill in chunks of {piece} tokens is limited by reading the weights once per chunk; "
                         f"--piece {enough} or more avoids this")  # fmt: skip
        if cfg.model.attention == "mla" and cfg.mesh.tensor > 1:
            lines.append(f"each of the tensor={cfg.mesh.tensor} devices stores the latents of all heads")
        if cfg.mesh.stage > 1:
            lines.append(f"stages run one after another, so {cfg.mesh.stage - 1} of {cfg.mesh.stage} are idle")
        return lines

    def to_json(self, asked: tuple[int, ...] = ()) -> dict:
        """Return the plan's numbers as a dict."""
        batches, request = self.batches(asked), self.request
        of_part = lambda row: {"part": row.part, "flops": row.flops, "weight_bytes": row.weight_bytes,
                               "cache_bytes": row.cache_bytes, "sent_bytes": sent_bytes(row, self.cfg),
                               "seconds": self.row_seconds(row) if self.speed_known else None}  # fmt: skip
        return {
            "mesh": str(self.cfg.mesh), "topology": self.topology and str(self.topology), **asdict(request),
            "cache_token_bytes": self.token_bytes, "cache_sequence_bytes": self.sequence_bytes,
            "weights_bytes": self.weights_bytes(), "limit_bytes": self.limit_bytes, "most": self.largest_batch,
            "flops_bound": self.bounds, "batches": [self.batch_summary(batch) for batch in batches],
            "decode": [of_part(row) for row in self.rows(batches[-1], "decode")],
            "prefill": [of_part(row) for row in self.rows(batches[-1], "prefill")], "notes": self.notes(),
        }  # fmt: skip


def check_decoder(cfg: Config) -> None:
    if not architecture(cfg.model).continues_prompt:
        raise UserError("--inference plans decoders, and this model has an encoder; drop --inference")


def plan(
    cfg: Config, topology: hardware.Topology | str | None, request: Request, limit_bytes: int | None = None
) -> Plan:
    """Plan the memory and time of inference, without using a device.

    topology     the devices; None: times and the largest batch are unknown
    limit_bytes  memory of a device, if it differs from the chip's
    Raises: UserError for a model that cannot be sharded over the mesh, and a mesh that does not match the topology.
    """
    check_decoder(cfg)
    topology = hardware.Topology.parse(topology) if isinstance(topology, str) else topology
    if topology:
        hardware.require_one_slice(topology)
        hardware.layout(cfg.mesh, topology)
        limit_bytes = limit_bytes or topology.chip.memory_bytes
    fit.check(cfg.model, cfg.mesh)
    formats = {name: cfg.model.compute_dtype for name in ("weights_dtype", "cache_dtype")
               if getattr(request, name) == AUTO}  # fmt: skip
    return Plan(cfg, topology, replace(request, **formats), limit_bytes)


def search(cfg: Config, topology: hardware.Topology, request: Request, limit_bytes: int | None, batch: int,
           track=planning.untracked):  # fmt: skip
    """Plan every mesh of the topology's devices.

    Returns a (plan, summary of the batch) for each mesh on which the batch fits, those with the shortest decode step
    first; for each mesh on which it does not fit, those that need the least memory first; and {reason: number} for
    meshes that the model cannot use. track: as in `planning.search`
    """
    check_decoder(cfg)
    check_batches((batch,))
    fit, large, refused = [], [], {}
    for mesh in track(planning.candidate_meshes(cfg, topology), f"meshes of {topology}"):
        try:
            one = plan(replace(cfg, mesh=mesh), topology, request, limit_bytes)
        except UserError as error:
            planning.count_refusal(refused, error)
            continue
        summary = one.batch_summary(batch)
        (large if summary["fits"] is False else fit).append((one, summary))
    fit.sort(key=lambda row: (row[1]["step_s"], row[1]["memory_bytes"]))
    large.sort(key=lambda row: row[1]["memory_bytes"])
    return fit, large, refused
