"""Exposed communication, unknown FLOPs and memory traffic in the ledger, and the command that prints them.

The texts are excerpts of XLA's output for TPU and GPU. PRODUCT is the FLOPs of %product, derived by hand.
"""

import json

import pytest

from bench import overlap
from compile import ledger
from config import preset
from plan import planner
from utils import UserError

SIZES = {"fsdp": 2}
PRODUCT = 2 * 5 * 7 * 3
TEXT = """\
HloModule m, is_scheduled=true, num_partitions=2

%product (x.1: f32[5,7], w.1: f32[7,3]) -> f32[5,3] {
  %x.1 = f32[5,7]{1,0} parameter(0)
  %w.1 = f32[7,3]{1,0} parameter(1)
  ROOT %dot.1 = f32[5,3]{1,0} dot(%x.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="attend/dot"}
}

%body (p.2: (f32[5,7], f32[7,3])) -> (f32[5,7], f32[7,3]) {
  %p.2 = (f32[5,7]{1,0}, f32[7,3]{1,0}) parameter(0)
  %x.2 = f32[5,7]{1,0} get-tuple-element(%p.2), index=0
  %w.2 = f32[7,3]{1,0} get-tuple-element(%p.2), index=1
  %y.2 = f32[5,3]{1,0} fusion(%x.2, %w.2), kind=kOutput, calls=%product, metadata={op_name="jit(f)/while/attend/dot"}
  ROOT %t.2 = (f32[5,7]{1,0}, f32[7,3]{1,0}) tuple(%x.2, %w.2)
}

%condition (p.3: (f32[5,7], f32[7,3])) -> pred[] {
  %p.3 = (f32[5,7]{1,0}, f32[7,3]{1,0}) parameter(0)
  ROOT %true.3 = pred[] constant(true)
}

%wrapped (z.4: f32[11,2]) -> f32[11,1] {
  %z.4 = f32[11,2]{1,0} parameter(0)
  ROOT %rs.4 = f32[11,1]{1,0} reduce-scatter(%z.4), channel_id=4, replica_groups={{0,1}}, dimensions={1}, to_apply=%sum
}

ENTRY %main (x: f32[5,7], w: f32[7,3], z: f32[11,2]) -> f32[5,3] {
  %x = f32[5,7]{1,0} parameter(0)
  %w = f32[7,3]{1,0} parameter(1)
  %z = f32[11,2]{1,0} parameter(2)
  %before = f32[5,3]{1,0} fusion(%x, %w), kind=kOutput, calls=%product
  LINES
  ROOT %after = f32[5,3]{1,0} fusion(%x, %w), kind=kOutput, calls=%product
}
"""  # noqa: E501


def read(*lines: str) -> ledger.Ledger:
    return ledger.read(TEXT.replace("LINES", "\n  ".join(lines)), SIZES)


# Overlapped and exposed -----------------------------------------------------------------------------------------------

# The start and the end of a collective, and the bytes it sends.
FORMS = {
    "all-gather": (
        "%s = (f32[11,2]{1,0}, f32[22,2]{1,0}) all-gather-start(%z), replica_groups={{0,1}}, dimensions={0}",
        "%d = f32[22,2]{1,0} all-gather-done(%s)", 88),
    "collective-permute": (
        "%s = (f32[11,2]{1,0}, f32[11,2]{1,0}, u32[]) collective-permute-start(%z), source_target_pairs={{0,1},{1,0}}",
        "%d = f32[11,2]{1,0} collective-permute-done(%s)", 88),
    "reduce-scatter": (
        "%b = ((f32[11,2]{1,0}), f32[11,1]{1,0}, u32[]) async-start(%z), calls=%wrapped\n"
        "  %s = ((f32[11,2]{1,0}), f32[11,1]{1,0}, u32[]) async-update(%b)",
        "%d = f32[11,1]{1,0} async-done(%s)", 44),
}  # fmt: skip
KERNEL = '%k = f32[5,3]{1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call"'
LOOP = """%y = (f32[5,7]{1,0}, f32[7,3]{1,0}) tuple(%x, %w)
  %l = (f32[5,7]{1,0}, f32[7,3]{1,0}) while(%y), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}"""  # noqa: E501
# Instructions between start and end -> whether they overlap with the collective, and their FLOPs.
BETWEEN = {
    "": (False, 0),
    "%y = f32[5,7]{1,0} tanh(%x)": (False, 0),
    '%y = f32[5,3]{1,0} custom-call(), custom_call_target="AllocateBuffer"': (False, 0),
    "%y = f32[5,3]{1,0} fusion(%x, %w), kind=kOutput, calls=%product": (True, PRODUCT),
    LOOP: (True, 4 * PRODUCT),
    KERNEL: (True, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("between", BETWEEN, ids=lambda line: line[:30])
def test_a_collective_is_overlapped_if_matmuls_run_meanwhile(kind, between):
    """Catches a collective that counts as overlapped because it has a start and an end, or through a matmul before or
    after it; matmuls missed in a loop, a fusion or a kernel; and a collective listed twice."""
    start, end, sent_bytes = FORMS[kind]
    hidden, overlapped_flops = BETWEEN[between]
    found = read(start, between, end)
    (one,) = found.collectives
    assert (one.kind, one.wire_bytes, one.asynchronous) == (kind, sent_bytes, True)
    assert (one.hidden, one.overlapped_flops) == (hidden, overlapped_flops)
    assert found.total == ledger.Total(1, sent_bytes, 0 if hidden else sent_bytes)
    assert found.total.hidden_bytes == (sent_bytes if hidden else 0)


def test_one_matmul_may_overlap_several_collectives():
    """Catches an end that is matched with the wrong start."""
    (gather, gathered, _), (permute, permuted, _) = FORMS["all-gather"], FORMS["collective-permute"]
    rename = lambda line: line.replace("%s", "%s2").replace("%d", "%d2")
    product = "%y = f32[5,3]{1,0} fusion(%x, %w), kind=kOutput, calls=%product"
    again = product.replace("%y", "%y2")
    found = read(gather, rename(permute), product, gathered, again, rename(permuted))
    assert [(x.kind, x.overlapped_flops) for x in found.collectives] == [
        ("all-gather", PRODUCT), ("collective-permute", 2 * PRODUCT)]  # fmt: skip


def test_a_synchronous_collective_is_exposed():
    """Catches a synchronous collective that counts as overlapped with matmuls before or after it."""
    found = read("%s = f32[22,2]{1,0} all-gather(%z), channel_id=1, replica_groups={{0,1}}, dimensions={0}")
    assert [(x.asynchronous, x.hidden, x.overlapped_flops) for x in found.collectives] == [(False, False, 0)]


# Excerpt of libtpu's output for a matmul fused with the gather of the next layer's weights.
FUSED = """\
HloModule m, is_scheduled=true, num_partitions=2

%fused_computation.3 (param_0: bf16[48,16], param_1: bf16[32,48], param_2: bf16[1,24,16]) -> (bf16[32,16], bf16[1,48,16]) {
  %param_0 = bf16[48,16]{1,0} parameter(0)
  %param_1 = bf16[32,48]{1,0} parameter(1)
  %param_2 = bf16[1,24,16]{2,1,0} parameter(2)
  %convolution.9 = bf16[32,16]{1,0} convolution(%param_1, %param_0), dim_labels=bf_io->bf
  %all-gather.7 = bf16[1,48,16]{2,1,0} all-gather(%param_2), channel_id=2, replica_groups={{0,1}}, dimensions={1}
  ROOT %tuple.21 = (bf16[32,16]{1,0}, bf16[1,48,16]{2,1,0}) tuple(%convolution.9, %all-gather.7)
}

ENTRY %main (a: bf16[48,16], b: bf16[32,48], c: bf16[1,24,16]) -> (bf16[32,16], bf16[1,48,16]) {
  %a = bf16[48,16]{1,0} parameter(0)
  %b = bf16[32,48]{1,0} parameter(1)
  %c = bf16[1,24,16]{2,1,0} parameter(2)
  ROOT %fusion.12 = (bf16[32,16]{1,0}, bf16[1,48,16]{2,1,0}) fusion(%a, %b, %c), kind=kOutput, calls=%fused_computation.3
}
"""  # noqa: E501


def test_a_collective_fused_with_a_matmul_is_overlapped():
    """Catches a gather that counts as exposed because it has no start, though a matmul runs in the same fusion."""
    (one,) = ledger.read(FUSED, SIZES).collectives
    assert (one.hidden, one.overlapped_flops, one.count) == (True, 2 * 32 * 48 * 16, 1)


# Kernels --------------------------------------------------------------------------------------------------------------

# A Pallas kernel with metadata in libtpu's output: an instruction of five lines.
LONG = """%kernel.1 = f32[5,3]{1,0:T(8,128)S(3)} custom-call(%x, %w), custom_call_target="tpu_custom_call", operand_layout_constraints={f32[5,7]{1,0}, f32[7,3]{1,0}}, frontend_attributes={kernel_metadata={
"a":"line one\\nline two",
"b":"x"
}}, metadata={op_name="jit(f)/shard_map/attend/pallas_call" source_file="/somewhere/attention.py" source_line=10}, backend_config={"custom_call_config":{"body":"TUzvUg==","cost_estimate":{"flops":"77","transcendentals":"0","bytes_accessed":"3"}}}"""  # noqa: E501


def test_an_instruction_may_span_lines():
    """Catches a kernel that loses its cost, scope and source because its metadata is on separate lines."""
    found = read(LONG)
    assert found.flops == 77 + 2 * PRODUCT
    assert found.unknown == {}
    assert found.memory_bytes("attend") == 4 * (5 * 7 + 7 * 3)  # it writes to on-chip memory


def test_a_kernel_without_a_cost_is_unknown():
    """Catches a kernel that silently counts 0, one counted once in a loop, and custom calls that are no work."""
    silent = LONG.replace('"cost_estimate":{"flops":"77",', '"other":{')
    again = silent.replace("%kernel.1", "%kernel.2")
    buffer = '%y = f32[5,3]{1,0} custom-call(), custom_call_target="AllocateBuffer"'
    found = read(silent, again, buffer)
    assert found.unknown == {"attend (attention.py:10)": 2}
    assert found.flops == 2 * PRODUCT
    inside = KERNEL.replace("%k", "%k.2").replace("(%x, %w)", "(%x.2, %w.2)")
    in_a_loop = TEXT.replace("  ROOT %t.2", f"  {inside}\n  ROOT %t.2")
    assert ledger.read(in_a_loop.replace("LINES", LOOP), SIZES).unknown == {"k.2 (?)": 4}


def test_a_cublas_matmul_is_counted():
    """Catches missed matmuls of a GPU program, which are custom calls."""
    gemm = ('%g = (f32[5,3]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", '
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
            '"rhs_contracting_dimensions":["0"]}}}')  # fmt: skip
    found = read(gemm)
    assert (found.flops, found.unknown) == (3 * PRODUCT, {})
    assert read(gemm.replace("__cublas$gemm", "__cudnn$fmhaSoftmax")).unknown == {"g (?)": 1}


# Memory ---------------------------------------------------------------------------------------------------------------


def test_memory_traffic_of_a_scope():
    """Catches a fusion whose inner instructions count, a loop that counts once, on-chip arrays that count, a two-part
    copy that counts twice, and a scope that matches only part of a name."""
    named = 'metadata={op_name="jit(f)/transpose(jvp(attend))/x"}'
    apart = f"%b = f32[5,7]{{1,0}} negate(%x), {named.replace('attend', 'attend_more')}"
    copy = f"%c = (f32[5,7]{{1,0:S(3)}}, f32[5,7]{{1,0}}, u32[]) copy-start(%x), {named}"
    copied = f"%e = f32[5,7]{{1,0:S(3)}} copy-done(%c), {named}"
    x, w, y = 4 * 5 * 7, 4 * 7 * 3, 4 * 5 * 3
    assert read(LOOP).memory_bytes("attend") == 4 * (x + w + y)
    assert read(apart, copy, copied).memory_bytes("attend") == x
    assert read(f"%b = f32[5,7]{{1,0}} bitcast(%x), {named}").memory_bytes("attend") == 0


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def numbers():
    start, end, _ = FORMS["all-gather"]
    found = read(start, KERNEL, end, *(line.replace("%s", "%s2").replace("%d", "%d2") for line in (start, end)), LONG)
    return overlap.ledger_numbers(found) | {"peak_bytes": 3 * 2**30, "compile_cpu_s": 41.7}


def test_the_table_shows_exposed_bytes(numbers):
    """Catches swapped columns, and a share of the wrong total."""
    assert numbers["by_kind"] == {"all-gather": {"count": 2, "wire_bytes": 176, "exposed_bytes": 88}}
    scaled = {name: size * 10**9 if name.endswith("bytes") and name != "peak_bytes" else size
              for name, size in numbers.items()}  # fmt: skip
    scaled["attention_by_memory"] = {"S(3)": 17 * 10**9, "HBM": 5 * 10**9}
    cells = {line[:42].strip(): line[42:].split() for line in overlap.table(scaled).splitlines() if line}
    assert cells["sent"] == ["176.000", "GB", "in", "2", "collectives"]
    assert cells["exposed: no overlap with matmuls"] == ["88.000", "GB", "50.0%", "of", "it"]
    assert cells["synchronous, without start and done"] == ["0.000", "GB", "0.0%", "of", "it"]
    assert cells["hidden: overlapped with matmuls"] == ["88.000", "GB", "50.0%", "of", "it"]
    assert cells["peak"] == ["3.00", "GiB"]
    assert numbers["attention_by_memory"] == {"HBM": 224, "S(3)": 60}
    assert cells["attention operands and results in CMEM"] == ["17.000", "GB"]
    assert cells["attention operands and results in HBM"] == ["5.000", "GB"]
    assert " ".join(cells["executed"]).endswith("TFLOP unknown: FLOPs of 1 kernel: 1 x k (?)")
    assert cells["compile time"] == ["42", "CPU", "s"]


def test_unlisted_lines_are_summed(numbers):
    """Catches a table whose rows do not add up, and a heading that leaves out part of the configuration."""
    rows = {f"model.py:{i} in f": {"count": i, "wire_bytes": 10**9 * i, "exposed_bytes": 0} for i in range(15)}
    last = overlap.table(numbers | {"by_source": rows}).splitlines()[-1].split()
    assert last[:5] == ["3", "others", "39", "39.000", "GB"]
    line = overlap.describe(preset("tiny", mesh="fsdp=4", **{"work.gather": "step"}), "v4:2x2x1")
    assert line == ("fsdp=4 on v4:2x2x1, 16 x 18 tokens, remat=none, gather=step, tensor_exchange=gather; "
                    "for one chip and step:")  # fmt: skip


def test_the_command_prints_one_line_of_json(numbers, monkeypatch, capsys):
    """Catches other text on stdout, and flags that reach the compiler changed."""
    asked = []
    monkeypatch.setattr(overlap, "measure", lambda cfg, args: asked.append((cfg, args.topology)) or numbers)
    argv = "tiny --topology v4:2x2x1 --mesh fsdp=4 --data.batch_size 24 --json"
    assert overlap.main(argv.split()) == 0
    assert json.loads(capsys.readouterr().out) == numbers
    cfg = preset("tiny", mesh="fsdp=4", **{"data.batch_size": 24})
    assert asked == [(planner.plan(cfg, "v4:2x2x1").cfg, "v4:2x2x1")]


def test_unsupported_topologies_are_refused():
    """Catches libtpu's own error about a GPU, and a preset compiled for the wrong machine."""
    with pytest.raises(UserError, match=r"^topology 'h100:8': compiling for devices .* v4:4x4x2, "):
        overlap.parse(["tiny", "--topology", "h100:8"])
    cfg, args = overlap.parse([])
    assert (cfg, args.topology) == (preset("moe1b"), "v4:4x4x2")
