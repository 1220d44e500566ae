"""Released DeepSeek-V3 checkpoints: weights in fp8 with a scale per block, and a module for multi-token prediction."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from utils import UserError
from weights import convert, folders

FIXTURE = Path(__file__).parent / "fixtures/deepseek_v3"
CODES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def write(folder, tensors, **changes) -> Path:
    """Write a folder with the settings of the fixture. The library's writer has no fp8."""
    folder.mkdir()
    header, data = {}, b""
    for name, x in tensors.items():
        span = [len(data), len(data := data + x.tobytes())]
        header[name] = {"dtype": CODES[str(x.dtype)], "shape": x.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    hf = json.loads((FIXTURE / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def test_each_block_has_its_scale():
    """Catches scales in transposed order, blocks counted from the end, and a last block that is cut short."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(130, 259)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1, 2, size=(2, 3)).astype(np.float32)
    got = folders.scale_blocks(x, scales, "w")
    want = [[np.float32(x[i, j]) * scales[i // 128, j // 128] for j in range(259)] for i in range(130)]
    np.testing.assert_array_equal(got, np.array(want).astype(ml_dtypes.bfloat16))
    with pytest.raises(
        UserError, match=r"w_scale_inv has shape \(3, 2\), but a matrix of shape .* has \(2, 3\) blocks"
    ):
        folders.scale_blocks(x, scales.T, "w")


def test_a_checkpoint_in_fp8_is_converted(tmp_path, capsys):
    """As DeepSeek-V3 is released: the norms, tables and routers in bfloat16, all other matrices in fp8. Catches weights
    without their scales, and a conversion that refuses or keeps the module for multi-token prediction."""
    plain = safetensors.numpy.load_file(FIXTURE / "model.safetensors")
    stored, scaled = {}, {}
    for name, x in plain.items():
        stored[name] = scaled[name] = x.astype(np.float32 if "correction_bias" in name else ml_dtypes.bfloat16)
        if x.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            scale = np.abs(x).max().reshape(1, 1) / 448  # the largest number of this dtype
            stored[name] = (x / scale).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            scaled[name] = (stored[name].astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    stored["model.layers.3.eh_proj.weight"] = np.zeros((2, 3), np.float32)
    released = write(tmp_path / "hf", stored, quantization_config=FP8, num_nextn_predict_layers=1)
    convert.from_hf(released, tmp_path / "run")
    assert "left out   1 tensors for multi-token prediction (model.layers.3.), " in capsys.readouterr().out
    convert.from_hf(write(tmp_path / "plain", scaled), tmp_path / "want")
    got, want = (convert.open_weights(tmp_path / name) for name in ("run", "want"))
    assert {*got} == {*want}
    assert not [name for name in want if got[name][()].tobytes() != want[name][()].tobytes()]
    assert convert.read_config(tmp_path / "run") == convert.read_config(tmp_path / "want")

    del stored["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    shutil.rmtree(released)
    write(released, stored, quantization_config=FP8, num_nextn_predict_layers=1)
    with pytest.raises(UserError, match=r"o_proj\.weight has dtype F8_E4M3; supported are F32, BF16"):
        convert.from_hf(released, tmp_path / "again")
