"""Bytes moved in main memory: if a layer of a stack is read or written, only the layer counts."""

import pytest

from compile.hlo import Program
from plan.simulate.moved import Memory

TEXT = """\
HloModule m, is_scheduled=true

%read (s.1: f32[11,5,3], i.1: s32[]) -> f32[5,3] {
  %s.1 = f32[11,5,3]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %slice.1 = f32[1,5,3]{2,1,0} dynamic-slice(%s.1, %i.1, %zero.1, %zero.1), dynamic_slice_sizes={1,5,3}
  ROOT %b.1 = f32[5,3]{1,0} bitcast(%slice.1)
}

%write (s.2: f32[11,5,3], x.2: f32[5,3], i.2: s32[]) -> f32[11,5,3] {
  %s.2 = f32[11,5,3]{2,1,0} parameter(0)
  %x.2 = f32[5,3]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %zero.2 = s32[] constant(0)
  %b.2 = f32[1,5,3]{2,1,0} bitcast(%x.2)
  ROOT %u.2 = f32[11,5,3]{2,1,0} dynamic-update-slice(%s.2, %b.2, %i.2, %zero.2, %zero.2)
}

%outer (s.3: f32[11,5,3], i.3: s32[]) -> f32[5,3] {
  %s.3 = f32[11,5,3]{2,1,0} parameter(0)
  %i.3 = s32[] parameter(1)
  ROOT %f.3 = f32[5,3]{1,0} fusion(%s.3, %i.3), kind=kLoop, calls=%read
}

ENTRY %main (s: f32[11,5,3], x: f32[5,3], i: s32[]) -> f32[5,3] {
  %s = f32[11,5,3]{2,1,0} parameter(0)
  %x = f32[5,3]{1,0} parameter(1)
  %i = s32[]{:S(1)} parameter(2)
  %reads = f32[5,3]{1,0} fusion(%s, %i), kind=kLoop, calls=%read
  %reads_on_chip = f32[5,3]{1,0:S(1)} fusion(%s, %i), kind=kLoop, calls=%read
  %nested = f32[5,3]{1,0} fusion(%s, %i), kind=kLoop, calls=%outer
  %writes = f32[11,5,3]{2,1,0} fusion(%s, %x, %i), kind=kLoop, calls=%write
  %plain = f32[5,3]{1,0} tanh(%x)
  %copied = (f32[5,3]{1,0}, f32[5,3]{1,0:S(1)}, u32[]) copy-start(%x)
  %arrived = f32[5,3]{1,0:S(1)} copy-done(%copied)
  %room = f32[11,5,3]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %end = f32[5,3]{1,0} copy(%x)
}
"""
LAYER = 4 * 5 * 3


@pytest.mark.parametrize(
    "name, size",
    [("reads", 2 * LAYER), ("reads_on_chip", LAYER), ("nested", 2 * LAYER), ("writes", 2 * LAYER), ("plain", 2 * LAYER),
     ("copied", LAYER), ("arrived", 0), ("room", 0), ("s", 0)],
)  # fmt: skip
def test_only_the_layer_of_a_stack_counts(name, size):
    """Catches a whole stack counted for each layer, arrays in on-chip memory, and buffers that are only allocated."""
    program = Program(TEXT)
    computation = program.computations[program.entry]
    assert Memory(program).bytes_moved(computation, computation[name]) == size
