"""The Ollama API over the real application, with plain HTTP and with its own client where that is installed."""

from __future__ import annotations

import asyncio
import json

import pytest

from quire.serving.errors import ApiError
from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_served, text_script
from tests.unit.serving.real_app import BASE, running_app

PLAIN = make_served("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
TOOLED = make_served(TOOL_TEMPLATE)
TOKENIZER = TOOLED.tokenizer
USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é", "b": [1]}}\n</tool_call>'


def script(*texts, **options):
    return text_script(TOKENIZER, *texts, **options)


def ask(play, path="/api/chat", served=TOOLED, method="POST", headers=None, **body):
    """Return the answer over HTTP, and the gateway."""

    async def work():
        gateway = FakeGateway(play)
        async with running_app(gateway, served) as app, app.http() as client:
            base = {"model": "demo", "messages": USER} if path == "/api/chat" else {"model": "demo"}
            content = json.dumps({**base, **body}).encode() if method == "POST" else None
            return await client.request(method, path, content=content, headers=headers), gateway

    return asyncio.run(work())


def lines_of(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def prompt_of(gateway):
    return TOKENIZER.decode(list(gateway.jobs[0].request.prompt_token_ids), skip_special_tokens=False)


def test_chat_streams_lines_and_ends_with_the_counts():
    answer, gateway = ask(script("Hello there"))
    *pieces, last = lines_of(answer)
    assert "".join(line["message"]["content"] for line in pieces) == "Hello there"
    assert not any(line["done"] for line in pieces)
    assert (last["done"], last["done_reason"], last["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    assert last["prompt_eval_count"] == len(gateway.jobs[0].request.prompt_token_ids)
    assert last["eval_count"] > 1
    assert last["total_duration"] >= last["prompt_eval_duration"] > 0
    assert {line["model"] for line in (*pieces, last)} == {"demo"}


def test_chat_without_stream_is_one_object():
    answer, _ = ask(script("Hello", finish_reason="length"), stream=False)
    found = answer.json()
    assert (found["message"], found["done"], found["done_reason"]) == (
        {"role": "assistant", "content": "Hello"},
        True,
        "length",
    )


def test_tag_latest_and_any_media_type_are_taken():
    answer, _ = ask(
        script("x"), model="demo:latest", stream=False, headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert (answer.status_code, answer.json()["model"]) == (200, "demo:latest")


def test_options_reach_the_engine():
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "typical_p": 0.9}
    more = {"seed": 5, "stop": ["a", "b"], "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    _, gateway = ask(script("x"), options={**options, **more})
    params = gateway.jobs[0].request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (7, 0.5, 3, 0.4, 0.1)
    assert (params.typical_p, params.seed, list(params.stop), params.repetition_penalty) == (0.9, 5, ["a", "b"], 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)


def test_options_of_loading_are_ignored_by_name():
    answer, _ = ask(script("x"), options={"num_ctx": 4096, "num_gpu": 1}, keep_alive="5m")
    assert answer.headers["x-quire-ignored-params"] == "options.num_ctx,options.num_gpu"


@pytest.mark.parametrize("schema", ["json", {"type": "object"}])
def test_format_constrains_the_output(schema):
    _, gateway = ask(script("{}"), served=PLAIN, format=schema)
    constraint = gateway.jobs[0].request.params.constraint
    assert constraint.kind == ("json_object" if schema == "json" else "json_schema")


def test_tool_call_comes_as_one_object_with_its_arguments():
    answer, gateway = ask(script(CALL), tools=[TOOL])
    calls = [call for line in lines_of(answer) for call in line["message"].get("tool_calls", ())]
    assert calls == [{"function": {"name": "f", "arguments": {"a": "é", "b": [1]}}}]
    assert '"name": "f"' in prompt_of(gateway)


def test_results_of_tools_belong_to_the_calls_before_them():
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("f", "g")]
    history = [*USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    results = [{"role": "tool", "tool_name": "g", "content": "of g"}, {"role": "tool", "content": "of f"}]
    answer, gateway = ask(script("x"), messages=[*history, *results], tools=[TOOL])
    assert answer.status_code == 200
    assert "of g" in prompt_of(gateway)
    answer, _ = ask(script("x"), messages=[*history, *results, results[0]])
    assert (answer.status_code, "messages[4]" in answer.json()["error"]) == (400, True)


def test_thinking_is_apart_from_the_answer():
    served = make_served(TOOL_TEMPLATE + "{% if enable_thinking is false %}NO{% endif %}<think></think>")
    answer, gateway = ask(script("<think>\nwhy\n</think>\n\nso"), served=served, stream=False, think=True)
    message = answer.json()["message"]
    assert (message["content"].strip(), message["thinking"].strip()) == ("so", "why")
    _, gateway = ask(script("so"), served=served, think=False)
    assert "NO" in prompt_of(gateway)


def test_generate_takes_the_template_unless_raw():
    answer, gateway = ask(script("out"), "/api/generate", PLAIN, prompt="hi", system="be", stream=False)
    assert (answer.json()["response"], answer.json()["done_reason"]) == ("out", "stop")
    assert prompt_of(gateway) == "[system]be[user]hi"
    _, gateway = ask(script("out"), "/api/generate", PLAIN, prompt="hi", raw=True)
    assert prompt_of(gateway) == "hi"


@pytest.mark.parametrize(("path", "body"), [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})])
def test_question_without_a_prompt_only_loads(path, body):
    answer, gateway = ask(script("x"), path, **body)
    assert (answer.json()["done"], answer.json()["done_reason"], gateway.jobs) == (True, "load", [])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "nope"}, 404, "'nope' does not exist"),
        ("/api/chat", {"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {"options": {"repeat_last_n": 64}}, 400, "options.repeat_last_n"),
        ("/api/chat", {"options": {"temperature": -1}}, 400, "options.temperature"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0]"),
        ("/api/chat", {"format": "yaml"}, 400, "format"),
        ("/api/chat", {"tools": [TOOL, TOOL]}, 400, "two have the name 'f'"),
        ("/api/chat", {"logprobs": True}, 400, "logprobs"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context"),
        ("/api/show", {"model": "nope"}, 404, "'nope' does not exist"),
        ("/api/embed", {}, 400, "input is required"),
        ("/api/pull", {}, 404, "there is no '/api/pull' here"),
    ],
)
def test_what_is_not_supported_is_refused_in_the_shape_of_the_api(path, body, status, words):
    answer, gateway = ask(script("x"), path, **body)
    assert (answer.status_code, gateway.jobs) == (status, [])
    assert words in answer.json()["error"]


def test_model_that_does_not_think_cannot_be_told_to():
    answer, _ = ask(script("x"), served=PLAIN, think=True)
    assert (answer.status_code, answer.json()["error"][:31]) == (400, "think: this model does not think"[:31])
    assert ask(script("x"), served=PLAIN, think=False)[0].status_code == 200


def test_error_within_a_stream_is_its_last_line():
    def play(job):
        yield from list(script("a b c")(job))[:1]
        yield ApiError(503, "gone")

    answer, _ = ask(play)
    assert lines_of(answer)[-1] == {"error": "gone"}


def test_model_is_described():
    tags = ask(script("x"), "/api/tags", method="GET")[0].json()["models"]
    running = ask(script("x"), "/api/ps", method="GET")[0].json()["models"]
    shown = ask(script("x"), "/api/show")[0].json()
    assert [model["name"] for model in tags] == [model["name"] for model in running] == ["demo"]
    assert tags[0]["details"]["parameter_size"] == "1.0K"
    assert running[0]["context_length"] == shown["model_info"]["LlamaForCausalLM.context_length"] == 1024
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert ask(script("x"), "/api/version", method="GET")[0].json() == {"version": "0.13.0"}


def test_its_own_client_reads_every_answer():
    ollama = pytest.importorskip("ollama")
    import httpx

    async def work():
        async with running_app(FakeGateway(script(CALL)), TOOLED) as app:
            client = ollama.AsyncClient(BASE, transport=httpx.ASGITransport(app.transport.app))
            answer = await client.chat("demo", messages=USER, tools=[TOOL])
            assert answer.message.tool_calls[0].function.arguments == {"a": "é", "b": [1]}
            streamed = [part async for part in await client.chat("demo", messages=USER, stream=True)]
            assert "".join(part.message.content for part in streamed).strip() != ""
            assert streamed[-1].done
            assert (await client.generate("demo", "hi")).done_reason == "stop"
            assert (await client.list()).models[0].model == "demo"
            assert (await client.show("demo")).capabilities == ["completion", "tools", "thinking"]
            with pytest.raises(ollama.ResponseError, match="'nope' does not exist") as caught:
                await client.chat("nope", messages=USER)
            assert caught.value.status_code == 404

    asyncio.run(work())
