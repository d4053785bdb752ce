"""What a router states of a stream that another server may continue, and what of it is refused."""

import asyncio

import httpx2
import pytest

from quire.serving.core import resumption
from quire.serving.core.resumption import Resumption
from quire.serving.endpoint import bind
from quire.serving.errors import ApiError
from quire.serving.http.app import make_app
from quire.serving.openai.endpoints import ENDPOINTS
from quire.serving.resume_wire import cut_output, pack_tokens, read_tokens_comment, tokens_comment
from tests.unit.serving.fakes import FakeGateway, make_served, text_script
from tests.unit.serving.real_app import BASE, running_app

HEADERS = {"x-quire-resumable": "18446744073709551617 k3fa8s2mabc 1700000000"}


def test_headers_and_output_are_read():
    assert Resumption.of({}, b"") is None
    assert Resumption.of(HEADERS, b"") == Resumption(1, "k3fa8s2mabc", 1_700_000_000)
    assert Resumption.of(HEADERS, pack_tokens([3, 70_000])).token_ids == (3, 70_000)


@pytest.mark.parametrize("stated", ["", "1", "1 abc 5", "-1 k3fa8s2mabc 5", "1 k3fa8s2m;bc 5", "1 k3fa8s2mabc 5 6"])
def test_headers_of_another_form_are_refused(stated):
    with pytest.raises(ApiError, match="x-quire-resumable must be like"):
        Resumption.of({"x-quire-resumable": stated}, b"")


def test_output_without_its_header_is_refused():
    with pytest.raises(ApiError, match="x-quire-resume needs x-quire-resumable"):
        Resumption.of({}, pack_tokens([1]))


def test_output_is_cut_from_the_body():
    body, output = b'{"a": 1}', pack_tokens([5, 6])
    assert cut_output([body[:3], body[3:] + output[:1], output[1:]], "2") == ([body], output)
    for stated in ("0", "-1", "x", "5", "99999999999", "1.5", ""):
        with pytest.raises(ApiError, match="must be the number of tokens after the body"):
            cut_output([body, output], stated)


def test_comments_tell_tokens():
    assert tokens_comment([1, 22]) == b": quire-tokens 1,22\n\n"
    assert read_tokens_comment(tokens_comment([1, 22])) == [1, 22]
    assert read_tokens_comment(tokens_comment([])) == []


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([5, 5000], "token ids must be from 0 to 4095"),
        ([-1], "token ids must be from 0 to 4095"),
        ([5] * 2000, "nothing is left"),
        ([0, 5], "a token that ends it"),
    ],
    ids=["above", "below", "long", "ended"],
)
def test_output_that_no_backend_can_have_made_is_refused_before_its_text_is_made(token_ids, message, monkeypatch):
    made = []
    monkeypatch.setattr(resumption, "OutputStream", lambda *args: made.append(args))
    served = make_served()

    async def work():
        async with running_app(FakeGateway(text_script(served.tokenizer, "Hello")), served) as app:
            transport = httpx2.ASGITransport(make_app(app.parts, bind(ENDPOINTS, app.responses.server)))
            async with httpx2.AsyncClient(transport=transport, base_url=BASE) as client:
                content = b'{"model": "demo", "prompt": "hi", "stream": true}' + pack_tokens(token_ids)
                sent = {**HEADERS, "x-quire-resume": str(len(token_ids)), "content-type": "application/json"}
                return await client.post("/v1/completions", content=content, headers=sent)

    answer = asyncio.run(work())
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True)
    assert not made
