"""The settings of a run. Each is one dataclass field with a name, a type, a default and a description.

Each class checks its own fields. The type of a setting also declares what it affects; see `affecting`.
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
    Baseline,
    Betas,
    Count,
    NotNegative,
    Positive,
    Share,
    ShareBelow1,
    Size,
    SizeOrAuto,
    check,
    hints,
    is_remote,
    metadata_of,
    parse_mixture,
    parse_skips,
)
from config.migrations import flatten, migrate, replacement
from errors import UserError, suggest

AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")  # outermost (slowest link) first
SHORT_AXES = {"dp": "data", "pp": "stage", "ep": "expert", "cp": "context", "tp": "tensor"}


@dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each mesh axis; their product is the number of devices."""

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
        """Parse `fsdp=2,tensor=4`. The short forms dp, pp, ep, cp, tp are accepted; missing axes have size 1.

        Raises: UserError naming the part that cannot be parsed.
        """
        sizes = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, size = part.partition("=")
            axis = SHORT_AXES.get(name, name)
            if axis not in AXES:
                raise UserError(f"mesh {text!r}: no axis is called {name!r}; {suggest(name, AXES)}")
            if not (equals and size.isdecimal() and int(size) > 0):
                raise UserError(f"mesh {text!r}: {part!r} should be AXIS=SIZE, SIZE at least 1, such as {axis}=2")
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
        """Number of device groups that hold different sequences."""
        return self.data * self.fsdp * self.expert

    @property
    def position_shards(self) -> int:
        """Number of devices that hold different positions of the same sequences between blocks."""
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


BARE = tyro.conf.arg(help="")  # a flag group without a description, so that --help fits two screens


@dataclass(frozen=True)
class WorkConfig:
    """Execution settings. They change results only by rounding, so a run may resume with other values.

    The planner chooses each `auto` from mesh, chip and memory. Start-up prints the chosen values and the reasons.
    """

    # activations saved for the backward pass, which recomputes the rest. none: all are saved (no remat); dots: outputs
    # of matmuls; branches: inputs of attention and feed-forward; full: the input of each layer
    remat: Annotated[Literal["auto", "none", "dots", "branches", "full"], Baseline("none", "full")] = AUTO
    # all-gather weights for each use of a layer, or once per step and keep them
    gather: Annotated[Literal["auto", "layer", "step"], Baseline("layer", "layer")] = AUTO
    # exchange of positions over tensor. gather: one all-gather; ring: chunks in flight overlap with matmuls
    tensor_exchange: Annotated[Literal["auto", "gather", "ring"], Baseline("gather", "ring")] = AUTO
    # over context. gather: all-gather keys; ring: ring attention; all_to_all: split heads instead (auto never picks it)
    context_attention: Annotated[Literal["auto", "gather", "ring", "all_to_all"], Baseline("gather", "gather")] = AUTO
    # compute the loss in slices: a device never holds more logits than this many tokens have
    loss_chunk: Annotated[SizeOrAuto, Baseline(512)] = AUTO
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb"] = AUTO  # see `python -m pipeline`
    chunks: SizeOrAuto = AUTO  # interleaved: chunks of layers on each stage
    microbatches: SizeOrAuto = AUTO  # pipeline microbatches per forward and backward pass
    device_batch: SizeOrAuto = AUTO  # maximum sequences per device and pass; larger batches accumulate gradients

    def __post_init__(self):
        check(self, "work.")
        if self.chunks not in (AUTO, 1) and self.schedule not in (AUTO, "interleaved"):
            raise UserError(f"work.chunks={self.chunks}: only work.schedule='interleaved' has chunks; use it, or 1")

    @classmethod
    def baselines(cls, which: Literal["plain", "least"]) -> dict[str, str | int]:
        """Return the plainest (or least-memory) value of each setting that declares one."""
        found = {name: metadata_of(hint, Baseline) for name, hint in hints(cls).items()}
        return {name: getattr(way, which) for name, way in found.items() if way and getattr(way, which) is not None}

    @property
    def auto_settings(self) -> list[str]:
        """Names of the settings that are still `auto`."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) == AUTO]

    @property
    def resolved(self) -> "WorkConfig":
        """Replace each `auto` with the plainest value, the baseline for comparisons.

        microbatches and device_batch stay `auto`: `pipeline/fit.py` derives them from the batch and the mesh.
        """
        schedule = "gpipe" if self.chunks in (AUTO, 1) else "interleaved"
        chunks = 2 if self.schedule == "interleaved" else 1
        plain = self.baselines("plain") | {"schedule": schedule, "chunks": chunks}
        chosen = {name: value for name, value in plain.items() if name in self.auto_settings}
        return dataclasses.replace(self, **chosen)

    def __str__(self) -> str:
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return " ".join(f"{name}={value}" for name, value in values if value != AUTO) or "all auto"


@dataclass(frozen=True)
class ModelConfig:
    """The transformer: a decoder in the DeepSeek-V3 family (arXiv:2412.19437). Every part is configurable."""

    vocab_size: Size = 272  # rows of the embedding table, at least the tokenizer's vocabulary
    d_model: Size = 128  # width of the residual stream
    n_layers: Size = 4  # attention + feed-forward pairs
    n_heads: Size = 4  # query heads
    attention: Literal["mla", "gqa"] = "mla"  # latent (arXiv:2405.04434) or grouped-query (arXiv:2305.13245)
    n_kv_heads: Size = 4  # gqa: key/value heads; divides n_heads, and follows n_heads if the preset has them equal
    d_head: Size = 32  # width of a head's query and key (mla: without rotary); follows d_model / n_heads if equal
    d_rope: Count = 16  # mla: width of the rotary part, one key shared by all heads
    d_value: Size = 32  # mla: width of a head's value
    d_query_latent: Count = 0  # mla: width of the query latent; 0: project queries directly from the residual stream
    d_kv_latent: Size = 64  # mla: width of the key/value latent
    rope_dims: Count = 0  # gqa: rotate only the first coordinates of a head, such as 64 of 256 in GPT-J; 0: all
    rope_theta: Positive = 10_000.0  # longest rotary wavelength / 2 pi, in positions
    no_rope_every: Annotated[Count, Affects.OWN] = 0  # every n-th layer has no rotary embedding; 0: all layers have it
    d_ff: Size = 512  # hidden width of a dense feed-forward
    activation: Literal["swiglu", "gelu"] = "swiglu"  # nonlinearity of dense, shared and routed feed-forwards
    parallel_residual: bool = False  # attention and feed-forward share input and are added together; gqa, dense only
    bias: bool = False  # biases in dense and shared feed-forwards and the logits; attention and experts have none
    n_experts: Count = 0  # routed experts of an MoE layer; 0: every layer is dense
    top_k: Size = 2  # routed experts per token
    n_shared: Count = 0  # shared experts, which process every token
    d_expert: Size = 128  # hidden width of one expert
    moe_every: Size = 1  # after the prefix, every n-th layer is MoE, and the n - 1 before it are dense
    dense_prefix: Count = 0  # dense layers before the first repeating block
    router: Literal["sigmoid", "softmax"] = "sigmoid"  # score function before the top-k
    normalize_gates: bool = True  # divide a token's gates by their sum; ignored with top_k=1, where it would give 1
    routed_scaling: Positive = 1.0  # factor on the gates
    # weight of the balance loss over the global batch (arXiv:2101.03961); 0: off
    balance_loss: Annotated[NotNegative, Affects.TRAINING] = 0.0
    # change of the router's selection bias per training step (arXiv:2408.15664); 0: no bias
    balance_rate: Annotated[NotNegative, Affects.TRAINING] = 0.0
    # weight of the z-loss, the mean of log(sum(exp(logits)))^2 (arXiv:2204.02311); 0: off
    z_loss: Annotated[NotNegative, Affects.TRAINING] = 0.0
    # fraction of the target's probability that is spread over the vocabulary (arXiv:1512.00567); 0: off
    label_smoothing: Annotated[ShareBelow1, Affects.TRAINING] = 0.0
    # slots of an expert per sequence, relative to the mean top_k * T / n_experts; 0: dropless
    capacity_factor: Annotated[NotNegative, Affects.TRAINING] = 0.0
    tie_embeddings: bool = False  # one table for embedding and unembedding
    # fraction of activations zeroed after the embedding and every residual branch
    dropout: Annotated[ShareBelow1, Affects.TRAINING] = 0.0
    norm: Literal["rms", "layer"] = "rms"  # RMSNorm (arXiv:1910.07467), or LayerNorm with bias (arXiv:1607.06450)
    norm_eps: NotNegative = 1e-6  # added to the mean square, or the variance, in norms
    # mixed: float32 parameters and optimizer moments, bfloat16 activations and matmul inputs; float32, bfloat16: one
    # dtype for all of these. Sums, softmax, norms, router and loss always use float32
    precision: Annotated[Literal["float32", "mixed", "bfloat16"], Affects.NUMBERS] = "mixed"
    work = WorkConfig().resolved  # not a field; see `ModelAtWork`

    def __post_init__(self):
        check(self, "model.")
        if self.attention == "gqa" and self.n_heads % self.n_kv_heads:
            self._refuse("n_heads", f"must be a multiple of n_kv_heads ({self.n_heads} % {self.n_kv_heads} = "
                         f"{self.n_heads % self.n_kv_heads})")  # fmt: skip
        rotary, name = (self.d_rope, "d_rope") if self.attention == "mla" else (self.d_head, "d_head")
        if rotary % 2:
            self._refuse(name, "must be even, because rotary embeddings rotate pairs of coordinates")
        if self.attention == "gqa" and (self.rope_dims % 2 or self.rope_dims > self.d_head):
            self._refuse("rope_dims", f"must be even, and at most d_head={self.d_head}")
        if self.parallel_residual and (self.attention != "gqa" or self.n_experts):
            has = f"attention={self.attention!r}" if self.attention != "gqa" else f"n_experts={self.n_experts}"
            self._refuse("parallel_residual", f"needs attention='gqa' and n_experts=0, but {has}")
        if self.n_experts and not 1 <= self.top_k <= self.n_experts:
            self._refuse("top_k", f"must be between 1 and n_experts={self.n_experts}")
        repeating = self.n_layers - self.dense_prefix
        if repeating < 1 or repeating % self.layers_per_block:
            below = max(repeating, 0) // self.layers_per_block
            fit = [self.dense_prefix + blocks * self.layers_per_block for blocks in (below, below + 1) if blocks]
            raise UserError(
                f"model.n_layers={self.n_layers}: after dense_prefix={self.dense_prefix} layers there must be one or "
                f"more whole blocks of {self.layers_per_block} layers; use {' or '.join(map(str, fit))} layers"
            )

    def _refuse(self, name: str, why: str):
        raise UserError(f"model.{name}={getattr(self, name)}: {why}")

    @property
    def param_dtype(self) -> str:
        """The dtype of stored parameters and optimizer moments."""
        return "bfloat16" if self.precision == "bfloat16" else "float32"

    @property
    def compute_dtype(self) -> str:
        """The dtype of activations and of matmul inputs."""
        return "float32" if self.precision == "float32" else "bfloat16"

    @property
    def layers_per_block(self) -> int:
        """Layers in a repeating block: moe_every - 1 dense layers and one MoE layer, or one dense layer."""
        return self.moe_every if self.n_experts else 1

    @property
    def n_blocks(self) -> int:
        return (self.n_layers - self.dense_prefix) // self.layers_per_block


@dataclass(frozen=True)
class ModelAtWork(ModelConfig):
    """A model with its execution settings, as the functions of `model.py` take it. Only `overlap/` reads `work`."""

    work: WorkConfig = ModelConfig.work


@dataclass(frozen=True)
class DataConfig:
    """The tokens, and how they form global batches."""

    # directory of token shards, written by `python -m data.prepare`, on disk or in a bucket: gs://BUCKET/DIR
    path: Annotated[str, Affects.RUN] = "tokens/stdlib-bytes"
    # fractions of sequences from each directory in data.path, exact over any 1,000 sequences: code=0.7,prose=0.3; with
    # other fractions from step 5000 on: code=0.7,prose=0.3@5000:code=0.5,prose=0.5
    mixture: Annotated[str, Affects.ORDER] = ""
    seq_len: Annotated[Size, Affects.FUNCTION] = 256  # T, positions in one sequence
    batch_size: Size = 8  # B, sequences per step, over all devices
    shuffle: bool = True  # use a new order in each epoch; False: every epoch in the order of the text
    # 1200:1210,..: skip 10 batches at step 1200: from then on, a step uses the batch of 10 steps later
    skip: Annotated[str, Affects.ORDER] = ""
    # content of a row. windows: data.seq_len consecutive tokens, across document ends; documents: whole documents,
    # packed by best fit (arXiv:2404.10830), and padding; only documents longer than a row are cut
    packing: Literal["windows", "documents"] = "windows"
    mask_documents: bool = True  # restrict attention to a document, and restart positions at each document

    def __post_init__(self):
        check(self, "data.")
        parse_skips(self.skip), parse_mixture(self.mixture)  # raise if they cannot be parsed
        if self.packing == "documents" and not self.shuffle:
            raise UserError("data.packing='documents' cannot keep the order of the text (data.shuffle=False), because "
                            "it packs documents by length; leave out one of them")  # fmt: skip

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: NotNegative = 3e-3  # peak learning rate of AdamW (arXiv:1711.05101)
    schedule: Literal["cosine", "wsd"] = "cosine"  # after warm-up: cosine decay; or wsd: constant, then linear decay
    warmup_steps: Count = 20  # steps of linear warm-up from 0 to lr
    decay_fraction: Share = 0.2  # wsd: fraction of all steps spent decaying
    final_lr: NotNegative = 0.1  # final learning rate, as a fraction of lr
    betas: Betas = (0.9, 0.95)  # decay rates of the first and second moments, per step
    eps: Positive = 1e-8  # added to the square root of the second moment
    weight_decay: NotNegative = 0.1  # per step, times the learning rate; none on norms, biases and embeddings
    clip_norm: NotNegative = 1.0  # clip the gradient to this global norm; 0: no clipping

    def __post_init__(self):
        check(self, "optim.")


@dataclass(frozen=True)
class RunConfig:
    """One training run: its length, its directory, and when it logs, evaluates and saves."""

    name: str = "laptop"  # name of the run; its files are in DIR/NAME
    dir: str = "runs"  # parent directory of all runs, on disk or in a bucket: gs://BUCKET/DIR
    steps: Size = 320  # optimizer steps; start-up prints how many steps an epoch has
    seed: Annotated[Count, Affects.TRAINING] = 0  # seed of initial parameters, dropout and the order of sequences
    # initialize from the parameters of this run directory (trained or converted), at step 0; empty: random parameters
    init_from: Annotated[str, Affects.TRAINING, tyro.conf.arg(aliases=["--init_from"])] = ""
    log_every: Size = 10  # steps between rows of metrics.jsonl
    eval_every: Count = 100  # steps between evaluations; 0: only at the end
    eval_batches: Count = 4  # batches per evaluation during the run; 0, and always at the end: the whole split
    checkpoint_every: Size = 100  # steps between checkpoints; the last step is saved too
    keep_checkpoints: Size = 2  # number of newest checkpoints to keep, besides the one with the lowest validation loss
    sample_prompt: str = "def "  # prompt of the sample at the end, which has up to 200 tokens; empty: no sample
    # steps between rows of norms per parameter and layer, and of the gradient noise scale (arXiv:1812.06162); such a
    # step takes about three times as long; 0: off
    gradient_stats_every: Count = 0
    tracker: Literal["none", "wandb"] = "none"  # where to send the rows of metrics.jsonl; wandb: `make extra-wandb`
    # do not train: repeat this step of metrics.jsonl from the checkpoint before it and print its norms; 0: train
    replay: Annotated[Count, Affects.START, tyro.conf.arg(aliases=["--replay"])] = 0
    # yes: train if the plan predicts that it fits in memory; no: train even if not; only: do not train or use a
    # device, but check settings, tokens, mesh and the run directory
    check: Annotated[Literal["yes", "no", "only"], Affects.START] = "yes"
    # number of CPU devices to simulate, for a mesh larger than the machine; 0: use the devices of this machine
    devices: Annotated[Count, tyro.conf.arg(aliases=["--devices"])] = 0
    # XLA options NAME=VALUE,.. added to those in xla/options.py; NAME= removes one
    compiler_options: str = ""
    # several processes: seconds without a heartbeat from one after which the others exit. They may take 5 times as long
    # to join at start-up, and 30 times as long for a step or an evaluation batch, before the run exits as hung
    peer_timeout_s: Size = 60
    # no: resume, but stop if the newest saved checkpoint is missing; newest: resume from the newest available one, or
    # from step 0; scratch: delete this run's results and start at step 0
    restart: Annotated[Literal["no", "newest", "scratch"], Affects.START] = "no"

    def __post_init__(self):
        check(self, "run.")
        if not re.fullmatch(r"[A-Za-z0-9._-]*[A-Za-z0-9_-]", self.name):
            raise UserError(f"run.name={self.name!r}: use letters, digits, '.', '_' and '-'")
        if is_remote(self.dir) and not re.match(r"gs://[^/]", self.dir):
            raise UserError(f"run.dir={self.dir!r}: use a directory on disk or gs://BUCKET/DIR, because Orbax writes "
                            "checkpoints to no other address; only tokens may be elsewhere (--data.path)")  # fmt: skip

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
        """The model with its execution settings resolved, as the functions of `model.py` take it."""
        return _at_work(self.model, self.work)

    def to_dict(self) -> dict:
        """Convert to nested dicts for JSON, with lists instead of tuples."""
        as_json = lambda pairs: {name: [*x] if isinstance(x, tuple) else x for name, x in pairs}
        return dataclasses.asdict(self, dict_factory=as_json)

    @classmethod
    def from_dict(cls, values: dict) -> "Config":
        """Rebuild a Config from `to_dict`, also of an older version. Raises: UserError for an unknown field."""
        return _build(cls, migrate(values), "")


def affecting(*kinds: Affects, group: str = "") -> dict[str, Any]:
    """Return {dotted name: default} of the settings that affect one of `kinds`; with a group, plain names in it."""
    found = {}
    for part, hint in hints(Config).items():
        for f in dataclasses.fields(cls := get_args(hint)[0]):
            kind = metadata_of(hints(cls)[f.name], Affects) or metadata_of(hint, Affects)
            if kind in kinds and group in ("", part):
                found[f.name if group else f"{part}.{f.name}"] = f.default
    return found


@functools.cache
def _at_work(c: ModelConfig, work: WorkConfig) -> ModelAtWork:
    return ModelAtWork(**vars(c), work=work.resolved)


def _build(cls, values: dict, prefix: str):
    if not isinstance(values, dict):
        raise UserError(f"{prefix.rstrip('.') or 'it'} should be an object of settings, but is {values!r:.60}")
    types = {f.name: f for f in dataclasses.fields(cls)}
    parts = {}
    for name, value in values.items():
        if name not in types:
            instead = replacement(f"{prefix}{name}")
            raise UserError(
                f"{prefix}{name}={value!r} {instead}" if instead
                else f"no setting is called {prefix}{name}; {suggest(name, types)}")  # fmt: skip
        factory = types[name].default_factory
        nested = factory is not dataclasses.MISSING and dataclasses.is_dataclass(factory)
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        parts[name] = _build(factory, value, f"{prefix}{name}.") if nested else value
    return cls(**parts)


def replace(cfg: Config, **dotted: Any) -> Config:
    """Return a Config with some settings changed by dotted name: replace(cfg, **{"model.n_heads": 6}).

    Raises: UserError for an unknown name, with the nearest known one.
    """
    values = cfg.to_dict()
    given = {name.removeprefix("model."): x for name, x in dotted.items() if name.startswith("model.")}
    for name, value in (dotted | {f"model.{n}": x for n, x in derived_settings(cfg.model, given).items()}).items():
        *path, last = name.split(".")
        here = values
        for part in path:
            here = here.get(part) if isinstance(here, dict) else None
        if instead := replacement(name):
            raise UserError(f"the setting {name} {instead}")
        if not isinstance(here, dict) or last not in here:
            raise UserError(f"no setting is called {name!r}; {suggest(name, list(flatten(values)))}")
        if dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)
        elif name == "mesh" and isinstance(value, str):
            value = MeshConfig.parse(value).sizes
        here[last] = value
    return _build(Config, values, "")


def derived_settings(before: ModelConfig, given: dict[str, int]) -> dict[str, int]:
    """Return n_kv_heads and d_head for `given` new values of n_heads or d_model.

    n_kv_heads follows n_heads, and d_head follows d_model / n_heads, if they were equal before and are not given.
    Raises: UserError if n_heads does not divide d_model.
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
                f"model.n_heads={n_heads} does not divide d_model={d_model} "
                f"({d_model} % {n_heads} = {d_model % n_heads}); use {nearest_two} heads, or set model.d_head"
            )
        found["d_head"] = d_model // n_heads
    return {name: value for name, value in found.items() if name not in given}


def differences(ours: dict, theirs: dict) -> list[tuple[str, Any, Any]]:
    """List (name, ours, theirs) for settings that differ. A missing, newer setting counts as its default."""
    default = flatten(Config().to_dict())
    ours, theirs = default | flatten(migrate(ours)), default | flatten(migrate(theirs))
    pairs = ((name, ours.get(name), theirs.get(name)) for name in ours | theirs)
    return [(name, x, y) for name, x, y in pairs if x != y]


def first_difference(ours: dict, theirs: dict) -> str | None:
    """Describe the first setting that differs, with both values; None if all are equal."""
    for name, x, y in differences(ours, theirs):
        instead = replacement(name)
        return f"{name}={y!r} there {instead}" if instead else f"{name} is {x!r} here and {y!r} there"
