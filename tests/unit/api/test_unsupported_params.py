"""Every parameter of other servers, on every generating route: neutral values are taken, others refused by name."""

from __future__ import annotations

import json

import pytest

from quire.api.anthropic.messages import MessagesRequest
from quire.api.decode import BodyError, decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.api.openai.responses import ResponsesRequest
from quire.api.openai.tokenize import TokenizeRequest
from quire.api.unsupported_params import NO_REASONING, PARAMETERS, WITHOUT_EFFECT

USER = [{"role": "user", "content": "x"}]
BODIES = {
    ChatCompletionRequest: {"model": "m", "messages": USER},
    CompletionRequest: {"model": "m", "prompt": "x"},
    ResponsesRequest: {"model": "m", "input": "x"},
    MessagesRequest: {"model": "m", "messages": USER, "max_tokens": 5},
}
LIMITS = ("max_output_tokens", "n_predict", "num_predict")  # -1 is not neutral where the default is a limit
CHANGING = (2, -7, 0.5, "some text", ["some"], {"some": 1}, True, False)


def is_field(kind, name):
    return name in kind.__struct_encode_fields__


def neutral_values():
    for kind in BODIES:
        for name, values in PARAMETERS.items():
            for value in values:
                if not (kind is CompletionRequest and name in LIMITS) and not is_field(kind, name):
                    yield kind, name, value


def label(value):
    return getattr(value, "__name__", None) or json.dumps(value)


@pytest.mark.parametrize(("kind", "name", "value"), list(neutral_values()), ids=label)
def test_neutral_value_is_taken_and_is_not_told(kind, name, value):
    assert decode_body(json.dumps({**BODIES[kind], name: value}).encode(), kind)[1] == ()


@pytest.mark.covering
@pytest.mark.parametrize("kind", BODIES, ids=label)
@pytest.mark.parametrize("name", PARAMETERS)
def test_changing_value_is_refused_by_the_name_of_the_field(kind, name):
    if is_field(kind, name):
        return
    neutral = [(type(value), value) for value in (*PARAMETERS[name], *NO_REASONING.get(name, ()))]
    changing = [value for value in CHANGING if (type(value), value) not in neutral]
    assert len(changing) >= 6
    for value in changing:
        with pytest.raises(BodyError) as caught:
            decode_body(json.dumps({**BODIES[kind], name: value}).encode(), kind)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
        assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.covering
@pytest.mark.parametrize("kind", BODIES, ids=label)
@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_field_without_effect_is_taken_and_named_unless_it_is_a_field_of_the_route(kind, name):
    assert name not in PARAMETERS
    if is_field(kind, name) or name in kind.refusals():
        return
    assert decode_body(json.dumps({**BODIES[kind], name: {"some": 1}}).encode(), kind)[1] == (name,)


@pytest.mark.parametrize("name", LIMITS)
def test_no_limit_is_refused_by_a_name_that_completions_do_not_have(name):
    with pytest.raises(BodyError) as caught:
        decode_body(json.dumps({**BODIES[CompletionRequest], name: -1}).encode(), CompletionRequest)
    assert (caught.value.param, "max_completion_tokens" in str(caught.value)) == (name, True)


NEUTRAL_IN_CHAT = [
    {"reasoning_effort": "none"},
    {"enable_thinking": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"effort": "none"}},
    {"functions": []},
    {"function_call": "none"},
    {"documents": []},
    {"length_penalty": 1.0},
    {"length_penalty": 1},
    {"n_predict": -1},
    {"max_tokens": -1},
    {"max_completion_tokens": -1},
    {"truncate_prompt_tokens": -1},
    {"suffix": ""},
    {"stop": ""},
    {"stop": ["a"] * 64},
]
CHANGING_ANYWHERE = [
    {"lora": [{"id": 0, "scale": 0.5}]},
    {"samplers": ["temperature"]},
    {"n_probs": 2},
    {"reasoning_format": "none"},
    {"no_stop_trim": True},
    {"separate_reasoning": False},
    {"return_hidden_states": True},
    {"repeat_last_n": 64},
    {"dry_base": 1.75},
    {"format": "json"},
    {"random_seed": 3},
]


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest], ids=label)
@pytest.mark.parametrize("field", NEUTRAL_IN_CHAT, ids=str)
def test_value_that_clients_send_is_taken(kind, field):
    if kind is CompletionRequest and "n_predict" in field:
        return
    assert decode_body(json.dumps({**BODIES[kind], **field}).encode(), kind)[1] == ()


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("kind", BODIES, ids=label)
@pytest.mark.parametrize("field", CHANGING_ANYWHERE, ids=str)
def test_value_that_changes_the_answer_in_its_own_server_is_refused(kind, field):
    with pytest.raises(BodyError) as caught:
        decode_body(json.dumps({**BODIES[kind], **field}).encode(), kind)
    assert caught.value.param == next(iter(field))


@pytest.mark.parametrize(
    ("kind", "body", "neutral", "changing"),
    [
        (EmbeddingRequest, {"model": "m", "input": "x"}, {"embed_dtype": "float32"}, {"embed_dtype": "float16"}),
        (EmbeddingRequest, {"model": "m", "input": "x"}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"a": 1}}),
        (TokenizeRequest, {"prompt": "x"}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 5}),
        (TokenizeRequest, {"prompt": "x"}, {"documents": []}, {"documents": [{}]}),
    ],
    ids=label,
)
def test_neutral_value_is_taken_where_nothing_is_generated(kind, body, neutral, changing):
    assert decode_body(json.dumps({**body, **neutral}).encode(), kind)[1] == ()
    with pytest.raises(BodyError):
        decode_body(json.dumps({**body, **changing}).encode(), kind)
