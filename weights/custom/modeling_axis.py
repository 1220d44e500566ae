"""A model of Axis by Axis in plain PyTorch: loaded by transformers with trust_remote_code=True.

A tensor's name ends with its shape: B sequences, T positions (S as keys), D model width, H heads, K a head's width,
R its rotary part, C latent width, E experts, N tokens. Nothing is kept between calls, so generation runs all of the
text for each new token. Experts drop no token, whatever capacity the model was trained with.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_axis import AxisConfig


def linear(into: int, out: int) -> nn.Linear:
    return nn.Linear(into, out, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


def rotate(x_BTHR, positions_BT, theta: float, on: bool):
    """Turn pair i, coordinates i and i + R/2, by its angle."""
    if not on:
        return x_BTHR
    R = x_BTHR.shape[-1]
    frequency = theta ** (-torch.arange(0, R, 2, device=x_BTHR.device, dtype=torch.float32) / R)
    angles = positions_BT[:, :, None, None].float() * frequency
    first, second = x_BTHR.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x_BTHR.dtype)


def attend(q_BTHK, k_BSHK, v_BSHU, allowed_BTS):
    scores_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK).float() * q_BTHK.shape[-1] ** -0.5
    # A row of padding may see nothing: the lowest number, unlike -inf, leaves it without NaN.
    scores_BHTS = scores_BHTS.masked_fill(~allowed_BTS[:, None], torch.finfo(torch.float32).min)
    o_BTHU = torch.einsum("bhts,bshu->bthu", scores_BHTS.softmax(-1).to(v_BSHU.dtype), v_BSHU)
    return o_BTHU.flatten(2)


class LatentAttention(nn.Module):
    """Keys and values come from one narrow latent; all heads share a rotary key (arXiv:2405.04434)."""

    def __init__(self, c: AxisConfig):
        super().__init__()
        self.c, wide = c, c.n_heads * (c.d_head + c.d_rope)
        if c.d_query_latent:
            self.q_a_proj = linear(c.d_model, c.d_query_latent)
            self.q_a_layernorm = RMSNorm(c.d_query_latent, c.norm_eps)
            self.q_b_proj = linear(c.d_query_latent, wide)
        else:
            self.q_proj = linear(c.d_model, wide)
        self.kv_a_proj_with_mqa = linear(c.d_model, c.d_kv_latent + c.d_rope)
        self.kv_a_layernorm = RMSNorm(c.d_kv_latent, c.norm_eps)
        self.kv_b_proj = linear(c.d_kv_latent, c.n_heads * (c.d_head + c.d_value))
        self.o_proj = linear(c.n_heads * c.d_value, c.d_model)

    def forward(self, x_BTD, positions_BT, allowed_BTS, rotary: bool):
        c, (B, T, _) = self.c, x_BTD.shape
        turned = lambda x_BTHR: rotate(x_BTHR, positions_BT, c.rope_theta, rotary)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))) if c.d_query_latent else self.q_proj(x_BTD)
        q_BTHK, q_BTHR = q.view(B, T, c.n_heads, -1).split((c.d_head, c.d_rope), -1)
        latent_BTC, k_BTR = self.kv_a_proj_with_mqa(x_BTD).split((c.d_kv_latent, c.d_rope), -1)
        made = self.kv_b_proj(self.kv_a_layernorm(latent_BTC)).view(B, T, c.n_heads, -1)
        k_BTHK, v_BTHU = made.split((c.d_head, c.d_value), -1)
        k_BTHR = turned(k_BTR[:, :, None]).expand(-1, -1, c.n_heads, -1)
        query, key = torch.cat((q_BTHK, turned(q_BTHR)), -1), torch.cat((k_BTHK, k_BTHR), -1)
        return self.o_proj(attend(query, key, v_BTHU, allowed_BTS))


class GroupedAttention(nn.Module):
    """Query heads share key and value heads, in groups of neighbours (arXiv:2305.13245)."""

    def __init__(self, c: AxisConfig):
        super().__init__()
        self.c = c
        self.q_proj = linear(c.d_model, c.n_heads * c.d_head)
        self.k_proj = linear(c.d_model, c.n_kv_heads * c.d_head)
        self.v_proj = linear(c.d_model, c.n_kv_heads * c.d_head)
        self.o_proj = linear(c.n_heads * c.d_head, c.d_model)

    def forward(self, x_BTD, positions_BT, allowed_BTS, rotary: bool):
        c = self.c
        heads = lambda x: x.unflatten(-1, (-1, c.d_head))
        turned = lambda x: rotate(heads(x), positions_BT, c.rope_theta, rotary)
        shared = lambda x: x.repeat_interleave(c.n_heads // c.n_kv_heads, dim=2)
        k, v = shared(turned(self.k_proj(x_BTD))), shared(heads(self.v_proj(x_BTD)))
        return self.o_proj(attend(turned(self.q_proj(x_BTD)), k, v, allowed_BTS))


class FeedForward(nn.Module):
    def __init__(self, c: AxisConfig, width: int):
        super().__init__()
        self.gate_proj = linear(c.d_model, width) if c.activation == "swiglu" else None
        self.up_proj, self.down_proj = linear(c.d_model, width), linear(width, c.d_model)

    def forward(self, x):
        up = self.up_proj(x)
        h = F.gelu(up, approximate="tanh") if self.gate_proj is None else F.silu(self.gate_proj(x)) * up
        return self.down_proj(h)


class Router(nn.Module):
    def __init__(self, c: AxisConfig):
        super().__init__()
        self.c, self.weight = c, nn.Parameter(torch.empty(c.n_experts, c.d_model))
        # Added when experts are chosen, never to the gates.
        self.e_score_correction_bias = nn.Parameter(torch.zeros(c.n_experts), False) if c.balance_rate else None

    def forward(self, x_ND):
        """Gates and experts of each token, [N, k], in float32."""
        c, logits_NE = self.c, x_ND.float() @ self.weight.float().T
        scores_NE = logits_NE.sigmoid() if c.router == "sigmoid" else logits_NE.softmax(-1)
        bias_E = 0 if self.e_score_correction_bias is None else self.e_score_correction_bias.float()
        experts_Nk = (scores_NE + bias_E).topk(c.experts_per_token, -1).indices
        gates_Nk = scores_NE.gather(-1, experts_Nk)
        if c.normalize_gates and c.experts_per_token > 1:
            gates_Nk = gates_Nk / (gates_Nk.sum(-1, keepdim=True) + 1e-20)
        return c.routed_scaling * gates_Nk, experts_Nk


class MoE(nn.Module):
    def __init__(self, c: AxisConfig):
        super().__init__()
        self.gate = Router(c)
        self.experts = nn.ModuleList(FeedForward(c, c.d_expert) for _ in range(c.n_experts))
        self.shared_experts = FeedForward(c, c.n_shared * c.d_expert) if c.n_shared else None

    def forward(self, x_BTD):
        x_ND = x_BTD.flatten(0, 1)
        gates_Nk, experts_Nk = self.gate(x_ND)
        out_ND = torch.zeros_like(x_ND) if self.shared_experts is None else self.shared_experts(x_ND)
        for number, expert in enumerate(self.experts):
            tokens, which = torch.where(experts_Nk == number)
            update = expert(x_ND[tokens]) * gates_Nk[tokens, which, None].to(x_ND.dtype)
            out_ND = out_ND.index_add(0, tokens, update)
        return out_ND.view_as(x_BTD)


class Layer(nn.Module):
    def __init__(self, c: AxisConfig, number: int):
        super().__init__()
        is_moe = c.n_experts and number >= c.dense_prefix and (number - c.dense_prefix + 1) % c.moe_every == 0
        self.rotary = not (c.no_rope_every and (number + 1) % c.no_rope_every == 0)
        self.input_layernorm = RMSNorm(c.d_model, c.norm_eps)
        self.self_attn = LatentAttention(c) if c.attention == "mla" else GroupedAttention(c)
        self.post_attention_layernorm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MoE(c) if is_moe else FeedForward(c, c.d_ff)

    def forward(self, x_BTD, positions_BT, allowed_BTS):
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), positions_BT, allowed_BTS, self.rotary)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Decoder(nn.Module):
    def __init__(self, c: AxisConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c, number) for number in range(c.n_layers))
        self.norm = RMSNorm(c.d_model, c.norm_eps)

    def forward(self, tokens_BT, positions_BT, allowed_BTS):
        x_BTD = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, positions_BT, allowed_BTS)
        return self.norm(x_BTD)


class AxisForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = AxisConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar = ["Layer"]
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: AxisConfig):
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = linear(config.d_model, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None, **_):
        """attention_mask: 1 where a token is one, 0 where it is padding, which no other token sees."""
        B, T = input_ids.shape
        real_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = (real_BT.cumsum(-1) - 1).clamp(min=0)
        causal_TS = torch.ones(T, T, dtype=torch.bool, device=input_ids.device).tril()
        allowed_BTS = causal_TS[None] & real_BT.bool()[:, None, :]
        x_BTD = self.model(input_ids, position_ids.expand(B, T), allowed_BTS)
        logits = self.lm_head(x_BTD).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
