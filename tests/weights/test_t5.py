"""T5 in transformers' format: what its table has and no other does, a scale and two stacks of layers."""

import importlib
import json

import numpy as np
import pytest

import pipeline
import sharding
from architectures import declare
from config import preset, replace
from tests import helpers
from tests.weights.test_convert import FIXTURES, change_tensors, command, copy, tensors_of, write_run
from weights import convert, hf_config, layouts

TIED = preset("t5_tiny", **{"model.tie_embeddings": True, "data.batch_size": 2})


def test_a_tied_head_scales_the_last_norm(tmp_path):
    """Catches the factor D**-0.5 of a tied T5 where it is untied, at no place, or at the encoder's norm. Newer files
    of transformers say tie_word_embeddings=true in both cases, and differ in scale_decoder_outputs."""
    folder = copy("t5", tmp_path / "hf")
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    about = json.loads((folder / "config.json").read_text())
    read = {}
    for name, more in {"older": {}, "newer": {"scale_decoder_outputs": True}}.items():
        (folder / "config.json").write_text(json.dumps(about | {"tie_word_embeddings": True} | more))
        assert command("from-hf", folder, "--out", tmp_path / name) == 0
        read[name] = {key: x[()] for key, x in convert.open_weights(tmp_path / name).items()}
    theirs = tensors_of(folder)
    for ours in read.values():
        np.testing.assert_allclose(ours["norm_D"], theirs["decoder.final_layer_norm.weight"] * 28**-0.5, rtol=1e-6)
        np.testing.assert_array_equal(ours["encoder.norm_D"], theirs["encoder.final_layer_norm.weight"])
        assert "unembedding_DV" not in ours
    untied = about | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert hf_config.config_from_hf(untied) == hf_config.config_from_hf(about)


def test_scores_are_scaled_in_the_weights_of_queries(tmp_path):
    """Catches a scale of keys, of one of the two stacks only, or by the width of the model."""
    assert command("from-hf", FIXTURES / "t5", "--out", tmp_path / "run") == 0
    ours, theirs = convert.open_weights(tmp_path / "run"), tensors_of(FIXTURES / "t5")
    for parameter, name in {"encoder.layers.attention": "encoder.block.1.layer.0.SelfAttention",
                            "decoder.layers.attention": "decoder.block.1.layer.0.SelfAttention",
                            "decoder.layers.cross": "decoder.block.1.layer.1.EncDecAttention"}.items():  # fmt: skip
        for letter, field, scale in (("q", "w_query_DHK", 4), ("k", "w_key_DGK", 1)):
            want = scale * theirs[f"{name}.{letter}.weight"].T.reshape(28, 4, 16)
            np.testing.assert_array_equal(ours[f"{parameter}.{field}"][1], want, err_msg=name)


def test_the_published_tensors_have_rows():
    """Catches a layer or a feed-forward layer with the number of another one, in a model of the published size."""
    shapes = {piece.hf_name: piece.shape for piece in layouts.pieces(preset("t5_base").model)}
    assert len(shapes) == 12 * (5 + 4) + 12 * (5 + 5 + 4) + 6
    assert shapes["encoder.block.11.layer.1.DenseReluDense.wi_0.weight"] == (2048, 768)
    assert shapes["decoder.block.11.layer.2.DenseReluDense.wo.weight"] == (768, 2048)
    assert shapes["decoder.block.0.layer.1.EncDecAttention.o.weight"] == (768, 768)
    assert shapes["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == (32, 12)
    assert shapes["lm_head.weight"] == shapes["shared.weight"] == (32_128, 768)


@pytest.mark.extra("parity", "torch")
def test_transformers_computes_what_our_tied_model_does(tmp_path):
    """Catches an export that only our import understands."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    write_run(TIED, tmp_path / "run")
    assert command("to-hf", tmp_path / "run", "--out", tmp_path / "hf") == 0
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    mesh, batch = sharding.make_mesh("data=1"), helpers.random_batch(TIED, 0)
    for side, width in (("", "T"), ("encoder_", "S")):  # one example in each row
        places = np.broadcast_to(np.arange(batch[f"{side}tokens_B{width}"].shape[1], dtype=np.int32),
                                 batch[f"{side}tokens_B{width}"].shape)  # fmt: skip
        batch |= {f"{side}positions_B{width}": places, f"{side}segments_B{width}": np.ones_like(places)}
    ours = convert.load_weights(tmp_path / "run", declare(TIED.model), mesh)
    got_BTV = pipeline.logits(replace(TIED, mesh="data=1"), mesh)(ours, sharding.put(batch, mesh))
    inputs = dict(input_ids=torch.tensor(batch["encoder_tokens_BS"]),
                  decoder_input_ids=torch.tensor(batch["tokens_BT"]))  # fmt: skip
    with torch.no_grad():
        want_BTV = model(**inputs, use_cache=False).logits.numpy()
    np.testing.assert_allclose(got_BTV, want_BTV, rtol=1e-4, atol=1e-4)  # float32, sums in another order
