"""Every schedule on every mesh trains the same model as one device, with the expected memory and communication."""

import functools

import jax
import numpy as np
import pytest

import model
import pipeline
import sharding
from compile import ledger
from config import preset
from pipeline import ticks
from tests import helpers, parity
from utils import UserError

# Sixteen blocks of one layer, so that 8 stages can have 2 chunks each; every dim a different size.
SHARED = {"model.n_layers": 16, "model.dense_prefix": 0, "model.moe_every": 1, "model.n_experts": 4,
          "model.n_shared": 1,
          "model.vocab_size": 56, "model.d_model": 16, "model.d_expert": 18, "model.d_head": 6, "model.d_rope": 4,
          "model.d_value": 10, "model.d_kv_latent": 32, "model.d_query_latent": 0, "model.no_rope_every": 3,
          "data.seq_len": 12, "data.batch_size": 64}  # fmt: skip
# One model has a balance loss, whose gradient needs the loads of the whole batch; the other a prefix on stage 0.
MODELS = {
    "balance": {"model.balance_loss": 0.5, "model.dropout": 0.1},
    "prefix": {"model.balance_loss": 0.0, "model.dense_prefix": 1, "model.n_layers": 17, "model.tie_embeddings": True},
}

CASES = """
balance  stage=2                       schedule=gpipe        microbatches=2
prefix   stage=4                       schedule=gpipe        microbatches=8
balance  stage=8                       schedule=gpipe        microbatches=64
prefix   stage=2                       schedule=1f1b         microbatches=16
balance  stage=4                       schedule=1f1b         microbatches=4
prefix   stage=8                       schedule=1f1b         microbatches=16
balance  stage=2                       schedule=interleaved:2 microbatches=2
prefix   stage=4                       schedule=interleaved:2 microbatches=32
balance  stage=8                       schedule=interleaved:2 microbatches=8
prefix   stage=4                       schedule=interleaved:1 microbatches=8
prefix   stage=2                       schedule=zb           microbatches=4
balance  stage=4                       schedule=zb           microbatches=32
prefix   stage=8                       schedule=zb           microbatches=8
balance  stage=2,fsdp=2,tensor=2       schedule=gpipe        microbatches=4
prefix   stage=2,expert=2,context=2    schedule=gpipe        microbatches=2
prefix   stage=2,fsdp=2,tensor=2       schedule=1f1b         microbatches=4
balance  stage=2,expert=2,context=2    schedule=1f1b         microbatches=4
prefix   stage=2,fsdp=2,tensor=2       schedule=interleaved:2 microbatches=2
balance  stage=2,expert=2,context=2    schedule=interleaved:2 microbatches=4
balance  stage=2,fsdp=2,tensor=2       schedule=zb           microbatches=8
prefix   stage=2,expert=2,context=2    schedule=zb           microbatches=4
prefix   tensor=2                      schedule=1f1b         microbatches=8
"""  # fmt: skip


def cases() -> dict[str, set]:
    """Return each case with the pairs of axis and feature that it tests."""
    rows = [line.split() for line in CASES.strip().splitlines()]
    return {" ".join(row): helpers.tested_pairs(row[1], row[0], row[2], *row[4:]) for row in rows}


def config(case: str, **more):
    """Apply `MODEL MESH [SETTING=VALUE ..]` to the preset `tiny`; the settings are those of `work`."""
    name, mesh, *words = case.split()
    work = {word: int(value) if value.isdecimal() else value for word, value in (w.split("=") for w in words)}
    settings = {**SHARED, **MODELS[name], "mesh": mesh, **{f"work.{word}": value for word, value in work.items()}}
    return preset("tiny", **settings | more)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Clear the compiled programs, which would take several GB."""
    yield
    jax.clear_caches()


QUICK = (  # test_parity.py compares the other schedules with one device
    "balance stage=2,fsdp=2,tensor=2 schedule=gpipe microbatches=4",
    "prefix stage=2,expert=2,context=2 schedule=zb microbatches=4",
)


@pytest.mark.parametrize("case", helpers.with_repeats(cases(), QUICK))
def test_every_schedule_computes_the_same_gradients(case):
    """Catches a microbatch's gradient lost or added twice, a buffer read too late, weights of the wrong chunk, a
    balance loss from one microbatch's loads, and a loss scaled by the number of microbatches."""
    comparison = parity.compare(config(case))
    print(case, comparison.worst("gradient"))
    assert comparison.worst().ok, f"{case}: {comparison.worst()}"


def lowered(case: str, **more):
    cfg = config(case, **more)
    mesh = sharding.make_mesh(cfg.mesh)
    shapes, batch = sharding.shapes(model.declare(cfg.model), mesh), sharding.put(helpers.random_batch(cfg, 0), mesh)
    return cfg, mesh, pipeline.loss_and_grads(cfg, mesh).lower(shapes, batch, 0)


def temporary_bytes(schedule: str, microbatches: int) -> int:
    """Return one device's temporary bytes with 2 sequences per microbatch; wide, so tokens (24 bytes each) are few."""
    wide = {"model.d_model": 128, "model.d_expert": 96, "data.batch_size": 2 * microbatches, "model.n_layers": 4,
            "work.remat": "full", "model.balance_loss": 0.0, "data.seq_len": 32}  # fmt: skip
    _, _, program = lowered(f"balance stage=2 schedule={schedule} microbatches={microbatches}", **wide)
    return program.compile().memory_analysis().temp_size_in_bytes


def test_memory_of_1f1b_does_not_grow_with_microbatches():
    """Catches activations saved for every microbatch, as in GPipe, and weights saved in every tick."""
    one = {M: temporary_bytes("1f1b", M) for M in (4, 64)}
    all_forward = {M: temporary_bytes("gpipe", M) for M in (4, 64)}
    assert one[64] < 1.05 * one[4], one
    assert all_forward[64] > 1.5 * all_forward[4], all_forward


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_programs_do_not_grow_with_layers_or_microbatches(schedule):
    """Catches a layer, tick or microbatch that is traced again, which lengthens compilation (bench.step times it)."""

    def size(**more):
        return len(lowered(f"balance stage=2 schedule={schedule}", **more)[2].as_text().splitlines())

    few, deep = size(**{"model.n_layers": 4}), size(**{"model.n_layers": 32})
    # Microbatches have 2 sequences in both cases, because another size would give another program.
    two, many = (size(**{"model.n_layers": 4, "work.microbatches": M, "data.batch_size": 2 * M}) for M in (2, 32))
    assert deep == few
    assert many == two


def test_a_layer_adds_its_gradients_to_its_row_of_the_sums():
    """Catches gradients of all layers that are stacked, read again and added once per microbatch."""
    text = lowered("balance stage=2 schedule=gpipe microbatches=4")[2].as_text()
    stack = "tensor<1x8x4x16x18xf32>"  # one chunk of 8 layers, w_up_EDM
    written = [line for line in text.splitlines() if line.endswith((f"-> {stack}", f": {stack}"))]
    kinds = {kind for kind in ("add", "scatter", "dynamic_update_slice") for line in written if f".{kind}" in line}
    assert kinds == {"dynamic_update_slice"}


def test_only_gradients_travel_over_data():
    """Catches weights gathered over the slow network between slices, and gradients sent unsharded or twice."""
    cfg, mesh, program = lowered("prefix data=2,fsdp=2", **{"model.n_layers": 3})
    found = [one for one in ledger.read(program.compile().as_text(), mesh).collectives if "data" in one.axes]
    assert {one.kind for one in found} == {"all-reduce"}
    slices = sum(
        d.size // (2 if "fsdp" in str(d.spec) else 1) for d in sharding.flatten_named(model.declare(cfg.model)).values()
    )
    sent = sum(one.count * one.wire_bytes for one in found)
    # An all-reduce over 2 devices sends the array once; sums of the loss and the router come on top.
    assert 4 * slices <= sent < 4.1 * slices + 1000


@functools.cache
def collectives(gather: str):
    cfg, mesh, program = lowered("prefix fsdp=2 schedule=1f1b microbatches=4",
                                 **{"work.gather": gather, "model.n_layers": 3, "work.remat": "full"})  # fmt: skip
    found = ledger.read(program.compile().as_text(), mesh).collectives
    return cfg, [one for one in found if one.axes == ("fsdp",) and one.kind in ("all-gather", "reduce-scatter")]


def test_weights_are_gathered_per_layer_or_per_step():
    """Catches gathered weights saved for the backward pass, a gather per microbatch with work.gather=step, and a
    gradient that is scattered more often than its weight is gathered."""
    for gather, gathers, scatters in (("layer", 8, 4), ("step", 1, 1)):
        cfg, found = collectives(gather)
        layers = [d for name, d in sharding.flatten_named(model.declare(cfg.model)).items()
                  if "fsdp" in str(d.spec) and not name.startswith("embedding")]  # fmt: skip
        gathered = 4 * sum(d.size for d in layers) / 2  # (n - 1)/n of the gathered array, n = 2
        for kind, times in (("all-gather", gathers), ("reduce-scatter", scatters)):
            sent = sum(one.count * one.wire_bytes for one in found if one.kind == kind)
            table = 4 * cfg.model.vocab_size * cfg.model.d_model / 2  # the embedding table, also used for the logits
            extra = sent - times * gathered
            assert 0 <= extra <= 16 * table, f"gather={gather}: {kind} sends {sent}, {times} x {gathered} and {extra}"


@pytest.mark.parametrize("case, more, message", [
    ("balance stage=2 schedule=interleaved:3", {},
     r"cannot split 16 layer blocks over stage=2 \* 3 chunks = 6 parts \(16 % 6 = 4\)"),
    ("balance stage=4 schedule=interleaved microbatches=2", {}, "groups of stage=4, and microbatches=2 is not a"),
])  # fmt: skip
def test_layers_and_microbatches_that_do_not_fit_are_refused(case, more, message):
    """Catches layers or microbatches that do not fit a schedule, and a crash instead of an error with the numbers."""
    with pytest.raises(UserError, match=message):
        lowered(case, **more)


def test_layers_move_to_their_chunks_and_back():
    """Catches blocks that arrive out of order, and gradients that return to the wrong blocks."""
    mesh = sharding.make_mesh("stage=4")
    spec = jax.sharding.PartitionSpec("stage")

    def there_and_back(x_l):
        chunks = ticks.to_chunks(x_l, 2)
        return chunks.reshape(x_l.shape), ticks.from_chunks(chunks, 2)

    x = np.arange(16 * 3).reshape(16, 3)
    moved, back = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    stages = np.asarray(moved).reshape(4, 2, 2, 3)  # stage, chunk, block in it
    for stage in range(4):
        for chunk in range(2):
            first = (chunk * 4 + stage) * 2
            np.testing.assert_array_equal(stages[stage, chunk], x[first : first + 2])
    np.testing.assert_array_equal(back, x)
