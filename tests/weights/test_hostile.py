"""Folders of weights with damaged or hostile files give a result or one line that names the file, never a traceback."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors

from utils import UserError
from weights import convert, folders, published
from weights.families import FAMILIES
from weights.hf_config import config_from_hf

FIXTURES = Path(__file__).parent / "fixtures"
F32 = lambda start, stop, *shape, dtype="F32": {"dtype": dtype, "shape": [*shape], "data_offsets": [start, stop]}
HEADERS = {  # of 24 bytes of data
    "whole": {"a": F32(0, 8, 2), "b": F32(8, 24, 2, 2)},
    "another order, and an empty tensor": {"b": F32(8, 24, 4), "c": F32(8, 8, 0), "a": F32(0, 8, 2)},
    "metadata": {"__metadata__": {"format": "pt"}, "a": F32(0, 24, 6)},
    "in the header": {"a": F32(-16, 0, 4), "b": F32(0, 24, 6)},
    "overlap": {"a": F32(0, 16, 4), "b": F32(8, 24, 4)},
    "twice": {"a": F32(0, 24, 6), "b": F32(0, 24, 6)},
    "hole": {"a": F32(0, 8, 2), "b": F32(16, 24, 2)},
    "late": {"a": F32(8, 24, 4)},
    "short": {"a": F32(0, 16, 4)},
    "long": {"a": F32(0, 32, 8)},
    "backward": {"a": F32(0, 24, 6), "b": F32(24, 8, 4, dtype="I32")},
    "other size": {"a": F32(0, 24, 5)},
    "three offsets": {"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 8, 24]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [6]}},
    "no dict": {"a": [0, 24]},
    "negative dims": {"a": F32(0, 24, -2, -3)},
    "float dims": {"a": F32(0, 24, 6.0)},
    "bool dims": {"a": F32(0, 24, True, 6)},
    "text dims": {"a": F32(0, 24, "6")},
    "text as shape": {"a": {"dtype": "F32", "shape": "6", "data_offsets": [0, 24]}},
    "float offsets": {"a": {"dtype": "F32", "shape": [6], "data_offsets": [0.0, 24.0]}},
    "dtype is a list": {"a": F32(0, 24, 6, dtype=["F32"])},
    "dtype is null": {"a": F32(0, 24, 6, dtype=None)},
    "huge dims": {"a": F32(0, 24, 2**62, 2**62)},
    "list": [],
    "null": None,
}  # fmt: skip


def write_header(file, header, data_bytes=24) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(data_bytes)))


def refusal(function, *args) -> str:
    """Return the message with which a function refuses its arguments; "" if it returns."""
    try:
        function(*args)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_read_as_the_library_reads_it(name, tmp_path):
    """Catches a tensor whose numbers are bytes of the header or of another tensor, and a size that is no number."""
    file = tmp_path / "model.safetensors"
    write_header(file, HEADERS[name])
    try:
        with safetensors.safe_open(file, "numpy") as opened:
            names = opened.keys()
            want = {key: opened.get_tensor(key) for key in names}
    except (safetensors.SafetensorError, TypeError):
        assert f"{file} is damaged or not a safetensors file: " in refusal(folders.Tensors, folders.Folder(tmp_path))
        assert name not in ("whole", "another order, and an empty tensor", "metadata")
        return
    tensors = folders.Tensors(folders.Folder(tmp_path))
    assert {key: tensors.arrays[key].shape for key in tensors.arrays} == {key: x.shape for key, x in want.items()}
    for key, x in want.items():
        assert not x.size or np.array_equal(tensors.read(key), x), key


@pytest.mark.parametrize("header", [b"[" * 100_000, b"{", b"\xff", b"9" * 5000, b'{"a": NaN}', b""])
def test_a_header_that_is_not_json_is_refused(header, tmp_path):
    """Catches a traceback of the parser."""
    write_header(tmp_path / "model.safetensors", header)
    assert "model.safetensors is damaged or not a safeten" in refusal(folders.Tensors, folders.Folder(tmp_path))


def test_a_huge_header_is_not_read(tmp_path, monkeypatch):
    """Catches a sparse file of a few bytes on the disk that fills the memory."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((3 * 2**30).to_bytes(8, "little"))
        file.truncate(4 * 2**30)
    reads, read = [], folders.Folder.read

    def recording_read(folder, name, start=0, stop=None):
        reads.append(stop)
        return read(folder, name, start, stop)

    monkeypatch.setattr(folders.Folder, "read", recording_read)
    assert "the header would end at byte 3221225480 of " in refusal(folders.Tensors, folders.Folder(tmp_path))
    assert reads == [8]


OUTSIDE = ["../outside.safetensors", "/outside.safetensors", "x/../../outside.safetensors", "..", "", "a\0.safetensors",
           "..\\outside.safetensors", "config.json", 5, None, ["a.safetensors"], {"a": "b"}]  # fmt: skip


@pytest.mark.parametrize("index", [{"weight_map": {"a": name}} for name in OUTSIDE]
                         + [{}, [], 5, {"weight_map": ["a.safetensors"]}, {"weight_map": None}])  # fmt: skip
def test_an_index_names_only_files_of_its_folder(index, tmp_path):
    """Catches a download that reads other files of this machine, and a traceback for another type."""
    (tmp_path / "in/x").mkdir(parents=True)
    write_header(tmp_path / "outside.safetensors", HEADERS["whole"])
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index))
    said = refusal(folders.Tensors, folders.Folder(tmp_path / "in"))
    assert said.startswith(f"{tmp_path}/in/model.safetensors.index.json")


def test_an_index_decides_which_of_two_tensors_is_read(tmp_path):
    """Catches a tensor that two files contain, and that is read from the one that the index does not name."""
    for name in ("1.safetensors", "2.safetensors"):
        write_header(tmp_path / name, {"a": F32(0, 24, 6)} | ({"b": F32(24, 32, 2)} if name[0] == "2" else {}),
                     24 if name[0] == "1" else 32)  # fmt: skip
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    arrays = folders.Tensors(folders.Folder(tmp_path)).arrays
    assert {name: array.file for name, array in arrays.items()} == {"a": "1.safetensors", "b": "2.safetensors"}


# config.json ----------------------------------------------------------------------------------------------------------

ODD = (None, "", "linear", True, -1, 0, 1.5, float("inf"), float("nan"), 10**400, [], ["a"], [[]], {}, {"a": 1},
       {"rope_type": []}, {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 10**400},
       {"full_attention": 5})  # fmt: skip
NESTED = ("rope_scaling", "rope_parameters", "quantization_config", "layer_types", "text_config", "sliding_window",
          "num_nextn_predict_layers", "n_group", "num_local_experts", "experts_per_token")  # fmt: skip
RENAMED = {"rope_parameters": "rope_scaling", "num_local_experts": "num_experts", "text_config": "model_type",
           "_sliding_window_pattern": "sliding_window_pattern"}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("read", [config_from_hf, published.describe])
def test_every_odd_value_in_config_json_is_refused_by_name(family, read):
    """Catches a traceback for a setting of another type, and a message about another setting than the one to mend."""
    base = folders.Folder(FIXTURES / family).json("config.json")
    for name in {*base, *NESTED}:
        for value in ODD:
            said = refusal(read, base | {name: value})
            if isinstance(value, str | list | dict | float) and said:
                assert name in said or RENAMED.get(name, name) in said, (name, value, said)
            assert name != "model_type" or said, value


@pytest.mark.parametrize("size", [2**31, 2**70, 10**400], ids=["2**31", "2**70", "10**400"])
def test_a_size_beyond_all_models_ends_in_one_line(size, tmp_path):
    """Catches a float that overflows while the planner counts, and a conversion that lists a billion layers."""
    base = folders.Folder(FIXTURES / "deepseek_v3").json("config.json")
    (tmp_path / "model.safetensors").write_bytes((FIXTURES / "deepseek_v3/model.safetensors").read_bytes())
    for name in ("num_hidden_layers", "hidden_size", "n_routed_experts", "vocab_size", "num_nextn_predict_layers"):
        (tmp_path / "config.json").write_text(json.dumps(base | {name: size}))
        refusal(lambda: published.read(str(tmp_path)).lines())
        said = refusal(convert.from_hf, str(tmp_path), str(tmp_path / "out"))
        assert str(tmp_path) in said or name in said or name == "num_nextn_predict_layers", said


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "5", "null", '"text"', "9" * 5000, "", '{"model_type": []}'])
def test_a_config_json_that_is_no_object_is_refused(text, tmp_path):
    """Catches a traceback of the parser, in the planner and in the conversions."""
    (tmp_path / "config.json").write_text(text)
    for read in (published.read, convert.read_about, lambda path: convert.from_hf(path, tmp_path / "out")):
        assert f"{tmp_path}/config.json" in refusal(read, str(tmp_path)) or "model_type=[]" in refusal(
            read, str(tmp_path)
        )


# A run that was exported ----------------------------------------------------------------------------------------------

ABOUT = {"family": "llama", "hf": {}, "data": {"source": "text:x", "tokenizer": {"name": "bytes"}},
         "slim": {"step": 3, "rows": {"train": {"step": 3, "loss": 1.0, "tokens": 5},
                                      "eval": {"step": 3, "loss": 1.0, "bits_per_byte": 1.0}}}}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory, converted from a Llama."""
    directory = tmp_path_factory.mktemp("run") / "llama"
    convert.from_hf(str(FIXTURES / "llama"), str(directory))
    return directory


def paths(values, at=()):
    for name, value in values.items() if isinstance(values, dict) else ():
        yield (*at, name)
        yield from paths(value, (*at, name))


@pytest.mark.parametrize("at", [*paths(ABOUT | {"config": {"model": None, "data": None}})], ids=".".join)
def test_odd_values_in_the_config_of_a_run_end_in_one_line(at, run, tmp_path):
    """Catches a traceback of `to-hf`, `slim` and --init-from, and what it leaves behind."""
    shutil.copytree(run, tmp_path / "run")
    whole = json.loads((run / "config.json").read_text()) | ABOUT
    for value in ("x", True, -1, 10**400, [], ["a"], {"a": 1}):
        place = (changed := json.loads(json.dumps(whole)))
        for name in at[:-1]:
            place = place[name]
        place[at[-1]] = value
        (tmp_path / "run/config.json").write_text(json.dumps(changed))
        refusal(convert.read_config, tmp_path / "run")
        if refusal(convert.to_hf, str(tmp_path / "run"), str(tmp_path / "out")):
            assert not [*tmp_path.glob("out*")]
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
