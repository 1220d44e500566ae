"""The presets. Each is a named set of values of settings."""

from typing import Any

from config.settings import Config, MeshConfig, ModelConfig, replace
from utils import UserError, suggest

# name -> (purpose, {dotted setting: value})
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "laptop": ("MoE model with about 3M parameters: trains in 2 to 3 minutes on 2 cores", {
        "model": ModelConfig(
            vocab_size=272, d_model=128, n_layers=4, n_heads=4, d_head=32, d_rope=16, d_value=32, d_kv_latent=64,
            d_ff=384, n_experts=8, top_k=2, n_shared=1, d_expert=320, dense_prefix=2, balance_loss=0.01,
            balance_rate=0.001, precision="float32"),
        "optim.lr": 5e-3,
    }),
    "deep": ("8 MoE layers, for pipelines of 4 or 8 stages with any schedule; 1.4M parameters", {
        "model": ModelConfig(
            vocab_size=272, d_model=64, n_layers=8, n_heads=8, d_head=8, d_rope=8, d_value=8, d_kv_latent=32,
            n_experts=8, top_k=2, d_expert=96, balance_loss=0.01, balance_rate=0.001, precision="float32"),
        "data.seq_len": 128, "data.batch_size": 16, "optim.lr": 5e-3,
        "run.name": "deep", "run.steps": 100, "run.eval_every": 50, "run.checkpoint_every": 50,
    }),
    "tiny": ("for tests: every dimension has a different size", {
        "model": ModelConfig(
            vocab_size=280, d_model=24, n_layers=5, n_heads=4, n_kv_heads=2, d_head=10, d_rope=6, d_value=14,
            d_query_latent=20, d_kv_latent=12, d_ff=40, n_experts=8, top_k=2, n_shared=2, d_expert=28, moe_every=2,
            dense_prefix=1, no_rope_every=3, balance_loss=0.01, balance_rate=0.001, precision="float32"),
        "work.loss_chunk": 36, "data.seq_len": 18, "data.batch_size": 16, "optim.warmup_steps": 2,
        "run.name": "tiny", "run.steps": 10, "run.log_every": 1, "run.eval_every": 5, "run.eval_batches": 2,
        "run.checkpoint_every": 5,
    }),
    "dense_124m": ("GPT-2-sized model, to compare with other trainers", {
        "model": ModelConfig(
            vocab_size=50304, d_model=768, n_layers=12, n_heads=12, attention="gqa", n_kv_heads=12, d_head=64,
            d_ff=3072, activation="gelu", tie_embeddings=True),
        "data.path": "tokens/stdlib-gpt2", "data.seq_len": 1024, "data.batch_size": 480,
        "optim.lr": 6e-4, "optim.warmup_steps": 700,
        "run.name": "dense_124m", "run.steps": 20_000, "run.eval_every": 250, "run.eval_batches": 20,
        "run.checkpoint_every": 1000,
    }),
    "moe1b": ("the main training run, on 32 TPU v4 chips", {
        "model": ModelConfig(
            vocab_size=100_352, d_model=768, n_layers=48, n_heads=12, d_head=64, d_rope=128, d_value=64,
            d_query_latent=128, d_kv_latent=128, no_rope_every=6, d_ff=3072, activation="gelu", n_experts=16, top_k=2,
            n_shared=2, d_expert=3072, moe_every=6, balance_loss=0.01),
        "mesh": MeshConfig(fsdp=32),
        "data.path": "tokens/stdlib-cl100k_base", "data.seq_len": 1024, "data.batch_size": 256,
        "optim.lr": 6e-4, "optim.warmup_steps": 500,
        "run.name": "moe1b", "run.steps": 20_000, "run.eval_every": 250, "run.eval_batches": 20,
        "run.checkpoint_every": 500,
    }),
    "gptj_6b": ("to fine-tune: the published architecture, 6,050,882,784 parameters", {
        "model": ModelConfig(
            vocab_size=50_400, d_model=4096, n_layers=28, n_heads=16, attention="gqa", n_kv_heads=16, d_head=256,
            rope_dims=64, d_ff=16_384, activation="gelu", parallel_residual=True,
            bias="feed_forward,logits", norm="layer",
            norm_eps=1e-5),
        "data.path": "tokens/stdlib-gpt2", "data.seq_len": 2048, "data.batch_size": 16,
        "optim.lr": 2e-5, "run.name": "gptj_6b",
    }),
    "t5_tiny": ("for tests: an encoder-decoder in which every dimension has a different size", {
        "model": ModelConfig(
            vocab_size=304, d_model=24, n_layers=4, encoder_layers=2, n_heads=4, attention="gqa", n_kv_heads=4,
            d_head=10, d_ff=40, activation="geglu", precision="float32"),
        "work.loss_chunk": 36, "data.seq_len": 12, "data.input_len": 28, "data.objective": "span",
        "data.batch_size": 16, "optim.warmup_steps": 2,
        "run.name": "t5_tiny", "run.steps": 10, "run.log_every": 1, "run.eval_every": 5, "run.eval_batches": 2,
        "run.checkpoint_every": 5,
    }),
    "t5_laptop": ("T5 with about 1M parameters: learns span corruption in minutes on 2 cores", {
        "model": ModelConfig(
            vocab_size=320, d_model=128, n_layers=2, encoder_layers=2, n_heads=4, attention="gqa", n_kv_heads=4,
            d_head=32, d_ff=384, activation="geglu", precision="float32"),
        "data.seq_len": 64, "data.input_len": 128, "data.objective": "span:0.3:16", "data.batch_size": 16,
        "optim.lr": 5e-3, "run.name": "t5_laptop", "run.steps": 700,
        "run.sample_prompt": "    def close(self):\n<extra_id_0>return None\n",
    }),
    "t5_small": ("T5 1.1, 76,961,152 parameters", {
        "model": ModelConfig(
            vocab_size=32_128, d_model=512, n_layers=8, encoder_layers=8, n_heads=6, attention="gqa", n_kv_heads=6,
            d_head=64, d_ff=1024, activation="geglu"),
        "data.path": "tokens/stdlib-t5", "data.seq_len": 128, "data.input_len": 512, "data.objective": "span",
        "data.batch_size": 128, "run.name": "t5_small",
    }),
    "t5_base": ("T5 1.1, 247,577,856 parameters", {
        "model": ModelConfig(
            vocab_size=32_128, d_model=768, n_layers=12, encoder_layers=12, n_heads=12, attention="gqa", n_kv_heads=12,
            d_head=64, d_ff=2048, activation="geglu"),
        "data.path": "tokens/stdlib-t5", "data.seq_len": 128, "data.input_len": 512, "data.objective": "span",
        "data.batch_size": 128, "run.name": "t5_base",
    }),
    "t5_xxl": ("T5 1.1, 11,135,332,352 parameters", {
        "model": ModelConfig(
            vocab_size=32_128, d_model=4096, n_layers=24, encoder_layers=24, n_heads=64, attention="gqa", n_kv_heads=64,
            d_head=64, d_ff=10_240, activation="geglu"),
        "data.path": "tokens/stdlib-t5", "data.seq_len": 128, "data.input_len": 512, "data.objective": "span",
        "data.batch_size": 128, "run.name": "t5_xxl",
    }),
    "llama3_8b": ("the published architecture, 8,030,261,248 parameters", {
        "model": ModelConfig(
            vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, attention="gqa", n_kv_heads=8, d_head=128,
            rope_theta=500_000.0, d_ff=14_336, norm_eps=1e-5),
        "data.seq_len": 8192, "run.name": "llama3_8b",
    }),
    "llama3_70b": ("the published architecture, 70,553,706,496 parameters", {
        "model": ModelConfig(
            vocab_size=128_256, d_model=8192, n_layers=80, n_heads=64, attention="gqa", n_kv_heads=8, d_head=128,
            rope_theta=500_000.0, d_ff=28_672, norm_eps=1e-5),
        "data.seq_len": 8192, "run.name": "llama3_70b",
    }),
    "mixtral_8x7b": ("the published architecture, 46,702,792,704 parameters", {
        "model": ModelConfig(
            vocab_size=32_000, d_model=4096, n_layers=32, n_heads=32, attention="gqa", n_kv_heads=8, d_head=128,
            rope_theta=1_000_000.0, n_experts=8, top_k=2, d_expert=14_336, router="softmax", balance_loss=0.02,
            norm_eps=1e-5),
        "data.seq_len": 4096, "run.name": "mixtral_8x7b",
    }),
    "deepseek_v3": ("the published architecture, 671.0B parameters, 37B active", {
        "model": ModelConfig(
            vocab_size=129_280, d_model=7168, n_layers=61, n_heads=128, d_head=128, d_rope=64, d_value=128,
            d_query_latent=1536, d_kv_latent=512, d_ff=18_432, n_experts=256, top_k=8, n_shared=1, d_expert=2048,
            dense_prefix=3, expert_groups=(8, 4), routed_scaling=2.5, balance_loss=0.0001, balance_rate=0.001),
        "data.seq_len": 4096, "run.name": "deepseek_v3",
    }),
}  # fmt: skip


# Names on the Hugging Face hub that the planner takes for a preset. Llama 3.1 scales its rotary frequencies, which
# changes no count.
HUB_NAMES = {
    "meta-llama/Meta-Llama-3-8B": "llama3_8b", "meta-llama/Llama-3.1-8B": "llama3_8b",
    "meta-llama/Meta-Llama-3-70B": "llama3_70b", "meta-llama/Llama-3.1-70B": "llama3_70b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral_8x7b", "deepseek-ai/DeepSeek-V3": "deepseek_v3",
}  # fmt: skip


def preset(name: str, **dotted_overrides: Any) -> Config:
    """Return a preset with some settings changed: preset("tiny", **{"model.n_heads": 8, "mesh": "fsdp=2"}).

    Raises: UserError for an unknown preset or setting; it suggests the most similar one.
    """
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; {suggest(name, PRESETS)}")
    return replace(replace(Config(), **PRESETS[name][1]), **dotted_overrides)
