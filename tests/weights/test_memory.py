"""Conversions read parts of a checkpoint, and never hold all of it in memory."""

import json
import os
import shutil
import struct
import subprocess
import sys

import pytest

from tests.weights.test_slim import ROOT

LIMIT_BYTES = 2_000_000_000  # limit of a process's allocations; the weights below are 2.2 GB
LIMITED = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT_BYTES}, {LIMIT_BYTES}))
runpy.run_module("weights", run_name="__main__", alter_sys=True)
"""
D, F, V, LAYERS, HEADS, KV, K = 2048, 8192, 32_000, 16, 32, 8, 64
LAYER = {
    "input_layernorm": [D], "post_attention_layernorm": [D], "self_attn.q_proj": [HEADS * K, D],
    "self_attn.k_proj": [KV * K, D], "self_attn.v_proj": [KV * K, D], "self_attn.o_proj": [D, HEADS * K],
    "mlp.gate_proj": [F, D], "mlp.up_proj": [F, D], "mlp.down_proj": [D, F],
}  # fmt: skip


def write_zeros(path, shapes: dict) -> None:
    """Write a sparse safetensors file of zeros; only its header takes disk space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if shape[1:] else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + size]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_made_up_weights(folder) -> None:
    """A Llama of 1.1 billion parameters in four files, and a fifth for tensors outside the layers."""
    folder.mkdir()
    config = json.loads((ROOT / "tests/weights/fixtures/llama/config.json").read_text())
    sizes = {"hidden_size": D, "intermediate_size": F, "vocab_size": V, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": K, "dtype": "bfloat16"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | sizes))
    files = {"model-0.safetensors": {"model.embed_tokens": [V, D], "lm_head": [V, D], "model.norm": [D]}}
    for part in range(4):
        layers = range(4 * part, 4 * part + 4)
        names = {f"model.layers.{n}.{name}": shape for n in layers for name, shape in LAYER.items()}
        files[f"model-{part + 1}.safetensors"] = names
    for file, names in files.items():
        write_zeros(folder / file, {f"{name}.weight": shape for name, shape in names.items()})
    where = {f"{name}.weight": file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.slow
def test_a_billion_parameters_are_converted_in_less_memory(tmp_path):
    """Catches a whole model, or a stack of all layers, in memory: 6 billion parameters would take 12 GB."""
    write_made_up_weights(tmp_path / "theirs")
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    for words in (["from-hf", "theirs", "--out", "run"], ["slim", "run", "slim"], ["to-hf", "slim", "--out", "back"]):
        done = subprocess.run([sys.executable, "-c", LIMITED, *words], cwd=tmp_path, text=True, capture_output=True,
                              env=env | {"PYTHONPATH": str(ROOT)})  # fmt: skip
        assert done.returncode == 0, f"{words[0]}: {done.stderr[-2000:]}"
        shutil.rmtree(tmp_path / words[1])  # at most two on the disk at a time
    size = sum(file.stat().st_size for file in (tmp_path / "back").glob("*.safetensors"))
    shutil.rmtree(tmp_path / "back")
    parameters = 2 * V * D + D + LAYERS * sum(shape[0] * (shape[1] if shape[1:] else 1) for shape in LAYER.values())
    assert parameters > 1_000_000_000 and LIMIT_BYTES < 2 * parameters <= size < 2 * parameters + 100_000
