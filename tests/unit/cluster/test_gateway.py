"""Gateway: requests reach replicas, and streams go on at another replica where one is lost."""

import asyncio
import json

import httpx
import pytest

from quire.cluster.config import read_config
from quire.cluster.gateway import Gateway, ReplicaLostError
from quire.cluster.messages import AnswerFailure, AnswerHead
from quire.serving.resume_wire import END_COMMENT, RESUMABLE_HEADER, RESUME_HEADER, tokens_comment, unpack_tokens

JSON = [(b"content-type", b"application/json")]
MARKED = [(b"content-type", b"text/event-stream"), (RESUMABLE_HEADER.encode(), b"1")]


class Replicas:
    """Answers by a list of items for each request; an exception among them is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []

    async def send(self, request):
        self.requests.append(request)
        for item in self.answers.pop(0):
            if isinstance(item, Exception):
                raise item
            yield item


def ask(replicas, path, body=None, root_path="", **config):
    async def work():
        app = Gateway(read_config({"model": "demo", **config}), replicas.send)
        transport = httpx.ASGITransport(app, root_path=root_path, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            if body is None:
                return await client.get(root_path + path)
            return await client.post(root_path + path, content=json.dumps(body), headers={"authorization": "Bearer k"})

    return asyncio.run(asyncio.wait_for(work(), 60))


def head(status=200, headers=JSON):
    return AnswerHead(status, headers, "r")


def delta(number):
    return b"data: %d\n\n" % number + tokens_comment([number])


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_request_and_answer_pass_through(root_path):
    replicas = Replicas([head(201), b"a", b"b"])
    got = ask(replicas, "/v1/chat/completions", {"model": "demo", "messages": []}, root_path)
    assert (got.status_code, got.content) == (201, b"ab")
    (request,) = replicas.requests
    assert (request.method, request.target) == ("POST", b"/v1/chat/completions")
    assert (b"authorization", b"Bearer k") in request.headers
    assert request.prompt.num_bytes > 0


def test_url_of_azure_names_the_model():
    replicas = Replicas([head(), b"{}"])
    assert ask(replicas, "/openai/deployments/demo/completions?api-version=1", {"prompt": "x"}).status_code == 200
    assert (replicas.requests[0].target, json.loads(replicas.requests[0].body)["model"]) == (b"/v1/completions", "demo")


@pytest.mark.parametrize(
    "path, body, status, word",
    [
        ("/health", None, 200, "ok"),
        ("/v1/files", None, 501, "share no files"),
        ("/v1/responses/resp_1", None, 501, "share no responses"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 501, "share no responses"),
        ("/v1/responses", {"input": "x", "background": True}, 501, "background"),
        ("/v1/requests/r1/timeline", None, 501, "quire explain"),
        ("/v1/load_lora_adapter", {}, 404, "there is no"),
        ("/metrics", None, 404, "there is no"),
        ("/v1/completions", {"model": 5}, 400, "model must be a string"),
    ],
)
def test_what_the_gateway_answers_itself(path, body, status, word):
    replicas = Replicas()
    got = ask(replicas, path, body)
    assert (got.status_code, word in got.text, replicas.requests) == (status, True, [])


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stream_goes_on_at_another_replica(after):
    first = [head(200, MARKED), *(delta(number) for number in range(after)), b"data: 9", ReplicaLostError("killed")]
    second = [head(200, MARKED), *(delta(number) for number in range(after, 5)), END_COMMENT]
    replicas = Replicas(first, second)
    got = ask(replicas, "/v1/completions", {"prompt": "x", "stream": True})
    assert got.content == b"".join(b"data: %d\n\n" % number for number in range(5))
    assert RESUMABLE_HEADER not in got.headers
    again = replicas.requests[1]
    assert dict(again.headers).get(RESUME_HEADER.encode(), b"0") == b"%d" % after
    num_body = len(replicas.requests[0].body)
    assert unpack_tokens(again.body[num_body:]) == tuple(range(after))


def test_lost_replica_before_the_answer_is_tried_again_and_the_last_one_is_told():
    replicas = Replicas([ReplicaLostError("x")], [AnswerFailure("refused")], [head(), b"{}"])
    assert ask(replicas, "/v1/completions", {"prompt": "x"}).status_code == 200
    replicas = Replicas([ReplicaLostError("x")], [])
    got = ask(replicas, "/v1/completions", {"prompt": "x"}, max_retries=1)
    assert (got.status_code, got.json()["error"]["code"]) == (503, "no_backend_available")
    replicas = Replicas([AnswerFailure("slow", is_timeout=True)])
    assert ask(replicas, "/v1/completions", {"prompt": "x"}).status_code == 504


def test_stream_that_nobody_continues_ends_with_an_error_event():
    broken = [head(200, MARKED), delta(0), ReplicaLostError("x")]
    got = ask(Replicas(broken, [head(503)]), "/v1/completions", {"prompt": "x", "stream": True}, max_retries=1)
    assert got.text.startswith('data: 0\n\ndata: {"error"')
    assert "backend_failed" in got.text
