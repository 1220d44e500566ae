"""The text interface: what a trained model generates, where it stops, and what it streams."""

import jax
import numpy as np
import pytest
import tiktoken

import model
import pipeline
from config import replace
from data import tokenizers
from generate.cache import NOWHERE
from generate.engine import Token
from generate.request import Request
from generate.sampling import BatchSettings, DrawnTokens
from generate.texts import Sampler
from tests import helpers
from tests.generate.models import BYTES, EOT, RULE, TINY, V, one_device, rule_text
from utils import UserError

# Whole samples from a real model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """A model of random weights that never ends a text: the logit of end of text is 0, and the largest is above 0.

    Its expert capacity in training is too small for one decoded token; sampling must drop none.
    """
    params = helpers.draw(model.declare(TINY.model), seed=1)
    params.unembedding_DV[:, EOT] = 0
    return Sampler(replace(TINY, **{"model.capacity_factor": 0.01}), jax.device_put(params), BYTES)


def draw_all(sampler, *requests):
    return [[token.id for token in one.tokens] for one in sampler.run_requests([*requests])]


def test_greedy_is_the_argmax_of_the_full_forward(tiny):
    """Catches logits of another position, and a temperature of 0 that does not take the most likely token."""
    prompt = [EOT, *b"ac"]
    (ids,) = draw_all(tiny, Request("ac", tokens=15, temperature=0, seed=5))
    assert len(ids) == 15 and len(set(ids)) > 3
    row_T = np.array(prompt + ids, np.int32)
    batch = {"tokens_BT": row_T[None, :], "positions_BT": np.arange(len(row_T), dtype=np.int32)[None, :],
             "segments_BT": np.ones((1, len(row_T)), np.int32)}  # fmt: skip
    logits_TV = np.asarray(pipeline.logits(TINY, one_device())(tiny.params, batch))[0]
    assert ids == np.argmax(logits_TV[:, :V], axis=-1)[len(prompt) - 1 : -1].tolist()


def test_unused_ids_are_never_generated():
    """A tokenizer may skip ids, as cl100k_base skips sixteen. They have no text to look up. Catches one that is
    generated, by sampling, speculation or beam search, and one among the alternatives."""
    ranks, end = {bytes([byte]): byte for byte in range(256)}, 262
    gaps = tiktoken.Encoding("gaps", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end})
    assert tokenizers.unused_ids(gaps) == [256, 257, 258, 259, 260, 261] and tokenizers.unused_ids(BYTES) == []
    params = helpers.draw(model.declare(TINY.model), seed=1)
    params.unembedding_DV[:, end] = 0
    params.unembedding_DV[:, 256:end] = 9 * params.unembedding_DV[:, 97:103]  # the largest logits, or the smallest
    sampler = Sampler(TINY, jax.device_put(params), gaps)
    for settings in (dict(temperature=0), dict(temperature=3.0, top_k=0, top_p=1.0, repetition_penalty=1.5)):
        asked = Request("ab", tokens=9, logprobs=20, **settings)
        (one,), (drafted, _) = sampler.run_requests([asked]), sampler.speculate(asked, sampler, 3)
        tokens = [*one.tokens, *drafted.tokens]
        assert max(id for token in tokens for id in (token.id, *dict(token.alternatives))) <= 255
        assert len(tokens) == 18 and all(np.isfinite(token.logprob) for token in tokens)
    found = sampler.search(Request("ab", tokens=9), width=4)
    assert max(id for _, beam in found for id in beam.tokens) <= 255
    row = DrawnTokens(np.int32([97]), np.float32([-0.5]), np.int32([[97, 256]]), np.float32([[-0.5, -np.inf]]))
    assert Token.from_row(row, 0, 2).alternatives == [(97, -0.5)]


# A trained model that follows the rule --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trained_model_follows_its_rule(rule, temperature):
    """Catches tokens, positions or parameters that are used differently in generation than in training."""
    prompts = ["!", "Nx", "abcy"]  # these prompts break the rule, and only the last byte counts
    texts = rule.generate_texts([Request(prompt, tokens=18, temperature=temperature) for prompt in prompts])
    assert texts == [rule_text(prompt, 18) for prompt in prompts]


def test_prompt_lengths_share_few_engines(rule):
    """Catches an engine for every prompt length, each of which takes seconds to compile."""
    sampler = Sampler(replace(RULE, **{"data.seq_len": 256}), rule.params, BYTES)
    for length in (5, 6, 7, 200, 190):
        sampler.generate_texts([Request("x" * length, tokens=3, seed=length)])
    assert [*sampler.engines] == [(1, 16, 8), (1, 256, 64)]
    assert len({id(engine.params) for engine in sampler.engines.values()}) == 1, "each engine has separate weights"
    engines = sampler.engines.values()
    assert [f._cache_size() for engine in engines for f in (engine.prefill, engine.decode_step)] == [1] * 4


# A scripted model -----------------------------------------------------------------------------------------------------


class Scripted(Sampler):
    """A sampler whose model is a function of the last token. The padding rows of its table have the largest logits.

    `calls` records the positions of every call.
    """

    def __init__(self, next_token, cfg=TINY, encoding=BYTES):
        super().__init__(cfg, {}, encoding)
        self.next_token, self.calls = next_token, []

    def engine(self, *sizes):
        new = super().engine(*sizes)

        def forward(params, cache, tokens_bs, positions_bs, last_b, *at_b):
            self.calls.append(positions_bs)
            logits_bV = np.zeros((len(tokens_bs), self.cfg.model.vocab_size), np.float32)
            logits_bV[:, self.encoding.n_vocab :] = 1e9
            for row, last in enumerate(last_b):
                logits_bV[row, self.next_token(int(tokens_bs[row, last]))] = 1e6
            return logits_bV, cache

        new.prefill = new.decode_step = forward
        return new


def test_a_text_ends_at_end_of_text_or_at_its_maximum_length():
    """Catches a text that continues after end of text, includes it, or ends early; a step too many; a row that ends
    because another does; and padding rows that are drawn."""
    sampler = Scripted(lambda token: EOT if token == ord("d") else token + 1)
    assert sampler.generate_texts([Request("a", tokens=50)]) == ["abcd"]
    assert len(sampler.calls) == 4  # a, b, c, d: the end token is not run through the model
    sampler.calls.clear()
    assert sampler.generate_texts([Request("A", tokens=5), Request("a", tokens=7), Request("xyz", tokens=1)]) == [
        "ABCDEF", "abcd", "xyz{"]  # fmt: skip
    # End of text, prompt and new tokens fill 18 positions: 1 + 1 + 16, and 1 + 16 + 1.
    sampler.calls.clear()
    assert sampler.generate_texts([Request("A", tokens=99), Request("0" * 16, tokens=99)]) == [
        "ABCDEFGHIJKLMNOPQ", "0" * 16 + "1"]  # fmt: skip
    looked_up = np.concatenate([positions.ravel() for positions in sampler.calls])
    assert looked_up.max(where=looked_up < NOWHERE, initial=0) == 16  # of 0 to 17; the last new token is not run
    with pytest.raises(UserError) as error:
        sampler.generate_texts([Request("0" * 17)])
    assert str(error.value) == (
        "a prompt of 17 tokens and the end-of-text token before it leave no room in data.seq_len=18; "
        "shorten the prompt to at most 16 tokens"
    )


def test_positions_follow_the_prompt():
    """Catches a decoded token at the position after the padding, or at that of another row."""
    sampler = Scripted(lambda token: token + 1)
    sampler.generate_texts([Request("a", tokens=3), Request("abcde", tokens=3)])
    decoded = [positions.ravel().tolist() for positions in sampler.calls if positions.shape == (2, 1)]
    assert decoded == [[2, 6], [3, 7]]
    read = [positions.ravel().tolist() for positions in sampler.calls if positions.shape == (1, 8)]
    assert read == [[0, 1] + [NOWHERE] * 6, [0, 1, 2, 3, 4, 5] + [NOWHERE] * 2]


def test_an_empty_prompt_is_continued():
    """Catches a missing end-of-text token before the prompt, without which there is no token to continue."""
    assert Scripted(lambda token: ord("d") if token == EOT else token + 1).generate_texts([Request("", tokens=3)]) == [
        "def"
    ]


def test_streamed_pieces_add_up_to_the_text():
    """Catches a character that is split because its bytes are separate tokens, a text that is printed twice, mixed up
    rows, and lost bytes at the end."""
    text = "né→😀"
    after = dict(zip(text.encode(), text.encode()[1:], strict=False))
    sampler, streamed = Scripted(lambda token: after.get(token, 0xE2)), []
    requests = [Request("n", tokens=9), Request("n", tokens=3)]
    texts = sampler.generate_texts(requests, stream=lambda row, piece: streamed.append((row, piece)))
    assert len(set(text.encode())) == len(text.encode()) == 10
    assert texts == ["né→😀", "né\ufffd"]  # the second ends within a character
    for row, want in enumerate(("é→😀", "é\ufffd")):
        assert [piece for at, piece in streamed if at == row] == list(want)


@pytest.mark.parametrize(
    "stop, text, drawn",
    [
        (("f",), "bcde", 5),
        (("efg", "ef"), "bcd", 5),  # the shorter stop is complete first
        (("de", "cdx"), "bc", 4),  # cd could have become cdx
        (("xyz",), "bcdefghi", 8),
        (("ijk",), "bcdefghi", 8),  # the text ends, and the held back end is released
        (("b",), "", 1),
    ],
)
def test_a_text_ends_before_a_stop(stop, text, drawn):
    """Catches a stop in the text, or found only within a token; the beginning of a stop that is streamed, or lost if
    the stop is not completed; and tokens after it."""
    sampler, streamed = Scripted(lambda token: token + 1), []
    (one,) = sampler.run_requests([Request("a", tokens=8, stop=stop)], stream=lambda _, piece: streamed.append(piece))
    assert one.text == "".join(streamed) == text
    assert one.ended == ("length" if len(text) == 8 else "stop")
    assert len(one.tokens) == drawn


def test_seeds_may_have_any_size():
    """Catches an overflow, and different seeds that become equal."""
    asked = lambda seed: BatchSettings.from_rows([(Request(seed=seed), 0)], 60).seed.tolist()
    assert asked(-1) == [2**32 - 1] != asked(2**31)
    assert Scripted(lambda token: token + 1).generate_texts([Request("a", tokens=1, seed=-(2**70))]) == ["ab"]
