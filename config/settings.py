"""The settings of a run. Each is one dataclass field with a name, a type, a default and a description.

Each class checks its own fields. The type of a setting also declares what it affects (see `affecting`), and which other
settings it needs to have an effect (see `needs.py`).
"""

import dataclasses
import functools
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args

import tyro

from config.fields import (
    AUTO,
    Affects,
    Baseline,
    Count,
    Form,
    NotNegative,
    Positive,
    ShareBelow1,
    Size,
    SizeOrAuto,
    check,
    flatten,
    hints,
    is_remote,
    metadata_of,
    parse_adamw,
    parse_bias,
    parse_mixture,
    parse_muon,
    parse_objectives,
    parse_outer,
    parse_packing,
    parse_pipeline,
    parse_remat,
    parse_rope_scaling,
    parse_schedule,
    parse_skips,
    parse_softmax,
    parse_window,
)
from config.mesh import MeshConfig, MeshFlag
from config.needs import (
    ADAMW,
    BIASED,
    CONTEXT,
    DENSE_LAYERS,
    DROPLESS,
    EXPERT,
    EXPERTS,
    GQA,
    INPUTS,
    LONGER,
    MASKED,
    MLA,
    MUON,
    NO_CAPACITY,
    NO_WINDOW,
    REPLICAS,
    ROPE,
    SEVERAL_EXPERTS,
    SINKS,
    STAGES,
    TENSOR,
    TEXTS,
    WARMUP,
    refuse_unused,
)
from utils import UserError, suggest

BARE = tyro.conf.arg(help="")  # no description for a group of flags, so that --help fits on two screens


@dataclass(frozen=True)
class WorkConfig:
    """Execution settings. They change results only by rounding, so a run may resume with other values.

    For each `auto`, the planner chooses a value that suits the mesh, the chip and its memory. Start-up prints these
    values with the reasons.
    """

    # activation checkpointing: what to save for the backward pass, which recomputes the rest. none: all; dots: outputs
    # of matmuls; branches: inputs of attention and feed-forward; full: inputs of layers; or a list: queries,keys@host
    remat: Annotated[str, Form(parse_remat), Baseline("none", "full")] = AUTO
    # layer: all-gather the sharded weights of a layer for each use; step: all-gather all weights once per step
    gather: Annotated[Literal["auto", "layer", "step"], Baseline("layer", "layer")] = AUTO
    # how devices along tensor exchange activations. gather: one collective; ring: in chunks, overlapped with matmuls
    tensor_exchange: Annotated[Literal["auto", "gather", "ring"], Baseline("gather", "ring"), TENSOR] = AUTO
    # how attention combines the shards of a sequence along context. gather: all-gather keys; ring: ring attention;
    # all_to_all: shard heads instead (auto never chooses it)
    context_attention: Annotated[
        Literal["auto", "gather", "ring", "all_to_all"], Baseline("gather", "gather"), CONTEXT
    ] = AUTO
    # which positions of a sequence each device along context gets. positions: an early and a late chunk of it;
    # documents: an early and a late part of each packed document
    context_layout: Annotated[
        Literal["auto", "positions", "documents"],
        Baseline("positions", "positions"),
        *(CONTEXT, MASKED, NO_CAPACITY, NO_WINDOW),
    ] = AUTO
    # how tokens reach dropless experts along expert. gathered: all-gather all tokens; routed: send a token only to
    # devices with its experts
    expert_exchange: Annotated[
        Literal["auto", "gathered", "routed"], Baseline("gathered", "routed"), *DROPLESS, EXPERT
    ] = AUTO
    # how devices that shard a matrix compute Muon's update. gather: each all-gathers every matrix; owner: each receives
    # some, and returns their updates
    muon_layout: Annotated[Literal["auto", "gather", "owner"], Baseline("gather", "owner"), MUON] = AUTO
    # compute the loss in chunks: a device never stores more logits than this number of tokens has
    loss_chunk: Annotated[SizeOrAuto, Baseline(512)] = AUTO
    # pipeline schedule: gpipe, 1f1b, zb, or interleaved:CHUNKS of layers (virtual stages) on each stage, 2 if you leave
    # out the number; see `python -m pipeline`
    schedule: Annotated[str, Form(parse_pipeline), Baseline("gpipe"), STAGES] = AUTO
    microbatches: SizeOrAuto = AUTO  # pipeline microbatches per forward and backward pass
    # maximum sequences per device in one forward and backward pass; a larger batch uses gradient accumulation
    device_batch: SizeOrAuto = AUTO

    def __post_init__(self):
        check(self, "work.")

    @classmethod
    @functools.cache
    def baselines(cls, which: Literal["plain", "least"]) -> dict[str, str | int]:
        """Return the `plain` or `least` value of each setting that declares a `Baseline`."""
        found = {name: metadata_of(hint, Baseline) for name, hint in hints(cls).items()}
        return {name: getattr(way, which) for name, way in found.items() if way and getattr(way, which) is not None}

    @property
    def auto_settings(self) -> list[str]:
        """Names of the settings that are still `auto`."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) == AUTO]

    @property
    def resolved(self) -> "WorkConfig":
        """Replace each `auto` with the `plain` value, the baseline for comparisons.

        microbatches and device_batch stay `auto`: `pipeline/fit.py` derives them from the batch and the mesh.
        """
        chosen = {name: value for name, value in self.baselines("plain").items() if name in self.auto_settings}
        return dataclasses.replace(self, **chosen)

    def __str__(self) -> str:
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return " ".join(f"{name}={value}" for name, value in values if value != AUTO) or "all auto"


@dataclass(frozen=True)
class ModelConfig:
    """The transformer: a decoder like DeepSeek-V3 (arXiv:2412.19437). Every part is configurable."""

    vocab_size: Size = 272  # rows of the embedding table: at least the size of the tokenizer's vocabulary
    d_model: Size = 128  # width of the residual stream
    n_layers: Size = 4  # layers; each has attention and a feed-forward layer (dense or MoE)
    encoder_layers: Count = 0  # layers of the encoder (T5, arXiv:1910.10683); n_layers is the decoder's; 0: no encoder
    # bidirectional attention over the inputs; see data.objective
    prefix_lm: Annotated[bool, Affects.OWN, INPUTS] = False
    n_heads: Size = 4  # query heads
    attention: Literal["mla", "gqa"] = "mla"  # multi-head latent (arXiv:2405.04434), grouped-query (arXiv:2305.13245)
    # gqa: key/value heads; must divide n_heads. If equal to n_heads in the preset, changing n_heads changes this too
    n_kv_heads: Annotated[Size, GQA] = 4
    # width of a head's query and key (mla: without the rotary part). If equal to d_model / n_heads in the preset,
    # changing either of these changes this too
    d_head: Size = 32
    d_rope: Annotated[Count, MLA] = 16  # mla: width of the rotary part, one key shared by all heads
    d_value: Annotated[Size, MLA] = 32  # mla: width of a head's value
    # mla: width of the query latent; 0: compute queries directly from the residual stream
    d_query_latent: Annotated[Count, MLA] = 0
    d_kv_latent: Annotated[Size, MLA] = 64  # mla: width of the key/value latent
    # gqa: rotate only the first coordinates of a head, such as 64 of 256 in GPT-J; 0: all
    rope_dims: Annotated[Count, GQA, *ROPE] = 0
    rope_theta: Annotated[Positive, *ROPE] = 10_000.0  # RoPE base (theta)
    # scale RoPE: linear:FACTOR; llama3:FACTOR:LOW:HIGH:POSITIONS, as in llama3:8:1:4:8192; yarn, or without rounding
    # yarn_exact, :FACTOR:BETA_SLOW:BETA_FAST:POSITIONS, then optionally :MSCALE:MSCALE_ALL (arXiv:2309.00071)
    rope_scaling: Annotated[str, Form(parse_rope_scaling), *ROPE] = ""
    qk_norm: Annotated[bool, GQA] = False  # gqa: apply RMSNorm to each head's query and key before RoPE, as in Qwen3
    no_rope_every: Annotated[Count, Affects.OWN, ROPE[0]] = 0  # n: no RoPE in every n-th layer; 0: RoPE in all layers
    # sliding window: 1024; 1024:6: in all layers but every 6th; 1024:6:10000: with RoPE base 10,000
    window: Annotated[str, Form(parse_window), LONGER] = ""
    # sinks: attention sinks (gpt-oss); cap:50:30: soft caps of scores, 50, and logits, 30 (Gemma 2)
    softmax: Annotated[str, Form(parse_softmax), SINKS] = ""
    d_ff: Annotated[Size, DENSE_LAYERS] = 512  # hidden dimension of a dense feed-forward layer
    # nonlinearity of feed-forward layers and of experts; swiglu_clamped is gpt-oss's
    activation: Literal["swiglu", "gelu", "geglu", "swiglu_clamped"] = "swiglu"
    parallel_residual: bool = False  # attention and feed-forward layer have the same input; needs gqa and no experts
    # parts with biases: feed_forward (also shared experts), logits, attention, experts (and router)
    bias: Annotated[str, Form(parse_bias), *BIASED] = ""
    n_experts: Count = 0  # routed experts of an MoE layer; 0: every layer is dense
    top_k: Annotated[Size, EXPERTS] = 2  # routed experts per token
    n_shared: Annotated[Count, EXPERTS] = 0  # shared experts, which process every token
    d_expert: Annotated[Size, EXPERTS] = 128  # hidden dimension of one expert
    # n: blocks of n - 1 dense layers and one MoE layer repeat, after the first dense_prefix layers
    moe_every: Annotated[Size, EXPERTS] = 1
    dense_prefix: Count = 0  # number of dense layers before the repeated blocks of moe_every layers
    router: Annotated[Literal["sigmoid", "softmax"], EXPERTS] = "sigmoid"  # score function before the top-k
    # number of groups of routed experts, and in how many of them, the best, a token may use experts
    expert_groups: Annotated[tuple[Size, Size], EXPERTS] = (1, 1)
    # divide the weights of a token's experts (gates) by their sum; ignored with top_k=1
    normalize_gates: Annotated[bool, *SEVERAL_EXPERTS] = True
    routed_scaling: Annotated[Positive, EXPERTS] = 1.0  # multiply the gates by this factor
    # weight of the load-balancing loss (arXiv:2101.03961) over the whole batch; 0: off
    balance_loss: Annotated[NotNegative, Affects.TRAINING, EXPERTS] = 0.0
    # step size of the load-balancing bias that is added to the router's scores (arXiv:2408.15664); 0: no bias
    balance_rate: Annotated[NotNegative, Affects.TRAINING, EXPERTS] = 0.0
    # weight of the z-loss, the mean of log(sum(exp(logits)))^2 (arXiv:2204.02311); 0: off
    z_loss: Annotated[NotNegative, Affects.TRAINING] = 0.0
    # fraction of the target's probability to spread over the vocabulary (arXiv:1512.00567); 0: off
    label_smoothing: Annotated[ShareBelow1, Affects.TRAINING] = 0.0
    # slots of an expert per sequence, as a multiple of the mean, top_k * data.seq_len / n_experts; 0: dropless
    capacity_factor: Annotated[NotNegative, Affects.TRAINING, EXPERTS] = 0.0
    tie_embeddings: bool = False  # use one table for the embedding and the unembedding (LM head)
    # fraction of activations to set to zero after the embedding and after every residual branch
    dropout: Annotated[ShareBelow1, Affects.TRAINING] = 0.0
    # RMSNorm; LayerNorm with bias; sandwich: RMSNorm before and after attention and feed-forward
    norm: Literal["rms", "layer", "sandwich"] = "rms"
    norm_eps: NotNegative = 1e-6  # epsilon of the norms, added to the mean square or the variance
    # mixed: float32 parameters and optimizer moments, bfloat16 activations and matmul inputs; float32 or bfloat16: this
    # dtype for all of these. Sums, softmax, norms, router and loss always use float32
    precision: Annotated[Literal["float32", "mixed", "bfloat16"], Affects.NUMBERS] = "mixed"
    work = WorkConfig().resolved  # not a field; see `ModelAtWork`

    def __post_init__(self):
        check(self, "model.")
        if self.attention == "gqa" and self.n_heads % self.n_kv_heads:
            self._refuse("n_heads", f"must be a multiple of n_kv_heads ({self.n_heads} % {self.n_kv_heads} = "
                         f"{self.n_heads % self.n_kv_heads})")  # fmt: skip
        rotary, name = (self.d_rope, "d_rope") if self.attention == "mla" else (self.d_head, "d_head")
        if rotary == 0:
            self._refuse(name, "latent attention needs a rotary part of 2 or more; for layers without rotary "
                         "embeddings, drop this setting and use model.no_rope_every=1")  # fmt: skip
        if rotary % 2:
            self._refuse(name, "must be even, because rotary embeddings rotate pairs of coordinates")
        if self.attention == "gqa" and (self.rope_dims % 2 or self.rope_dims > self.d_head):
            self._refuse("rope_dims", f"must be even, and at most d_head={self.d_head}")
        refuse_unused(SimpleNamespace(model=self), ["model.qk_norm"] * self.qk_norm)
        if self.parallel_residual and (self.attention != "gqa" or self.n_experts):
            has = f"attention={self.attention!r}" if self.attention != "gqa" else f"n_experts={self.n_experts}"
            self._refuse("parallel_residual", f"needs attention='gqa' and n_experts=0, but {has}")
        if self.parallel_residual and self.norm == "sandwich":
            self._refuse("parallel_residual", "needs norm='rms' or 'layer', but norm='sandwich'")
        if parse_window(self.window).theta and self.rope_scaling.startswith("yarn"):
            self._refuse("window", "YaRN scales the scores of all layers, so none may have another RoPE base; drop the "
                         "third number, or use model.rope_scaling=linear:FACTOR")  # fmt: skip
        if self.encoder_layers:
            needed = dict(attention="gqa", n_experts=0, dense_prefix=0, parallel_residual=False, norm="rms",
                          prefix_lm=False, rope_scaling="", qk_norm=False, window="", softmax="")  # fmt: skip
            for name, allowed in needed.items():
                if getattr(self, name) != allowed:
                    self._refuse(name, f"a model with an encoder needs {name}={allowed!r}")
            if "attention" in parse_bias(self.bias):
                self._refuse("bias", "attention in a model with an encoder has no biases; drop 'attention'")
        if self.prefix_lm and (name := "window" if self.window else "softmax" if self.softmax else ""):
            self._refuse(name, f"not available with prefix_lm, which has its own attention; drop prefix_lm or {name}")
        if self.n_experts and not 1 <= self.top_k <= self.n_experts:
            self._refuse("top_k", f"must be between 1 and n_experts={self.n_experts}")
        n_groups, per_token = self.expert_groups
        if self.n_experts and n_groups > 1:
            size = self.n_experts // n_groups
            if self.n_experts % n_groups or size < 2:
                self._refuse("expert_groups", f"must divide n_experts={self.n_experts} into groups of at least 2")
            if not self.top_k <= per_token * size <= self.n_experts:
                self._refuse("expert_groups", f"a token needs top_k={self.top_k} experts, in groups of {size}; use "
                             f"{n_groups} {-(-self.top_k // size)} to {n_groups} {n_groups}")  # fmt: skip
        repeating = self.n_layers - self.dense_prefix
        if repeating < 1 or repeating % self.layers_per_block:
            below = max(repeating, 0) // self.layers_per_block
            fit = [self.dense_prefix + blocks * self.layers_per_block for blocks in (below, below + 1) if blocks]
            raise UserError(
                f"model.n_layers={self.n_layers}: n_layers - dense_prefix = {repeating} must be a positive multiple of "
                f"{self.layers_per_block}, the length of the layer pattern; use {' or '.join(map(str, fit))} layers"
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
    def has_dense_layers(self) -> bool:
        """Whether some layer has a dense feed-forward layer."""
        return not self.n_experts or self.moe_every > 1 or self.dense_prefix > 0

    @property
    def n_blocks(self) -> int:
        return (self.n_layers - self.dense_prefix) // self.layers_per_block


@dataclass(frozen=True)
class ModelAtWork(ModelConfig):
    """A model with its execution settings, as functions in `model.py` expect it. Only `overlap/` reads `work`."""

    work: WorkConfig = ModelConfig.work


@dataclass(frozen=True)
class DataConfig:
    """The tokens, and how to form global batches from them."""

    # directory of token shards that `python -m data.prepare` wrote, on disk or in a bucket: gs://BUCKET/DIR
    path: Annotated[str, Affects.RUN] = "tokens/stdlib-bytes"
    # weights of the directories in data.path: fractions of the sequences, exact over any 1,000 sequences, such as
    # code=0.7,prose=0.3; to change the weights at step 5000: code=0.7,prose=0.3@5000:code=0.5,prose=0.5
    mixture: Annotated[str, Form(parse_mixture), Affects.ORDER] = ""
    seq_len: Annotated[Size, Affects.FUNCTION] = 256  # tokens per sequence
    input_len: Annotated[Count, Affects.FUNCTION] = 0  # inputs per sequence, if the model has an encoder
    # causal, prefix, span, span:RATE:LENGTH, task, or a mixture of these; see docs/objectives.md
    objective: Annotated[str, Form(parse_objectives)] = "causal"
    batch_size: Size = 8  # sequences per step, over all devices
    # batches to skip, START:END,..: with 1200:1210, step 1200 uses the batch of step 1210, step 1201 that of step 1211
    skip: Annotated[str, Form(parse_skips), Affects.ORDER] = ""
    # content of a sequence: windows of the text, or documents. windows: data.seq_len consecutive tokens, across
    # document boundaries; documents: whole documents, packed by best fit (arXiv:2404.10830), and padding; only a
    # document longer than data.seq_len is cut. windows,ordered keeps the order of the text instead of shuffling each
    # epoch. With ,unmasked at the end, a token also attends to earlier documents, and positions do not restart at each
    # document
    packing: Annotated[str, Form(parse_packing), TEXTS] = "windows"

    def __post_init__(self):
        check(self, "data.")
        packing, is_task = parse_packing(self.packing), "task" in parse_objectives(self.objective)
        if is_task and packing.ordered:
            raise UserError(f"data.objective={self.objective!r} packs documents by length, so it cannot keep the order "
                            "of the text; remove ,ordered from data.packing")  # fmt: skip
        if (packing.documents or is_task) and packing.unmasked and self.objective != "causal":
            raise UserError(f"data.objective={self.objective!r} packs several examples into a row, and none may attend "
                            "to another; remove ,unmasked from data.packing")  # fmt: skip

    @property
    def tokens_per_step(self) -> int:
        """Number of positions in a batch, of inputs and of targets."""
        return self.batch_size * (self.seq_len + self.input_len)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    # AdamW (arXiv:1711.05101); Adafactor (arXiv:1804.04235) as in T5; muon: Muon (arXiv:2502.16982) for the matrices of
    # layers without the router's, and AdamW for the other parameters, with the same learning rate and weight decay
    name: Literal["adamw", "adafactor", "muon"] = "adamw"
    lr: NotNegative = 3e-3  # peak learning rate; adafactor: as a fraction of each matrix's root mean square
    # learning rate after warm-up: STEP:MULTIPLE,.., cosine, wsd or rsqrt. cosine:0.1: cosine decay to a last rate of
    # 0.1 * lr; wsd:0.2:0.1: constant, then in the last 0.2 of all steps, linear decay to 0.1 * lr; rsqrt: 1 /
    # sqrt(step). Numbers that you leave out are those above. STEP:MULTIPLE,.. of lr: linear in between and without
    # warm-up, as in 0:0,1000:1,5000:0.1
    schedule: Annotated[str, Form(parse_schedule)] = "cosine"
    warmup_steps: Annotated[Count, WARMUP] = 20  # steps of linear warm-up from 0 to lr
    # adamw: decay rates of the first and second moments, per step, and epsilon, which is added to the second's root. A
    # part that you leave out has the default. moments=float32 or bfloat16 stores the moments in this dtype instead of
    # that of the parameters; a step computes with float32
    adamw: Annotated[str, Form(parse_adamw), ADAMW] = "b1=0.9,b2=0.95,eps=1e-8"
    # muon: decay rate of the momentum, steps of the Newton-Schulz iteration, and root mean square of an update before
    # the learning rate. A part that you leave out has the default
    muon: Annotated[str, Form(parse_muon), MUON] = "momentum=0.95,steps=5,rms=0.2"
    weight_decay: NotNegative = 0.1  # multiplied by the learning rate; not applied to norms, biases and embeddings
    clip_norm: NotNegative = 1.0  # clip the gradient to this global norm; 0: no clipping
    frozen: str = ""  # names of parameters not to train, with wildcards, such as encoder.*,embedding_VD
    # store 1/data of the parameters and moments on each replica (ZeRO stage 1, arXiv:1910.02054)
    shard_over_data: Annotated[bool, Affects.SPEED, REPLICAS] = False
    # local steps (DiLoCo, arXiv:2311.08105): every=100 lets each replica along data train alone for 100 steps, and then
    # average. every=100,lr=0.7,momentum=0.9,fragments=4 also sets the SGD that does it, with Nesterov momentum, and
    # exchanges 1/4 of the layers every 25 steps (arXiv:2501.18512); empty: off
    outer: Annotated[str, Form(parse_outer)] = ""

    def __post_init__(self):
        check(self, "optim.")


@dataclass(frozen=True)
class RunConfig:
    """One training run: its length, its directory, and when it logs, evaluates and saves."""

    name: str = "laptop"  # name of the run; its files are in DIR/NAME
    dir: str = "runs"  # parent directory of all runs, on disk or in a bucket: gs://BUCKET/DIR
    steps: Size = 320  # optimizer steps; start-up prints how many steps an epoch has
    seed: Annotated[Count, Affects.TRAINING] = 0  # seed of initial parameters, dropout and the order of sequences
    # run directory (trained or converted) whose parameters the run starts with, at step 0; empty: random parameters
    init_from: Annotated[str, Affects.TRAINING, tyro.conf.arg(aliases=["--init_from"])] = ""
    log_every: Size = 10  # steps between rows of metrics.jsonl
    eval_every: Count = 100  # steps between evaluations; 0: only at the end
    eval_batches: Count = 4  # batches per evaluation; 0: the whole validation split, as at the end of the run
    eval_tasks: str = ""  # tasks to evaluate too, comma-separated, on at most eval_batches * batch_size examples each
    checkpoint_every: Size = 100  # steps between checkpoints; the last step is saved too
    keep_checkpoints: Size = 2  # number of latest checkpoints to keep, besides the one with the lowest validation loss
    sample_prompt: str = "def "  # prompt of the sample at the end, which has up to 200 tokens; empty: no sample
    # steps between gradient statistics: norms for each parameter and layer, and the gradient noise scale
    # (arXiv:1812.06162); such a step takes about three times as long; 0: off
    gradient_stats_every: Count = 0
    tracker: Literal["none", "wandb"] = "none"  # where to send the metrics; wandb: `make extra-wandb`
    # repeat this step from the checkpoint before it, and print its norms instead of training; 0: train
    replay: Annotated[Count, Affects.START, tyro.conf.arg(aliases=["--replay"])] = 0
    profile: Annotated[str, Affects.START] = ""  # record steps FIRST:LAST with jax.profiler, for `plan.profile`
    # yes: train if the planner predicts that the run fits in memory; no: train anyway; only: check the settings,
    # tokens, mesh and run directory without training and without using a device
    check: Annotated[Literal["yes", "no", "only"], Affects.START] = "yes"
    # number of CPU devices to simulate, for a mesh larger than the machine; 0: the machine's devices
    devices: Annotated[Count, tyro.conf.arg(aliases=["--devices"])] = 0
    # XLA options, as NAME=VALUE,.., in addition to those in compile/options.py; NAME= removes an option
    compiler_options: str = ""
    # if a process sends no heartbeat for this many seconds, the others exit; the processes may take 5 times as long to
    # join at start-up, and 30 times as long for one step or evaluation batch, before the run exits as hung
    peer_timeout_s: Size = 60
    # no: resume, but stop if the latest saved checkpoint is missing; newest: resume from the latest available
    # checkpoint, or from step 0; scratch: delete this run's results and start at step 0
    restart: Annotated[Literal["no", "newest", "scratch"], Affects.START] = "no"

    def __post_init__(self):
        check(self, "run.")
        if not re.fullmatch(r"[A-Za-z0-9._-]*[A-Za-z0-9_-]", self.name):
            raise UserError(f"run.name={self.name!r}: use letters, digits, '.', '_' and '-'")
        if is_remote(self.dir) and not re.match(r"gs://[^/]", self.dir):
            raise UserError(f"run.dir={self.dir!r}: use a directory on disk or gs://BUCKET/DIR, because Orbax supports "
                            "no other URLs for checkpoints; only tokenized data may be at other URLs")  # fmt: skip
        _ = self.profiled_steps  # raises if it cannot be parsed

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step to record; None: no steps."""
        if not self.profile:
            return None
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", self.profile)
        first, last = map(int, match.groups()) if match else (1, 0)
        if not first <= last <= self.steps:
            raise UserError(f"run.profile={self.profile!r}: use FIRST:LAST, as in 20:23, with 1 <= FIRST <= LAST <= "
                            f"run.steps={self.steps}")  # fmt: skip
        return first, last

    @property
    def join_timeout_s(self) -> int:
        return 5 * self.peer_timeout_s

    @property
    def hang_timeout_s(self) -> int:
        return 30 * self.peer_timeout_s


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: Annotated[ModelConfig, BARE, Affects.FUNCTION] = field(default_factory=ModelConfig)
    mesh: Annotated[MeshFlag, Affects.SPEED] = field(default_factory=MeshConfig)  # devices along each mesh axis
    work: Annotated[WorkConfig, BARE, Affects.SPEED] = field(default_factory=WorkConfig)  # remat, schedule, ..
    data: Annotated[DataConfig, BARE, Affects.TRAINING] = field(default_factory=DataConfig)
    optim: Annotated[OptimConfig, BARE, Affects.TRAINING] = field(default_factory=OptimConfig)
    run: Annotated[RunConfig, BARE, Affects.RUN] = field(default_factory=RunConfig)

    def __post_init__(self):
        layers, positions = self.model.encoder_layers, self.data.input_len
        if bool(layers) != bool(positions):
            raise UserError(f"data.input_len={positions}, but model.encoder_layers={layers}: a model with an encoder "
                            "needs data.input_len of 1 or more, and a model without one needs 0")  # fmt: skip
        if layers and self.mesh.context > 1:
            raise UserError(f"mesh context={self.mesh.context}: a model with an encoder cannot split positions over "
                            "context; use another axis, such as fsdp or tensor")  # fmt: skip

    @functools.cached_property  # the planner asks for it a hundred times for each plan of a search
    def at_work(self) -> ModelAtWork:
        """The model with its resolved execution settings, as functions in `model.py` expect it."""
        return _at_work(self.model, self.work)

    def to_dict(self) -> dict:
        """Convert to nested dicts for JSON, with lists instead of tuples."""
        as_json = lambda pairs: {name: [*x] if isinstance(x, tuple) else x for name, x in pairs}
        return dataclasses.asdict(self, dict_factory=as_json)

    @classmethod
    def from_dict(cls, values: dict) -> "Config":
        """Rebuild a Config from what `to_dict` returned. Raises: UserError for an unknown field."""
        return _build(cls, values, "")


def affecting(*kinds: Affects, group: str = "") -> dict[str, Any]:
    """Return {dotted name: default} for the settings that affect one of `kinds`; with `group`, {name: default}."""
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


def as_written_now(name: str, value):
    """Return name and value of a setting from an older file: model.bias and model.sinks were true or false."""
    if name == "model.bias" and isinstance(value, bool):
        return name, "feed_forward,logits" if value else ""
    return ("model.softmax", "sinks" if value else "") if name == "model.sinks" else (name, value)


def _build(cls, values: dict, prefix: str):
    if not isinstance(values, dict):
        raise UserError(f"{prefix.rstrip('.') or 'the top level'} must be a JSON object, but is {values!r:.60}")
    types = {f.name: f for f in dataclasses.fields(cls)}
    parts = {}
    for name, value in values.items():
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        name, value = as_written_now(f"{prefix}{name}", value)
        name = name.removeprefix(prefix)
        if name not in types:
            raise UserError(f"unknown setting {prefix}{name}; {suggest(name, types, 'python main.py --help')}")
        factory = types[name].default_factory
        nested = factory is not dataclasses.MISSING and dataclasses.is_dataclass(factory)
        parts[name] = _build(factory, value, f"{prefix}{name}.") if nested else value
    return cls(**parts)


def replace(cfg: Config, **dotted: Any) -> Config:
    """Return a Config with some settings changed by dotted name: replace(cfg, **{"model.n_heads": 6}).

    Raises: UserError for an unknown name; it suggests the most similar one.
    """
    values = cfg.to_dict()
    given = {name.removeprefix("model."): x for name, x in dotted.items() if name.startswith("model.")}
    for name, value in (dotted | {f"model.{n}": x for n, x in derived_settings(cfg.model, given).items()}).items():
        *path, last = name.split(".")
        here = values
        for part in path:
            here = here.get(part) if isinstance(here, dict) else None
        if not isinstance(here, dict) or last not in here:
            raise UserError(
                f"unknown setting {name!r}; {suggest(name, list(flatten(values)), 'python main.py --help')}"
            )
        if dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)
        elif name == "mesh" and isinstance(value, str):
            value = dataclasses.asdict(MeshConfig.parse(value))
        here[last] = value
    return dataclasses.replace(cfg, **vars(_build(Config, values, "")))


def derived_settings(before: ModelConfig, given: dict[str, int]) -> dict[str, int]:
    """Return the values of n_kv_heads and d_head that follow from the `given` new values of n_heads or d_model.

    n_kv_heads stays equal to n_heads, and d_head to d_model / n_heads, if they were equal before and are not given.
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
    """List (name, ours, theirs) for settings that differ. A setting that is missing has its default."""
    default = flatten(Config().to_dict())
    written = (dict(as_written_now(*pair) for pair in flatten(one).items()) for one in (ours, theirs))
    ours, theirs = (default | one for one in written)
    pairs = ((name, ours.get(name), theirs.get(name)) for name in ours | theirs)
    return [(name, x, y) for name, x, y in pairs if x != y]


def first_difference(ours: dict, theirs: dict) -> str | None:
    """Describe the first setting that differs, with both values; return None if all are equal.

    A setting that only one side has comes last: another one is the reason why it is there.
    """
    in_both = {*flatten(ours)} & {*flatten(theirs)}
    for name, x, y in sorted(differences(ours, theirs), key=lambda one: one[0] not in in_both):
        return f"{name} is {x!r} here and {y!r} there"
