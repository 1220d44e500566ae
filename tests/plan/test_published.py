"""The planner reads the config.json of published models. The fixture has settings from Hugging Face, and the parameter
counts that each repository publishes for its safetensors files: for the DeepSeek models with the selection biases and
the module for multi-token prediction, but without the 41,540,496 scales of fp8 blocks; for gpt-oss before quantization
to 4 bits (arXiv:2508.10925, table 1)."""

import json
from pathlib import Path

import pytest

from config import preset, replace
from config.flags import starting_point
from kernels import attention
from plan import __main__ as plan_command, planner
from plan.__main__ import main
from utils import UserError
from weights import published

MODELS = json.loads((Path(__file__).parent / "fixtures/published_configs.json").read_text())


def write(folder, hf) -> str:
    """Write a config.json, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(hf if isinstance(hf, str) else json.dumps(hf))
    return str(folder)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_the_published_number_of_parameters(name, tmp_path):
    """To the last digit. Catches a bias, a norm or an expert too few, and a default that is not the library's."""
    about = MODELS[name]
    one = published.read(write(tmp_path / name, about["config"]))
    assert one.parameters == about["parameters"]
    assert one.config.run.name == name and one.config.data.seq_len == 4096


SAME = {"Mixtral-8x7B": "mixtral_8x7b", "DeepSeek-V3": "deepseek_v3"}


@pytest.mark.parametrize("name", SAME)
def test_a_config_gives_the_model_of_the_preset(name, tmp_path):
    """Catches a file that is planned as another model than the preset of the same name."""
    found = published.read(write(tmp_path, MODELS[name]["config"])).config.model
    want = preset(SAME[name]).model
    training = {"balance_loss", "balance_rate", "rope_scaling"}  # the preset has the context of the pretraining
    unused = {"n_kv_heads", "d_rope", "d_value", "d_kv_latent", "d_ff"}
    differ = {field for field, value in vars(want).items() if getattr(found, field) != value}
    assert differ <= training | unused


PLANS = {  # model -> topology and mesh that fit
    "Llama-3.1-8B": ("v5e:8x8", "fsdp=64"),
    "Qwen3-30B-A3B": ("v5p:4x4x4", "fsdp=32,expert=2"),
    "gpt-oss-20b": ("h100:64", "fsdp=8,tensor=8"),
    "DeepSeek-V2-Lite": ("v4:4x4x2", "fsdp=32"),
    "gemma-3-1b": ("v5e:2x4", "fsdp=8"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_config_is_planned_from_its_folder(name, tmp_path, capsys):
    """Catches a model that is counted, but can't be planned, and a plan whose parameters are not those of the file."""
    topology, mesh = PLANS[name]
    folder = write(tmp_path / name, MODELS[name]["config"])
    words = [folder, "--topology", topology, "--mesh", mesh, "--data.batch_size", "64", "--work.remat", "full"]
    assert main([*words, "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    source = numbers["config_json"]
    assert source["parameters"] == MODELS[name]["parameters"]
    assert numbers["params_total"] + sum(source["left_out"].values()) == source["parameters"]
    assert numbers["fits"] and 0 < numbers["mfu"] < 1


def test_the_output_lists_what_the_plan_leaves_out(tmp_path, capsys):
    """Catches a part that the planner silently drops, and percentages that are fractions."""
    quantized = {"quantization_config": {"quant_method": "gptq"}}
    file = write(tmp_path / "Qwen2.5-7B", MODELS["Qwen2.5-7B"]["config"] | quantized) + "/config.json"
    assert main([file, "--model.n_layers", "2", "--mesh", "fsdp=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"config     qwen2 with 7,615,616,512 parameters, from {file}",
        "left out   attention biases: 129,024 parameters (0.0017%)",
        "note       quantized weights: the plan has weights of the dtype that model.precision sets",
    ]


LLAMA = MODELS["Llama-2-7b"]["config"]
WINDOWS = {"Mistral-7B-v0.1": "4096", "gpt-oss-20b": "128:2", "gpt-oss-120b": "128:2", "gemma-2-9b": "4096:2",
           "gemma-2-27b": "4096:2", "gemma-3-1b": "512:6:10000"}  # fmt: skip
FULL, SLIDING = ["full_attention"], ["sliding_attention"]
WINDOW_SETTINGS = [  # changes of a model's config.json -> model.window, and a note if our model can't express them
    ("Qwen2.5-7B", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 9}, "1024:3",
     "sliding windows in 19 of 28 layers: the plan has model.window=1024:3"),
    ("Qwen2.5-7B", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 0}, "1024", ""),
    ("Qwen2.5-7B", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 28}, "", ""),
    ("gpt-oss-20b", {"layer_types": FULL * 18 + SLIDING * 6}, "128:2",
     "sliding windows in 6 of 24 layers: the plan has model.window=128:2"),
    ("gpt-oss-20b", {"layer_types": (SLIDING * 3 + FULL) * 6}, "128:4", ""),
    ("gemma-3-1b", {"sliding_window_pattern": 2}, "512:2:10000", ""),
    ("Mistral-7B-v0.1", {"sliding_window": None}, "", ""),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, window, note", [
    *((name, {}, WINDOWS.get(name, ""), "") for name in MODELS), *WINDOW_SETTINGS,
])  # fmt: skip
def test_the_window_and_the_layers_that_have_it_are_read(name, changes, window, note, tmp_path):
    """Catches windows in all layers, too few layers with windows, and windows that a file switches off."""
    one = published.read(write(tmp_path, MODELS[name]["config"] | changes))
    assert one.config.model.window == window
    assert [what for what in one.left_out if "window" in what] == [note] * bool(note)


def test_attention_is_counted_inside_the_windows(tmp_path):
    """By hand, for layers with windows of 4,096 and 0 positions. Catches windows in all layers or in none, blocks of
    keys that no window reaches, and windows that shorten other matmuls."""
    words = ["--topology", "v5p:4x4x4", "--data.batch_size", "64", "--data.seq_len", "16384", "--work.remat", "full",
             "--work.gather", "layer", "--work.device_batch", "1"]  # fmt: skip
    folder = write(tmp_path, MODELS["gemma-2-9b"]["config"] | {"max_position_embeddings": 32768})
    cfg, args = plan_command.parse([folder, *words, "--mesh", "fsdp=64"], published.read(folder).config)
    T, W, block = 16384, 4096, 512
    inside = sum(min(position + 1, W) for position in range(T))
    pairs = T * (T + 1) // 2
    ours, whole = (planner.plan(replace(cfg, **{"model.window": text}), args.topology) for text in ("4096:2", ""))
    span = attention.blocks_per_span(T, 256, 256, block, 2)  # of keys: the backward pass visits each at least once
    starts = range(0, T // block, span)

    def cost(window):  # of the forward pass, again, and of the backward pass, in matmuls of two blocks
        seen = [range(max(query - window // block, 0), query + 1) for query in range(T // block)]
        back = (len({*keys} & {*range(start, start + span)}) or 1 for keys in seen for start in starts)
        return 2 * 2 * sum(map(len, seen)) + 5 * sum(back)

    by_kernel = [sum(one.flops for one in plan.work if one.kernel == "attention") for plan in (ours, whole)]
    assert by_kernel[0] / by_kernel[1] == pytest.approx((cost(W) / cost(T) + 1) / 2)
    others = [sum(one.flops for one in plan.work if one.kernel != "attention") for plan in (ours, whole)]
    assert others[0] == others[1] and ours.step_s < whole.step_s
    scores = 6 * 2 * cfg.model.n_layers * cfg.model.n_heads * cfg.model.d_head
    assert whole.model_flops - ours.model_flops == pytest.approx(scores * (pairs - inside) / 2)


NOTES = [  # changes of Llama 2's config.json -> the part that is left out, and its parameters
    ({"attention_bias": True}, "attention biases", 32 * 4 * 4096),
    ({"mlp_bias": True}, "feed-forward biases", 32 * (2 * 11008 + 4096)),
    ({"pretraining_tp": 2}, "pretraining_tp=2: the plan has 1", 0),
    ({"n_hyper": 3, "gate": "new"}, "settings that the planner doesn't know: n_hyper, gate", 0),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}},
        "rope_scaling={'rope_type': 'dynamic', 'factor': 8.0}: the plan does not scale; it costs the same",
        0,
    ),
]


@pytest.mark.parametrize("changes, what, size", NOTES)
def test_a_setting_that_the_plan_ignores_is_named(changes, what, size, tmp_path):
    """Catches a setting that changes the model and is silently ignored."""
    one = published.read(write(tmp_path, LLAMA | changes))
    assert one.left_out == {what: size} and one.parameters == 6_738_415_616 + size


def test_a_multimodal_model_is_planned_without_its_encoders(tmp_path):
    """Gemma 3 4B, whose published file leaves out settings that have the default. Catches another library's default."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    one = published.read(write(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    # 4,300,079,472 published, of which the vision encoder and its projection have 416,866,032 and 2,950,272.
    assert one.parameters == 3_880_263_168 and one.config.model.tie_embeddings
    assert any("encoders" in what for what in one.left_out)


def test_a_cache_has_the_positions_of_the_windows(tmp_path, capsys):
    """By hand: gpt-oss-20b has windows of 128 positions in 12 of 24 layers, and 2 * 8 heads of 64 entries. Catches a
    cache of whole sequences, and a decode step that reads it."""
    folder = write(tmp_path, MODELS["gpt-oss-20b"]["config"])
    words = [folder, "--inference", "--topology", "v5p:2x2x1", "--mesh", "tensor=4", "--prompt", "3072", "--answer",
             "1024", "--batch", "8", "--json", "-"]  # fmt: skip
    assert main(words) == 0
    numbers = json.loads(capsys.readouterr().out)
    entry = 2 * 8 * 64 * 2  # bytes of a position in a layer
    assert numbers["cache_sequence_bytes"] == 12 * (128 + 4096) * entry
    (cache,) = (row for row in numbers["decode"] if row["part"] == "cache")
    assert cache["cache_bytes"] == 8 * (12 * (128 + 4096) + 24) * entry / 4
    assert cache["flops"] == 8 * 12 * (128 + 4096) * 2 * 2 * 64 * 64 / 4


REFUSED = [  # contents of config.json -> the message
    ("{", "not JSON"),
    ("[1]", "a config.json is a JSON object, but this is [1]"),
    ({"config": {}}, "has the settings of a run; pass it with --config "),
    ({"model_type": "qwen33"}, "model_type='qwen33' is unknown; did you mean 'qwen3'"),
    ({"model_type": "mamba"}, "to plan a similar model, change the settings of a preset, such as llama3_8b"),
    ({"hidden_size": 8}, "has no model_type; it is the name of the architecture, such as llama or qwen3"),
    (
        {"model_type": "qwen2", "vocab_size": 8},
        "has no hidden_size; a model of this type needs vocab_size, hidden_size",
    ),
    ({"model_type": "gpt_oss"} | {"vocab_size": 8}, "has no hidden_size"),
    (LLAMA | {"hidden_size": "4096"}, "hidden_size='4096': should be a whole number"),
    (LLAMA | {"num_attention_heads": 0}, "num_attention_heads=0: must be at least 1"),
    (LLAMA | {"num_key_value_heads": 5}, "must be a multiple of n_kv_heads (32 % 5 = 2)"),
]


@pytest.mark.parametrize("hf, why", REFUSED)
def test_a_config_that_cannot_be_planned_is_one_line(hf, why, tmp_path, capsys):
    """Catches a traceback, and an error that does not say which file and what to do."""
    assert main([write(tmp_path, hf)]) == 2
    out, said = capsys.readouterr()
    assert not out and said.startswith("error: ") and why in said and said.count("\n") == 1


def test_a_path_that_does_not_exist_is_one_line(tmp_path, capsys):
    """Catches a traceback, and a path that is called an unknown preset."""
    assert main([str(tmp_path / "no/config.json")]) == 2
    assert "nothing is downloaded; pass a preset, or a config.json of Hugging Face" in capsys.readouterr().err
    with pytest.raises(UserError, match="pass only one preset or --config file"):
        starting_point(["x/config.json", "--config", "y.json"], None, preset("tiny"))


def test_help_lists_every_model_type(capsys):
    """Catches a family that the planner reads and its help doesn't name, the only complete list on the command line."""
    with pytest.raises(SystemExit, match="0"):
        main(["laptop", "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {about["config"]["model_type"] for about in MODELS.values()} <= {*words}
