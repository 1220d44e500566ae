"""Test that the ledger counts collectives between TPU slices, which are a send to the host and a recv."""

import numpy as np
import pytest
from jax.sharding import Mesh

from compile import ledger
from utils import UserError

# As libtpu 0.0.42 compiles a psum over data and fsdp on two slices of four chips; shortened.
TEXT = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[64,32]) -> f32[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %token = token[] after-all()
  %part = f32[16,32]{1,0} reduce-scatter(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  %send = (f32[16,32]{1,0}, u32[], token[]) send(%part, %token), channel_id=2, is_host_transfer=true, SENT
  %recv = (OUT, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, SENT
  %send-done = token[] send-done(%send), channel_id=2, frontend_attributes={HANDLER}
  BESIDE
  %recv-done = (OUT, token[]) recv-done(%recv), channel_id=1, frontend_attributes={HANDLER}
  LATER
  %sum.2 = OUT get-tuple-element(%recv-done), index=0
  ROOT %y = f32[64,32]{1,0} all-gather(%part), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}
"""
SENT = 'frontend_attributes={HANDLER,_xla_host_transfer_rendezvous="r",_xla_megascale_transfer_type="KIND"}'
HANDLER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
DOT = "%d = f32[16,16]{1,0} dot(%part, %part), lhs_contracting_dims={1}, rhs_contracting_dims={1}"


class Chip:
    platform = "tpu"

    def __init__(self, number):
        self.id, self.slice_index, self.process_index = number, number // 4, number // 4


def count(kind, beside="", later="", out="f32[16,32]{1,0}", handler=HANDLER):
    """Return the collectives of TEXT on a mesh of two slices, data=2 by fsdp=4."""
    names = {"SENT": SENT, "HANDLER": handler, "KIND": kind, "BESIDE": beside, "LATER": later, "OUT": out}
    text = TEXT
    for name, value in names.items():
        text = text.replace(name, value)
    chips = np.array([Chip(number) for number in range(8)]).reshape(2, 4)
    return ledger.read(text, Mesh(chips, ("data", "fsdp"))).collectives


@pytest.mark.parametrize("kind, expected, payload, sent", [
    ("ALL_REDUCE", "all-reduce", 2048, 2048), ("REDUCE_SCATTER", "reduce-scatter", 2048, 1024),
    ("ALL_GATHER", "all-gather", 4096, 2048), ("ALL_TO_ALL", "all-to-all", 2048, 1024),
    ("ONE_TO_ONE", "collective-permute", 2048, 2048),
])  # fmt: skip
def test_bytes_between_slices_are_counted(kind, expected, payload, sent):
    """Catches 0 bytes between slices, the bytes of a whole array, and in a slice the axes of the mesh of all slices."""
    inside, between, again = count(kind)
    assert (between.kind, between.axes, between.payload_bytes) == (expected, ("data between slices",), payload)
    assert (between.wire_bytes, between.dtype, between.count) == (sent, "f32", 1)
    assert [(one.kind, one.axes) for one in (inside, again)] == [
        ("reduce-scatter", ("fsdp",)),
        ("all-gather", ("fsdp",)),
    ]
    assert inside.wire_bytes == again.wire_bytes == 3 * 64 * 32


def test_a_send_lasts_until_its_recv_is_done():
    """Catches a transfer that seems to end with its send, and one that never ends."""
    _, beside, _ = count("ALL_REDUCE", beside=DOT)
    _, later, _ = count("ALL_REDUCE", later=DOT)
    assert (beside.hidden, beside.asynchronous, beside.overlapped_flops) == (True, True, 2 * 16 * 16 * 32)
    assert (later.hidden, later.asynchronous, later.overlapped_flops) == (False, True, 0)


def test_another_send_is_refused():
    """Catches a transfer to the host, or between processes, that counts 0 bytes."""
    with pytest.raises(UserError, match=r"does not know opcode send and would count 0 bytes"):
        count("ALL_REDUCE", handler='_xla_host_transfer_handler_name="another"')
