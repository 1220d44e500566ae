"""What answering costs: prompts are read (prefill), then every sequence gets a token at a time (decode).

`plan(cfg, topology, request)` adds up `rows`: what each part of the model does in a pass of a device. What the layers
compute and send is read from their trace with a KV cache (`traced_layer.cached_rows`). Parameters lie as in training;
those in slices over FSDP, EXPERT and CONTEXT are gathered for every pass. Sequences are split over data, fsdp and
expert; their cache by heads over TENSOR, where latents are the same, and by positions over CONTEXT. Tokens are split
over CONTEXT, and between blocks over TENSOR. Stages work one after another. Prompts are read in pieces, one sequence
after another; logits are gathered everywhere, where tokens are drawn.

A pass is a roofline: each part takes its FLOPs at the chip's peak, or what it reads of memory, whichever is longer,
and then its collectives, their hops too. Nothing hides them. All slots of a cache are read, filled or not. Activations
are left out, in memory and of what is read: of few rows they are nothing, of many the FLOPs take longer.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, NamedTuple

from config import AUTO, AXES, Config, ModelConfig
from errors import UserError
from generate.cache import decoding_config
from pipeline import fit
from plan import costs, hardware, hiding, traced_layer
from plan.auto import SPARE
from plan.costs import Weights
from sharding import BATCH, CONTEXT, EXPERT, STAGE, TENSOR

WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1}  # bytes; int8's scales, one a column or position, are left out
DType = Literal["auto", "float32", "bfloat16", "int8"]
CAUSES = ("weights", "cache", "FLOPs", "wires", "hops")  # what a pass waits for


@dataclass(frozen=True)
class Request:
    """What is asked of each sequence, and in which number formats weights and cache are kept."""

    prompt: int  # tokens
    answer: int  # tokens
    weights_dtype: DType = AUTO  # auto: as activations are
    cache_dtype: DType = AUTO
    piece: int = 64  # tokens of a prompt that are read at once; as `generate.engine` does, if nobody says otherwise

    @property
    def slots(self) -> int:
        return self.prompt + self.answer


class Sent(NamedTuple):
    """A collective, as `hardware.wire_bytes` asks, and how often a pass has it."""

    kind: str
    axes: tuple[str, ...]
    joined_bytes: float
    count: float


@dataclass
class Row:
    """What one part of the model does in a pass, of a device: all layers, those of other stages before and after."""

    part: str
    flops: float = 0.0
    weight_bytes: float = 0.0  # read; of those that are gathered, written before
    cache_bytes: float = 0.0  # read, and written
    exchanges: list[Sent] = field(default_factory=list)

    def times(self, n: int) -> "Row":
        exchanges = [one._replace(count=n * one.count) for one in self.exchanges]
        return Row(self.part, n * self.flops, n * self.weight_bytes, n * self.cache_bytes, exchanges)


# Rows -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """So many new tokens of so many sequences on each device, with the whole cache before them."""

    cfg: Config
    request: Request
    b: int  # sequences
    s: int  # new tokens of each
    padded: bool = False  # experts' rows, as they are on simulated CPU devices

    @functools.cached_property
    def n(self) -> dict[str, int]:
        return self.cfg.mesh.sizes

    @property
    def tokens(self) -> int:
        return self.b * self.s

    @property
    def own(self) -> int:
        """Tokens between attentions, in whole shares of CONTEXT and TENSOR."""
        return -(-self.tokens // (self.n[CONTEXT] * self.n[TENSOR]))

    @property
    def fed(self) -> int:
        """Tokens of feed-forward: those of all TENSOR neighbours."""
        return self.own * self.n[TENSOR]

    @property
    def width(self) -> int:
        return WIDTHS[self.cfg.model.compute_dtype]

    def stream(self, tokens: int) -> int:
        return tokens * self.cfg.model.d_model * self.width

    @property
    def logits_bytes(self) -> int:
        """Those of all devices' sequences, everywhere."""
        return 4 * self.b * math.prod(self.n[axis] for axis in BATCH) * self.cfg.model.vocab_size

    @property
    def slots(self) -> int:
        """Positions of a sequence whose cache a device keeps."""
        return -(-self.request.slots // self.n[CONTEXT])


def width(w: Weights, dtype: str) -> int:
    """Bytes of an entry: of matrices as asked, of gains, biases and routers as the model has them."""
    vector = len(w.d.dims.lstrip("PLJ")) == 1
    return w.d.dtype.itemsize if vector or w.d.exact else WIDTHS[dtype]


def part_of(w: Weights) -> str:
    """The row in which a weight counts."""
    if w.name == "embedding_VD":
        return "embedding"
    if "attention" in w.name:
        return "attention"
    if "feed_forward" not in w.name:
        return "logits"
    return "shared experts" if ".shared." in w.name else "experts" if ".moe." in w.name else "feed-forward"


def share_read(w: Weights, at: Pass) -> float:
    """Of a weight, the part that is read: of experts those that a token has chosen, if each is as likely.

    An expert is left out by a token with probability 1 - k/E, so by N of them with (1 - k/E)^N.
    """
    if part_of(w) == "embedding":
        return 0
    if not w.d.dims.lstrip("PLJ").startswith("E") or w.d.dims.endswith("E"):
        return 1
    c = at.cfg.model
    return 1 - (1 - c.top_k / c.n_experts) ** (at.tokens / at.n[CONTEXT] * at.n[EXPERT])


def of_weights(at: Pass):
    """(part, FLOPs, bytes moved, gathers) of each weight. FLOPs: only those of logits; a layer's are in `of_layers`."""
    c = at.cfg.model
    for w in costs.weights(at.cfg):
        stages = at.n[STAGE] if "L" in w.d.dims else 1
        entries, layers = w.joined * stages, w.layers * stages
        each = width(w, at.request.weights_dtype)
        gather = Sent("all-gather", w.gathered_over, w.joined / w.layers * each, layers)
        gathered = w.parts > 1
        flops = 2 * at.b * entries if w.name == "unembedding_DV" else 0
        yield part_of(w), flops, each * entries * (share_read(w, at) + gathered), [gather] * gathered
        if w.name == "embedding_VD" and c.tie_embeddings:
            yield "logits", 2 * at.b * entries, each * entries * (1 + gathered), [gather] * gathered


def letters(at: Pass) -> dict:
    """The sizes of the letters in `traced_layer.PRIMES`, of one device."""
    c, n = decoding_config(at.cfg.at_work), at.n
    g, r = (c.n_heads, 1) if c.attention == "mla" else (c.n_kv_heads, c.n_heads // c.n_kv_heads)
    g, z = g // n[TENSOR], costs.Sizes(at.b, 0, 0, 0, at.width, 0, n, "cpu")
    return costs.letters(c, z) | {
        "g": g, "s": at.s, "n": at.own, "S": at.slots, "(r + 2)": r + 2, "(K + 1)": c.d_head + 1,
        "(U + 1)": c.d_value + 1, "(C + R)": c.d_kv_latent + c.d_rope,
        "(g (K + R) + C + R)": g * (c.d_head + c.d_rope) + c.d_kv_latent + c.d_rope,
    }  # fmt: skip


def of_layers(at: Pass):
    """(part, FLOPs, collectives) of each operation of the layers, read from their trace: see `traced_layer`.

    A matmul of experts multiplies as many rows as if each expert were as likely.
    """
    c, sizes = decoding_config(at.cfg.at_work), letters(at)
    of_moe = c.n_blocks if c.n_experts else 0
    for is_moe, layers in ((False, c.n_layers - of_moe), (True, of_moe)):
        for row in traced_layer.cached_layer_rows(c, is_moe) if layers else ():
            part, count = traced_layer.part_of(row), layers * row.count.at(sizes)
            if is_moe and part in ("router", "feed-forward"):
                part = "experts"
            if row.axes:
                n = math.prod(at.n[axis] for axis in row.axes) if row.kind == "all-to-all" else 1
                yield part, 0, [Sent(row.kind, row.axes, n * row.payload.at(sizes), count)]
            elif row.dims:
                (A, _), (e, D, m), *_ = ([dim.at(sizes) for dim in dims] for dims in row.dims)
                rows = costs.grouped_rows(A, e, "cpu") if at.padded else A / at.n[EXPERT]
                yield part, 2 * count * rows * D * m, []
            else:
                yield part, count * row.flops.at(sizes), []


def kept(c: ModelConfig, tensor: int = 1) -> int:
    """Numbers of a position that a layer keeps on a device: keys and values of its heads, or the latent of all."""
    return c.d_kv_latent + c.d_rope if c.attention == "mla" else 2 * c.n_kv_heads // tensor * c.d_head


def cache_moved(at: Pass) -> float:
    """Bytes of the cache that a pass reads and writes. Each CONTEXT neighbour has some slots."""
    c = at.cfg.model
    each = WIDTHS[at.request.cache_dtype] * kept(c, at.n[TENSOR])
    return c.n_layers * at.b * (at.slots + -(-at.s // at.n[CONTEXT])) * each


def exchanges(at: Pass):
    """(part, collective) of activations outside of layers."""
    c = at.cfg.model
    yield "embedding", Sent("reduce-scatter", (TENSOR,), at.stream(at.fed), 1)
    yield "logits", Sent("all-gather", (TENSOR,), at.stream(at.fed), 1)
    yield "logits", Sent("all-reduce", (STAGE, CONTEXT), 4 * at.b * c.vocab_size / at.n[TENSOR], 1)
    yield "drawing", Sent("all-gather", (*BATCH, TENSOR), at.logits_bytes, 1)
    yield "stages", Sent("collective-permute", (STAGE,), at.stream(at.own), at.n[STAGE])


def rows(at: Pass) -> list[Row]:
    """Each part of a pass."""
    names = ("embedding", "attention", "cache", "feed-forward", "experts", "shared experts", "stages", "logits",
             "drawing")  # fmt: skip
    found = {name: Row(name) for name in names}
    found["cache"].cache_bytes = cache_moved(at)
    for part, flops, sent in of_layers(at):
        found[part].flops += flops
        found[part].exchanges += sent
    for part, flops, weight_bytes, gathers in of_weights(at):
        found[part].flops += flops
        found[part].weight_bytes += weight_bytes
        found[part].exchanges += gathers
    for part, one in exchanges(at):
        found[part].exchanges.append(one)
    for row in found.values():
        axes = lambda one: tuple(axis for axis in AXES if axis in one.axes and at.n[axis] > 1)
        row.exchanges = [one._replace(axes=axes(one)) for one in row.exchanges if axes(one)]
    return [row for row in found.values() if row.flops or row.weight_bytes or row.cache_bytes or row.exchanges]


# Seconds --------------------------------------------------------------------------------------------------------------


def seconds(row: Row, cfg: Config, topology: hardware.Topology) -> dict[str, float]:
    """Seconds of a part by what it waits for."""
    chip, found, sizes = topology.chip, dict.fromkeys(CAUSES, 0.0), cfg.mesh.sizes
    compiled_away = chip.torus_dims and chip.devices_per_chip == 1 and topology.hosts > 1  # see `hardware.check`
    computing = row.flops / chip.peak_flops_per_s
    reading = {"weights": row.weight_bytes / chip.hbm_bytes_per_s, "cache": row.cache_bytes / chip.hbm_bytes_per_s}
    found |= {"FLOPs": computing} if computing > sum(reading.values()) else reading
    for one in row.exchanges:
        link, n = hardware.link(cfg.mesh, topology, one.axes), math.prod(sizes[axis] for axis in one.axes)
        kind = hiding.made_of(one.kind, one.axes, sizes, "tpu" if compiled_away else "")
        found["wires"] += one.count * hardware.collective_seconds(kind, one.joined_bytes, n, link)
        found["hops"] += one.count * hardware.latency_seconds(kind, link)
    return found


def sent_bytes(row: Row, cfg: Config) -> float:
    """What a device sends for a part."""
    n = lambda axes: math.prod(cfg.mesh.sizes[axis] for axis in axes)
    return sum(one.count * hardware.wire_bytes(one.kind, one.joined_bytes, n(one.axes)) for one in row.exchanges)


def added(found: list[dict[str, float]]) -> dict[str, float]:
    return {cause: sum(one[cause] for one in found) for cause in CAUSES}


def largest(found: dict[str, float]) -> str:
    """What is waited for longest."""
    return max(found, key=found.get)


# Plan -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Answering on a mesh: bytes are those of a device, batches and tokens those of all."""

    cfg: Config
    topology: hardware.Topology | None
    request: Request
    limit_bytes: int | None  # memory of a device

    @property
    def unit(self) -> int:
        """Groups of devices that answer different sequences: fewer are filled up to so many."""
        return math.prod(self.cfg.mesh.sizes[axis] for axis in BATCH)

    @property
    def speed_known(self) -> bool:
        return bool(self.topology and self.topology.chip.peak_flops_per_s)

    def rows(self, batch: int, phase: str) -> list[Row]:
        """Of a decode step, or of all passes that read the prompts: a piece of one sequence of each group.

        A token is drawn behind a prompt's last piece alone.
        """
        b, padded = -(-batch // self.unit), not self.speed_known
        if phase == "decode":
            return rows(Pass(self.cfg, self.request, b, 1, padded))
        piece = min(self.request.piece, self.request.prompt)
        pieces = -(-self.request.prompt // piece)
        found = rows(Pass(self.cfg, self.request, 1, piece, padded))
        return [row.times(b if row.part == "drawing" else b * pieces) for row in found]

    def seconds(self, batch: int, phase: str) -> dict[str, float] | None:
        """Seconds of a pass by what it waits for: of all prompts, or of a token for each sequence. None: not known."""
        if not self.speed_known:
            return None
        return added([self.of_row(row) for row in self.rows(batch, phase)])

    def of_row(self, row: Row) -> dict[str, float]:
        return seconds(row, self.cfg, self.topology)

    # Memory

    @property
    def token_bytes(self) -> int:
        """Cache of one token, in all layers: each number once, however often the mesh has it."""
        c = self.cfg.model
        return c.n_layers * kept(c) * WIDTHS[self.request.cache_dtype]

    def cache_bytes(self, batch: int) -> int:
        """What a device keeps of a batch. The first layers, before the blocks, are on every stage, see `generate`."""
        c, at = self.cfg.model, Pass(self.cfg, self.request, -(-batch // self.unit), 1)
        layers = c.dense_prefix + (c.n_layers - c.dense_prefix) // self.cfg.mesh.stage
        return layers * at.b * at.slots * kept(c, self.cfg.mesh.tensor) * WIDTHS[self.request.cache_dtype]

    def weights_bytes(self, dtype: str = "") -> int:
        return sum(w.held * width(w, dtype or self.request.weights_dtype) for w in costs.weights(self.cfg))

    @functools.cached_property
    def gathered_bytes(self) -> float:
        """Weights in one piece, where they lie in slices: a layer's, or a table."""
        found: dict[str, float] = {}
        for w in (w for w in costs.weights(self.cfg) if w.parts > 1):
            of = ".".join(w.name.split(".")[:2])  # prefix, blocks.dense, blocks.moe, or the name of a table
            found[of] = found.get(of, 0) + w.joined / w.layers * width(w, self.request.weights_dtype)
        return max(found.values(), default=0)

    def memory_bytes(self, batch: int) -> dict[str, float]:
        at = Pass(self.cfg, self.request, -(-batch // self.unit), 1)
        logits = at.logits_bytes * 5 / 4  # and which words a sequence has, a byte each
        return {"weights": self.weights_bytes(), "gathered": self.gathered_bytes, "cache": self.cache_bytes(batch),
                "logits": logits}  # fmt: skip

    @property
    def room_bytes(self) -> float | None:
        """What may be filled: a tenth of the memory stays free."""
        return self.limit_bytes and (1 - SPARE) * self.limit_bytes

    @property
    def most(self) -> int | None:
        """The most sequences that fit. None: the memory is not known."""
        if not self.room_bytes:
            return None
        none, one = (sum(self.memory_bytes(batch).values()) for batch in (0, self.unit))
        return max(int((self.room_bytes - none) // (one - none)), 0) * self.unit

    def refusal(self) -> str:
        """Why no sequence fits, in numbers, and what would do."""
        request, room, held = self.request, self.room_bytes, self.memory_bytes(self.unit)
        parts = ", ".join(f"{part} {size / 2**30:.3f} GiB" for part, size in held.items() if size >= 2**20)
        fits = lambda dtype: sum(held.values()) - held["weights"] + self.weights_bytes(dtype) <= room
        now = WIDTHS[request.weights_dtype]
        ways = [f"--weights_dtype {dtype}" for dtype, each in WIDTHS.items() if each < now and fits(dtype)]
        whole = sum(w.d.size * width(w, request.weights_dtype) for w in costs.weights(self.cfg))
        whole += self.unit * self.token_bytes * request.slots
        devices = max(math.ceil(whole / room), self.cfg.mesh.devices + 1)
        ways.append(f"at least {1 << (devices - 1).bit_length()} devices that split all of it")
        return (
            f"not even {self.unit} x {request.slots:,} tokens fit on {self.cfg.mesh}: a device would hold {parts}, and "
            f"of its {self.limit_bytes / 2**30:.3f} GiB a tenth stays free; try {' or '.join(ways)}"
        )

    # Batches

    def batches(self, asked: tuple[int, ...] = ()) -> list[int]:
        """As asked; or in powers of two up to the most that fit."""
        if min(asked, default=1) < 1:
            raise UserError(f"--batch {min(asked)}: must be at least 1 sequence")
        if asked:
            return sorted(set(asked))
        most = (256 * self.unit if self.most is None else self.most) or self.unit
        doubled = [self.unit << n for n in range((most // self.unit).bit_length())]
        return sorted({*doubled, most})

    def flops_bound(self, parts: Callable[[Row], bool]) -> int | None:
        """The fewest sequences of which a decode step takes longer to compute than to read. None: no batch does."""
        chip = self.topology.chip

        def bound(units: int) -> bool:
            found = [row for row in self.rows(units * self.unit, "decode") if parts(row)]
            reading = sum(row.weight_bytes + row.cache_bytes for row in found) / chip.hbm_bytes_per_s
            return sum(row.flops for row in found) / chip.peak_flops_per_s >= reading

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
        """From which batch on decode computes longer than it reads: products with weights, and all of it."""
        if not self.speed_known:
            return {}
        return {
            "products": self.flops_bound(lambda row: row.part != "cache"),
            "step": self.flops_bound(lambda row: True),
        }

    def answered(self, batch: int) -> dict:
        """What a batch of this size takes, and gets."""
        memory_bytes = sum(self.memory_bytes(batch).values())
        found = {"batch": batch, "memory_bytes": memory_bytes,
                 "fits": None if self.room_bytes is None else memory_bytes <= self.room_bytes}  # fmt: skip
        if not self.speed_known:
            return found
        by_cause, first = self.seconds(batch, "decode"), self.seconds(batch, "prefill")
        step_s = sum(by_cause.values())
        return found | {"first_token_s": sum(first.values()), "step_s": step_s, "seconds": by_cause,
                        "prefill_seconds": first, "tokens_per_s": batch / step_s, "sequence_tokens_per_s": 1 / step_s,
                        "with_prefill_tokens_per_s": batch * self.request.answer / (
                            sum(first.values()) + (self.request.answer - 1) * step_s),
                        "bound_by": largest(by_cause)}  # fmt: skip

    def notes(self) -> list[str]:
        """Say in a line each what the numbers depend on that one may not expect."""
        cfg, found = self.cfg, []
        if (slots := self.request.slots) > (T := cfg.data.seq_len):
            found.append(f"prompt and answer are {slots:,} tokens, and the model is trained on data.seq_len={T:,}: "
                         f"sampling ends a text there; give --data.seq_len {slots} for another model")  # fmt: skip
        if self.gathered_bytes:
            axes = "*".join(axis for axis in ("fsdp", "expert", "context") if cfg.mesh.sizes[axis] > 1)
            sent = sum(sent_bytes(Row("", exchanges=gathers), cfg)
                       for *_, gathers in of_weights(Pass(cfg, self.request, 1, 1)))  # fmt: skip
            found.append(f"weights lie in slices over {axes} and are gathered for every token: a device sends "
                         f"{sent / 2**30:.3f} GiB of them; tensor and stage split weights and gather none")  # fmt: skip
        enough = self.bounds["products"] if self.bounds else None
        if enough and (piece := min(self.request.piece, self.request.prompt)) < (enough := -(-enough // self.unit)):
            found.append(f"prompts are read in pieces of {piece} tokens, and each reads the weights for longer than it "
                         f"computes; from --piece {enough} on it would not")  # fmt: skip
        if cfg.model.attention == "mla" and cfg.mesh.tensor > 1:
            found.append(f"each of tensor={cfg.mesh.tensor} devices keeps the latents of all heads")
        if cfg.mesh.stage > 1:
            found.append(f"stages work one after another: {cfg.mesh.stage - 1} of {cfg.mesh.stage} wait")
        return found

    def to_json(self, asked: tuple[int, ...] = ()) -> dict:
        """The plan as a dict of numbers."""
        batches, request = self.batches(asked), self.request
        of_part = lambda row: {"part": row.part, "flops": row.flops, "weight_bytes": row.weight_bytes,
                               "cache_bytes": row.cache_bytes, "sent_bytes": sent_bytes(row, self.cfg),
                               "seconds": self.of_row(row) if self.speed_known else None}  # fmt: skip
        return {
            "mesh": str(self.cfg.mesh), "topology": self.topology and str(self.topology), **asdict(request),
            "cache_token_bytes": self.token_bytes, "cache_sequence_bytes": self.token_bytes * request.slots,
            "weights_bytes": self.weights_bytes(), "limit_bytes": self.limit_bytes, "most": self.most,
            "flops_bound": self.bounds, "batches": [self.answered(batch) for batch in batches],
            "decode": [of_part(row) for row in self.rows(batches[-1], "decode")],
            "prefill": [of_part(row) for row in self.rows(batches[-1], "prefill")], "notes": self.notes(),
        }  # fmt: skip


def plan(
    cfg: Config, topology: hardware.Topology | str | None, request: Request, limit_bytes: int | None = None
) -> Plan:
    """Predict what answering costs; no device is touched.

    topology     the devices; None: times, and what fits, are not known
    limit_bytes  memory of a device, if not what the chip has
    Raises: UserError for a model that does not split over the mesh, and a mesh that does not fit the topology.
    """
    topology = hardware.Topology.parse(topology) if isinstance(topology, str) else topology
    if topology:
        hardware.layout(cfg.mesh, topology)
        limit_bytes = limit_bytes or topology.chip.memory_bytes
    fit.check(cfg.model, cfg.mesh)
    for name in ("prompt", "answer", "piece"):
        value = getattr(request, name)
        if value < 1:
            raise UserError(f"--{name} {value}: must be at least 1 token")
    formats = {name: cfg.model.compute_dtype for name in ("weights_dtype", "cache_dtype")
               if getattr(request, name) == AUTO}  # fmt: skip
    return Plan(cfg, topology, replace(request, **formats), limit_bytes)
