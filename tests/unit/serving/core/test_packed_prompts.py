"""Long prompts are packed before they come to the event loop, and told as they were."""

import random
from array import array

import msgspec
import pytest

from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.serving.core import long_prompts
from quire.serving.core.long_prompts import LONG_TOKENS, pack_prompt, write_ids
from quire.serving.engine_client.messages import Submit


def request_of(num_tokens):
    rng = random.Random(num_tokens)
    ids = tuple(rng.randrange(2**31) for _ in range(num_tokens))
    return Request(request_id="r", prompt_token_ids=ids, params=SamplingParams(), seed=1, prompt="text")


@pytest.mark.parametrize("num_tokens", [1, LONG_TOKENS, LONG_TOKENS + 1, 3 * LONG_TOKENS, 3 * LONG_TOKENS + 5])
def test_packed_request_is_sent_as_the_same_message(num_tokens):
    request = request_of(num_tokens)
    packed = pack_prompt(request)
    assert isinstance(packed.prompt_token_ids, array) == (num_tokens > LONG_TOKENS)
    assert list(packed.prompt_token_ids) == list(request.prompt_token_ids)
    assert Submit.of(packed) == Submit.of(request)
    assert Submit.of(packed).request() == request


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9])
def test_ids_are_written_as_one_list_whatever_their_number(monkeypatch, num_tokens):
    monkeypatch.setattr(long_prompts, "_PIECE_TOKENS", 4)
    ids = request_of(num_tokens).prompt_token_ids
    assert write_ids(ids) == msgspec.json.encode(ids)
    assert write_ids(array("i", ids)) == msgspec.json.encode(ids)
