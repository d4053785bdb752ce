"""Wrong types in every field of every JSON route, and schemathesis over the API's own description."""

import asyncio
import copy
import json
from types import SimpleNamespace

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quire.contracts.config import EngineConfig
from quire.serving.config import ServerConfig
from quire.serving.http.app import make_app
from quire.serving.http.main import Server
from quire.serving.http.openapi import document
from quire.serving.link.messages import RequestDelta
from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, engine_info, load_demo_tokenizer, make_served, text_script

TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
# One body for each JSON route, in which everything can be put wrong.
BODIES = {
    "/v1/chat/completions": {
        "model": "demo",
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": {"name": "get", "description": "d", "parameters": TOOL_SCHEMA}}],
        "max_tokens": 2,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "stream_options": {"include_usage": True},
        "stream": True,
    },
    "/v1/completions": {"model": "demo", "prompt": ["a", "b"], "max_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1}},
    "/v1/embeddings": {"model": "demo", "input": ["a"], "encoding_format": "float"},
    "/tokenize": {"model": "demo", "messages": MESSAGES[:1]},
    "/detokenize": {"model": "demo", "tokens": [5, 6]},
    "/v1/responses": {
        "model": "demo",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "get", "parameters": TOOL_SCHEMA}],
        "max_output_tokens": 16,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "demo",
        "max_tokens": 2,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"name": "get", "input_schema": TOOL_SCHEMA}],
    },
    "/v1/messages/count_tokens": {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/batches": {
        "input_file_id": "file-x",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    },
}
CONFIG = ServerConfig(enable_page=False)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["auto", "none", "required", "function", "text", "json_object", "user", "assistant", "\x00", "a" * 5000])
)
KEYS = st.sampled_from(["type", "role", "content", "name", "text", "function", "id", "arguments", ""]) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)
SEEDED = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


talk = text_script(load_demo_tokenizer(), "Hello there")


def play(job):
    """Answer a job: with text, or with the embedding that it asks for."""
    if job.request.pooling is None:
        return talk(job)
    return [RequestDelta(job.request.request_id, [], True, embedding=[1.0] * 64)]


class App:
    """The whole application without an engine, asked without a socket."""

    def __init__(self):
        self.runner = asyncio.Runner()
        server = Server.of(CONFIG, EngineConfig(model="demo"))
        self.context = context = server.context
        context.client = SimpleNamespace(state="ready", heartbeat_age_s=0.1, last_error=None, info=engine_info(), pid=1)
        self.runner.run(server.on_loaded())
        context.gateway = FakeGateway(play)
        context.served = make_served(TOOL_TEMPLATE)
        context.phase = "serving"
        self.endpoints = server.endpoints()
        self.app = make_app(context, self.endpoints)

    def close(self):
        self.runner.run(self.context.batches.close())
        self.runner.run(self.context.responses.close())
        self.runner.close()

    def post(self, path, body):
        """Return (status, headers, body) of the answer to a JSON body."""
        return self.runner.run(asyncio.wait_for(self._post(path, json.dumps(body).encode()), 20))

    async def _post(self, path, data):
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        scope |= {
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}
        inbox = [{"type": "http.request", "body": data, "more_body": False}]
        sent = []

        async def receive():
            return inbox.pop() if inbox else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        await self.app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], dict(sent[0]["headers"]), body


@pytest.fixture(scope="module")
def app():
    made = App()
    yield made
    made.close()


@pytest.fixture(scope="module")
def validators(app):
    """Return a validator of the described body for each JSON route."""
    described = document("quire", "0", app.endpoints)
    found = {}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                assert method == "post"
                schema = {**content["application/json"]["schema"], "components": described["components"]}
                found[path] = jsonschema.Draft202012Validator(schema)
    return found


def check(app, validators, path, body):
    """Ask, and see that the answer is what the description of the route promises."""
    status, headers, data = app.post(path, body)
    assert status < 500, data
    is_valid = validators[path].is_valid(body)
    assert is_valid or 400 <= status < 500, (status, body)
    if status >= 400:
        assert len(data) < 4096
        assert headers[b"content-type"] == b"application/json"
        error = json.loads(data)["error"]
        assert error["type"]
        assert error["message"]
        assert path.startswith("/v1/messages") or {"message", "type", "param", "code"} == set(error)


def places(value, path=()):
    """Return the paths of everything in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [place for key, item in items for place in places(item, (*path, key))]


def put(body, place, value):
    """Return a copy of a body with something else in one place."""
    changed = copy.deepcopy(body)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return changed


def test_every_json_route_has_a_body_to_put_wrong(validators):
    assert set(validators) == set(BODIES)


@pytest.mark.parametrize("path", BODIES)
def test_body_is_taken_when_nothing_is_wrong(app, validators, path):
    status, _, data = app.post(path, BODIES[path])
    assert validators[path].is_valid(BODIES[path])
    assert status == 200 or (path == "/v1/batches" and status == 404), data


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_examples", [30, pytest.param(3000, marks=pytest.mark.slow)])
def test_field_of_a_wrong_type_is_refused(app, validators, path, num_examples):
    fields = [name for name in fields_of(validators[path].schema) if name not in ("model",)]

    @settings(SEEDED, max_examples=num_examples)
    @given(st.sampled_from(fields), VALUES)
    def go(name, value):
        check(app, validators, path, {**BODIES[path], name: value})

    go()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_examples", [30, pytest.param(3000, marks=pytest.mark.slow)])
def test_anything_wrong_anywhere_in_a_body_is_no_server_error(app, validators, path, num_examples):
    @settings(SEEDED, max_examples=num_examples)
    @given(st.sampled_from(places(BODIES[path])), VALUES)
    def go(place, value):
        check(app, validators, path, put(BODIES[path], place, value))

    go()


def fields_of(schema):
    """Return the names of the fields of a body."""
    if "$ref" in schema:
        schema = {**schema["components"]["schemas"][schema["$ref"].rpartition("/")[2]]}
    return list(schema["properties"])


# The same on a real server.


API = schemathesis.openapi.from_dict(document("quire", "0", Server.of(CONFIG, EngineConfig(model="demo")).endpoints()))
OPERATIONS = {operation.label: operation for operation in (result.ok() for result in API.get_all_operations())}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("num_examples", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_are_as_described(server, name, num_examples):
    @settings(SEEDED, max_examples=num_examples)
    @given(OPERATIONS[name].as_strategy())
    def go(case):
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body, dict) and isinstance(case.body.get(field), int):
                case.body[field] = min(case.body[field], 16)  # what is generated does not matter here
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=30)

    go()


def test_server_is_idle_after_all_of_it(server):
    server.wait_for(server.is_idle, 60)
    assert httpx.get(f"{server.url}/health").status_code == 200
