"""Requests for chats: what of them reaches the template and the engine, and how their work ends."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from quire.api.decode import BodyError, decode_body
from quire.base.errors import RequestError
from quire.contracts.kv_compression import KvCompression
from quire.serving.config import ServerConfig
from quire.serving.core.prepare import salt_of
from quire.serving.engine_client.messages import ChoiceDelta
from quire.serving.errors import ApiError, engine_unavailable, from_quire_error, overloaded
from quire.serving.interfaces import Tenant
from quire.serving.openai.chat import ChatCompletionRequest, chat
from quire.text.chat_template import ChatTemplate
from tests.unit.serving.fakes import make_served
from tests.unit.serving.openai.asking import CALLER, USER, ask_chat, chunks_of, finish
from tests.unit.serving.openai.chatting import (
    TOOL,
    TOOLED,
    context,
    fold_stream,
    params_of,
    say,
    whole,
)


def test_special_tokens_are_asked_for_and_left_out_again_when_a_parser_reads():
    where = say("Yes<|endoftext|>No", served=TOOLED)
    assert whole(where)["choices"][0]["message"]["content"] == "YesNo"
    assert params_of(where).skip_special_tokens is False
    where = say("Yes<|endoftext|>No", served=TOOLED)
    assert whole(where, skip_special_tokens=False)["choices"][0]["message"]["content"] == "Yes<|endoftext|>No"


def test_template_is_never_rendered_on_the_event_loop(monkeypatch):
    """It waits for the process that renders."""
    render, threads = ChatTemplate.render_hiding, []

    def note(*args, **kwargs):
        threads.append(threading.current_thread())
        return render(*args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render_hiding", note)
    whole(say("Yes", served=TOOLED))
    assert threads
    assert threading.main_thread() not in threads


def test_reasoning_effort_becomes_a_variable_of_the_template():
    where = say("Yes", served=TOOLED)
    whole(where, reasoning_effort="none")
    assert where.gateway.jobs[0].request.prompt.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(RequestError, match="low, medium, high") as caught:
        whole(say("Yes", served=TOOLED), reasoning_effort="extreme")
    assert caught.value.param == "reasoning_effort"
    where = say("Yes")
    whole(where, reasoning_effort="low")
    assert "low" not in where.gateway.jobs[0].request.prompt


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"think": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
    ],
    ids=str,
)
def test_reasoning_is_turned_off_by_every_name_that_it_has(field):
    where = say("Yes", served=TOOLED)
    whole(where, **field)
    assert where.gateway.jobs[0].request.prompt.endswith("<think>\n\n</think>\n\n")
    plain = say("Yes")
    whole(plain, **field)  # whose model does not reason
    assert "think" not in plain.gateway.jobs[0].request.prompt


def test_minus_one_is_no_limit_and_no_seed_and_empty_text_stops_nowhere():
    where = say("Yes")
    whole(where, max_tokens=-1, seed=-1, stop="")
    params, plain = params_of(where), say("Yes")
    whole(plain)
    assert (params.max_tokens, params.seed, params.stop) == (params_of(plain).max_tokens, None, params_of(plain).stop)


def test_template_variables_reach_the_template():
    where = say("Yes", served=TOOLED)
    whole(where, chat_template_kwargs={"enable_thinking": False})
    assert "</think>" in where.gateway.jobs[0].request.prompt


def test_tools_are_refused_when_the_model_has_no_format():
    with pytest.raises(RequestError, match="--tool-call-parser") as caught:
        whole(say("Yes", served=make_served(config=ServerConfig(tool_call_parser="none"))), tools=[TOOL])
    assert caught.value.param == "tools"


@pytest.mark.parametrize("content", ["Once upon ", [{"type": "text", "text": "Once upon "}]])
def test_last_message_is_continued_and_echoed_when_asked_for(content):
    messages = [*USER, {"role": "assistant", "content": content}]
    where = say("a time", served=TOOLED)
    answer = whole(where, messages=messages, continue_final_message=True, echo=True, add_generation_prompt=False)
    assert where.gateway.jobs[0].request.prompt.endswith("assistantOnce upon ")
    assert answer["choices"][0]["message"]["content"] == "Once upon a time"
    chunks = chunks_of(
        ask_chat(say("a time", served=TOOLED), messages=messages, continue_final_message=True, echo=True, stream=True)
    )
    assert fold_stream(chunks)[0]["content"] == "Once upon a time"


def test_whole_conversation_reaches_the_template():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "D"}, {"type": "text", "text": "E"}], "name": "n"},
        {"role": "user", "content": "U"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "R",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "T"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "function", "name": "g", "content": "G"},
    ]
    where = say("Yes", served=TOOLED)
    whole(where, messages=messages, tools=[TOOL])
    prompt = where.gateway.jobs[0].request.prompt
    for part in (
        "developerD\nE",
        "<think>R</think>",
        '"arguments": {"a": 1}',
        "toolT",
        "assistantno",
        "functionG",
        '"description": "d"',
    ):
        assert part in prompt


PARAMETERS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "typical_p": 0.8,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.3,
    "n": 2,
    "min_tokens": 2,
    "seed": -5,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_reaches_the_engine(name):
    where = say("Hi")
    whole(where, **{name: PARAMETERS[name]})
    assert getattr(params_of(where), name) == PARAMETERS[name]


def test_parameters_of_another_form_reach_the_engine():
    where = say("Hi")
    whole(where, stop="x", stop_token_ids=[5], logit_bias={"7": -100}, allowed_token_ids=[1, 2], bad_words=["no"], max_tokens=9)
    params = params_of(where)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (5,), {7: -100.0})
    assert (params.allowed_token_ids, params.bad_words, params.max_tokens) == ((1, 2), ("no",), 9)
    whole(where := say("Hi"), max_tokens=9, max_completion_tokens=4)
    assert params_of(where).max_tokens == 4


def test_kv_compression_reaches_the_engine_and_bad_fields_are_refused_by_name():
    whole(where := say("Hi"), kv_compression={"method": "streaming", "budget_tokens": 64})
    assert params_of(where).kv_compression == KvCompression(method="streaming", budget_tokens=64)
    with pytest.raises(RequestError, match="method 'snapkv' needs budget_tokens or compression_ratio") as caught:
        whole(say("Hi"), kv_compression={"method": "snapkv"})
    assert caught.value.param == "kv_compression"
    with pytest.raises(BodyError) as caught:
        whole(say("Hi"), kv_compression={"method": "h2o"})
    assert caught.value.param == "kv_compression.method"


def test_checkpoint_recommends_what_is_absent():
    served = make_served(generation_defaults={"temperature": 0.7, "top_k": 20})
    whole(where := say("Hi", served=served), top_k=5)
    assert (params_of(where).temperature, params_of(where).top_k, params_of(where).max_tokens) == (0.7, 5, None)
    whole(where := say("Hi"))
    assert (params_of(where).temperature, params_of(where).top_p, params_of(where).n) == (1.0, 1.0, 1)


def test_cache_salts_of_two_owners_differ_whatever_the_body_says():
    owners = [Tenant(name=name, cache_salt=name) for name in ("", "a", "1:a", "ab")]
    salts = [salt_of(owner, salt) for owner in owners for salt in ("", "a", "b", "ab")]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize(("asked", "seconds"), [(None, 0.0), ("in_memory", 0.0), ("24h", 86_400.0)])
def test_prompt_cache_retention_reaches_the_engine(asked, seconds):
    where = say("Hi")
    whole(where, **({} if asked is None else {"prompt_cache_retention": asked}))
    assert where.gateway.jobs[0].request.cache_retention_s == seconds


def test_job_says_who_asks_and_how():
    where = say("Hi")
    whole(where, service_tier="flex", seed=3)
    job = where.gateway.jobs[0]
    assert (job.owner, job.route, job.is_streaming, job.priority) == (CALLER.owner, CALLER.route, False, "batch")
    assert job.request.request_id.startswith("chatcmpl-")


@pytest.mark.parametrize(
    ("tier", "may_use_interactive", "priority", "told"),
    [
        ("priority", True, "interactive", "priority"),
        ("fast", True, "interactive", "priority"),
        ("priority", False, "default", "default"),
        ("flex", False, "batch", "flex"),
        ("auto", True, "default", "default"),
        ("default", True, "default", "default"),
        (None, True, "default", None),
    ],
)
def test_service_tier_becomes_a_class_and_is_told(tier, may_use_interactive, priority, told):
    where = say("Hi")
    body = {"model": "demo", "messages": USER} | ({} if tier is None else {"service_tier": tier})
    decoded, _ = decode_body(json.dumps(body).encode(), ChatCompletionRequest)
    caller = replace(CALLER, owner=Tenant(name="a", cache_salt="", may_use_interactive=may_use_interactive))
    answer = asyncio.run(finish_chat(where, decoded, caller))
    assert (where.gateway.jobs[0].priority, answer.get("service_tier")) == (priority, told)


async def finish_chat(where, body, caller):
    return json.loads(await finish(await chat(where, body, caller)))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_has_left_are_refused_by_their_field(name):
    whole(where := say("Hi"))
    room = 1024 - len(where.gateway.jobs[0].request.prompt_token_ids)
    whole(where := say("Hi"), **{name: room})
    assert params_of(where).max_tokens == room
    with pytest.raises(RequestError, match=rf"{name}: .* 1024 tokens .* {room} are left, and {room + 1}") as caught:
        whole(say("Hi"), **{name: room + 1})
    error = from_quire_error(caught.value)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", name)


def test_unknown_model_is_a_404_and_too_many_choices_a_400():
    with pytest.raises(ApiError) as caught:
        whole(say("Hi"), model="other")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    with pytest.raises(RequestError, match="at most 16"):
        whole(say("Hi"), n=17)
    served = make_served(config=ServerConfig(served_model_names=("a", "*")))
    assert whole(say("Hi", served=served), model="anything")["model"] == "a"


def test_refusal_of_the_gateway_is_raised():
    with pytest.raises(ApiError, match="full"):
        ask_chat(say("Hi", gateway={"refuses": overloaded("full", 1.0)}), stream=True)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_error_in_the_middle_is_raised_and_the_stream_left(is_streaming):
    def script(job):
        yield [ChoiceDelta(0, "Hi", [5])]
        yield engine_unavailable("gone")

    where = context(script)
    with pytest.raises(ApiError, match="gone"):
        ask_chat(where, stream=is_streaming)
    assert where.gateway.streams[0].is_left


def test_closing_the_frames_aborts_the_request():
    where = say("One two three four")

    async def run():
        body = ChatCompletionRequest(model="demo", messages=[], stream=True)
        body.messages = ask_messages()
        answer = await chat(where, body, CALLER)
        await anext(answer.frames)
        await answer.frames.aclose()

    asyncio.run(run())
    assert where.gateway.streams[0].aborts == ["cancelled"]


def test_frames_that_nobody_reads_open_no_request():
    where = say("One")

    async def run():
        body = ChatCompletionRequest(model="demo", messages=ask_messages(), stream=True)
        answer = await chat(where, body, CALLER)
        await answer.frames.aclose()

    asyncio.run(run())
    assert where.gateway.streams == []


def test_cancelling_a_whole_answer_aborts_the_request():
    where = say("One two three four", gateway={"blocks_after": 2})

    async def run():
        answer = await chat(where, ChatCompletionRequest(model="demo", messages=ask_messages()), CALLER)
        task = asyncio.create_task(answer.work())
        while not where.gateway.streams or not where.gateway.streams[0].is_entered:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert where.gateway.streams[0].aborts == ["cancelled"]


def ask_messages():
    return decode_body(json.dumps({"model": "demo", "messages": USER}).encode(), ChatCompletionRequest)[0].messages
