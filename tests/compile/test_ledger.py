"""The ledger counts the collectives and FLOPs that a program was written to do.

By default the mesh is stage=2, fsdp=2, tensor=2, and expected numbers are derived by hand.
"""

import collections
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import model
import pipeline
import sharding
from bench import step as bench_step
from compile import hlo, ledger
from config import preset, replace
from pipeline import fit
from plan.trace import compiled as compiled_step
from sharding import FSDP, STAGE, TENSOR

ROOT = Path(__file__).resolve().parents[2]
ALL = (STAGE, FSDP, TENSOR)
SIZES = {"data": 1, STAGE: 2, FSDP: 2, "expert": 1, "context": 1, TENSOR: 2}


def compiled(function, *shapes):
    """HLO text of a function of local shards, which are cut from dim 0 of float32 arrays of these whole shapes."""
    mesh = sharding.make_mesh("stage=2,fsdp=2,tensor=2")
    sharded = jax.shard_map(function, mesh=mesh, in_specs=(P(ALL),) * len(shapes), out_specs=P(ALL))
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, P(ALL))) for s in shapes]
    return jax.jit(sharded).lower(*arrays).compile().as_text()


# Collectives ----------------------------------------------------------------------------------------------------------

LOCAL_BYTES = 4 * 24 * 4  # of a device's x_bD, float32 [4, 24]


def ring(axes):
    n = 2 ** len(axes)
    return [(i, (i + 1) % n) for i in range(n)]


# kind -> function that runs it, and its payload bytes on n devices
COLLECTIVES = {
    "all-gather": (lambda x, a: sharding.all_gather(x, a, dim=1), lambda n: n * LOCAL_BYTES),
    "reduce-scatter": (lambda x, a: sharding.reduce_scatter(x, a, dim=1), lambda n: LOCAL_BYTES),
    "all-reduce": (lambda x, a: sharding.vary(sharding.psum(x, a), ALL), lambda n: LOCAL_BYTES),
    "all-to-all": (lambda x, a: sharding.all_to_all(x, a, split_dim=1, join_dim=0), lambda n: LOCAL_BYTES),
    "collective-permute": (lambda x, a: jax.lax.ppermute(x, a, ring(a)), lambda n: LOCAL_BYTES),
}


@pytest.mark.parametrize("axes", [(FSDP,), (STAGE, TENSOR)], ids="*".join)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_has_its_axes_and_bytes(kind, axes):
    """Catches axes inferred from the size of a group alone, an axis of size 1 reported as used, and bytes of a shard
    counted for the whole array."""
    function, payload = COLLECTIVES[kind]
    (one,) = ledger.read(compiled(lambda x: function(x, axes), (32, 24)), SIZES).collectives
    n = 2 ** len(axes)
    sent = {"all-reduce": 2 * payload(n) * (n - 1) // n, "collective-permute": payload(n)}
    assert (one.kind, one.axes, one.dtype, one.count, one.asynchronous) == (kind, axes, "f32", 1, False)
    assert (one.payload_bytes, one.wire_bytes) == (payload(n), sent.get(kind, payload(n) * (n - 1) // n))


def test_the_source_is_the_line_that_calls_a_thin_collective():
    """Catches a ledger in which every collective comes from sharding.py."""

    def gather(x):
        return sharding.all_gather(x, FSDP, dim=1)

    (one,) = ledger.read(compiled(gather, (32, 24)), SIZES).collectives
    line = gather.__code__.co_firstlineno + 1
    name = "test_the_source_is_the_line_that_calls_a_thin_collective.gather"
    assert one.source == f"test_ledger.py:{line} in {name}"
    assert one.scope == "jit(gather)/shard_map/all_gather"


@pytest.mark.parametrize("text, groups", [
    ("{{0,4},{1,5}}", [[0, 4], [1, 5]]),
    ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[3, 1], [2, 0]]),
    ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
])  # fmt: skip
def test_every_notation_of_groups_is_read(text, groups):
    """Catches a notation that only one of the compilers uses. The expected lists are written by hand."""
    assert sorted(hlo.device_groups(text, 8)) == sorted(groups)
    line = f"all-gather(%x), replica_groups={text}, dimensions={{0}}"
    assert re.search("replica_groups=" + hlo.GROUPS, line)[1] == text


@pytest.mark.parametrize("kind, groups", [
    ("all-gather", "{{0,3},{1,2},{4,7},{5,6}}"),  # pairs along no axis
    ("all-gather", "{{0,1},{2,3}}"),  # half of the devices
    ("collective-permute", "{{0,1},{1,0},{2,3},{3,2}}"),  # stage 0 swaps, stage 1 does not
])  # fmt: skip
def test_groups_along_no_axes_have_no_axes(kind, groups):
    """Catches a collective assigned to an axis that only some of its groups run along, such as those of one stage."""
    assert ledger.axes_of(kind, groups, tuple(SIZES.items()))[0] == ("?",)


def test_devices_outside_the_mesh_are_refused():
    """Catches a program that is read with the wrong mesh."""
    with pytest.raises(ValueError, match=re.escape("all-gather: cannot read its devices {{0,8}} on mesh")):
        ledger.axes_of("all-gather", "{{0,8}}", tuple(SIZES.items()))


# Loops and conditionals -----------------------------------------------------------------------------------------------

LAYERS, TICKS, B, D = 3, 5, 6, 16  # [6, 16] activations, and the 16 x 16 weight of a layer, split over FSDP
PRODUCT_FLOPS = 2 * B * D * D


def network(w_lDD, x_bD):
    """Run TICKS passes through LAYERS layers: a gather and a matmul per layer, a permute per tick."""
    w_LdD = sharding.all_gather(w_lDD, (STAGE, TENSOR), dim=0).reshape(LAYERS + 1, D // 2, D)[:LAYERS]

    def layer(x_bD, w_dD):
        w_DD = sharding.all_gather(w_dD, FSDP, dim=0)
        return jnp.tanh(x_bD @ w_DD), None

    def tick(x_bD, _):
        x_bD = jax.lax.scan(layer, x_bD, w_LdD)[0]
        return jax.lax.ppermute(x_bD, STAGE, [(0, 1), (1, 0)]), None

    return jax.lax.scan(tick, x_bD, None, TICKS)[0]


SHAPES = (8, D // 2, D), (8 * B, D)


def counts(found: ledger.Ledger) -> dict:
    return dict(
        sum((collections.Counter({(c.kind, c.axes): c.count}) for c in found.collectives), collections.Counter())
    )


@pytest.fixture(scope="module")
def nested_text():
    return compiled(network, *SHAPES)


def without_trip_counts(text):
    cut = re.sub(r',?"known_trip_count":\{"n":"\d+"\}', "", text)
    assert cut != text
    return cut


@pytest.mark.parametrize("edit", [str, without_trip_counts])
def test_a_loop_body_counts_once_per_trip(nested_text, edit):
    """Catches a loop body counted once, or by the trips of the inner or outer loop only, and trip counts that are read
    only from the compiler's annotation (which TPU programs lack)."""
    found = ledger.read(edit(nested_text), SIZES)
    assert counts(found) == {
        ("all-gather", (STAGE, TENSOR)): 1,
        ("all-gather", (FSDP,)): LAYERS * TICKS,
        ("collective-permute", (STAGE,)): TICKS,
    }
    assert found.flops == LAYERS * TICKS * PRODUCT_FLOPS


def test_the_backward_pass_is_twice_the_forward_pass():
    """Catches matmuls or collectives of the transposed loop that are missed or counted twice."""

    def loss(w, x):
        return sharding.psum(jnp.sum(network(w, x) ** 2), ALL)

    found = ledger.read(compiled(jax.grad(loss, argnums=(0, 1)), *SHAPES), SIZES)
    assert found.flops == 3 * LAYERS * TICKS * PRODUCT_FLOPS
    assert counts(found) == {
        ("all-gather", (STAGE, TENSOR)): 1,
        ("all-gather", (FSDP,)): LAYERS,  # autodiff moves tick-invariant work out of the loop over ticks
        ("collective-permute", (STAGE,)): 2 * TICKS,
        ("reduce-scatter", (FSDP,)): LAYERS * TICKS,
        ("reduce-scatter", (STAGE, TENSOR)): 1,
    }


def test_a_loop_of_unknown_length_is_refused():
    """Catches a loop of unknown length that is silently counted once."""

    def until_small(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x / 2, x)

    with pytest.raises(ValueError, match=r"loop %while\S* runs \(jit\(until_small\)/.*, test_ledger.py:\d+ in"):
        ledger.read(compiled(until_small, (32, 24)), SIZES)


def test_a_conditional_costs_its_most_expensive_branch():
    """Catches a conditional that costs nothing, all its branches, or the first; a share that is ignored, or applied
    again to a nested conditional; and a share for a scope that does not exist."""

    def gathered(x_bD):
        return jnp.sum(sharding.all_gather(x_bD, FSDP, dim=0), axis=0, keepdims=True) + x_bD

    def slot(x_bD):
        on = jax.lax.axis_index(STAGE) == 0
        square = x_bD.T @ x_bD
        twice = lambda x_bD: jax.lax.cond(on, lambda x: gathered(x) @ square @ square, lambda x: x @ square, x_bD)
        with jax.named_scope("forward_slot"):
            return jax.lax.cond(x_bD[0, 0] > 0, lambda x: x, twice, x_bD)

    def ticks(x_bD):
        return jax.lax.scan(lambda x_bD, _: (slot(x_bD), None), x_bD, None, TICKS)[0]

    text = compiled(ticks, (8 * B, D))
    square_flops, dear_flops = 2 * D * B * D, 2 * PRODUCT_FLOPS
    found = ledger.read(text, SIZES)
    assert counts(found) == {("all-gather", (FSDP,)): TICKS}
    assert found.flops == TICKS * (square_flops + dear_flops)
    for share in (0.8, lambda ticks: 4 / ticks):
        found = ledger.read(text, SIZES, {"forward_slot": share})
        assert counts(found) == {("all-gather", (FSDP,)): 4}
        assert found.flops == 5 * square_flops + 4 * dear_flops
    with pytest.raises(ValueError, match="shares: no conditional is in scope backward_slot"):
        ledger.read(text, SIZES, {"backward_slot": 0.5})


# A model of one block -------------------------------------------------------------------------------------------------
# Bytes that its loss and gradients send on two devices, derived by hand. Numbers are float32 or int32: 4 bytes.

SEQUENCES, POSITIONS, WIDTH, HIDDEN, VOCABULARY = 6, 12, 24, 44, 56
HEADS, KV_HEADS, HEAD, EXPERTS, CHOSEN = 4, 2, 10, 8, 3
BLOCK = {"model.n_layers": 1, "model.dense_prefix": 0, "model.n_experts": 0, "model.attention": "gqa",
         "model.activation": "gelu", "model.n_heads": HEADS, "model.n_kv_heads": KV_HEADS, "model.d_head": HEAD,
         "model.d_model": WIDTH, "model.d_ff": HIDDEN, "model.vocab_size": VOCABULARY, "data.seq_len": POSITIONS,
         "data.batch_size": SEQUENCES, "work.loss_chunk": 1000}  # fmt: skip
TOKENS = SEQUENCES * POSITIONS
TABLE, QUERY, KEY, FEED_FORWARD = WIDTH * VOCABULARY, WIDTH * HEADS * HEAD, WIDTH * KV_HEADS * HEAD, WIDTH * HIDDEN

# Sharded weights are gathered before use, and their gradients scattered after it. A loop over one layer is inlined, so
# the backward pass still has the layer's gathered weights.
ATTENTION = [QUERY, KEY, KEY, QUERY]  # query, key, value, out
DENSE = ATTENTION + [FEED_FORWARD, FEED_FORWARD]  # up, down


def there_and_back(function, arrays, there="all-gather", back="reduce-scatter"):
    return {(function, there): arrays, (function, back): arrays}


UNEMBEDDING = there_and_back("slice_by_slice", [TABLE])  # slice by slice; here there is one slice

# A device has 36 tokens, fewer than there are words. So token ids are sent to the shards of the embedding, and each
# shard returns its half of the activation.
EMBEDDING = {("embed_in_slices", "all-gather"): [TOKENS],
             ("embed_in_slices", "all-to-all"): [TOKENS * WIDTH // 2] * 2}  # fmt: skip

# Norm gains (two in the layer, one at the end) are replicated, so their gradients are all-reduced.
NORMS = {("ready_for_autodiff", "all-reduce"): [3 * WIDTH]}
LOSS = {("loss", "all-reduce"): [2]}  # nats and target weights
STREAM = [TOKENS * WIDTH]  # activations of all tokens

# mesh -> settings, and for each (function, kind) the number of elements of each gathered or sent array
BY_HAND = {
    "fsdp=2": ({}, there_and_back("gather_weights", DENSE) | UNEMBEDDING | EMBEDDING | NORMS | LOSS),
    # Between blocks positions are sharded. A branch gathers them and scatters its partial sums; the embedding only
    # scatters and the logits only gather; the backward pass does the reverse. The logits' maximum and both sums are one
    # number per token. There is one chunk of tokens, so the backward pass need not recompute them.
    "tensor=2": ({},
                 there_and_back("grouped_attention", STREAM * 2) | there_and_back("feed_forward_branch", STREAM * 2)
                 | there_and_back("embed", STREAM) | there_and_back("final_norm", STREAM) | NORMS
                 | {("loss_sums", "all-reduce"): [3 * TOKENS]}),
    # Two layers, one per stage. Three microbatches take three ticks and one more for the last stage, forward and then
    # backward. The last stage's activations are spread over both stages for the loss. Parameters that one stage uses
    # (both embeddings and the last norm) have gradients there only, which are summed together with the nats.
    "stage=2": ({"model.n_layers": 2, "work.microbatches": 3},
                {("store_forward", "collective-permute"): [TOKENS // 3 * WIDTH] * (3 + 1),
                 ("run_ticks", "collective-permute"): [TOKENS // 3 * WIDTH] * (3 + 1),
                 ("loss", "all-reduce"): [2 * TABLE + WIDTH + 1]}
                | there_and_back("spread_loss", [TOKENS // 3 * WIDTH] * 3)),
    # Dense weights are sharded over this axis too. The batch's five arrays arrive in order, are gathered and cut again.
    # Keys, values and document ids of all positions are gathered.
    "context=2": ({},
                  there_and_back("gather_weights", DENSE) | UNEMBEDDING | EMBEDDING | NORMS | LOSS
                  | {("on_mesh", "all-gather"): [TOKENS] * 5,
                     ("grouped_attention", "all-gather"): [TOKENS * KV_HEADS * HEAD] * 2 + [TOKENS],
                     ("grouped_attention", "reduce-scatter"): [TOKENS * KV_HEADS * HEAD] * 2}),
    # Experts stay on their devices, the router's matrix is gathered. Tokens, gates and indices of the chosen experts go
    # to all devices; indices have no gradient. The experts' outputs are scattered back. The balance needs sums: two per
    # expert, the entropy, and the numbers of dropped assignments and of tokens.
    "expert=2": ({"model.n_experts": EXPERTS, "model.moe_every": 1, "model.n_shared": 0, "model.top_k": CHOSEN,
                  "model.balance_rate": 0.0},
                 there_and_back("gather_weights", ATTENTION + [WIDTH * EXPERTS]) | UNEMBEDDING | EMBEDDING | NORMS
                 | {("gathered", "all-gather"): STREAM + [TOKENS * CHOSEN] * 2 + STREAM,
                    ("gathered", "reduce-scatter"): STREAM + [TOKENS * CHOSEN] + STREAM,
                    ("loss", "all-reduce"): [2 + 2 * EXPERTS + 3]}),
}  # fmt: skip


@pytest.mark.parametrize("mesh_text", BY_HAND)
def test_one_block_sends_the_bytes_derived_by_hand(mesh_text, as_on_accelerators):
    """Catches an exchange more or less than the model needs, of another size, along another axis, or from elsewhere;
    and a ledger that loses or doubles one."""
    settings, wanted = BY_HAND[mesh_text]
    cfg = preset("tiny", **BLOCK | {"mesh": mesh_text} | settings)
    mesh = sharding.make_mesh(cfg.mesh)
    params, batch = sharding.shapes(model.declare(cfg.model), mesh), compiled_step.shapes(cfg, mesh)[1]
    text = pipeline.loss_and_grads(cfg, mesh).lower(params, batch, 0).compile().as_text()
    found = ledger.read(text, mesh, compiled_step.shares(cfg, text)).collectives

    payloads = collections.defaultdict(list)
    for one in found:
        function = one.source.split(" in ")[1].split(".")[0]
        payloads[function, one.kind] += [one.payload_bytes] * round(one.count)
    for key in payloads:
        if key[1] == "all-reduce":  # XLA merges independent all-reduces
            payloads[key] = [sum(payloads[key])]
    assert {key: sorted(sizes) for key, sizes in payloads.items()} == {
        key: sorted(4 * n for n in numbers) for key, numbers in wanted.items()
    }
    axis = mesh_text.split("=")[0]
    assert {one.axes for one in found} == {(axis,)}
    # Each of two devices sends half of a gathered or scattered array, two halves of a sum, and all of a permuted array.
    whole = ("all-reduce", "collective-permute")
    assert [one.wire_bytes for one in found] == [one.payload_bytes // (1 if one.kind in whole else 2) for one in found]


# Other texts ----------------------------------------------------------------------------------------------------------

# Excerpts of the TPU compilers' output (v4 and v5e) for a scan over 6 layers with weights gathered one layer ahead.
# Shapes, groups and layouts are unchanged; parts that the ledger does not read are left out.
TPU = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

FileNames
1 "/somewhere/model.py"
2 "/somewhere/sharding.py"

FunctionNames
1 "f.<locals>.layer"
2 "all_gather"

FileLocations
1 {file_name_id=1 function_name_id=1 line=18 end_line=18 column=12 end_column=12}
2 {file_name_id=2 function_name_id=2 line=240 end_line=240 column=4 end_column=4}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused_computation.74 (param_0.174: bf16[1,512,2048]) -> (bf16[1,512,2048], bf16[1,2048,2048], u32[]) {
  %param_0.174 = bf16[1,512,2048]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.13 = bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.174), channel_id=2, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={1}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, metadata={op_name="jit(f)/while/body/all_gather" stack_frame_id=2}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %custom-call.15 = (bf16[1,512,2048]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) custom-call(%all-gather.13), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.103 (param_0.182: bf16[1,512,2048], param_16.14: bf16[2048,2048], param_17.13: bf16[8192,2048]) -> (bf16[8192,2048], bf16[1,2048,2048]) {
  %param_0.182 = bf16[1,512,2048]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_16.14 = bf16[2048,2048]{1,0:T(8,128)(2,1)} parameter(1)
  %param_17.13 = bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %convolution.26 = bf16[8192,2048]{1,0:T(8,128)(2,1)S(3)} convolution(%param_17.13, %param_16.14), dim_labels=bf_io->bf, metadata={op_name="jit(f)/while/body/bD,Df->bf/dot_general" stack_frame_id=1}
  %all-gather.15 = bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.182), channel_id=2, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={1}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, metadata={op_name="jit(f)/while/body/all_gather" stack_frame_id=2}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %tuple.9 = (bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)S(1)}) tuple(%convolution.26, %all-gather.15)
}

%all-reduce-scatter.1 (input.3: bf16[2048,2048]) -> bf16[512,2048] {
  %input.3 = bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.8 = bf16[2048,2048]{1,0:T(8,128)(2,1)} all-reduce(%input.3), channel_id=5, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%region_7.8.clone, frontend_attributes={from-cross-replica-sharding="true"}
  %partition-id.15 = u32[] partition-id()
  %constant.267 = u32[] constant(0)
  ROOT %dynamic-slice.37 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.8, %partition-id.15, %constant.267), dynamic_slice_sizes={512,2048}
}

%wide.body (wide.param.2: (s32[], bf16[1,512,2048], bf16[2048,2048], bf16[8192,2048])) -> (s32[], bf16[1,512,2048], bf16[2048,2048], bf16[8192,2048]) {
  %constant.136..sunk = s32[]{:T(128)} constant(1)
  %wide.param.2 = (s32[]{:T(128)}, bf16[1,512,2048]{2,1,0:T(8,128)(2,1)}, bf16[2048,2048]{1,0:T(8,128)(2,1)}, /*index=3*/bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%wide.param.2), index=0
  %get-tuple-element.2 = bf16[1,512,2048]{2,1,0:T(8,128)(2,1)} get-tuple-element(%wide.param.2), index=1
  %get-tuple-element.3 = bf16[2048,2048]{1,0:T(8,128)(2,1)} get-tuple-element(%wide.param.2), index=2
  %get-tuple-element.4 = bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.2), index=3
  %copy.86 = s32[]{:T(128)} copy(%get-tuple-element.1)
  %add.168 = s32[]{:T(128)} add(%copy.86, %constant.136..sunk)
  %async-collective-start = (bf16[1,512,2048]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%get-tuple-element.2), kind=kCustom, calls=%fused_computation.74
  %fusion.103 = (bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)S(1)}) fusion(%get-tuple-element.2, %get-tuple-element.3, %get-tuple-element.4), kind=kOutput, calls=%async_collective_fusion.103
  %fusion.97 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} fusion(%get-tuple-element.3), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %tuple.85 = (s32[]{:T(128)}, bf16[1,512,2048]{2,1,0:T(8,128)(2,1)}, bf16[2048,2048]{1,0:T(8,128)(2,1)}, /*index=3*/bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}) tuple(%add.168, %get-tuple-element.2, %get-tuple-element.3, /*index=3*/%get-tuple-element.4)
}

%wide.condition (wide.param.3: (s32[], bf16[1,512,2048], bf16[2048,2048], bf16[8192,2048])) -> pred[] {
  %constant.209 = s32[]{:T(128)} constant(6)
  %wide.param.3 = (s32[]{:T(128)}, bf16[1,512,2048]{2,1,0:T(8,128)(2,1)}, bf16[2048,2048]{1,0:T(8,128)(2,1)}, /*index=3*/bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %get-tuple-element.9 = s32[]{:T(128)} get-tuple-element(%wide.param.3), index=0
  ROOT %lt.39 = pred[]{:T(512)} compare(%get-tuple-element.9, %constant.209), direction=LT
}

ENTRY %main (param.1: bf16[1,512,2048], param.2: bf16[2048,2048], param.3: bf16[8192,2048], param.4: bf16[4,256,8,256], param.5: bf16[4,8,256,256]) -> bf16[4,8,256,256] {
  %param.1 = bf16[1,512,2048]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param.2 = bf16[2048,2048]{1,0:T(8,128)(2,1)} parameter(1)
  %param.3 = bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %param.4 = bf16[4,256,8,256]{3,1,2,0:T(8,128)(2,1)} parameter(3)
  %param.5 = bf16[4,8,256,256]{3,2,1,0:T(8,128)(2,1)} parameter(4)
  %constant.187 = s32[]{:T(128)} constant(0)
  %copy.186 = s32[]{:T(128)} copy(%constant.187)
  %tuple.86 = (s32[]{:T(128)}, bf16[1,512,2048]{2,1,0:T(8,128)(2,1)}, bf16[2048,2048]{1,0:T(8,128)(2,1)}, /*index=3*/bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}) tuple(%copy.186, %param.1, %param.2, /*index=3*/%param.3)
  %while.53 = (s32[]{:T(128)}, bf16[1,512,2048]{2,1,0:T(8,128)(2,1)}, bf16[2048,2048]{1,0:T(8,128)(2,1)}, /*index=3*/bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}) while(%tuple.86), condition=%wide.condition, body=%wide.body, metadata={op_name="jit(f)/while" stack_frame_id=1}
  %collective-permute-start = (bf16[2048,2048]{1,0:T(8,128)(2,1)S(3)}, bf16[2048,2048]{1,0:T(8,128)(2,1)S(3)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%param.2), channel_id=1, source_target_pairs={{0,1},{2,3},{4,5},{6,7}}, metadata={op_name="jit(f)/ppermute" stack_frame_id=1}
  %collective-permute-done = bf16[2048,2048]{1,0:T(8,128)(2,1)S(3)} collective-permute-done(%collective-permute-start)
  %all-reduce.3 = (f32[256]{0:T(256)}, bf16[2048,2048]{1,0:T(8,128)(2,1)}) all-reduce(%bias.1, %param.2), channel_id=9, replica_groups={}, use_global_device_ids=true, to_apply=%region_7.8.clone
  %bias.1 = f32[256]{0:T(256)} parameter(5)
  %ragged-dot-none.1 = f32[8192,2048]{1,0:T(8,128)S(3)} custom-call(%param.3, %param.2), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/ragged_dot_general/ragged-dot-none"}, backend_config={"custom_call_config":{"body":"TUzvUg==","cost_estimate":{"flops":"68719476736","transcendentals":"0"}}}
  ROOT %convolution-base-dilated.2 = bf16[4,8,256,256]{3,2,1,0:T(8,128)(2,1)} convolution(%param.5, %param.4), window={size=4x8 stride=3x7 lhs_dilate=4x8}, dim_labels=01bf_0i1o->01bf, metadata={op_name="jit(f)/bhst,bthK->bshK/dot_general" stack_frame_id=1}
}
"""  # noqa: E501


def test_tpu_text_is_read():
    """Catches misread features of TPU programs: matmuls written as (dilated) convolutions, a gather copied into
    every fusion that overlaps with it, a reduce-scatter written as an all-reduce, one all-reduce of several arrays,
    missing trip counts, kernels with a FLOP count, layouts with brackets."""
    found = ledger.read(TPU, {"fsdp": 4, "tensor": 2})
    matrix = 2048 * 2048 * 2  # bytes
    rows = [(c.kind, c.axes, c.count, c.payload_bytes, c.wire_bytes, c.asynchronous) for c in found.collectives]
    assert sorted(rows) == sorted([
        ("all-gather", ("fsdp",), 6, matrix, matrix * 3 // 4, True),
        ("reduce-scatter", ("fsdp",), 6, matrix, matrix * 3 // 4, False),
        ("collective-permute", ("tensor",), 1, matrix, matrix, True),
        ("all-reduce", ("fsdp", "tensor"), 1, matrix + 1024, (matrix + 1024) * 7 // 4, False),
    ])  # fmt: skip
    assert {c.kind: c.dtype for c in found.collectives}["all-reduce"] == "bf16+f32"
    assert {c.kind: c.source for c in found.collectives} == {
        "all-gather": "model.py:18 in f.layer",
        "reduce-scatter": "?",
        "collective-permute": "model.py:18 in f.layer",
        "all-reduce": "?",
    }
    batched = 2 * (4 * 8) * 256 * 256 * 256  # one 256 x 256 x 256 matmul for each of 4 * 8 batch indices
    assert found.flops == 6 * 2 * 8192 * 2048 * 2048 + 68719476736 + batched
    assert found.totals_by("axes")["fsdp"] == ledger.Total(12, 12 * matrix * 3 / 4, 6 * matrix * 3 / 4)


def test_collectives_of_one_channel_are_told_apart_by_their_chain():
    """Catches gathers of several weights in a loop counted as one: the TPU compiler gives them the same channel."""
    start, fusion = TPU.split("%async_collective_fusion.103", 1)
    text = start + "%async_collective_fusion.103" + fusion.replace('chain_id="0"', 'chain_id="1"')
    assert ledger.read(text, {"fsdp": 4, "tensor": 2}).totals_by("kind")["all-gather"].count == 12


@pytest.mark.parametrize("window, pairs", [
    ("size=3 pad=1_1", 5 * 3 - 2),  # both ends lose one
    ("size=3 stride=2", 2 * 3),
    ("size=2 rhs_dilate=3", 2 * 2),
])  # fmt: skip
def test_a_convolution_counts_inputs_not_padding(window, pairs):
    """Catches a convolution counted as if every weight met an input at every position."""
    out = {"size=3 pad=1_1": 5, "size=3 stride=2": 2, "size=2 rhs_dilate=3": 2}[window]
    text = ("HloModule m\n\nENTRY %main (a: f32[7,5,4], b: f32[3,4,6]) -> f32[7,5,6] {\n"
            "  %a = f32[7,5,4]{2,1,0} parameter(0)\n"
            "  %b = f32[3,4,6]{2,1,0} parameter(1)\n"
            f"  ROOT %c = f32[7,{out},6]{{2,1,0}} convolution(%a, %b), window={{{window}}}, dim_labels=b0f_0io->b0f\n"
            "}\n")  # fmt: skip
    assert ledger.read(text, {"fsdp": 1}).flops == 2 * 7 * 6 * 4 * pairs


def test_thousands_of_computations_are_read_quickly():
    """Catches a reader that recurses into nested computations, or scans the text again for each of them."""
    product = "  %a.{0} = f32[2,3]{{1,0}} parameter(0)\n  ROOT %d.{0} = f32[2,2]{{1,0}} dot(%a.{0}, %a.{0}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}\n"  # noqa: E501
    call = "  %p.{0} = f32[2,3]{{1,0}} parameter(0)\n  ROOT %c.{0} = f32[2,2]{{1,0}} call(%p.{0}), to_apply=%f.{1}\n"
    head = "%f.{0} (p: f32[2,3]) -> f32[2,2] {{\n"
    parts = [(head + (call if i else product) + "}}\n\n").format(i, i - 1) for i in range(5000)]
    parts[-1] = "ENTRY " + parts[-1]
    assert ledger.read("HloModule m\n\n" + "".join(parts), {"fsdp": 1}).flops == 2 * 2 * 2 * 3


def test_text_that_is_no_program_is_refused():
    """Catches an empty ledger for jaxpr or StableHLO text."""
    with pytest.raises(ValueError, match=r"pass compiled\.as_text\(\)"):
        ledger.read("module @jit_f {}", SIZES)


# The bench ------------------------------------------------------------------------------------------------------------


def bench(*flags):
    command = [sys.executable, "-m", "bench.step", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_bench_prints_one_line_of_json():
    """Catches other text on stdout, a missing number, and FLOPs that miss or double the loop over layers. Attention
    computes more than the causal half, so the ratio is above 1."""
    dense = "--model.n_layers 4 --model.n_experts 0 --model.dense_prefix 0 --mesh fsdp=2 --steps 1 --json"
    done = bench("tiny", *dense.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert all(found[name] > 0 for name in "lower_s compile_s step_s temp_bytes wire_bytes".split())
    assert 1 < found["flops_ratio"] < 1.5
    assert isinstance(found["collectives"], int)
    assert sum(part["wire_bytes"] for part in found["collectives_by_kind"].values()) == found["wire_bytes"]
    assert set(found["collectives_by_axes"]) == {"fsdp"}


def test_the_bench_refuses_before_it_starts(capsys):
    """Catches a traceback for a user's mistake, and a mesh with more devices than can be simulated."""
    assert bench_step.main("--mesh fsdp=32,tensor=4".split()) == 2
    message = "error: mesh fsdp=32,tensor=4 needs 128 devices, but at most 64 can be simulated; use smaller axes\n"
    assert capsys.readouterr().err == message
    assert bench_step.main(["tinny"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown preset 'tinny'; did you mean 'tiny'?")


def test_idle_ticks_are_not_counted():
    """Catches a ledger that counts every tick of a stage as work."""
    cfg = replace(bench_step.DEFAULT, **{"work.schedule": "interleaved:2"})
    line = '  %c.1 = f32[] conditional(%p), metadata={op_name="jit(step)/while/body/forward_slot/cond"}\n'
    found = compiled_step.shares(cfg, line + line.replace("forward", "loss"))
    assert {scope: share(10) for scope, share in found.items()} == {"forward_slot": 0.8, "loss_slot": 0.4}
    assert compiled_step.shares(cfg, "") == {}


def test_the_bench_default_stays_the_same():
    """Catches a changed default, after which numbers of different days cannot be compared."""
    cfg = bench_step.DEFAULT
    split = fit.split_batch(cfg)
    assert str(cfg.mesh) == "stage=2,fsdp=2,tensor=2"
    assert (split.microbatches, split.device_batch * split.shards, cfg.data.tokens_per_step) == (4, 4, 2048)
    assert (cfg.model.n_blocks, cfg.model.layers_per_block) == (4, 2)
