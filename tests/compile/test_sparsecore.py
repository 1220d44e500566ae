"""The ledger finds collectives on a SparseCore, and refuses instructions that it does not know.

The text is an excerpt of libtpu 0.0.42.1's output for a v6e step with offloaded collectives; shapes are smaller.
"""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from compile import ledger, options
from config import MeshConfig
from plan.trace import compiled
from sharding import FSDP
from utils import UserError

SIZES = {"data": 2, "fsdp": 2}
PRODUCT = 2 * 5 * 7 * 3
TEXT = """\
HloModule m, is_scheduled=true, num_partitions=4

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[]{:T(256)S(7)} parameter(0)
  %b = bf16[]{:T(256)S(7)} parameter(1)
  ROOT %add = bf16[]{:T(256)S(7)} add(%a, %b)
}

%gathered (p.1: bf16[4,6], t.1: token[]) -> bf16[8,6] {
  %t.1 = token[] parameter(1)
  %p.1 = bf16[4,6]{1,0:T(8,128)(2,1)} parameter(0), backend_config={"compute_type":"COMPUTE_TYPE_SCALAR"}
  ROOT %all-gather.1 = bf16[8,6]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=23, replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/shard_map/all_gather"}, backend_config={"device_type":"DEVICE_TYPE_SPARSECORE"}
}, execution_thread="sparsecore"

%scattered (p.2: bf16[8,6], t.2: token[]) -> bf16[4,6] {
  %t.2 = token[] parameter(1)
  %p.2 = bf16[8,6]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %reduce-scatter.2 = bf16[4,6]{1,0:T(8,128)(2,1)} reduce-scatter(%p.2), channel_id=24, replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%sum
}, execution_thread="sparsecore"

ENTRY %main (x: f32[5,7], w: f32[7,3], z: bf16[4,6], g: bf16[8,6]) -> f32[5,3] {
  %x = f32[5,7]{1,0} parameter(0)
  %w = f32[7,3]{1,0:S(1)} parameter(1)
  %z = bf16[4,6]{1,0} parameter(2)
  %g = bf16[8,6]{1,0} parameter(3)
  %prepare = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %token = token[] custom-call(%prepare), custom_call_target="PrepareAsyncCallDone"
  %scatter-start = ((bf16[8,6]{1,0}, token[]), bf16[4,6]{1,0}) call-start(%g, %token), async_execution_thread="sparsecore", to_apply=%scattered
  %scatter-done = bf16[4,6]{1,0} call-done(%scatter-start)
  %gather-start = ((bf16[4,6]{1,0}, token[]), bf16[8,6]{1,0}) call-start(%z, %token), async_execution_thread="sparsecore", to_apply=%gathered, metadata={op_name="jit(step)/shard_map/all_gather"}
  %product = f32[5,3]{1,0:S(3)} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="attend/dot"}
  %gather-done = bf16[8,6]{1,0} call-done(%gather-start)
  LINE
  ROOT %end = f32[5,3]{1,0} copy(%product)
}
"""  # noqa: E501


def read(text: str = TEXT, line: str = "") -> ledger.Ledger:
    return ledger.read(text.replace("LINE", line or "%nothing = f32[5,7]{1,0} negate(%x)"), SIZES)


# On a SparseCore ------------------------------------------------------------------------------------------------------


def test_a_collective_on_a_sparsecore_is_counted():
    """Catches a ledger that finds 0 of 2: these collectives are in a computation of another thread, named by a
    `call-start`. They are overlapped if matmuls run between their start and end, like any other."""
    found = read()
    assert [(x.kind, x.axes, x.wire_bytes, x.count, x.asynchronous, x.hidden, x.overlapped_flops)
            for x in found.collectives] == [
        ("reduce-scatter", ("data",), 2 * 8 * 6 // 2, 1, True, False, 0),
        ("all-gather", ("fsdp",), 2 * 8 * 6 // 2, 1, True, True, PRODUCT)]  # fmt: skip
    assert found.total == ledger.Total(2, 96, 48)
    assert found.flops == PRODUCT


def in_a_loop(text: str) -> str:
    """Put the gather into a loop of three trips."""
    begin, end = text.index("  %gather-start"), text.index("  LINE")
    body = text[begin:end]
    computations = (
        "%body (p: bf16[4,6]) -> bf16[4,6] {\n  %z = bf16[4,6]{1,0} parameter(0)\n"
        "  %token = token[] after-all()\n  %x = f32[5,7]{1,0} constant({...})\n  %w = f32[7,3]{1,0} constant({...})\n"
        + body.replace("  %gather-done", "  ROOT %same = bf16[4,6]{1,0} copy(%z)\n  %gather-done")
        + "}\n\n%condition (c: bf16[4,6]) -> pred[] {\n  %c = bf16[4,6]{1,0} parameter(0)\n"
        "  ROOT %go = pred[] constant(true)\n}\n\n"
    )
    loop = ('  %loop = bf16[4,6]{1,0} while(%z), condition=%condition, body=%body, '
            'backend_config={"known_trip_count":{"n":"3"}}\n'
            "  %product = f32[5,3]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n")  # fmt: skip
    return (text[:begin] + loop + text[end:]).replace("ENTRY", computations + "ENTRY")


def test_a_sparsecore_collective_in_a_loop_counts_once_per_trip():
    """Catches an offloaded collective that counts once, though a loop over layers starts it."""
    found = read(in_a_loop(TEXT))
    assert {x.kind: (x.count, x.hidden) for x in found.collectives} == {
        "all-gather": (3, True), "reduce-scatter": (1, False)}  # fmt: skip


@pytest.mark.parametrize("early", [True, False])
def test_a_prepared_sparsecore_collective_begins_at_its_update(early):
    """Catches a collective in the notation of libtpu 0.0.52 that is refused, counted twice, or that overlaps with
    matmuls that run before it has its operand."""
    prepare = ('  %prepared = ((), (), s32[]) custom-call-start(), async_execution_thread="sparsecore", '
               'custom_call_target="TODO", called_computations={%gathered}')  # fmt: skip
    update = "  %gather-start = ((bf16[4,6]{1,0}), bf16[8,6]{1,0}, s32[]) custom-call-update(%prepared, %z)"
    lines = TEXT.replace(" call-done(%gather-start)", " custom-call-done(%gather-start)").splitlines()
    start, done = (
        next(i for i, x in enumerate(lines) if x.startswith(f"  %gather-{end} ")) for end in ("start", "done")
    )
    lines[start] = "\n".join([prepare, update] if early else [prepare])
    if not early:
        lines.insert(done, update)
    gather = read("\n".join(lines)).totals_by("axes")["fsdp"]
    assert gather == ledger.Total(1, 2 * 8 * 6 // 2, 0 if early else 2 * 8 * 6 // 2)


# Unknown instructions -------------------------------------------------------------------------------------------------

STRANGE = {
    "%r = bf16[8,6]{1,0} ragged-all-to-all(%g, %g, %i, %i, %i, %i), replica_groups={{0,1},{2,3}}":
        "opcode ragged-all-to-all",
    "%r = bf16[4,6]{1,0} collective-broadcast(%z), replica_groups={{0,1},{2,3}}": "opcode collective-broadcast",
    "%r = (bf16[4,6]{1,0}, u32[], token[]) send(%z, %token), channel_id=9": "opcode send",
    "%r = (bf16[4,6]{1,0}, u32[], token[]) recv(%token), channel_id=9": "opcode recv",
    "%r = (bf16[4,6]{1,0}, token[]) recv-done(%q), channel_id=9": "opcode recv-done",
    "%r = bf16[4,6]{1,0} ragged-dot(%z, %g, %i), lhs_contracting_dims={1}, rhs_contracting_dims={1}":
        "opcode ragged-dot",
    "%r = ((bf16[4,6]{1,0}), bf16[8,6]{1,0}) all-swap-start(%z)": "opcode all-swap-start",
    '%r = ((bf16[4,6]{1,0}), bf16[8,6]{1,0}) call-start(%z), async_execution_thread="elsewhere", to_apply=%gathered':
        "execution thread 'elsewhere'",
    '%r = ((bf16[4,6]{1,0}), bf16[8,6]{1,0}) async-start(%z), async_execution_thread="elsewhere", calls=%gathered':
        "execution thread 'elsewhere'",
    '%r = ((bf16[4,6]{1,0}), bf16[8,6]{1,0}) call-start(%z), async_execution_thread="sparsecore", runs=%gone':
        "a computation that the text does not have",
    '%r = bf16[8,6]{1,0} custom-call(%z), custom_call_target="Wrapped", called_computations={%gathered}':
        "how custom-call runs %gathered, which contains collectives,",
    "%r = bf16[4]{0} reduce(%z, %i), dimensions={1}, to_apply=%gathered":
        "how reduce runs %gathered, which contains collectives,",
}  # fmt: skip


@pytest.mark.parametrize("line", STRANGE, ids=lambda line: line.split("} ")[-1][:24])
def test_unknown_instructions_are_refused(line):
    """Catches uncounted bytes: an opcode, a thread or a call that the ledger does not know may communicate."""
    with pytest.raises(UserError) as refusal:
        read(line=f'{line}, metadata={{op_name="jit(step)/strange"}}')
    message = str(refusal.value)
    assert message.startswith(f"compile/ledger.py, which counts communication, does not know {STRANGE[line]} and would")
    assert message.endswith(" (jit(step)/strange, ?)") and "\n" not in message and len(message) < 300


@pytest.mark.parametrize("line", [
    '%r = bf16[4,6]{1,0} custom-call(%z), custom_call_target="NeverSeen"',
    "%r = (bf16[4,6]{1,0}, bf16[2,6]{1,0:S(1)}, u32[]) slice-start(%z), slice={[0:2], [0:6]}",
    '%r = ((bf16[4,6]{1,0}), bf16[8,6]{1,0}) async-start(%z), async_execution_thread="main", calls=%gathered',
    "%r = bf16[4]{0} reduce(%z, %i), dimensions={1}, to_apply=%sum, control-predecessors={%gathered}",
])  # fmt: skip
def test_known_instructions_are_accepted(line):
    """Catches a ledger that refuses programs that it reads correctly."""
    assert read(line=line.replace("%i", "%token")).total.count >= 2


@pytest.mark.parametrize("line", ["%r = bf16[4,6]{1,0} negate[%z]", "%r := bf16[4,6] negate(%z)"])
def test_a_line_that_cannot_be_read_is_refused(line):
    """Catches an instruction in an unknown notation that is skipped together with its bytes."""
    with pytest.raises(UserError, match=r"^cannot parse this line of HLO, please report it: %r :?= bf16\[4,6\]"):
        read(line=line)
    with pytest.raises(UserError, match=r"^cannot parse this line of HLO, please report it: gathered \("):
        read(TEXT.replace("%gathered (", "gathered ("))


# Memories -------------------------------------------------------------------------------------------------------------


def test_bytes_are_counted_by_memory():
    """Catches on-chip operands that are missing in a scope's traffic; on v4 the larger part is in CMEM."""
    found = read()
    assert found.memories("attend") == {"HBM": 4 * 5 * 7, "S(1)": 4 * 7 * 3, "S(3)": 4 * 5 * 3}
    assert found.memory_bytes("attend") == 4 * 5 * 7 and found.memory_bytes("attend", "S(3)") == 4 * 5 * 3
    assert found.memories("attended") == {}


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.tpu
@pytest.mark.parametrize("topology, devices", [("v5p:2x2x1", 4), ("v6e:2x2", 4), ("tpu7x:2x2x1", 8)])
def test_all_sparsecore_communication_is_counted(topology, devices):
    """Catches a ledger that misses collectives on SparseCores, and options that offload none. The bytes of gathers and
    scatters for the gradients of 6 layers match a formula, and no scatter is exposed."""
    layers, wide = 6, 1024
    mesh = compiled.topology_mesh(MeshConfig(fsdp=devices), topology)

    def layer(x_bD, w_dD):
        return jax.numpy.tanh(x_bD @ jax.lax.all_gather(w_dD, FSDP, axis=0, tiled=True)), None

    def gradient(w_LdD, x_bD):
        return jax.grad(lambda w_LdD: jax.lax.scan(layer, x_bD, w_LdD)[0].astype("float32").sum())(w_LdD)

    specs = P(None, FSDP), P(FSDP)
    step = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs[0])
    shapes = (layers, wide, wide), (1024 * devices, wide)
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))
              for shape, spec in zip(shapes, specs, strict=True)]  # fmt: skip
    lowered = jax.jit(step, compiler_options=options.compiler_options(mesh)).lower(*arrays)
    found = ledger.read(compiled.compile_lowered(lowered)[0].as_text(), mesh).totals_by("kind")
    sent = 2 * layers * wide * wide * (devices - 1) // devices
    assert {kind: (total.count, total.wire_bytes) for kind, total in found.items()} == {
        "all-gather": (layers, sent), "reduce-scatter": (layers, sent)}  # fmt: skip
    assert found["reduce-scatter"].exposed_bytes == 0
