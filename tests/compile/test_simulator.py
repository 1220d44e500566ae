"""The simulated schedule of ten-line programs takes the seconds that are derived by hand.

Per second the machine does 1 FLOP, moves 10 bytes of memory and 4 bytes over a link, and runs 2 clock cycles.
"""

import numpy as np
import pytest

from plan.chips.links import Torus
from plan.simulate import simulator

LINE = simulator.Machine(Torus((4,), (False,)), np.array([[0], [1], [2], [3]]), 1.0, 2.0, 10.0, 4.0)
SIZES = {"fsdp": 4}
FLOPS = 2 * 5 * 3 * 7
TEXT = """\
HloModule m, is_scheduled=true, num_partitions=4

%product (x.1: f32[5,7], w.1: f32[7,3]) -> f32[5,3] {
  %x.1 = f32[5,7]{1,0:S(1)} parameter(0)
  %w.1 = f32[7,3]{1,0:S(1)} parameter(1)
  ROOT %dot.1 = f32[5,3]{1,0:S(1)} dot(%x.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p.2: (f32[5,7], f32[7,3])) -> (f32[5,7], f32[7,3]) {
  %p.2 = (f32[5,7]{1,0:S(1)}, f32[7,3]{1,0:S(1)}) parameter(0)
  %x.2 = f32[5,7]{1,0:S(1)} get-tuple-element(%p.2), index=0
  %w.2 = f32[7,3]{1,0:S(1)} get-tuple-element(%p.2), index=1
  %y.2 = f32[5,3]{1,0:S(1)} fusion(%x.2, %w.2), kind=kOutput, calls=%product
  ROOT %t.2 = (f32[5,7]{1,0:S(1)}, f32[7,3]{1,0:S(1)}) tuple(%x.2, %w.2)
}

%nothing (p.3: (f32[5,7], f32[7,3])) -> (f32[5,7], f32[7,3]) {
  ROOT %p.3 = (f32[5,7]{1,0:S(1)}, f32[7,3]{1,0:S(1)}) parameter(0)
}

%gathered (z.5: f32[100]) -> f32[40] {
  %z.5 = f32[100]{0} parameter(0)
  ROOT %g.5 = f32[40]{0} slice(%z.5), slice={[0:40]}
}, execution_thread="sparsecore"

%offloaded (z.6: f32[100]) -> f32[40] {
  %z.6 = f32[100]{0} parameter(0)
  %s.6 = ((f32[100]{0}), f32[40]{0}, u32[]) call-start(%z.6), async_execution_thread="sparsecore", to_apply=%gathered
  ROOT %d.6 = f32[40]{0} call-done(%s.6)
}, execution_thread="sparsecore"

%condition (p.4: (f32[5,7], f32[7,3])) -> pred[] {
  %p.4 = (f32[5,7]{1,0:S(1)}, f32[7,3]{1,0:S(1)}) parameter(0)
  ROOT %true.4 = pred[] constant(true)
}

ENTRY %main (x: f32[5,7], w: f32[7,3], z: f32[100]) -> f32[5,3] {
  %x = f32[5,7]{1,0:S(1)} parameter(0)
  %w = f32[7,3]{1,0:S(1)} parameter(1)
  %z = f32[100]{0} parameter(2)
  %which = pred[]{:S(1)} constant(true)
  %both = (f32[5,7]{1,0:S(1)}, f32[7,3]{1,0:S(1)}) tuple(%x, %w)
  LINES
  ROOT %end = f32[5,7]{1,0:S(1)} get-tuple-element(%both), index=0
}
"""
PRODUCT = "%{} = f32[5,3]{{1,0:S(1)}} fusion(%x, %w), kind=kOutput, calls=%product".format
TICKS = 'backend_config={"window_config":{"estimated_cycles":"500"}}'
SEND = ("%s{0} = (f32[100]{{0}}, f32[100]{{0}}) collective-permute-start(%z), source_target_pairs={{{{{1}}}}}").format
DONE = "%d{0} = f32[100]{{0}} collective-permute-done(%s{0})".format
TANH = "%t = f32[100]{0} tanh(%z)"  # 400 bytes read, 400 written
LOOP = ('%l = (f32[5,7]{1,0:S(1)}, f32[7,3]{1,0:S(1)}) while(%both), condition=%condition, body=%body, '
        'backend_config={"known_trip_count":{"n":"3"}}')  # fmt: skip
BRANCH = ('%c = (f32[5,7]{1,0:S(1)}, f32[7,3]{1,0:S(1)}) conditional(%which, %both, %both), true_computation=%body, '
          'false_computation=%nothing, metadata={op_name="jit(f)/slot/cond"}')  # fmt: skip
# A SparseCore reads 160 bytes and writes 160: 32 s. It begins at the update, which has its operand.
OFFLOADED = ("%o = ((), (), s32[]) custom-call-start(), async_execution_thread=\"sparsecore\", "
             "called_computations={%offloaded}",
             "%u = ((f32[100]{0}), f32[40]{0}, s32[]) custom-call-update(%o, %z)",
             "%r = f32[40]{0} custom-call-done(%u)")  # fmt: skip


def play(*lines: str, machine=LINE, **more) -> simulator.Replay:
    return simulator.replay(TEXT.replace("LINES", "\n  ".join(lines)), SIZES, machine, **more)


# Lines -> seconds by cause. A permute of 400 bytes takes 100 s if it shares no link.
CASES = {
    "a matmul at the peak without an estimate": ((PRODUCT("y"),), {"matmuls": FLOPS}),
    "a matmul by the compiler's cycles": ((PRODUCT("y") + ", " + TICKS,), {"matmuls": 250}),
    "memory reads and writes": ((TANH,), {"other ops": 80}),
    "a permute without overlap": ((SEND(0, "0,1"), DONE(0)), {"fsdp": 100}),
    "a permute overlapped with a matmul": ((SEND(0, "0,1"), PRODUCT("y"), DONE(0)), {"matmuls": FLOPS}),
    "a permute overlapped in part": ((SEND(0, "0,1"), TANH, DONE(0)), {"other ops": 80, "fsdp": 20}),
    "two permutes on one link": ((SEND(0, "0,1"), SEND(1, "0,2"), DONE(0), DONE(1)), {"fsdp": 200}),
    "two permutes on different links": ((SEND(0, "0,1"), SEND(1, "1,2"), DONE(0), DONE(1)), {"fsdp": 100}),
    "two directions of one link": ((SEND(0, "0,1"), SEND(1, "1,0"), DONE(0), DONE(1)), {"fsdp": 100}),
    "the second alone after the first has arrived": (
        (SEND(0, "0,1"), TANH, SEND(1, "0,1"), DONE(0), DONE(1)), {"other ops": 80, "fsdp": 120}),
    "a loop by its trip count": ((LOOP,), {"matmuls": 3 * FLOPS}),
    "the longest branch": ((BRANCH,), {"matmuls": FLOPS}),
    "a permute overlapped with a loop": ((SEND(0, "0,1"), LOOP, DONE(0)), {"matmuls": 3 * FLOPS}),
    "a synchronous gather": (
        ("%g = f32[400]{0} all-gather(%z), replica_groups={{0,1,2,3}}, dimensions={0}",), {"fsdp": 300}),
    "a copy without compute": (
        ("%c = (f32[100]{0}, f32[100]{0:S(1)}, u32[]) copy-start(%z)", "%e = f32[100]{0:S(1)} copy-done(%c)"),
        {"copies": 40}),
    "a gather on a SparseCore": (OFFLOADED, {"copies": 32}),
    "a gather that starts with its operand": (
        ('%s = ((f32[100]{0}), f32[40]{0}, u32[]) call-start(%z), async_execution_thread="sparsecore", '
         "to_apply=%gathered", "%d = f32[40]{0} call-done(%s)"), {"copies": 32}),
    "a gather overlapped with a permute": (
        (SEND(0, "0,1"), *OFFLOADED[:2], DONE(0), OFFLOADED[2]), {"fsdp": 100}),
    "a gather before it has its operand": (
        (OFFLOADED[0], PRODUCT("y"), *OFFLOADED[1:]), {"matmuls": FLOPS, "copies": 32}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_seconds_match_those_derived_by_hand(name):
    """Catches a wait counted twice or not at all, two permutes that each get the whole link, a loop run once, and a
    SparseCore that takes no time or begins before its operands exist."""
    lines, causes = CASES[name]
    found = play(*lines)
    assert found.causes == pytest.approx(causes)
    assert found.seconds == pytest.approx(sum(causes.values()))


def test_at_peak_ignores_the_estimate():
    """Catches `at_peak` being ignored if the compiler has an estimate."""
    assert play(PRODUCT("y") + ", " + TICKS, at_peak=True).causes == {"matmuls": FLOPS}


def test_other_operations_can_take_the_estimate():
    """Catches `by_cycles` being ignored, applied without an estimate, or applied to a matmul at the peak."""
    lines = TANH + ", " + TICKS, TANH.replace("%t", "%u"), PRODUCT("y") + ", " + TICKS
    assert play(*lines, at_peak=True).causes == pytest.approx({"other ops": 160, "matmuls": FLOPS})
    assert play(*lines, at_peak=True, by_cycles=True).causes == pytest.approx({"other ops": 250 + 80, "matmuls": FLOPS})


def test_a_branch_is_scaled_by_its_share():
    """Catches a share that is ignored, or applied to a loop's trip count."""
    assert play(BRANCH, shares={"slot": 0.25}).seconds == FLOPS / 4
    assert play(BRANCH, shares={"slot": lambda reached: reached / 2}).seconds == FLOPS / 2


def test_latency_is_for_each_link():
    """Catches missing latency, or latency counted once for a message over three links."""
    machine = simulator.Machine(*(getattr(LINE, name) for name in list(LINE.__dataclass_fields__)[:-1]), latency_s=5.0)
    assert play(SEND(0, "0,3"), DONE(0), machine=machine).seconds == 100 + 3 * 5


def test_a_timeline_shows_core_and_communication():
    """Catches a permute that is drawn until its done instruction instead of its arrival."""
    found = play(SEND(0, "0,1"), PRODUCT("y"), DONE(0))
    events = found.played["main"].events
    assert [(e.lane, e.what, e.start, e.end) for e in events] == [
        ("fsdp", "collective-permute", 0, 100), ("core", "matmuls", 0, FLOPS)]  # fmt: skip
    assert found.longest(1) == ["main"]


def test_unscheduled_programs_are_refused():
    """Catches a program before scheduling, whose order means nothing, and one for another number of devices."""
    with pytest.raises(ValueError, match="is not scheduled"):
        simulator.replay(TEXT.replace(", is_scheduled=true", ""), SIZES, LINE)
    with pytest.raises(ValueError, match="has 2 devices, but the machine has 4 places"):
        simulator.replay(TEXT, {"fsdp": 2}, LINE)


def test_an_event_has_its_bytes():
    """Catches a timeline that does not show which communication is exposed."""
    found = play(SEND(0, "0,1"), PRODUCT("y"), TANH, DONE(0))
    events = {event.what: event for event in found.played["main"].events}
    assert events["collective-permute"].wire_bytes == 400
    assert events["matmuls"].wire_bytes == 0
    late = {event.what: event for event in play(SEND(0, "0,1"), DONE(0)).played["main"].events}
    assert late["waiting for fsdp"].wire_bytes == 400
