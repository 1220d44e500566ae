"""Released DeepSeek-V3 checkpoints: weights in fp8 with a scale per block, and a module for multi-token prediction. And
gpt-oss: experts in MXFP4."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from utils import UserError
from weights import convert, folders

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE = FIXTURES / "deepseek_v3"
CODES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def write(folder, tensors, fixture=FIXTURE, **changes) -> Path:
    """Write a folder with the settings of the fixture. The library's writer has no fp8."""
    folder.mkdir()
    header, data = {}, b""
    for name, x in tensors.items():
        span = [len(data), len(data := data + x.tobytes())]
        header[name] = {"dtype": CODES[str(x.dtype)], "shape": x.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    hf = json.loads((fixture / "config.json").read_text()) | changes
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


def packed():
    """Return blocks and exponents of two experts with matrices of 64 rows and 2 columns."""
    blocks = ((7 * np.arange(2 * 2 * 2 * 16) + 3) % 256).astype(np.uint8).reshape(2, 2, 2, 16)
    return blocks, np.uint8([[[120, 127], [130, 125]], [[127, 128], [119, 126]]])


def test_mxfp4_has_the_numbers_that_the_library_reads(tmp_path):
    """The numbers are those of transformers 5.23.0 (`convert_moe_packed_tensors`). Catches halves of a byte that are
    swapped, another bias of the exponents, and a matrix that is not transposed."""
    blocks, exponents = packed()
    folder = write(tmp_path / "hf", {"w_blocks": blocks, "w_scales": exponents})
    tensors = folders.Tensors(folders.Folder(folder))
    got, dtype = tensors.read("w"), tensors.dtype("w")
    assert got.shape == tensors.arrays["w"].shape == (2, 64, 2) and got.dtype == dtype == "bfloat16"
    got = got.astype(np.float32)
    assert got[0, :4, 0].tolist() == [0.01171875, 0.0, -0.0078125, 0.0]
    assert got[0, -4:, 1].tolist() == [0.75, -0.375, -0.5, -0.375]
    assert got[1, 30:34, 0].tolist() == [-2.0, 1.0, 3.0, 3.0]
    assert got[1, :3, 1].tolist() == [0.005859375, -0.00390625, -0.00390625]
    other = folders.Tensors(folders.Folder(write(tmp_path / "b", {"w_blocks": blocks, "w_scales": exponents[:1]})))
    with pytest.raises(UserError, match="lacks w"):
        other.check({"w": (2, 64, 2)})


def test_a_checkpoint_in_mxfp4_is_converted(tmp_path):
    """As gpt-oss is released: experts in MXFP4, all else in bfloat16. Catches experts that are refused or not
    transposed, and a quantization_config that is written again."""
    plain = safetensors.numpy.load_file(FIXTURES / "gpt_oss" / "model.safetensors")
    released = {name: x.astype(ml_dtypes.bfloat16) for name, x in plain.items()}
    wanted, rng = dict(released), np.random.default_rng(0)
    for name in [name for name in plain if name.endswith("gate_up_proj")]:  # 32 rows, which are one block
        E, D, M = released.pop(name).shape
        blocks = rng.integers(0, 256, (E, M, D // 32, 16)).astype(np.uint8)
        exponents = rng.integers(120, 130, blocks.shape[:3]).astype(np.uint8)
        released |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        matrices = [folders.unpack_fp4(*one).T for one in zip(blocks, exponents, strict=True)]
        wanted[name] = np.ascontiguousarray(np.stack(matrices))
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    hf = write(tmp_path / "hf", released, FIXTURES / "gpt_oss", quantization_config=about)
    convert.from_hf(hf, tmp_path / "run")
    convert.to_hf(tmp_path / "run", tmp_path / "back")
    back = folders.Tensors(folders.Folder(tmp_path / "back"))
    assert {*back.arrays} == {*wanted}
    assert not [name for name, x in wanted.items() if back.read(name).tobytes() != x.tobytes()]
    assert json.loads((tmp_path / "back/config.json").read_text())["quantization_config"] is None
