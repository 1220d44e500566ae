"""Make batches of examples: feature converters for a decoder, a decoder with a prefix-LM mask, and an encoder-decoder.

An example (`objectives.Example`) has inputs and targets. Several examples share a row; each is a segment, numbered from
1, and no token attends to another segment. The arrays are those of `dataset.batch`:

    decoder            a segment is end of text, inputs, targets. Only the targets count in the loss. The last target is
                       end of text
    prefix LM          the same, and prefix_BT is 1 at the end-of-text token and at the inputs
    encoder-decoder    a segment of the encoder is inputs, end of text; the same segment of the decoder is end of text,
                       targets. The last target is end of text

Source: the feature converters of seqio, in the T5X paper, arXiv:2203.17189, section 3.2.
"""

import bisect
import functools
from collections.abc import Sequence

import numpy as np

from config import Config, DataConfig
from data.reading import objectives
from data.reading.objectives import Example, Lengths
from utils import UserError

Rows = Sequence[Sequence[Example]]  # the examples of each row of a batch


def convert(rows: Rows, eot: int, cfg: Config) -> dict[str, np.ndarray]:
    """Make the batch that the model of a run reads."""
    if cfg.data.input_len:
        return encoder_decoder(rows, eot, cfg.data.input_len, cfg.data.seq_len)
    return decoder(rows, eot, cfg.data.seq_len, cfg.model.prefix_lm)


def decoder(rows: Rows, eot: int, seq_len: int, prefix_lm: bool = False) -> dict[str, np.ndarray]:
    """Make a batch of inputs followed by targets, for a model without an encoder."""

    def arrays(example: Example) -> dict[str, np.ndarray]:
        ids = np.concatenate([[eot], *example, [eot]])
        is_input = np.arange(len(ids)) <= len(example.inputs)
        found = {"tokens": ids[:-1], "targets": ids[1:], "weights": ~is_input[1:]}
        return found | {"prefix": is_input[:-1]} if prefix_lm else found

    padding = {"tokens": eot, "targets": eot, "weights": 0.0} | ({"prefix": 0} if prefix_lm else {})
    return _pack([[*map(arrays, row)] for row in rows], padding, seq_len, "{}_BT", "data.seq_len")


def encoder_decoder(rows: Rows, eot: int, input_len: int, seq_len: int) -> dict[str, np.ndarray]:
    """Make a batch of inputs for an encoder, which end with end of text as in T5, and targets for a decoder."""
    inputs = [[{"tokens": np.append(one.inputs, eot)} for one in row] for row in rows]
    read = _pack(inputs, {"tokens": eot}, input_len, "encoder_{}_BS", "data.input_len")
    return read | decoder([[Example([], one.targets) for one in row] for row in rows], eot, seq_len)


def _pack(rows: list[list[dict]], padding: dict, length: int, name: str, setting: str) -> dict[str, np.ndarray]:
    """Concatenate the arrays of each row's examples, pad them, and number segments and positions.

    padding   name -> value after the last example; a float makes a float32 array, an int an int32 array
    Raises: UserError if the examples of a row are longer than a row.
    """
    dtype = lambda value: np.float32 if isinstance(value, float) else np.int32
    padding = padding | {"positions": 0, "segments": 0}
    packed = {what: np.full((len(rows), length), value, dtype(value)) for what, value in padding.items()}
    for number, row in enumerate(rows):
        end = 0
        for segment, example in enumerate(row, 1):
            begin, end = end, end + len(example["tokens"])
            if end > length:
                raise UserError(f"the examples of a row need {end} positions or more, but {setting}={length}")
            for what, values in (example | {"positions": np.arange(end - begin), "segments": segment}).items():
                packed[what][number, begin:end] = values
    return {name.format(what): array for what, array in packed.items()}


# Which examples fit into a row ----------------------------------------------------------------------------------------


def room(d: DataConfig) -> tuple[int, ...]:
    """Return the positions of a row: of the encoder and of the decoder, or only of the decoder."""
    return (d.input_len, d.seq_len) if d.input_len else (d.seq_len,)


def positions(example: Lengths, room: tuple[int, ...]) -> tuple:
    """Return how many positions an example needs in each part of a row's room."""
    return (example.inputs + 1, example.targets + 1) if len(room) == 2 else (example.both + 1,)


@functools.lru_cache(maxsize=4096)
def longest_text(objective: str, room: tuple[int, ...]) -> int:
    """Return the most tokens of a text whose example fits into the room; less than `objectives.LEAST`: none fits.

    Source: `compute_input_and_target_lengths` of T5: 568 tokens become 512 inputs and 114 targets.
    """

    too_long = lambda tokens: not fits(objectives.lengths(objective, tokens), room)
    least = objectives.LEAST
    return least - 1 + bisect.bisect_left(range(least, sum(room) + least), True, key=too_long)


def fits(example: Lengths, room: tuple[int, ...]) -> bool:
    return all(needed <= free for needed, free in zip(positions(example, room), room, strict=True))


def row_share(examples: Lengths, room: tuple[int, ...]) -> np.ndarray:
    """Return the share of a row that each example takes, out of max(room): that of the encoder or of the decoder,
    whichever is larger. So examples whose shares fit into a row fit into both."""
    shares = [-(-needed * max(room) // free) for needed, free in zip(positions(examples, room), room, strict=True)]
    return np.max(shares, axis=0)
