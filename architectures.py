"""Choose the architecture of a model: a decoder (`model.py`), or an encoder and a decoder (`encoder_decoder.py`)."""

import encoder_decoder
import model
from config import ModelConfig


def architecture(c: ModelConfig):
    """Return the module that has the model's `declare`, `embed_batch` and `stage`."""
    return encoder_decoder if c.encoder_layers else model


def declare(c: ModelConfig) -> model.Transformer:
    """Declare every parameter, as `model.declare` and `encoder_decoder.declare`."""
    return architecture(c).declare(c)


def passes(c: ModelConfig) -> int:
    """Return how often a microbatch passes through the pipeline stages: twice if there is an encoder."""
    return 2 if c.encoder_layers else 1
