"""A GPT-2-sized trainer of model.py's model in torch: the baseline of `python -m bench.gpu`.

It needs only torch (2.10 or later) and NumPy, imports nothing from this project, and uses only torch's public API. It
uses the usual techniques: `torch.compile`, `F.scaled_dot_product_attention`, one matmul for queries, keys and values,
float32 weights cast to bfloat16 per matmul, and fused AdamW. Experts are dropless: rows sorted by expert go through
`F.grouped_mm`, which on a GPU is faster than a loop over the experts or a matmul padded to the largest group.

The model computes the same as model.py with the settings in `FIXED`: with the same weights, the losses are equal.
"""

import functools
import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# Settings of config/settings.py for which this trainer supports only one value.
FIXED = {
    "model.attention": "gqa", "model.activation": "gelu", "model.tie_embeddings": True, "model.no_rope_every": 0,
    "model.dropout": 0.0, "model.z_loss": 0.0, "model.label_smoothing": 0.0,
    "optim.warmup_steps": 0, "optim.schedule": "cosine:1", "optim.adamw": "b1=0.9,b2=0.95,eps=1e-8",
}  # fmt: skip
FIXED_EXPERTS = {
    "model.moe_every": 1, "model.dense_prefix": 0, "model.n_shared": 0, "model.top_k": 2, "model.router": "softmax",
    "model.normalize_gates": True, "model.routed_scaling": 1.0, "model.balance_rate": 0.0, "model.capacity_factor": 0.0,
}  # fmt: skip


def settings(cfg: dict) -> tuple[SimpleNamespace, SimpleNamespace]:
    """The settings of the model and of the optimizer, from `Config.to_dict()`.

    Raises: ValueError for a setting that this trainer does not support.
    """
    for name, value in (FIXED | (FIXED_EXPERTS if cfg["model"]["n_experts"] else {})).items():
        given = functools.reduce(dict.__getitem__, name.split("."), cfg)
        if given != value:
            raise ValueError(f"{name}={given!r}: the torch trainer supports only {value!r}; use that, or --ours_only")
    c = SimpleNamespace(**cfg["model"])
    if c.precision == "bfloat16":
        raise ValueError("model.precision='bfloat16': the torch trainer supports 'mixed' and 'float32'; use one, "
                         "or --ours_only")  # fmt: skip
    c.compute = torch.float32 if c.precision == "float32" else torch.bfloat16
    return c, SimpleNamespace(**cfg["optim"])


# The model ------------------------------------------------------------------------------------------------------------


def weight(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * std)


def matrix(c, n_in: int, n_out: int, residual=False) -> nn.Parameter:
    """A float32 matrix [out, in] for F.linear, initialized as in model.py; see `sharding.param`."""
    return weight(n_out, n_in, std=n_in**-0.5 / (2 * c.n_layers if residual else 1) ** 0.5)


def linear(x, w):
    return F.linear(x, w.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.eps, self.gain = c.norm_eps, nn.Parameter(torch.ones(c.d_model))

    def forward(self, x_BTD):
        return F.rms_norm(x_BTD.float(), self.gain.shape, self.gain, self.eps).to(x_BTD.dtype)


def rotate(x_BHTK, cos_TK, sin_TK):
    """Rotate pair i, coordinates i and i + K/2, by its angle."""
    first, second = x_BHTK.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos_TK - second * sin_TK, first * sin_TK + second * cos_TK], dim=-1)
    return turned.to(x_BHTK.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = [c.n_heads, c.n_kv_heads, c.n_kv_heads]  # of queries, keys, values
        self.w_query_key_value = matrix(c, c.d_model, sum(self.heads) * c.d_head)
        self.w_out = matrix(c, c.n_heads * c.d_head, c.d_model, residual=True)

    def forward(self, x_BTD, cos, sin):
        B, T, _ = x_BTD.shape
        qkv_BHTK = linear(x_BTD, self.w_query_key_value).view(B, T, sum(self.heads), -1).transpose(1, 2)
        q, k, v = qkv_BHTK.split(self.heads, dim=1)
        q, k, grouped = rotate(q, cos, sin), rotate(k, cos, sin), self.heads[0] != self.heads[1]
        o_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return linear(o_BHTK.transpose(1, 2).reshape(B, T, -1), self.w_out)


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w_up = matrix(c, c.d_model, c.d_ff)
        self.w_down = matrix(c, c.d_ff, c.d_model, residual=True)

    def forward(self, x_BTD):
        return linear(F.gelu(linear(x_BTD, self.w_up), approximate="tanh"), self.w_down), x_BTD.new_zeros(())


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        E, D, M = c.n_experts, c.d_model, c.d_expert
        self.top_k, self.w_router = c.top_k, matrix(c, D, E)
        self.w_up_EDM = weight(E, D, M, std=D**-0.5)
        self.w_down_EMD = weight(E, M, D, std=(2 * c.n_layers * M) ** -0.5)

    def forward(self, x_BTD):
        """Return the experts' output and the balance loss of this layer."""
        x_ND, E = x_BTD.flatten(0, 1), len(self.w_router)
        probability_NE = F.linear(x_ND.float(), self.w_router).softmax(dim=-1)
        chosen_Nk, experts_Nk = probability_NE.topk(self.top_k)
        gates_Nk = chosen_Nk / chosen_Nk.sum(dim=-1, keepdim=True)

        sorted_A, order_A = experts_Nk.flatten().sort(stable=True)
        ends_E = torch.searchsorted(sorted_A, torch.arange(E, device=sorted_A.device), right=True)
        matmul = lambda rows, w: F.grouped_mm(rows, w.to(rows.dtype), offs=ends_E.int())
        up_AM = matmul(x_ND.index_select(0, order_A // self.top_k), self.w_up_EDM)
        out_AD = matmul(F.gelu(up_AM, approximate="tanh"), self.w_down_EMD)
        out_NkD = out_AD.index_select(0, order_A.argsort()).view(*experts_Nk.shape, -1)

        share_E = ends_E.diff(prepend=ends_E.new_zeros(1)) / len(sorted_A)
        balance = E * (share_E * probability_NE.mean(dim=0)).sum()
        return (out_NkD * gates_Nk[..., None].to(out_NkD.dtype)).sum(dim=1).view(x_BTD.shape), balance


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_attention, self.attention = Norm(c), Attention(c)
        self.norm_feed_forward, self.feed_forward = Norm(c), MoE(c) if c.n_experts else FeedForward(c)

    def forward(self, x_BTD, cos, sin):
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD), cos, sin)
        update_BTD, balance = self.feed_forward(self.norm_feed_forward(x_BTD))
        return x_BTD + update_BTD, balance


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, self.embedding, self.norm = c, weight(c.vocab_size, c.d_model, std=c.d_model**-0.5), Norm(c)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.n_layers))

    def forward(self, tokens_BT, targets_BT):
        """Return the training loss, and its main part, the cross-entropy, in nats per token."""
        c, T = self.c, tokens_BT.shape[1]
        frequency = c.rope_theta ** (-torch.arange(0, c.d_head, 2, device=tokens_BT.device) / c.d_head)
        angles = torch.arange(T, device=tokens_BT.device)[:, None] * frequency
        x_BTD, balance = F.embedding(tokens_BT, self.embedding.to(c.compute)), 0.0
        for layer in self.layers:
            x_BTD, more = layer(x_BTD, angles.cos(), angles.sin())
            balance = balance + more / c.n_layers
        logits_NV = linear(self.norm(x_BTD), self.embedding).flatten(0, 1)
        cross_entropy = F.cross_entropy(logits_NV.float(), targets_BT.flatten())
        return cross_entropy + c.balance_loss * balance, cross_entropy


def from_ours(c, ours: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Convert the parameters of model.py, with the names of `sharding.flatten_named`, to a Transformer's state_dict."""
    found = {"embedding": ours["embedding_VD"], "norm.gain": ours["norm_D"]}
    for number in range(c.n_layers):
        kind, place = ("moe", number) if c.n_experts else ("dense", (number, 0))  # a block has one layer
        of = lambda name, kind=kind, place=place: ours[f"blocks.{kind}.{name}"][place]
        # model.py's weights are [in, out], with a separate dim for heads.
        turned = lambda name, n_in=c.d_model, of=of: of(name).reshape(n_in, -1).T
        attention = [turned(f"attention.{name}") for name in ("w_query_DHK", "w_key_DGK", "w_value_DGK")]
        found |= {f"layers.{number}.{name}": value for name, value in {
            "norm_attention.gain": of("norm_attention_D"),
            "norm_feed_forward.gain": of("norm_feed_forward_D"),
            "attention.w_query_key_value": np.concatenate(attention),
            "attention.w_out": turned("attention.w_out_HKD", c.n_heads * c.d_head),
            **({
                "feed_forward.w_router": turned("feed_forward.w_router_DE"),
                "feed_forward.w_up_EDM": of("feed_forward.w_up_EDM"),
                "feed_forward.w_down_EMD": of("feed_forward.w_down_EMD"),
            } if c.n_experts else {
                "feed_forward.w_up": turned("feed_forward.w_up_DF"),
                "feed_forward.w_down": turned("feed_forward.w_down_FD", c.d_ff),
            }),
        }.items()}  # fmt: skip
    return {name: torch.tensor(value) for name, value in found.items()}


# The trainer ----------------------------------------------------------------------------------------------------------


def trainer(model: Transformer, o, compile: bool):
    """Return fn(tokens, targets) -> cross-entropy. Each call takes a step of AdamW with a clipped gradient."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim > 1 and name != "embedding"]
    others = [p for name, p in named.items() if p.ndim == 1 or name == "embedding"]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    forward = torch.compile(model) if compile else model

    def step(tokens_BT, targets_BT):
        loss, cross_entropy = forward(tokens_BT, targets_BT)
        loss.backward()
        if o.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return cross_entropy.detach()

    return step


def measure(spec: dict) -> dict:
    """Train on one batch, as `bench.gpu.measure` does. `compile_s` is the time of the first step, which compiles.

    It calls `torch.compile` only on a GPU, because on CPU that needs a C compiler and grouped bfloat16 matmuls.
    """
    c, o = settings(spec["config"])
    on_gpu = spec["device"] == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no GPU; without one: --device cpu")
    device, wait = torch.device("cuda" if on_gpu else "cpu"), torch.cuda.synchronize if on_gpu else lambda: None
    torch.manual_seed(spec["config"]["run"]["seed"])
    with device:
        model = Transformer(c)
    host = np.load(spec["batch"])
    batch = [torch.tensor(host[name], dtype=torch.int64, device=device) for name in ("tokens_BT", "targets_BT")]
    step, losses = trainer(model, o, compile=on_gpu), []
    wait()
    begin = time.perf_counter()
    losses.append(step(*batch))
    wait()
    compile_s = time.perf_counter() - begin
    losses += [step(*batch) for _ in range(spec["warmup"])]
    wait()
    begin = time.perf_counter()
    losses += [step(*batch) for _ in range(spec["steps"])]
    wait()
    seconds = time.perf_counter() - begin
    return {
        "tokens_per_s": spec["steps"] * batch[0].numel() / seconds,
        "compile_s": compile_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "losses": [float(loss) for loss in losses],
        "params": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "version": f"torch {torch.__version__}",
    }


if __name__ == "__main__":
    try:
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    except ValueError as error:
        sys.exit(f"error: {error}")
