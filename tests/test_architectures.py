"""The records of `architectures.py` agree with the code that they describe."""

import numpy as np
import pytest

import sharding
from architectures import architecture, declare
from config import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_stacks_have_every_layer_and_the_shapes_of_the_parameters(name):
    """Catches a layer that the planner and the converter leave out or count twice, and a stack with a wrong name."""
    c = preset(name).model
    declared, by_kind = sharding.flatten_named(declare(c)), {}
    for stack in architecture(c).stacks(c):
        shapes = {d.shape[: stack.numbers.ndim] for name, d in declared.items() if name.startswith(f"{stack.name}.")}
        assert shapes == ({stack.numbers.shape} if stack.numbers.size else set()), stack.name
        by_kind.setdefault(stack.kind if stack.kind == "encoder" else "decoder", []).extend(stack.numbers.flat)
    counts = {"encoder": c.encoder_layers, "decoder": c.n_layers}
    assert {kind: sorted(numbers) for kind, numbers in by_kind.items()} == {
        kind: [*np.arange(n)] for kind, n in counts.items() if n}  # fmt: skip


def test_a_decoder_runs_every_schedule():
    """Catches a new schedule that no architecture lists: every run with it would be refused."""
    assert architecture(preset("tiny").model).schedules == ()  # all, also a schedule that someone adds
