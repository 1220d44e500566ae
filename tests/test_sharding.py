"""Tests of settings, meshes, declarations, batches and collectives: valid values, errors and results."""

import dataclasses
import functools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec as P

import parameters
import sharding
from architectures import declare
from config import (
    PRESETS,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    WorkConfig,
    first_difference,
    preset,
    replace,
)
from config.fields import flatten
from config.flags import command_line
from pipeline import fit
from plan import planner
from sharding import AXES, DATA, FSDP, SLICED, TENSOR
from utils import UserError

# Meshes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, sizes, text_again", [
    ("fsdp=2,tensor=4", dict(fsdp=2, tensor=4), "fsdp=2,tensor=4"),
    ("dp=2, pp=3, ep=5, cp=7, tp=11", dict(data=2, stage=3, expert=5, context=7, tensor=11),
     "data=2,stage=3,expert=5,context=7,tensor=11"),
    ("tensor=4,fsdp=2", dict(fsdp=2, tensor=4), "fsdp=2,tensor=4"),
    ("", {}, "data=1"),
    ("pp=2,across=pp", dict(stage=2, across="stage"), "stage=2,across=stage"),
])  # fmt: skip
def test_mesh_parse_and_print_round_trip(text, sizes, text_again):
    """Catches a short form that means the wrong axis, and a printed mesh that parses to another mesh."""
    mesh = MeshConfig.parse(text)
    assert mesh == MeshConfig(**sizes)
    assert str(mesh) == text_again and MeshConfig.parse(str(mesh)) == mesh
    sizes = {axis: size for axis, size in sizes.items() if axis != "across"}
    assert mesh.devices == np.prod([*sizes.values(), 1])
    assert mesh.batch_shards == np.prod(
        [size for axis, size in sizes.items() if axis in ("data", "fsdp", "expert")] + [1]
    )


@pytest.mark.parametrize("text, message", [
    ("tensr=2", "unknown axis 'tensr'; did you mean 'tensor'? known: data, stage, fsdp, expert, context, tensor"),
    ("tensor=0", "'tensor=0' should be AXIS=SIZE, with a size of 1 or more, e.g. tensor=2"),
    ("tp=-2", "'tp=-2' should be AXIS=SIZE, with a size of 1 or more, e.g. tensor=2"),
    ("fsdp", "'fsdp' should be AXIS=SIZE, with a size of 1 or more, e.g. fsdp=2"),
    ("fsdp=1.5", "'fsdp=1.5' should be AXIS=SIZE"),
    ("data=2,dp=4", "axis 'data' is given twice"),
])  # fmt: skip
def test_invalid_mesh_text_is_refused(text, message):
    """Catches a typo that becomes a one-device run, and a message that does not name the wrong part."""
    with pytest.raises(UserError, match=re.escape(f"mesh {text!r}: {message}")):
        MeshConfig.parse(text)


def test_tensor_across_slices_is_refused():
    """Catches an axis that exchanges activations in every layer between slices."""
    with pytest.raises(UserError, match=r"^mesh.across='tensor': should be one of 'data', 'stage', 'fsdp'$"):
        MeshConfig.parse("tensor=4,across=tensor")


def test_mesh_axes_are_in_the_order_of_link_speed():
    """Catches neighbors along the fastest axis that are far apart, and devices that are used twice."""
    mesh = sharding.make_mesh("fsdp=2,tensor=3")
    assert mesh.axis_names == ("data", "stage", "fsdp", "expert", "context", "tensor") == AXES
    assert mesh.devices.shape == (1, 1, 2, 1, 1, 3)
    assert [d.id for d in mesh.devices.flat] == [0, 1, 2, 3, 4, 5]
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_a_mesh_larger_than_the_machine_is_refused():
    """Catches a crash deep in JAX instead of the arithmetic."""
    with pytest.raises(UserError, match=re.escape("mesh fsdp=4,tensor=3 needs 4 * 3 = 12 devices, and there are 8")):
        sharding.make_mesh("fsdp=4,tensor=3")
    with pytest.raises(UserError, match=re.escape("mesh expert=2 needs 2 devices, and there are 1")):
        sharding.make_mesh("expert=2", jax.devices()[:1])


def chips_of_slices(*sizes):
    """Return fake TPU devices in slices of these sizes, shuffled."""
    chips = [types.SimpleNamespace(id=10 * s + i, slice_index=s, platform="tpu", device_kind="a chip", process_index=s)
             for s, size in enumerate(sizes) for i in range(size)]  # fmt: skip
    return chips[1::2] + chips[::2]


@pytest.fixture
def on_no_torus(monkeypatch):
    """Arrange devices without the chip coordinates that JAX would read."""
    reshape = lambda sizes, devices, **_: np.array(sorted(devices, key=lambda d: d.id)).reshape(sizes)
    monkeypatch.setattr("jax.experimental.mesh_utils.create_device_mesh", reshape)
    monkeypatch.setattr(sharding, "Mesh", lambda devices, *_, **__: devices)


def test_only_data_crosses_slices(on_no_torus):
    """Catches weights gathered, or activations sent, over the slow network between slices."""
    chips = chips_of_slices(6, 6, 6)
    mesh = sharding.make_mesh("data=6,stage=3", chips)
    slices = np.vectorize(lambda chip: chip.slice_index)(mesh)[:, :, 0, 0, 0, 0]
    assert (slices == np.array([0, 0, 1, 1, 2, 2])[:, None]).all()
    assert len({chip.id for chip in mesh.flat}) == 18
    fits = sharding.make_mesh("stage=2,tensor=3", chips)
    assert {chip.slice_index for chip in fits.flat} == {0}
    some = sharding.make_mesh("data=2,tensor=5", chips)
    assert [chip.slice_index for chip in some.flat] == [0] * 5 + [1] * 5


@pytest.mark.parametrize("mesh, axis", [("stage=3,fsdp=4,across=fsdp", 2), ("stage=6,fsdp=2,across=pp", 1)])
def test_another_axis_crosses_slices_on_request(on_no_torus, mesh, axis):
    """Catches slices along the wrong axis: each must hold adjacent parts of this axis, and all of the others."""
    devices = np.moveaxis(sharding.make_mesh(mesh, chips_of_slices(6, 6)), axis, 0)
    slices = np.vectorize(lambda chip: chip.slice_index)(devices).reshape(len(devices), -1)
    assert (slices == np.repeat([0, 1], len(devices) // 2)[:, None]).all()


@pytest.mark.parametrize("mesh, message", [
    ("data=3,tensor=4", "only the axis 'data' spans the 2 slices, and data=3 is not a multiple of 2; use data=4"),
    ("fsdp=4,tensor=3", "data=1 is not a multiple of 2; use data=2 or across=fsdp"),
    ("fsdp=3,tensor=4,across=fsdp", "only the axis 'fsdp' spans the 2 slices, and fsdp=3 is not .*; use fsdp=4"),
])  # fmt: skip
def test_an_axis_that_slices_do_not_divide_is_refused(on_no_torus, mesh, message):
    """Catches a mesh that runs but takes ten times as long."""
    with pytest.raises(UserError, match=f"^mesh {mesh}: .*{message}$"):
        sharding.make_mesh(mesh, chips_of_slices(6, 6, 6))


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_a_round_trip(name):
    """Catches a setting lost on the way to config.json, and a nested one that comes back as a dict."""
    cfg = preset(name)
    again = Config.from_dict(json.loads(json.dumps(cfg.to_dict())))
    assert again == cfg
    assert first_difference(cfg.to_dict(), again.to_dict()) is None


def test_auto_settings_resolve_to_the_plain_values():
    """Catches an execution setting that stays `auto` when it is read, or another default."""
    settled = WorkConfig().resolved
    assert settled == WorkConfig("none", "layer", "gather", "gather", "positions", "gathered", "gather", 512, "gpipe")
    assert settled.auto_settings == ["microbatches", "device_batch"] and settled.resolved == settled
    cfg = preset("tiny", **{"work.tensor_exchange": "ring"})
    assert cfg.at_work.work == WorkConfig(tensor_exchange="ring", loss_chunk=36).resolved
    assert {name: getattr(cfg.at_work, name) for name in vars(cfg.model)} == vars(cfg.model)


def test_settings_change_by_dotted_name():
    """Catches an override that has no effect, changes another setting, or changes the preset itself."""
    cfg = preset("tiny", **{"model.n_heads": 6, "mesh": "fsdp=2", "model.precision": "mixed"})
    assert (cfg.model.n_heads, cfg.mesh, cfg.model.compute_dtype) == (6, MeshConfig(fsdp=2), "bfloat16")
    back = replace(cfg, **{"model.n_heads": 4, "mesh": MeshConfig(), "model.precision": "float32"})
    assert back == preset("tiny")
    assert first_difference(cfg.to_dict(), back.to_dict()) == "model.n_heads is 6 here and 4 there"


@pytest.mark.parametrize("call, message", [
    (lambda: preset("lapton"), f"unknown preset 'lapton'; did you mean 'laptop'? known: {', '.join(PRESETS)}"),
    (lambda: preset("tiny", **{"model.n_head": 3}), "'model.n_head'; did you mean 'model.n_heads'?"),
    (lambda: preset("tiny", **{"modle.n_heads": 3}), "'modle.n_heads'; did you mean 'model.n_heads'? closest of "
     f"{len(flatten(preset('tiny').to_dict()))}: model.n_heads, "),
    (lambda: preset("tiny", **{"x.y": 3}), "; all: python main.py --help"),
    (lambda: preset("tiny", **{"run.steps.x": 3}), "unknown setting 'run.steps.x'; did you mean 'run.steps'?"),
    (lambda: Config.from_dict({"optim": {"lrr": 1.0}}), "unknown setting optim.lrr; did you mean 'lr'?"),
])  # fmt: skip
def test_a_misspelt_name_is_refused_with_the_nearest(call, message):
    """Catches a typo that is silently ignored, and an answer that leaves the user to search."""
    with pytest.raises(UserError, match=re.escape(message)):
        call()


def test_heads_that_do_not_split_over_context_are_refused():
    """Catches an error from the compiler instead, arithmetic with the wrong heads or without `tensor`, and a suggestion
    that is refused too."""
    settings = {"work.context_attention": "all_to_all", "mesh": "context=4,tensor=4"}
    message = "model.n_kv_heads=8 does not split over tensor*context = 4*4 = 16 devices (8 % 16 = 8); use n_kv_heads=16"
    with pytest.raises(UserError, match=re.escape(f"{message}, mesh context=2, or work.context_attention=ring")):
        planner.plan(preset("llama3_8b", **settings))
    for more in ({"model.n_kv_heads": 16}, {"mesh": "context=2,tensor=4"}, {"work.context_attention": "ring"}):
        planner.plan(preset("llama3_8b", **settings | more))


@pytest.mark.parametrize("setting, message", [
    ({"attention": "gqa", "n_kv_heads": 3}, "model.n_heads=4: must be a multiple of n_kv_heads (4 % 3 = 1)"),
    ({"d_rope": 15}, "model.d_rope=15: must be even"),
    ({"attention": "gqa", "d_head": 15}, "model.d_head=15: must be even"),
    ({"n_experts": 8, "top_k": 9}, "model.top_k=9: must be between 1 and n_experts=8"),
    ({"dropout": 1.0}, "model.dropout=1.0: must be at least 0 and below 1"),
    ({"n_experts": 8, "n_layers": 12, "moe_every": 3, "dense_prefix": 1},
     "model.n_layers=12: n_layers - dense_prefix = 11 must be a positive multiple of 3, the length of the "),
    ({"n_layers": 2, "dense_prefix": 3}, "; use 4 layers"),
    ({"n_layers": 3, "dense_prefix": 3}, "; use 4 layers"),
    ({"attention": "MLA"}, "model.attention='MLA': should be one of 'mla', 'gqa'"),
    ({"norm_eps": -1.0}, "model.norm_eps=-1.0: must be at least 0, and finite"),
    ({"qk_norm": True}, "model.qk_norm=True has no effect: only attention='gqa' uses it, and model.attention is 'mla'"),
    ({"n_experts": 8, "expert_groups": (3, 1)}, "model.expert_groups=(3, 1): must divide n_experts=8 into groups of"),
    ({"n_experts": 8, "expert_groups": (4, 1), "top_k": 3}, "model.expert_groups=(4, 1): a token needs top_k=3 "
     "experts, in groups of 2"),
    ({"n_layers": 2.5}, "model.n_layers=2.5: should be a whole number"),
    ({"n_layers": True}, "model.n_layers=True: should be a whole number"),
    ({"z_loss": float("nan")}, "model.z_loss=nan: must be at least 0, and finite"),
])  # fmt: skip
def test_an_invalid_model_is_refused(setting, message):
    """Catches a shape that fails only in compilation, and a suggested size that is invalid too."""
    with pytest.raises(UserError, match=re.escape(message)):
        ModelConfig(**setting)
    if "; use" in message:
        for n_layers in map(int, re.findall(r"\d+", message.split("; use")[1])):
            ModelConfig(**{**setting, "n_layers": n_layers})


@pytest.mark.parametrize("make, message", [
    (lambda: ModelConfig(precision="float8"), "model.precision='float8': should be one of 'float32', 'mixed', "),
    (lambda: OptimConfig(lr=-1), "optim.lr=-1: must be at least 0, and finite"),
    (lambda: OptimConfig(adamw="b2=1.5"), "optim.adamw='b2=1.5': b2=1.5: must be at least 0 and below 1"),
    (lambda: OptimConfig(adamw="beta2=0.9"), "optim.adamw='beta2=0.9': should be b1=DECAY,b2=DECAY,eps=NUMBER,"),
    (lambda: OptimConfig(adamw="moments=int8"), "moments='int8': should be one of 'parameters', 'float32', 'bfloat16'"),
    (lambda: OptimConfig(warmup_steps=-3), "optim.warmup_steps=-3: must be at least 0"),
    (lambda: OptimConfig(adamw="eps=0"), "optim.adamw='eps=0': eps=0.0: must be above 0, and finite"),
    (lambda: OptimConfig(name="sgd"), "optim.name='sgd': should be one of 'adamw', 'adafactor', 'muon'"),
    (lambda: OptimConfig(schedule="wds"), "optim.schedule='wds': 'wds' should be cosine:FINAL, wsd:DECAY:FINAL, "),
    (lambda: OptimConfig(schedule=""), "optim.schedule='': '' should be cosine:FINAL, wsd:DECAY:FINAL, "),
    (lambda: OptimConfig(schedule="0:1,9:x"), "optim.schedule='0:1,9:x': '9:x' should be cosine:FINAL, wsd:DECAY"),
    (lambda: OptimConfig(schedule="9:1,9:0"), "'9:0' should be cosine:FINAL, wsd:DECAY:FINAL, rsqrt, or STEP"),
    (lambda: OptimConfig(schedule="wsd:1.1"), "optim.schedule='wsd:1.1': decay=1.1: must be between 0 and 1"),
    (lambda: OptimConfig(schedule="cosine:0.1:0.2"), "'cosine:0.1:0.2' should be cosine:FINAL, wsd:DECAY:FINAL"),
    (lambda: OptimConfig(schedule="rsqrt:0.5"), "'rsqrt:0.5' should be cosine:FINAL, wsd:DECAY:FINAL, rsqrt, or"),
    (lambda: WorkConfig(schedule="zzz"), "work.schedule='zzz': should be one of auto, gpipe, 1f1b, "),
    (lambda: MeshConfig(fsdp=0), "mesh.fsdp=0: must be at least 1"),
    (lambda: DataConfig(path=3), "data.path=3: should be text"),
    (lambda: ModelConfig(tie_embeddings="no"), "model.tie_embeddings='no': should be true or false"),
    (lambda: ModelConfig(softmax="cap:50"), "model.softmax='cap:50': should be empty, sinks, or cap:SCORES:LOGITS "),
    (lambda: ModelConfig(softmax="cap:0:0.0"), "one may be 0, which is no cap"),
    (lambda: ModelConfig(bias="no"), "model.bias='no': 'no' should be one of feed_forward, logits, "),
    (lambda: ModelConfig(bias="logits,logits"), "attention, experts, given once"),
    (lambda: preset("laptop", **{"optim.lr": float("inf")}), "optim.lr=inf: must be at least 0, and finite"),
])  # fmt: skip
def test_the_library_refuses_what_the_command_line_does(make, message):
    """Catches settings from Python that are not checked: a misspelled schedule, a negative learning rate."""
    with pytest.raises(UserError, match=re.escape(message)):
        make()


def test_numpy_numbers_are_accepted():
    """Catches a type check that accepts only Python's own numbers."""
    assert OptimConfig(lr=np.float32(0.5), warmup_steps=np.int64(3)) == OptimConfig(lr=0.5, warmup_steps=3)


@pytest.mark.parametrize("start, given, follows", [
    ("laptop", {"n_heads": 8}, {"n_kv_heads": 8, "d_head": 16}),
    ("laptop", {"n_heads": 8, "d_model": 256}, {"n_kv_heads": 8, "d_head": 32}),
    ("dense_124m", {"d_model": 384}, {"n_kv_heads": 12, "d_head": 32}),
    ("dense_124m", {"n_heads": 6, "n_kv_heads": 3}, {"n_kv_heads": 3, "d_head": 128}),
    ("dense_124m", {"n_heads": 6, "d_head": 64}, {"n_kv_heads": 6, "d_head": 64}),
    ("llama3_8b", {"n_heads": 64}, {"n_kv_heads": 8, "d_head": 64}),  # grouped: as many groups as before
    ("tiny", {"n_heads": 6}, {"n_kv_heads": 2, "d_head": 10}),  # heads that were no equal shares before
])  # fmt: skip
def test_heads_follow_the_model_width(start, given, follows):
    """Catches a head width or key/value head count of the old model that stays, from Python or from flags."""
    by_name = preset(start, **{f"model.{name}": value for name, value in given.items()}).model
    flags = [word for name, n in given.items() for word in (f"--model.{name.replace('_', '-')}", str(n))]
    by_flag = command_line([start, *flags], "main.py", "")[0].model
    assert by_flag == by_name == dataclasses.replace(by_name, **given | follows)


def test_heads_that_do_not_divide_the_model_width_are_refused():
    """Catches heads of width 18 with a remainder, and a suggested number of heads that does not divide either."""
    arithmetic = "model.n_heads=7 does not divide d_model=128 (128 % 7 = 2); use 4 or 8 heads, or set model.d_head"
    with pytest.raises(UserError, match=re.escape(arithmetic)):
        preset("laptop", **{"model.n_heads": 7})


# Declarations ---------------------------------------------------------------------------------------------------------


@struct.dataclass
class Pair:
    w_XY: object = sharding.param("XY", fan_in="X", X=(FSDP, DATA), Y=TENSOR)
    gain_Y: object = sharding.param("Y", mean=2.0, decay=False)
    bias_X: object = sharding.param("X", needs=lambda c: c.biased)
    inner: object = None


def pair(X=6, Y=10, biased=True, **more):
    c = types.SimpleNamespace(biased=biased, n_layers=3, param_dtype="float32")
    return sharding.declare(Pair, dict(X=X, Y=Y, L=3), c, **more)


def test_a_declaration_is_read_once_and_stacked():
    """Catches a stacked dim that is not sharded or counts as fan-in, and a field that should not exist."""
    d = pair(stacked="L", stacked_axes={"L": "stage"}, biased=False)
    assert d.bias_X is None and d.inner is None
    assert (d.w_XY.dims, d.w_XY.shape, d.w_XY.spec) == ("LXY", (3, 6, 10), P("stage", (FSDP, DATA), TENSOR))
    assert (d.w_XY.size, d.gain_Y.mean, d.gain_Y.std) == (180, 2.0, 0.0)
    assert d.w_XY.std == pytest.approx(6**-0.5)
    assert (d.w_XY.decay, d.gain_Y.decay) == (True, False)
    assert (
        list(sharding.flatten_named(pair(inner=pair())))
        == "w_XY gain_Y bias_X inner.w_XY inner.gain_Y inner.bias_X".split()
    )
    shape = sharding.shapes(d, sharding.make_mesh("tensor=2")).w_XY
    assert (shape.shape, shape.dtype, shape.sharding.spec) == ((3, 6, 10), jnp.float32, d.w_XY.spec)


def test_a_matrix_is_also_sharded_over_its_replicas():
    """Catches a dim that does not split evenly, axes in an order that no all-gather can undo, an axis left out, and
    norms that are split."""

    def stored(mesh):
        cfg = preset("tiny", **{"mesh": mesh, "optim.shard_over_data": True})
        declared, new = (sharding.flatten_named(tree) for tree in (declare(cfg.model), parameters.declare_stored(cfg)))
        return {name: (d.spec, new[name].spec) for name, d in declared.items()}

    found = stored("data=2,fsdp=2,tensor=2")
    assert found["embedding_VD"] == (P(TENSOR, SLICED), P((TENSOR, DATA, "stage"), SLICED))
    query = "blocks.moe.attention.w_down_query_DQ"  # [2, 24, 20]: 2 blocks do not split over data * tensor = 4
    assert found[query] == (P("stage", SLICED, None), P("stage", (*SLICED, DATA, TENSOR), None))
    assert found["norm_D"] == (P(None), P(None))
    same = {name for name, (declared, new) in stored("data=11,tensor=2").items() if declared == new}
    assert query in same, "no dim splits over 22 replicas"
    assert all(declared == new for declared, new in stored("fsdp=2,tensor=2").values())


def test_adding_a_parameter_changes_no_other():
    """Catches random keys that depend on the order of fields: a new field would change every parameter after it."""
    mesh = sharding.make_mesh("data=1")
    small, large = parameters.init(pair(), mesh, 5), parameters.init(pair(inner=pair()), mesh, 5)
    np.testing.assert_array_equal(small.w_XY, large.w_XY)
    assert np.all(np.asarray(large.inner.w_XY) != np.asarray(large.w_XY)), "two parameters start equal"
    assert np.all(np.asarray(parameters.init(pair(), mesh, 6).w_XY) != np.asarray(small.w_XY)), "the seed does nothing"
    np.testing.assert_array_equal(small.gain_Y, np.full(10, 2.0, np.float32))


def test_a_dim_that_does_not_split_is_refused():
    """Catches a message without the parameter, the letter, or a size that works."""
    message = (
        "cannot split X=6 of inner.w_XY over mesh axes fsdp*data = 4 devices (6 % 4 = 2); "
        "use a multiple of 4, or a smaller axis"
    )
    mesh = sharding.make_mesh("fsdp=2,data=2")
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        sharding.check_divides(pair(X=8, inner=pair()), mesh)
    with pytest.raises(UserError, match="cannot split X=6 of w_XY"):
        parameters.init(pair(), mesh, 0)
    sharding.check_divides(pair(X=8), mesh)


# Batches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size, mesh, limit, split", [
    (48, "data=2,fsdp=3,tensor=5", "auto", (6, 8, 1)),
    (48, "data=2,expert=3", 3, (6, 2, 4)),  # 8 sequences a device, at most 3 at once: 2 divides 8, 3 does not
    (48, "context=4", 48, (1, 48, 1)),
    (48, "fsdp=48", 7, (48, 1, 1)),
])  # fmt: skip
def test_batch_split_arithmetic(batch_size, mesh, limit, split):
    """Catches axes with the same sequences that count as batch shards, and a microbatch above the limit."""
    sizes = {"data.batch_size": batch_size, "data.seq_len": 40, "work.device_batch": limit}
    found = fit.split_batch(preset("tiny", mesh=mesh, **sizes))
    assert (found.shards, found.device_batch, found.accumulation) == split
    assert found.batch_size == batch_size == found.shards * found.device_batch * found.accumulation
    shards, device_batch, passes = split
    assert str(found) == (
        f"48 sequences a step = {shards} batch shards x {device_batch} sequences x {passes} accumulation passes"
    )


@pytest.mark.parametrize("batch_size, mesh, near, into", [
    (20, "fsdp=6", "18 or 24", "5 or 10"), (3, "data=2,fsdp=2,expert=2", "8", "3"),
])  # fmt: skip
def test_a_batch_that_does_not_split_is_refused_with_the_nearest(batch_size, mesh, near, into):
    """Catches a suggested size that does not divide either, or is 0."""
    cfg = preset("tiny", mesh=mesh, **{"data.batch_size": batch_size})
    shards = cfg.mesh.batch_shards
    message = (
        f"cannot split data.batch_size={batch_size} sequences over data*fsdp*expert = {shards} batch shards "
        f"({batch_size} % {shards} = {batch_size % shards}); use data.batch_size={near}, "
        f"or a --mesh with data*fsdp*expert = {into}"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        fit.split_batch(cfg)
    for suggestion in near.split(" or "):
        fit.split_batch(replace(cfg, **{"data.batch_size": int(suggestion)}))
    for suggestion in into.split(" or "):
        fit.split_batch(replace(cfg, mesh=MeshConfig(fsdp=int(suggestion))))


def test_positions_that_do_not_split_are_refused_with_the_nearest():
    """Catches a sequence that fails only in compilation, and an axis counted that does not shard positions."""
    message = (
        "cannot split data.seq_len=18 positions over context*tensor = 4 devices (18 % 4 = 2); "
        "use data.seq_len=16 or 20, or a --mesh with context*tensor = 3 or 6"
    )
    cfg = preset("tiny", mesh="context=2,tensor=2,fsdp=2")
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        fit.split_batch(cfg)
    for seq_len in (16, 20):
        fit.split_batch(replace(cfg, **{"data.seq_len": seq_len}))


def test_put_shards_a_batch_as_the_model_expects():
    """Catches sequences or positions placed on the wrong devices."""
    tokens_BT = np.arange(12 * 9).reshape(12, 9)
    x = sharding.put({"tokens_BT": tokens_BT}, sharding.make_mesh("fsdp=2,context=3"))["tokens_BT"]
    np.testing.assert_array_equal(x, tokens_BT)
    held = [shard.data for shard in sorted(x.addressable_shards, key=lambda shard: shard.device.id)]
    for device, (fsdp, context) in enumerate(np.ndindex(2, 3)):
        np.testing.assert_array_equal(held[device], tokens_BT[6 * fsdp :][:6, 3 * context :][:, :3])


# Collectives ----------------------------------------------------------------------------------------------------------
# Device 0 holds x[0], device 1 holds x[1]; g is the gradient of each device's output, `pull` gives that of its input.

N, X, Y = 2, 4, 6  # devices, and the dims of what one device holds


@functools.cache
def on_two_devices(name):
    """Return fn(x, g) -> the outputs and backward passes of two devices, stacked along a leading dim of devices."""
    collective = {
        "all_gather": lambda x: sharding.all_gather(x, TENSOR, dim=1),
        "reduce_scatter": lambda x: sharding.reduce_scatter(x, TENSOR, dim=0),
        "psum": lambda x: sharding.psum(x, TENSOR),
        "all_to_all": lambda x: sharding.all_to_all(x, TENSOR, split_dim=1, join_dim=0),
    }[name]

    def local(x, g):
        out, pull = jax.vjp(collective, x[0])
        g = sharding.psum(g[0], TENSOR) / N if name == "psum" else g[0]  # everywhere the same, as the output is
        return sharding.vary(out, (TENSOR,))[None], pull(g)[0][None]

    mesh = sharding.make_mesh("tensor=2")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(TENSOR), P(TENSOR)), out_specs=(P(TENSOR), P(TENSOR))))


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def call(name, x, g):
    return [np.asarray(y) for y in on_two_devices(name)(x, g)]


def test_all_gather_concatenates_and_its_backward_is_reduce_scatter():
    """Catches shards concatenated along the wrong dim or stacked, and a backward pass that slices without adding."""
    x, g = random(N, X, Y), random(N, X, N * Y, seed=1)
    out, back = call("all_gather", x, g)
    for device in range(N):
        np.testing.assert_array_equal(out[device], np.concatenate([x[0], x[1]], axis=1))
        np.testing.assert_allclose(back[device], (g[0] + g[1])[:, device * Y : (device + 1) * Y], rtol=1e-6)


def test_reduce_scatter_adds_and_its_backward_is_all_gather():
    """Catches a slice without the sum, and a backward pass divided by the number of devices."""
    x, g = random(N, X, Y), random(N, X // N, Y, seed=1)
    out, back = call("reduce_scatter", x, g)
    for device in range(N):
        np.testing.assert_allclose(out[device], (x[0] + x[1])[device * X // N : (device + 1) * X // N], rtol=1e-6)
        np.testing.assert_array_equal(back[device], np.concatenate([g[0], g[1]], axis=0))


def test_psum_adds_and_its_backward_sends_nothing():
    """Catches the doubled gradient of a psum whose backward pass is another psum."""
    x, g = random(N, X, Y), random(N, X, Y, seed=1)
    out, back = call("psum", x, g)
    for device in range(N):
        np.testing.assert_allclose(out[device], x[0] + x[1], rtol=1e-6)
        np.testing.assert_allclose(back[device], (g[0] + g[1]) / N, rtol=1e-6)  # what came in, on every device


def test_all_to_all_and_its_backward_is_the_inverse():
    """Catches chunks concatenated in the wrong order, or split along the dim of the concatenation."""
    x, g = random(N, X, Y), random(N, N * X, Y // N, seed=1)
    out, back = call("all_to_all", x, g)
    for device in range(N):
        piece = slice(device * Y // N, (device + 1) * Y // N)
        np.testing.assert_array_equal(out[device], np.concatenate([x[0][:, piece], x[1][:, piece]], axis=0))
        np.testing.assert_array_equal(back[device], np.concatenate([g[0], g[1]], axis=1)[device * X : (device + 1) * X])


def test_vary_changes_the_type_only_and_its_backward_adds():
    """Catches a gradient of a replicated value that is not summed over devices, and a second vary that sums again."""

    def local(x, g):
        varied = lambda x: sharding.vary(sharding.vary(x, (TENSOR,)), (TENSOR, FSDP))
        out, pull = jax.vjp(varied, x)
        assert jax.typeof(out).mat.varying == {TENSOR, FSDP} and not jax.typeof(x).mat.varying
        return out[None], pull(sharding.vary(g[0], (FSDP,)))[0]

    split = P((FSDP, TENSOR))
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    x, g = random(X, Y), random(4, X, Y, seed=1)
    out, back = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), split), out_specs=(split, P())))(x, g)
    np.testing.assert_array_equal(out, np.stack([x] * 4))
    np.testing.assert_allclose(back, g.sum(axis=0), rtol=1e-5)


def test_declarations_are_leaves():
    """Catches a Declaration that becomes a pytree: maps over declarations would then descend into it."""
    assert jax.tree.leaves(pair()) == [pair().w_XY, pair().gain_Y, pair().bias_X]
    assert dataclasses.is_dataclass(pair().w_XY)
