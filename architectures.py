"""What differs between architectures: a causal decoder and a prefix LM, which are both `model.py`, and an
encoder-decoder, `encoder_decoder.py`. Code that runs, plans or converts any of them asks `architecture(c)`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np

import encoder_decoder
import model
from config import ModelConfig
from config.fields import parse_window


class Stack(NamedTuple):
    """Layers of one kind, whose parameters are stacked."""

    name: str  # the beginning of their parameters' names, such as `blocks.moe`
    kind: str  # dense, moe, encoder or decoder
    numbers: np.ndarray  # the layers' numbers, counted from 0, in the shape in which their parameters are stacked


def decoder_stacks(c: ModelConfig) -> list[Stack]:
    numbers_LJ = np.arange(c.dense_prefix, c.n_layers).reshape(c.n_blocks, c.layers_per_block)
    dense_LJ = numbers_LJ[:, : c.layers_per_block - bool(c.n_experts)]
    moe = [Stack("blocks.moe", "moe", numbers_LJ[:, -1])] * bool(c.n_experts)
    return [Stack("prefix", "dense", np.arange(c.dense_prefix)), Stack("blocks.dense", "dense", dense_LJ), *moe]


def encoder_decoder_stacks(c: ModelConfig) -> list[Stack]:
    layers = {"encoder": c.encoder_layers, "decoder": c.n_layers}
    return [Stack(f"{kind}.layers", kind, np.arange(count)) for kind, count in layers.items()]


@dataclass(frozen=True)
class Architecture:
    """What the rest of the code needs to know about an architecture. The defaults are those of a causal decoder."""

    name: str  # in messages
    module: ModuleType = model  # has `declare`, `embed_batch` and `stage`
    stacks: Callable[[ModelConfig], list[Stack]] = decoder_stacks
    batch: tuple[str, ...] = ()  # arrays that it reads from a batch, besides those of a causal decoder
    passes: int = 1  # how often a microbatch passes through the pipeline stages, each time through other layers
    schedules: tuple[str, ...] = ()  # that it can run; none named: all
    splits_context: bool = True  # CONTEXT may shard its positions
    lists_remat: bool = True  # work.remat may be a list of activations
    whole_prompt: bool = False  # the tokens of a prompt attend to all of it, so it is read in one chunk
    continues_prompt: bool = True  # a text continues its prompt; otherwise an encoder reads the prompt
    input_len: int = 0  # inputs per sequence of the published models


DECODER = Architecture("a causal decoder")
PREFIX_LM = Architecture("a prefix LM", batch=("prefix_BT",), whole_prompt=True)
ENCODER_DECODER = Architecture(
    "an encoder-decoder", encoder_decoder, encoder_decoder_stacks, encoder_decoder.ENCODER_BATCH, passes=2,
    schedules=("gpipe", "1f1b"), splits_context=False, lists_remat=False, whole_prompt=True, continues_prompt=False,
    input_len=512)  # fmt: skip


def architecture(c: ModelConfig) -> Architecture:
    return ENCODER_DECODER if c.encoder_layers else PREFIX_LM if c.prefix_lm else DECODER


def declare(c: ModelConfig) -> model.Transformer:
    """Declare every parameter, as `model.declare` and `encoder_decoder.declare`."""
    return architecture(c).module.declare(c)


def busiest_stage(c: ModelConfig, stages: int, chunks: int) -> Counter[tuple[str, bool]]:
    """Count the layers of a pipeline stage by kind and by whether they attend to all positions, without a window.

    Stages are compared by their layers, then by the layers without a window; the first stage wins a tie.
    """
    (window, every, _), counts = parse_window(c.window), [Counter() for _ in range(stages)]
    for stack in architecture(c).stacks(c):
        parts = 1 if stack.name == "prefix" else stages * (chunks if stages > 1 else 1)
        numbers = stack.numbers.reshape(-1).tolist()
        size = -(-len(numbers) // parts)
        for i in range(parts):
            full = [(x + 1) % every == 0 if every else not window for x in numbers[i * size : (i + 1) * size]]
            counts[i % stages].update((stack.kind, one) for one in full)
    return max(counts, key=lambda count: (count.total(), sum(n for (_, full), n in count.items() if full)))
