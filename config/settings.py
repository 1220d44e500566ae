"""Settings: a setting is one field, with its name, type, default, and one sentence with its unit.

A check lives in the class whose fields it checks. What a setting affects is declared with its type: see `affecting`.
"""

import dataclasses
import functools
import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import tyro

from config.fields import (
    AUTO,
    Affects,
    Betas,
    Count,
    NotNegative,
    Positive,
    Share,
    ShareBelow1,
    Size,
    SizeOrAuto,
    Way,
    check,
    declared,
    hints,
    is_remote,
    parse_mixture,
    parse_skips,
)
from config.migrations import flatten, instead_of, moved
from errors import UserError, nearest

AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")  # outermost (slowest link) first
SHORT_AXES = {"dp": "data", "pp": "stage", "ep": "expert", "cp": "context", "tp": "tensor"}


@dataclass(frozen=True)
class MeshConfig:
    """How many devices lie along each mesh axis; the product is the number of devices."""

    data: Size = 1
    stage: Size = 1
    fsdp: Size = 1
    expert: Size = 1
    context: Size = 1
    tensor: Size = 1

    def __post_init__(self):
        check(self, "mesh.")

    @classmethod
    def parse(cls, text: str) -> "MeshConfig":
        """Read `fsdp=2,tensor=4`; dp, pp, ep, cp, tp are accepted, absent axes are 1.

        Raises: UserError naming the part that cannot be read.
        """
        sizes = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, size = part.partition("=")
            axis = SHORT_AXES.get(name, name)
            if axis not in AXES:
                raise UserError(f"mesh {text!r}: no axis is called {name!r}; {nearest(name, AXES)}")
            if not (equals and size.isdecimal() and int(size) > 0):
                raise UserError(f"mesh {text!r}: {part!r} should be AXIS=SIZE, a whole size of at least 1: {axis}=2")
            if axis in sizes:
                raise UserError(f"mesh {text!r}: axis {axis!r} is given twice")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Groups of devices that hold different sequences."""
        return self.data * self.fsdp * self.expert

    @property
    def position_shards(self) -> int:
        """Devices that hold different positions of the same sequences between blocks."""
        return self.context * self.tensor

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "data=1"


MeshFlag = Annotated[
    MeshConfig,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="AXIS=N,..",
        instance_from_str=lambda words: MeshConfig.parse(words[0]),
        is_instance=lambda x: isinstance(x, MeshConfig),
        str_from_instance=lambda mesh: [str(mesh)],
    ),
]


BARE = tyro.conf.arg(help="")  # a group of flags whose name says enough: --help fits two screens


@dataclass(frozen=True)
class WorkConfig:
    """How the work is done. None of it changes a number but by rounding: a run may go on with other values.

    `auto` is chosen from mesh, chip and memory by the planner's rules; at its start a run says what, and why.
    """

    # kept for the way back, where the rest is made again: all; products; what comes into a branch; into a layer
    remat: Annotated[Literal["auto", "none", "dots", "branches", "full"], Way("none", "full")] = AUTO
    # weights are joined for each use of a layer; or once a step, and kept
    gather: Annotated[Literal["auto", "layer", "step"], Way("layer", "layer")] = AUTO
    # positions of tensor's devices: ring, in turn, on their way while products of others run; gather, all at once
    tensor_exchange: Annotated[Literal["auto", "gather", "ring"], Way("gather", "ring")] = AUTO
    # keys of other devices: all at once; in turn; or all_to_all, a share of the heads for all positions, never by auto
    context_attention: Annotated[Literal["auto", "gather", "ring", "all_to_all"], Way("gather", "gather")] = AUTO
    # logits that exist at once, per device: as many as so many tokens have
    loss_chunk: Annotated[SizeOrAuto, Way(512)] = AUTO
    # who works on what when, in stages: `python -m pipeline`
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb"] = AUTO
    chunks: SizeOrAuto = AUTO  # interleaved: parts of the layers on each stage, around which microbatches go in turn
    microbatches: SizeOrAuto = AUTO  # parts of a pass that follow each other through the stages
    device_batch: SizeOrAuto = AUTO  # most sequences a device works on at once; the rest is accumulated

    def __post_init__(self):
        check(self, "work.")
        if self.chunks not in (AUTO, 1) and self.schedule not in (AUTO, "interleaved"):
            raise UserError(f"work.chunks={self.chunks}: only the schedule 'interleaved' has chunks")

    @classmethod
    def ways(cls, which: Literal["plain", "least"]) -> dict[str, str | int]:
        """The plainest value, or that of least memory, of each setting that declares one."""
        found = {name: declared(hint, Way) for name, hint in hints(cls).items()}
        return {name: getattr(way, which) for name, way in found.items() if way and getattr(way, which) is not None}

    @property
    def autos(self) -> list[str]:
        """The settings that are to be chosen."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) == AUTO]

    @property
    def settled(self) -> "WorkConfig":
        """The same with the plainest way wherever nobody has chosen: what every other way is compared with.

        `auto` stays for microbatches and device_batch, which `pipeline/fit.py` reads off the batch and the mesh.
        """
        schedule = "gpipe" if self.chunks in (AUTO, 1) else "interleaved"
        chunks = 2 if self.schedule == "interleaved" else 1
        plain = self.ways("plain") | {"schedule": schedule, "chunks": chunks}
        chosen = {name: value for name, value in plain.items() if name in self.autos}
        return dataclasses.replace(self, **chosen)

    def __str__(self) -> str:
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return " ".join(f"{name}={value}" for name, value in values if value != AUTO) or "all auto"


@dataclass(frozen=True)
class ModelConfig:
    """The transformer: a decoder in the DeepSeek-V3 family (arXiv:2412.19437), every part switchable."""

    vocab_size: Size = 272  # rows of the embedding table, at least the tokenizer's vocabulary
    d_model: Size = 128  # width of the residual stream
    n_layers: Size = 4  # attention + feed-forward pairs
    n_heads: Size = 4  # query heads
    attention: Literal["mla", "gqa"] = "mla"  # latent (arXiv:2405.04434) or grouped-query (arXiv:2305.13245)
    n_kv_heads: Size = 4  # key/value heads; gqa only, divides n_heads; follows n_heads where they are equal
    d_head: Size = 32  # width of a head's query and key, mla: without rotary; follows d_model / n_heads where equal
    d_rope: Count = 16  # mla: width of the rotary part, one key shared by all heads
    d_value: Size = 32  # mla: width of a head's value
    d_query_latent: Count = 0  # mla: width of the query latent; 0 projects queries straight from the residual stream
    d_kv_latent: Size = 64  # mla: width of the key/value latent
    rope_dims: Count = 0  # gqa: the first coordinates of a head that are rotary, as 64 of GPT-J's 256; 0: all
    rope_theta: Positive = 10_000.0  # longest rotary wavelength / 2 pi, in positions
    no_rope_every: Annotated[Count, Affects.OWN] = 0  # every n-th layer has no rotary; 0: all have
    d_ff: Size = 512  # hidden width of a dense feed-forward
    activation: Literal["swiglu", "gelu"] = "swiglu"  # nonlinearity of dense, shared and routed feed-forwards
    parallel_residual: bool = False  # attention and feed-forward read the same norm, and are added at once; gqa, dense
    bias: bool = False  # dense and shared feed-forwards and the logits have biases; attention and experts have none
    n_experts: Count = 0  # routed experts of an MoE layer; 0: every layer is dense
    top_k: Size = 2  # experts that see each token
    n_shared: Count = 0  # shared experts, which see every token
    d_expert: Size = 128  # hidden width of one expert
    moe_every: Size = 1  # after the prefix, every n-th layer is MoE, the n - 1 before it dense
    dense_prefix: Count = 0  # dense layers before the first repeating block
    router: Literal["sigmoid", "softmax"] = "sigmoid"  # scores before the top-k
    normalize_gates: bool = True  # a token's gates are divided by their sum; not where top_k=1, whose gate would be 1
    routed_scaling: Positive = 1.0  # factor on the gates
    # weight of the balance loss over the global batch (arXiv:2101.03961); 0: off
    balance_loss: Annotated[NotNegative, Affects.TRAINING] = 0.0
    # step of the selection bias per training step (arXiv:2408.15664); 0: no bias
    balance_rate: Annotated[NotNegative, Affects.TRAINING] = 0.0
    # weight of the mean of log(sum of exp(logits)) squared (arXiv:2204.02311); 0: off
    z_loss: Annotated[NotNegative, Affects.TRAINING] = 0.0
    # share of a target's probability given to all words (arXiv:1512.00567); 0: off
    label_smoothing: Annotated[ShareBelow1, Affects.TRAINING] = 0.0
    # slots an expert keeps per sequence, over top_k * T / n_experts; 0: dropless
    capacity_factor: Annotated[NotNegative, Affects.TRAINING] = 0.0
    tie_embeddings: bool = False  # one table for embedding and unembedding
    # share of activations zeroed after the embedding and every residual branch
    dropout: Annotated[ShareBelow1, Affects.TRAINING] = 0.0
    norm: Literal["rms", "layer"] = "rms"  # of the stream: RMSNorm (arXiv:1910.07467), LayerNorm with bias (1607.06450)
    norm_eps: NotNegative = 1e-6  # added to the mean square, or the variance, in norms
    # float32; mixed: float32 parameters and optimizer moments, bfloat16 activations and inputs of matmuls; bfloat16:
    # all of these. Sums, and what is sensitive to them, are always float32
    precision: Annotated[Literal["float32", "mixed", "bfloat16"], Affects.NUMBERS] = "mixed"
    work = WorkConfig().settled  # no setting of the model: see `ModelAtWork`

    def __post_init__(self):
        check(self, "model.")
        if self.attention == "gqa" and self.n_heads % self.n_kv_heads:
            self._refuse("n_heads", f"must be a multiple of n_kv_heads ({self.n_heads} % {self.n_kv_heads} = "
                         f"{self.n_heads % self.n_kv_heads})")  # fmt: skip
        rotary, name = (self.d_rope, "d_rope") if self.attention == "mla" else (self.d_head, "d_head")
        if rotary % 2:
            self._refuse(name, "must be even: rotary turns pairs of coordinates")
        if self.attention == "gqa" and (self.rope_dims % 2 or self.rope_dims > self.d_head):
            self._refuse("rope_dims", f"must be even, and at most d_head={self.d_head}")
        if self.parallel_residual and (self.attention != "gqa" or self.n_experts):
            has = f"attention={self.attention!r}" if self.attention != "gqa" else f"n_experts={self.n_experts}"
            self._refuse("parallel_residual", f"only with attention='gqa' and n_experts=0; here is {has}")
        if self.n_experts and not 1 <= self.top_k <= self.n_experts:
            self._refuse("top_k", f"must lie between 1 and n_experts={self.n_experts}")
        repeating = self.n_layers - self.dense_prefix
        if repeating < 1 or repeating % self.layers_per_block:
            below = max(repeating, 0) // self.layers_per_block
            fit = [self.dense_prefix + blocks * self.layers_per_block for blocks in (below, below + 1) if blocks]
            raise UserError(
                f"model.n_layers={self.n_layers}: after dense_prefix={self.dense_prefix} layers, whole blocks of "
                f"{self.layers_per_block} layers follow, at least one; nearest that fit: {' or '.join(map(str, fit))}"
            )

    def _refuse(self, name: str, why: str):
        raise UserError(f"model.{name}={getattr(self, name)}: {why}")

    @property
    def param_dtype(self) -> str:
        """Of stored parameters and optimizer moments."""
        return "bfloat16" if self.precision == "bfloat16" else "float32"

    @property
    def compute_dtype(self) -> str:
        """Of activations and the inputs of matmuls."""
        return "float32" if self.precision == "float32" else "bfloat16"

    @property
    def layers_per_block(self) -> int:
        """Layers of one repeating block: moe_every - 1 dense ones, then an MoE; or one dense layer."""
        return self.moe_every if self.n_experts else 1

    @property
    def n_blocks(self) -> int:
        return (self.n_layers - self.dense_prefix) // self.layers_per_block


@dataclass(frozen=True)
class ModelAtWork(ModelConfig):
    """A model, and how its work is done, which `overlap/` alone asks: what the functions of `model.py` are given."""

    work: WorkConfig = ModelConfig.work


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, and how they are cut into global batches."""

    # directory of token shards, written by `python -m data.prepare`; or a bucket's, gs://BUCKET/DIR
    path: Annotated[str, Affects.RUN] = "tokens/stdlib-bytes"
    # shares of directories in data.path, exact over any 1,000 sequences: code=0.7,prose=0.3; others from a step on:
    # code=0.7,prose=0.3@5000:code=0.5,prose=0.5
    mixture: Annotated[str, Affects.ORDER] = ""
    seq_len: Annotated[Size, Affects.FUNCTION] = 256  # T, positions in one sequence
    batch_size: Size = 8  # B, sequences in one step, over all devices
    shuffle: bool = True  # each epoch in another order; False: every epoch in the order of the text
    # 1200:1210,..: from step 1200 on, a step takes the batch of 10 steps later: 10 are passed over
    skip: Annotated[str, Affects.ORDER] = ""
    # what a row holds. windows: data.seq_len tokens that follow each other, wherever a document ends; documents: whole
    # ones, by best fit (arXiv:2404.10830), and padding; only those longer than a row are cut
    packing: Literal["windows", "documents"] = "windows"
    mask_documents: bool = True  # attention stays inside a document, and positions restart with it

    def __post_init__(self):
        check(self, "data.")
        parse_skips(self.skip), parse_mixture(self.mixture)  # refuse what cannot be read
        if self.packing == "documents" and not self.shuffle:
            raise UserError("data.packing='documents' and data.shuffle=False: it puts documents together by their "
                            "lengths, not in the order of the text; leave out one of them")  # fmt: skip

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, and its learning-rate schedule."""

    lr: NotNegative = 3e-3  # peak learning rate of AdamW (arXiv:1711.05101)
    schedule: Literal["cosine", "wsd"] = "cosine"  # after warm-up: cosine decay, or stay, then linear decay
    warmup_steps: Count = 20  # linear from 0 to lr
    decay_fraction: Share = 0.2  # wsd: share of all steps spent decaying
    final_lr: NotNegative = 0.1  # learning rate when it has fallen, as a share of lr
    betas: Betas = (0.9, 0.95)  # decay of the first and of the second moment, per step
    eps: Positive = 1e-8  # added to the root of the second moment
    weight_decay: NotNegative = 0.1  # per step, times the learning rate; none on norms, biases and embeddings
    clip_norm: NotNegative = 1.0  # largest global norm of the gradient; 0: no clipping

    def __post_init__(self):
        check(self, "optim.")


@dataclass(frozen=True)
class RunConfig:
    """One training run: how long, where it is kept, what is written when."""

    name: str = "laptop"  # the run lives in DIR/NAME
    dir: str = "runs"  # parent of all runs: a directory of a disk, or a bucket's, gs://BUCKET/DIR
    steps: Size = 320  # optimizer steps; a start prints how many an epoch has
    seed: Annotated[Count, Affects.TRAINING] = 0  # initial parameters, dropout, and the order of the sequences
    # directory of a run, converted or trained, whose parameters this one starts from, at step 0; empty: new ones
    init_from: Annotated[str, Affects.TRAINING, tyro.conf.arg(aliases=["--init_from"])] = ""
    log_every: Size = 10  # steps between rows of metrics.jsonl
    eval_every: Count = 100  # steps between evaluations; 0: only at the end
    eval_batches: Count = 4  # batches of an evaluation on the way; 0: the whole validation split (always, at the end)
    checkpoint_every: Size = 100  # steps between checkpoints; one more is written at the end
    keep_checkpoints: Size = 2  # newest checkpoints that are kept; the one with the lowest validation loss stays too
    sample_prompt: str = "def "  # text that the sample at the end continues, by up to 200 tokens; empty: no sample
    # steps between rows of norms per parameter and layer, and of the gradient noise scale (arXiv:1812.06162); such a
    # step takes about three times as long; 0: none
    gradient_stats_every: Count = 0
    tracker: Literal["none", "wandb"] = "none"  # who is sent the rows of metrics.jsonl; wandb needs `make extra-wandb`
    # train nothing: take this step of metrics.jsonl again, from the checkpoint before it, and print its norms; 0: train
    replay: Annotated[Count, Affects.START, tyro.conf.arg(aliases=["--replay"])] = 0
    # yes: train if the plan says that it fits in memory; no: train even if it does not; only: train nothing, but report
    # whether settings, tokens, mesh and this run's directory are right; no device is touched
    check: Annotated[Literal["yes", "no", "only"], Affects.START] = "yes"
    # simulate this many CPU devices, for a mesh larger than the machine; 0: work on the devices there are
    devices: Annotated[Count, tyro.conf.arg(aliases=["--devices"])] = 0
    # NAME=VALUE,.. of XLA, added to those of xla/options.py; NAME= leaves one out
    compiler_options: str = ""
    # of several processes: seconds without a heartbeat of one after which the others end. They have 5 times as long to
    # join at the start, and 30 times as long to finish a step, or a batch of an evaluation, before the run ends as hung
    peer_timeout_s: Size = 60
    # no: resume, and stop if the newest checkpoint that was saved is gone; newest: resume from the newest one that is
    # there, or from step 0; scratch: delete this run's results and start at step 0
    restart: Annotated[Literal["no", "newest", "scratch"], Affects.START] = "no"

    def __post_init__(self):
        check(self, "run.")
        if not re.fullmatch(r"[A-Za-z0-9._-]*[A-Za-z0-9_-]", self.name):
            raise UserError(f"run.name={self.name!r}: use letters, digits, '.', '_' and '-'")
        if is_remote(self.dir) and not re.match(r"gs://[^/]", self.dir):
            raise UserError(f"run.dir={self.dir!r}: a run is kept on a disk, or at gs://BUCKET/DIR: Orbax writes "
                            "checkpoints to no other address; tokens may lie at any (--data.path)")  # fmt: skip

    @property
    def join_timeout_s(self) -> int:
        return 5 * self.peer_timeout_s

    @property
    def hang_timeout_s(self) -> int:
        return 30 * self.peer_timeout_s


@dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    model: Annotated[ModelConfig, BARE, Affects.FUNCTION] = field(default_factory=ModelConfig)
    mesh: Annotated[MeshFlag, Affects.SPEED] = field(default_factory=MeshConfig)  # devices along each mesh axis
    work: Annotated[WorkConfig, BARE, Affects.SPEED] = field(default_factory=WorkConfig)  # remat, schedule, ..
    data: Annotated[DataConfig, BARE, Affects.TRAINING] = field(default_factory=DataConfig)
    optim: Annotated[OptimConfig, BARE, Affects.TRAINING] = field(default_factory=OptimConfig)
    run: Annotated[RunConfig, BARE, Affects.RUN] = field(default_factory=RunConfig)

    @property
    def at_work(self) -> ModelAtWork:
        """The model with `work` settled, as the functions of `model.py` take it."""
        return _at_work(self.model, self.work)

    def to_dict(self) -> dict:
        """As JSON has it: with lists for tuples."""
        as_json = lambda pairs: {name: [*x] if isinstance(x, tuple) else x for name, x in pairs}
        return dataclasses.asdict(self, dict_factory=as_json)

    @classmethod
    def from_dict(cls, values: dict) -> "Config":
        """Rebuild what `to_dict` wrote, in an older version too. Raises: UserError for a field that is not known."""
        return _build(cls, moved(values), "")


def affecting(*kinds: Affects, group: str = "") -> dict[str, Any]:
    """The settings that affect one of these, by dotted name, or of one group by their own; each with its default."""
    found = {}
    for part, hint in hints(Config).items():
        for f in dataclasses.fields(cls := get_args(hint)[0]):
            kind = declared(hints(cls)[f.name], Affects) or declared(hint, Affects)
            if kind in kinds and group in ("", part):
                found[f.name if group else f"{part}.{f.name}"] = f.default
    return found


@functools.cache
def _at_work(c: ModelConfig, work: WorkConfig) -> ModelAtWork:
    return ModelAtWork(**vars(c), work=work.settled)


def _build(cls, values: dict, prefix: str):
    if not isinstance(values, dict):
        raise UserError(f"{prefix.rstrip('.') or 'it'} should hold settings, {{name: value}}, and is {values!r:.60}")
    types = {f.name: f for f in dataclasses.fields(cls)}
    parts = {}
    for name, value in values.items():
        if name not in types:
            instead = instead_of(f"{prefix}{name}")
            raise UserError(
                f"{prefix}{name}={value!r} {instead}" if instead
                else f"no setting is called {prefix}{name}; {nearest(name, types)}")  # fmt: skip
        factory = types[name].default_factory
        nested = factory is not dataclasses.MISSING and dataclasses.is_dataclass(factory)
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        parts[name] = _build(factory, value, f"{prefix}{name}.") if nested else value
    return cls(**parts)


def replace(cfg: Config, **dotted: Any) -> Config:
    """Change settings by dotted name: replace(cfg, **{"model.n_heads": 6}).

    Raises: UserError for a name that does not exist, with the nearest one that does.
    """
    values = cfg.to_dict()
    given = {name.removeprefix("model."): x for name, x in dotted.items() if name.startswith("model.")}
    for name, value in (dotted | {f"model.{n}": x for n, x in following(cfg.model, given).items()}).items():
        *path, last = name.split(".")
        here = values
        for part in path:
            here = here.get(part) if isinstance(here, dict) else None
        if instead := instead_of(name):
            raise UserError(f"the setting {name} {instead}")
        if not isinstance(here, dict) or last not in here:
            raise UserError(f"no setting is called {name!r}; {nearest(name, list(flatten(values)))}")
        if dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)
        elif name == "mesh" and isinstance(value, str):
            value = MeshConfig.parse(value).sizes
        here[last] = value
    return _build(Config, values, "")


def following(before: ModelConfig, given: dict[str, int]) -> dict[str, int]:
    """The settings that follow others which are `given`: as many key/value heads as heads, heads as wide as the stream.

    A setting that is given itself, or was something else before, stays.
    Raises: UserError if d_model does not split into the heads.
    """
    shape = {"n_heads": before.n_heads, "d_model": before.d_model} | given
    n_heads, d_model = shape["n_heads"], shape["d_model"]
    if not {"n_heads", "d_model"} & set(given) or n_heads < 1:
        return {}
    found = {"n_kv_heads": n_heads} if before.n_kv_heads == before.n_heads else {}
    if before.d_head * before.n_heads == before.d_model and "d_head" not in given:
        if d_model % n_heads:
            near = sorted((n for n in range(1, d_model + 1) if d_model % n == 0), key=lambda n: abs(n - n_heads))[:2]
            nearest_two = " or ".join(map(str, sorted(near)))
            raise UserError(
                f"model.n_heads={n_heads}: d_model={d_model} does not split into as many heads "
                f"({d_model} % {n_heads} = {d_model % n_heads}); nearest that do: {nearest_two}; "
                "or say how wide a head is: model.d_head"
            )
        found["d_head"] = d_model // n_heads
    return {name: value for name, value in found.items() if name not in given}


def differences(ours: dict, theirs: dict) -> list[tuple[str, Any, Any]]:
    """Every setting whose value differs, with both values. One that is not there has its default: it is younger."""
    default = flatten(Config().to_dict())
    ours, theirs = default | flatten(moved(ours)), default | flatten(moved(theirs))
    pairs = ((name, ours.get(name), theirs.get(name)) for name in ours | theirs)
    return [(name, x, y) for name, x, y in pairs if x != y]


def first_difference(ours: dict, theirs: dict) -> str | None:
    """Name the first setting whose value differs, with both values; None if all are equal."""
    for name, x, y in differences(ours, theirs):
        instead = instead_of(name)
        return f"{name}={y!r} there {instead}" if instead else f"{name} is {x!r} here and {y!r} there"
