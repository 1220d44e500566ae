"""Settings of a model of Axis by Axis, under the names they have there (its config.py)."""

from typing import ClassVar

from transformers import PretrainedConfig


class AxisConfig(PretrainedConfig):
    """A decoder in the DeepSeek-V3 family, every part switchable."""

    model_type = "axis"
    attribute_map: ClassVar = {
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    }  # fmt: skip

    def __init__(
        self,
        vocab_size=272,
        d_model=128,  # width of the residual stream
        n_layers=4,
        n_heads=4,
        attention="mla",  # latent, or "gqa": grouped-query
        n_kv_heads=4,  # gqa
        d_head=32,  # width of a head's query and key; mla: without rotary
        d_rope=16,  # mla: width of the rotary part, one key shared by all heads
        d_value=32,  # mla: width of a head's value
        d_query_latent=0,  # mla: 0 projects queries straight from the residual stream
        d_kv_latent=64,  # mla
        rope_theta=10_000.0,
        no_rope_every=0,  # every n-th layer has no rotary; 0: all have
        d_ff=512,  # hidden width of a dense feed-forward
        activation="swiglu",  # or "gelu"
        n_experts=0,  # routed experts of an MoE layer; 0: every layer is dense
        experts_per_token=2,  # not top_k, which is a setting of generation
        n_shared=0,  # shared experts, which see every token
        d_expert=128,  # hidden width of one expert
        moe_every=1,  # after the prefix, every n-th layer is MoE
        dense_prefix=0,  # dense layers before that
        router="sigmoid",  # or "softmax"
        normalize_gates=True,
        routed_scaling=1.0,
        balance_rate=0.0,  # 0: the router has no selection bias
        norm_eps=1e-6,
        tie_word_embeddings=False,
        **kwargs,
    ):
        ours = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        tied = ours.pop("tie_word_embeddings")
        for name, value in ours.items():
            setattr(self, name, value)
        super().__init__(tie_word_embeddings=tied, **kwargs)
        self.use_cache = False  # the model keeps nothing between calls
