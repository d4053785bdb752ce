"""Wrong types in every field of every JSON route, and schemathesis over the API's own description."""

import asyncio
import collections
import copy
import json
import re
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
from quire.serving.engine_client.messages import RequestDelta
from quire.serving.http.app import make_app
from quire.serving.http.main import Server
from quire.serving.http.openapi import document
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
SCORE = {"model": "demo", "queries": "a", "documents": ["b", "c"], "truncate_prompt_tokens": 8}
RERANK = {"model": "demo", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}
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
    **dict.fromkeys(("/v1/score", "/score"), SCORE),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), RERANK),
    "/classify": {"model": "demo", "input": ["a"], "use_activation": True},
    "/pooling": {"model": "demo", "input": ["a"], "encoding_format": "float", "normalize": True},
    "/api/chat": {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "options": {"num_predict": 2, "stop": ["x"], "temperature": 0.5},
        "stream": False,
    },
    "/api/generate": {"model": "demo", "prompt": "a", "system": "b", "options": {"num_predict": 2}, "stream": False},
    "/api/embed": {"model": "demo", "input": ["a"], "truncate": True},
    "/api/embeddings": {"model": "demo", "prompt": "a"},
    "/api/show": {"model": "demo", "verbose": True},
    "/tokenize": {"model": "demo", "messages": MESSAGES[:1]},
    "/detokenize": {"model": "demo", "tokens": [5, 6]},
    "/v1/responses": {
        "model": "demo",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "get", "parameters": TOOL_SCHEMA}],
        "max_output_tokens": 16,
        "metadata": {"a": "b"},
    },
    "/v1/responses/input_tokens": {
        "model": "demo",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "get", "parameters": TOOL_SCHEMA}],
        "reasoning": {"effort": "low"},
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
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a", "load_inplace": False},
    "/v1/unload_lora_adapter": {"lora_name": "a", "lora_int_id": 1},
    "/v1/messages/batches": {
        "requests": [{"custom_id": "a", "params": {"model": "demo", "max_tokens": 2, "messages": MESSAGES[:1]}}]
    },
    "/v1/conversations": {"items": [{"type": "message", "role": "user", "content": "hi"}], "metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}": {"metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"type": "message", "role": "user", "content": "hi"}]},
}
for _path in ("chat/completions", "completions", "embeddings"):
    BODIES[f"/openai/deployments/{{deployment}}/{_path}"] = BODIES[f"/v1/{_path}"]
NOTHING_THERE = {
    "/v1/batches": 404,
    "/v1/unload_lora_adapter": 404,
    "/v1/load_lora_adapter": 400,
    "/v1/conversations/{conversation_id}": 404,
    "/v1/conversations/{conversation_id}/items": 404,
}
"""Status of the routes whose body names what this server does not have."""
PUT_ROUTES = {"/prefill_urls", "/role"}
"""Which talk to engines: see tests/unit/serving/http/test_system.py."""
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


NOT_FOR_GENERATIVE_MODELS = ("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/classify")


class App:
    """The whole application without an engine, asked without a socket."""

    def __init__(self):
        self.runner = asyncio.Runner()
        server = Server.of(CONFIG, EngineConfig(model="demo"))
        self.server = server
        context = server.context
        server.client = SimpleNamespace(
            state="ready", heartbeat_age_s=0.1, last_error=None, info=engine_info(), pid=1, replicas=()
        )
        self.runner.run(server.on_loaded())
        context.gateway = FakeGateway(play)
        context.served = make_served(TOOL_TEMPLATE)
        context.state.phase = "serving"
        routes = server.routes()
        self.endpoints = [route.endpoint for route in routes]
        self.app = make_app(server.shell(), routes)

    def close(self):
        self.runner.run(self.server.close_stores())
        self.runner.close()

    def post(self, path, body, media_type=b"application/json"):
        """Return (status, headers, body) of the answer to a body, JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = path.replace("{deployment}", "demo").replace("{conversation_id}", "conv_0")
        return self.runner.run(asyncio.wait_for(self._ask("POST", path, data, media_type), 60))

    def get(self, path, query):
        """Return (status, headers, body)."""
        return self.runner.run(asyncio.wait_for(self._ask("GET", path, query=query), 60))

    async def _ask(self, method, path, data=b"", media_type=b"", query=b""):
        headers = [(b"host", b"127.0.0.1"), (b"content-type", media_type), (b"content-length", b"%d" % len(data))]
        scope = {"type": "http", "method": method, "path": path, "raw_path": b"", "query_string": query, "headers": headers}
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
            if "application/json" in content and path not in PUT_ROUTES:
                assert method == "post"
                schema = {**content["application/json"]["schema"], "components": described["components"]}
                found[path] = jsonschema.Draft202012Validator(schema)
    return found


def check(app, validators, path, body, field):
    """Ask, and see that the answer is what the description of the route promises; an error names the field that is wrong."""
    status, headers, data = app.post(path, body)
    assert status < 500, data
    is_valid = validators[path].is_valid(body)
    assert is_valid or 400 <= status < 500, (status, body)
    if status >= 400:
        assert len(data) < 4096
        assert headers[b"content-type"] == b"application/json"
        error = json.loads(data)["error"]
        if path.startswith("/api/"):  # Ollama's errors are texts
            assert is_valid or re.search(rf"\b{re.escape(field)}\b", error), error
            return
        assert error["type"]
        assert error["message"]
        # What is valid as the schema has it may contradict another field, and that one be named: tools make prompts long.
        if path.startswith("/v1/messages"):
            assert is_valid or re.search(rf"\b{re.escape(field)}\b", error["message"]), error
        else:
            assert {"message", "type", "param", "code"} == set(error)
            assert error["param"] is not None, error
            assert is_valid or re.match(r"\w+", error["param"])[0] == field, error


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
    if path in NOT_FOR_GENERATIVE_MODELS:
        assert (status, json.loads(data)["error"]["param"]) == (400, "model"), data
    else:
        assert status == NOTHING_THERE.get(path, 200), data


@pytest.mark.one_in(2, keep=False)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_examples", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_field_of_a_wrong_type_is_refused(app, validators, path, num_examples):
    fields = [name for name in fields_of(validators[path].schema) if name not in ("model",)]

    @settings(SEEDED, max_examples=num_examples)
    @given(st.sampled_from(fields), VALUES)
    def go(name, value):
        check(app, validators, path, {**BODIES[path], name: value}, name)

    go()


@pytest.mark.one_in(2, keep=False)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_examples", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_anything_wrong_anywhere_in_a_body_is_no_server_error(app, validators, path, num_examples):
    # The path names the model of a deployment: what the body has for it is not read.
    changed = [place for place in places(BODIES[path]) if place != ("model",) or "{deployment}" not in path]

    @settings(SEEDED, max_examples=num_examples)
    @given(st.sampled_from(changed), VALUES)
    def go(place, value):
        check(app, validators, path, put(BODIES[path], place, value), place[0])

    go()


def fields_of(schema):
    """Return the names of the fields of a body."""
    if "$ref" in schema:
        schema = {**schema["components"]["schemas"][schema["$ref"].rpartition("/")[2]]}
    return list(schema["properties"])


def part(name, content=b"x", more=b""):
    return b'--B\r\ncontent-disposition: form-data; name="' + name + b'"' + more + b"\r\n\r\n" + content + b"\r\n"


FILE = part(b"file", b'{"a":1}', b'; filename="in.jsonl"')
PURPOSE = part(b"purpose", b"batch")
FORM = FILE + PURPOSE + b"--B--\r\n"
FORM_TYPE = b"multipart/form-data; boundary=B"
BAD_FORMS = {
    "charset_wrong": (FORM_TYPE + b"; charset=utf-16", FORM),
    "no_boundary": (b"multipart/form-data", FORM),
    "empty_boundary": (b"multipart/form-data; boundary=", FORM),
    "long_boundary": (b"multipart/form-data; boundary=" + b"b" * 10_000, FORM),
    "other_boundary": (b"multipart/form-data; boundary=C", FORM),
    "other_type": (b"multipart/form-dataset; boundary=B", b""),
    "nothing": (FORM_TYPE, b""),
    "not_a_form": (FORM_TYPE, b"\xff" * 1000),
    "part_without_name": (FORM_TYPE, FORM.replace(b'name="purpose"', b"x=1")),
    "part_without_disposition": (FORM_TYPE, FORM.replace(b"content-disposition", b"content-x")),
    "name_of_bytes": (FORM_TYPE, FORM.replace(b"purpose", b"\xff\xfe")),
    "purpose_of_bytes": (FORM_TYPE, FORM.replace(b"batch", b"\xff\xfe")),
    "purpose_unknown": (FORM_TYPE, FORM.replace(b"batch", b"fine-tune")),
    "purpose_is_a_file": (FORM_TYPE, part(b"purpose", b"batch", b'; filename="a"') + b"--B--\r\n"),
    "file_is_a_field": (FORM_TYPE, part(b"file") + PURPOSE + b"--B--\r\n"),
    "two_files": (FORM_TYPE, FILE + FORM),
    "many_fields": (FORM_TYPE, part(b"a") * 100 + FORM),
    "long_field": (FORM_TYPE, part(b"a", b"x" * (2 << 20)) + FORM),
    "long_part_header": (FORM_TYPE, part(b"a", more=b"; b=" + b"c" * 100_000) + FORM),
    "lifetime_of_nothing": (FORM_TYPE, part(b"expires_after[anchor]", b"created_at") + FORM),
    "lifetime_of_digits_that_are_none": (
        FORM_TYPE,
        part(b"expires_after[anchor]", b"created_at") + part(b"expires_after[seconds]", "\u00b2\u0663".encode()) + FORM,
    ),
}


@pytest.mark.parametrize("name", BAD_FORMS)
def test_form_is_refused_when_it_is_malformed(app, name):
    media_type, data = BAD_FORMS[name]
    status, _, body = app.post("/v1/files", data, media_type)
    assert 400 <= status < 500, body
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("num_examples", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_form_is_no_server_error_when_bytes_of_it_are_changed(app, num_examples):
    whole = FORM_TYPE + b"|" + part(b"expires_after[anchor]", b"created_at") + part(b"expires_after[seconds]", b"3600") + FORM

    @settings(SEEDED, max_examples=num_examples)
    @given(
        st.integers(0, len(whole)), st.integers(0, 30), st.binary(max_size=12) | st.sampled_from([b"\r\n", b"--B", b'"', b";"])
    )
    def go(start, num_removed, added):
        media_type, _, data = (whole[:start] + added + whole[start + num_removed :]).partition(b"|")
        status, _, body = app.post("/v1/files", data, media_type)
        assert status < 500, body

    go()


QUERIES = (
    b"limit=%b",
    b"after=%b",
    b"order=%b",
    b"purpose=%b",
    b"compat=%b",
    b"include=%b",
    b"stream=%b",
    b"starting_after=%b",
)
LISTS = ("/v1/files", "/v1/batches", "/v1/models", "/metrics", "/v1/responses/resp_1/input_items", "/v1/responses/resp_1")


@pytest.mark.parametrize("path", LISTS)
def test_query_is_no_server_error_whatever_it_says(app, path):
    @settings(SEEDED, max_examples=60)
    @given(
        st.sampled_from(QUERIES),
        st.binary(max_size=12) | st.sampled_from([b"%ed%a0%80", b"%00", b"%ff", b"-1", b"\xb2", b"1e3"]),
    )
    def go(query, value):
        status, _, body = app.get(path, query % value)
        assert status < 500, body

    go()


# The same on a real server.


ROUTES = Server.of(CONFIG, EngineConfig(model="demo")).routes()
API = schemathesis.openapi.from_dict(document("quire", "0", [route.endpoint for route in ROUTES]))
OPERATIONS = {operation.label: operation for operation in (result.ok() for result in API.get_all_operations())}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def is_short(timeout):
    """Whether a header states a deadline that may pass while others use the machine."""
    try:
        return timeout is not None and 0 < float(timeout) < 60
    except ValueError:
        return False


LENGTH_FIELDS = {"/v1/chat/completions": "max_completion_tokens", "/v1/responses": "max_output_tokens"}


@pytest.mark.one_in(2, keep=False)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("num_examples", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_answers_are_as_described(server, name, num_examples):
    statuses = collections.Counter()

    @settings(SEEDED, max_examples=num_examples)
    @given(OPERATIONS[name].as_strategy())
    def go(case):
        for header in ("x-request-timeout", "x-stainless-read-timeout"):
            if is_short((case.headers or {}).get(header)):
                case.headers[header] = "60"  # a deadline that passes is a 504, and no failure
        if isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str):
                case.body["model"] = "demo"  # any other name is all that the server would look at
            if case.body.get("input") in ("", []):
                case.body["input"] = "hi"  # which may be empty where a response is continued alone
            field = LENGTH_FIELDS.get(case.path)
            if field is not None and case.body.get(field) is None and sum(statuses.values()) % 8 < 7:
                case.body[field] = 16  # the length of the context, often times n, is waited for now and then only
            for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if isinstance(case.body.get(field), int):
                    case.body[field] = min(case.body[field], 16)  # what is generated does not matter here
        statuses[case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=120).status_code] += 1

    go()
    if name == "POST /sleep":
        httpx.post(f"{server.url}/wake_up", timeout=60).raise_for_status()
    print(name, dict(statuses))


def test_server_is_idle_after_all_of_it(server):
    server.wait_for(server.is_idle)
    assert httpx.get(f"{server.url}/health").status_code == 200
