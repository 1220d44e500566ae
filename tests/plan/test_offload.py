"""Activations that `work.remat` lists: their bytes on the device and on its host, and the time to copy them."""

import dataclasses

import jax
import pytest

import model
import pipeline
import sharding
from config import preset, replace
from config.fields import ACTIVATIONS
from plan import planner
from plan.answer import show
from plan.chips import hardware
from plan.count import costs, memory
from plan.time import measured, offload
from tests import helpers
from utils import UserError

EVERY = ",".join(f"{name}@host" for name in ACTIVATIONS)
GROUPED = helpers.GROUPED | {"dense_prefix": 0}
MODELS = {
    "mla": {"n_layers": 2, "moe_every": 1},
    "gqa": GROUPED | {"n_layers": 4, "activation": "gelu", "capacity_factor": 1.0},
    "parallel": GROUPED | {"n_layers": 2, "parallel_residual": True, "n_experts": 0, "norm": "layer"},
    "prefix": {"n_layers": 1, "dense_prefix": 0, "n_experts": 0, "prefix_lm": True},
}
WIDE = {"data.batch_size": 32, "data.seq_len": 4096, "work.gather": "layer", "mesh": "fsdp=32"}


def config(name, mesh, remat, way="gather"):
    settings = {f"model.{key}": value for key, value in MODELS[name].items()}
    return preset("tiny", mesh=mesh, **settings, **{"work.remat": remat, "work.context_attention": way,
                                                   "data.batch_size": 4, "data.seq_len": 24})  # fmt: skip


def copied_bytes(cfg):
    """Return the bytes that one device copies to its host for one layer of each kind, in the trace of a step."""
    step = pipeline.loss_and_grads(cfg, sharding.make_mesh(cfg.mesh))
    jaxpr = jax.make_jaxpr(step)(helpers.draw(model.declare(cfg.model)), helpers.random_batch(cfg, seed=0), 3).jaxpr
    puts = [one for one in helpers.equations(jaxpr) if one.primitive.name == "device_put"]
    arrays = [x.aval for one in puts if "Host" in str(one.params["devices"]) for x in one.outvars]
    assert len(puts) >= 2 * len(arrays)  # each is copied back; in a ring, once for each form of a step
    return sum(x.size * x.dtype.itemsize for x in arrays)


def planned_bytes(cfg, on_host, platform="tpu"):
    c, z = cfg.at_work, costs.Sizes.from_config(cfg, platform)
    kinds = [kind for kind, many in costs.layer_counts(c, z).items() if many]
    return sum(memory.listed_bytes(c, z, kind, on_host) for kind in kinds)


@pytest.mark.parametrize("name, mesh, way", [
    ("mla", "expert=2,fsdp=2", "gather"), ("mla", "context=2", "ring"), ("gqa", "tensor=2,context=2", "gather"),
    ("gqa", "context=2", "all_to_all"), ("parallel", "tensor=2", "gather"), ("prefix", "fsdp=2", "gather"),
])  # fmt: skip
def test_the_host_stores_the_planned_bytes(name, mesh, way):
    """Catches a wrong size of an activation, and one that the layer does not name."""
    cfg = config(name, mesh, EVERY, way)
    assert copied_bytes(cfg) == planned_bytes(cfg, on_host=True) > 0
    assert planned_bytes(cfg, on_host=False) == 0


def test_the_device_stores_what_the_host_does_not():
    """Catches an input that nobody stores, and a CPU that is planned with a second memory."""
    on_both = config("mla", "fsdp=2", "queries,keys@host,hidden")
    whole = planned_bytes(config("mla", "fsdp=2", "input,queries,keys,hidden"), on_host=False)
    device, host = (planned_bytes(on_both, where) for where in (False, True))
    assert device + host == whole and 0 < host < device
    assert planned_bytes(on_both, False, "cpu") == whole and planned_bytes(on_both, True, "cpu") == 0
    assert planned_bytes(config("mla", "fsdp=2", "full"), False) == 2 * 4 * 2 * 24 * on_both.model.d_model


def llama(topology, remat):
    settings = WIDE | {"work.remat": remat}
    return planner.plan(preset("llama3_8b", **settings), topology)


def test_the_time_of_copies_by_hand():
    """Catches copies that are counted once for both directions, and a time that overlap does not shorten."""
    one = llama("v5e:4x8", "input@host,queries@host")
    sent = 32 * 2 * 4096 * 4096 * 2  # layers * activations * positions * width * bytes
    assert offload.step_bytes(one) == sent
    assert offload.host_bytes(one) == 4 * sent  # of the 4 chips of a host
    assert offload.host_bytes(dataclasses.replace(one, topology=hardware.Topology.parse("v5e:1x1"))) == sent
    one_way, compute = sent / 1.5e10, 8 * sent / 1.5e10
    assert offload.exposed_seconds(one, compute) == 0
    assert offload.exposed_seconds(one, 0.0) == pytest.approx(2 * one_way)
    # Of four equal parts (forward, recomputation, gradients of inputs and of weights) the first is the forward pass
    assert offload.exposed_seconds(one, 2 * one_way) == pytest.approx(0.5 * one_way)


def test_a_faster_host_shortens_the_step():
    """Catches exposed copies that are missing in the compiled step, in the roofline or in the real step."""
    slow, plain = llama("v6e:4x8", EVERY), llama("v6e:4x8", "full")
    assert slow.simulated["host"] > 0 and slow.lower_bound()["host"] > 0 and "host" not in plain.simulated
    assert slow.memory_bytes["saved"] == 0 < plain.memory_bytes["saved"]
    gpu = llama("4*h100", EVERY)
    waits = measured.causes(gpu, None)["host"]
    assert 0 < waits == offload.exposed_seconds(gpu, 1.35 * gpu.lower_bound()["compute"])
    assert waits < gpu.lower_bound()["host"]  # slower compute overlaps with more of the copies


def test_what_is_listed_is_not_computed_again():
    """Catches a bubble and FLOPs that do not depend on the list."""
    shares = {}
    for remat in ("full", "queries,keys,attention", EVERY):
        cfg = llama("v5p:4x4x2", remat).cfg
        shares[remat] = costs.recomputed_share(cfg.at_work, costs.Sizes.from_config(cfg, "tpu"))
    full, attention, every = shares.values()
    assert every == 0 < attention < full < 1  # the last matmul of a layer is never computed again


def test_the_plan_says_what_the_host_stores():
    one = llama("v5e:4x8", "input@host,queries@host")
    line = next(line for line in show.heading(one) if line.startswith("offload"))
    assert line == ("offload    2.000 GiB per device and step go to the host and back, each at 15 GB/s; a host of 4 "
                    "chips stores 8.000 GiB")  # fmt: skip
    assert not [line for line in show.heading(llama("v5e:4x8", "full")) if line.startswith("offload")]


@pytest.mark.parametrize("more, has, use", [
    ({"work.device_batch": 1}, "2 and 1", "a larger work.device_batch"), ({"mesh": "stage=2"}, "4 and 2", "stage=1"),
    ({"work.microbatches": 2}, "2 and 1", "work.microbatches=1"),
    ({"mesh": "stage=2", "work.microbatches": 2, "work.device_batch": 1}, "4 and 2",
     "stage=1 and work.microbatches=1 and a larger work.device_batch"),
])  # fmt: skip
def test_a_step_in_parts_refuses_the_host(more, has, use):
    """Catches a trace that fails when it stores arrays of the host's memory in the device's buffers, and advice to
    change a setting that is not the reason."""
    cfg = preset("tiny", **{"work.remat": "keys@host", "data.batch_size": 4, "mesh": "fsdp=2", "model.n_layers": 2,
                            "model.dense_prefix": 0, "model.moe_every": 1} | more)  # fmt: skip
    with pytest.raises(UserError, match=f"can offload activations to the host, and this step has {has}; use {use}, or"):
        planner.plan(cfg)
    planner.plan(replace(cfg, **{"work.remat": "keys"}))


def test_an_encoder_decoder_refuses_a_list():
    with pytest.raises(UserError, match=r"work.remat='keys@host': an encoder-decoder has no such list; use one of"):
        planner.plan(preset("t5_laptop", **{"work.remat": "keys@host"}))


@pytest.mark.parametrize("remat, message", [
    ("query@host", "unknown activation 'query'; did you mean 'queries'? known: input, queries, keys, attention"),
    ("out_proj@host", "unknown activation 'out_proj'; MaxText's 'out_proj' is 'branch' here; each may end with @host; "
     "without a list, use none, dots, branches, full or auto"),
    ("keys, keys@host", "'keys' is given twice"), ("keys,full", "'full' cannot be in a list; use it alone, or list"),
])  # fmt: skip
def test_a_list_that_cannot_be_parsed_is_explained(remat, message):
    with pytest.raises(UserError) as error:
        preset("tiny", **{"work.remat": remat})
    assert str(error.value).startswith(f"work.remat={remat!r}: {message}")
