"""Rows and requests for the tests of the sampling package."""

from quire.base.ids import RequestId
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.sampling import SamplingRow

PROMPT = (3, 1, 4, 1, 5)


def make_request(prompt=PROMPT, seed=7, eos=(), **params):
    return Request(
        request_id=RequestId("r"),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": None} | params),
        seed=seed,
        eos_token_ids=frozenset(eos),
    )


def make_row(vocab_size, output=(), choice=0, **fields):
    request = make_request(**fields)
    return SamplingRow(request, choice, (*request.prompt_token_ids, *output), vocab_size)
