"""Tests of requests to a server of an encoder-decoder, without a server."""

import json

import pytest

from data import tokenizers
from generate.texts import WithSentinels
from tests import extras

pytestmark = extras.require("serve")

from serve.protocol import RequestError, ServedModel

ENCODING = WithSentinels(tokenizers.load("bytes"), 304)
SERVED = ServedModel("t5", ENCODING, context=20, input_len=8)


def parse(**values):
    return SERVED.parse_request(json.dumps({"model": "t5"} | values).encode(), chat=False)


def test_a_prompt_ends_with_the_end_of_text_and_starts_the_decoder():
    """Catches a prompt that the encoder reads in another form than in training."""
    assert parse(prompt="a<extra_id_0>b").texts[0].prompt == [97, 303, 98, 256, 256]
    assert parse(prompt=[97, 303]).texts[0].prompt == [97, 303, 256, 256]


@pytest.mark.parametrize("values, message", [
    ({"prompt": "12345678"}, "8 tokens and the end-of-text token after it do not fit into the encoder's 8 positions; "
                             "shorten it by at least 1"),
    ({"prompt": "a", "echo": True}, "echo does not work with an encoder-decoder"),
])  # fmt: skip
def test_what_does_not_work_is_refused(values, message):
    """Catches inputs that are cut, and a request that stops the server."""
    with pytest.raises(RequestError) as error:
        parse(**values)
    assert message in str(error.value)
