"""What a line of a batch runs: the routes themselves, over the real handlers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time

import pytest

from quire.api.decode import LARGE_BYTES, decode_body
from quire.serving.answers import Ready
from quire.serving.batch import execution
from quire.serving.batch.execution import BATCH_ENDPOINTS, check_batch_body, make_execute
from quire.serving.batch.records import BatchRecord
from quire.serving.batch.runner import answer_line, usage_of
from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError
from tests.unit.serving.fakes import FakeGateway, make_served, text_script
from tests.unit.serving.real_app import running_app

SERVED = make_served()
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


def record_of(endpoint):
    return BatchRecord(
        id="batch_x",
        owner="anonymous",
        endpoint=endpoint,
        input_file_id="file-x",
        completion_window="24h",
        status="in_progress",
        created_at=0,
        expires_at=int(time.time()) + 1000,
    )


def execute_in(app):
    return make_execute(app.responses, app.parts.authenticator, app.parts.bodies.decoding)


def run(endpoint, body, keeps_responses=True):
    """Return the answer to a line, the jobs of the gateway, and the responses that are stored."""

    async def work():
        gateway = FakeGateway(text_script(SERVED.tokenizer, "Hello"))
        async with running_app(gateway, SERVED) as app:
            app.responses.keeps_responses = keeps_responses
            answer = await execute_in(app)(record_of(endpoint), json.dumps({"model": "demo", **body}).encode())
            found = json.loads(answer.body)
            stored = 200 if keeps_responses else None
            if endpoint == "/v1/responses":
                async with app.http() as client:
                    stored = (await client.get(f"/v1/responses/{found['id']}")).status_code
            return found, gateway.jobs, stored, usage_of(answer.body, "a line")

    return asyncio.run(work())


def test_endpoints_are_those_of_the_batch_api_that_the_server_has():
    assert set(BATCH_ENDPOINTS) == {*BODIES, "/v1/embeddings"}


@pytest.mark.parametrize("endpoint", BODIES)
def test_line_runs_in_the_class_of_batches(endpoint):
    answer, (job,), _, usage = run(endpoint, BODIES[endpoint])
    assert (job.priority, job.route) == ("batch", endpoint)
    assert "Hello" in json.dumps(answer)
    assert usage.input_tokens > 0
    assert usage.output_tokens > 0


def test_line_of_the_output_tells_unknown_fields():
    async def work(config):
        gateway = FakeGateway(text_script(SERVED.tokenizer, "Hello"))
        async with running_app(gateway, SERVED, config) as app:
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": "hi", "mood": 1}],
                "chat_template_kwargs": {"x": 1},
            }
            return await execute_in(app)(record_of("/v1/chat/completions"), json.dumps(body).encode())

    answer = asyncio.run(work(ServerConfig()))
    line = json.loads(answer_line("a", answer))
    assert line["response"]["ignored_params"] == ["messages[0].mood", "chat_template_kwargs.x"]
    assert "ignored_params" not in json.loads(answer_line("a", Ready(b"{}")))["response"]
    with pytest.raises(ApiError) as caught:
        asyncio.run(work(ServerConfig(strict=True)))
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "messages[0].mood")


def test_response_of_a_line_is_stored_when_the_server_stores():
    answer, _, status, _ = run("/v1/responses", {"input": "hi"})
    assert (answer["store"], status) == (True, 200)


def test_response_of_a_line_says_that_it_is_not_stored_when_nothing_is():
    answer, _, status, _ = run("/v1/responses", {"input": "hi"}, keeps_responses=False)
    assert (answer["store"], status) == (False, 404)
    with pytest.raises(ApiError, match="no responses are stored") as caught:
        run("/v1/responses", {"input": "hi", "previous_response_id": "resp_x"}, keeps_responses=False)
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")


def test_body_is_refused_by_its_field_when_its_route_would_refuse_it():
    for body, param in (({"input": "hi", "stream": True}, "stream"), ({"input": 5}, "input")):
        with pytest.raises(ApiError) as caught:
            check_batch_body("/v1/responses", json.dumps({"model": "demo", **body}).encode())
        assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("num_characters", "is_beside"), [(10, False), (LARGE_BYTES, True)])
def test_body_of_a_line_is_decoded_in_a_thread_when_it_is_large(monkeypatch, num_characters, is_beside):
    threads = []

    def decode(body, kind):
        threads.append(threading.current_thread())
        return decode_body(body, kind)

    monkeypatch.setattr(execution, "decode_body", decode)
    with contextlib.suppress(ApiError):  # the context does not hold the large one
        run("/v1/completions", {"prompt": "x" * num_characters})
    assert [thread is not threading.main_thread() for thread in threads] == [is_beside]
