"""The OpenAPI description: answers, events, errors and their headers, as the routes give them."""

import asyncio
import json

import jsonschema
import pytest

from quire.contracts.config import EngineConfig
from quire.serving.config import ServerConfig
from quire.serving.http.main import Server
from quire.serving.http.openapi import document


@pytest.fixture(scope="module")
def described():
    return document("quire", "1", [route.endpoint for route in Server.of(ServerConfig(), EngineConfig(model="demo")).routes()])


@pytest.fixture(scope="module")
def operations(described):
    paths = described["paths"].items()
    return {f"{method.upper()} {path}": operation for path, found in paths for method, operation in found.items()}


STREAMING = ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages")


def test_every_schema_that_is_referred_to_is_there(described):
    referred = {part.split('"')[0] for part in json.dumps(described).split("#/components/schemas/")[1:]}
    assert referred <= set(described["components"]["schemas"])


def test_routes_that_stream_say_so_and_no_others(operations):
    found = {name for name, operation in operations.items() if "text/event-stream" in operation["responses"]["200"]["content"]}
    azure = {f"POST /openai/deployments/{{deployment}}/{path}" for path in ("chat/completions", "completions")}
    assert found == {*STREAMING, *azure, "GET /ui/events"}


def test_every_json_answer_has_a_schema(described, operations):
    for name, operation in operations.items():
        content = operation["responses"]["200"]["content"]
        assert content, name
        if "application/json" in content and name != "GET /openapi.json":
            schema = {**content["application/json"]["schema"], "components": described["components"]}
            jsonschema.Draft202012Validator.check_schema(schema)
            assert not jsonschema.Draft202012Validator(schema).is_valid({"a": 1}), name


@pytest.mark.parametrize("name", STREAMING)
def test_errors_of_a_job_are_those_that_it_may_get(operations, name):
    responses = operations[name]["responses"]
    errors = {"400", "401", "403", "404", "408", "413", "415", "429", "431", "500", "503", "504"}
    assert set(responses) == {"200", *errors, *(["529"] if name == "POST /v1/messages" else [])}


def test_answers_that_say_when_to_come_back_have_the_header(operations):
    for name, operation in operations.items():
        for status, response in operation["responses"].items():
            assert ("retry-after" in response.get("headers", {})) == (status in ("429", "503", "529")), (name, status)


def test_health_may_say_503_in_its_own_words_and_pages_304(operations):
    described = operations["GET /health"]["responses"]["503"]["content"]["application/json"]["schema"]["anyOf"]
    assert [schema["$ref"].rpartition("/")[2] for schema in described] == ["Health", "OpenAIError"]
    assert "304" in operations["GET /"]["responses"]
    assert list(operations["GET /"]["responses"]["200"]["content"]) == ["text/html"]


def test_limits_of_choices_are_those_of_the_server_when_it_has_its_own():
    server = Server.of(ServerConfig(max_n=7), EngineConfig(model="demo"))
    routes = {route.endpoint.path: route for route in server.routes()}
    answer = asyncio.run(routes["/openapi.json"].answer(None))
    schemas = json.loads(answer.body)["components"]["schemas"]
    for kind, name in (("ChatCompletionRequest", "n"), ("CompletionRequest", "n"), ("CompletionRequest", "best_of")):
        kinds = schemas[kind]["properties"][name]["anyOf"]
        assert [part["maximum"] for part in kinds if part["type"] == "integer"] == [7]
