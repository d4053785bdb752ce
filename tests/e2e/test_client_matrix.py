"""The official OpenAI clients over every option of every route: a table of (route, option, what must follow), run by both.

Each check looks at what an option does. What it should do is found out by other requests, or by the logits of single tokens.
"""

import base64
import json
import struct

import openai
import pytest

from tests.e2e.asking import GREEDY, MESSAGES, NUM_TOKENS, PROMPT, checks, flavours, text_of
from tests.e2e.tooled_model import SCHEMA, fits_schema

TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "tides", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "weather", "parameters": SCHEMA}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
EOS = 0
ask_openai = flavours(openai.OpenAI, openai.AsyncOpenAI, "/v1")


# What the sampler does, on every route that takes the option.


def is_greedy(**options):
    """The options leave the most likely token alone, whatever the seed."""

    def check(ask, route):
        assert ask.text(route, temperature=1, seed=5, **options) == ask.greedy(route)

    return check


def seed_repeats(ask, route):
    one, same, other = (ask.text(route, temperature=1, top_p=1, seed=seed) for seed in (3, 3, 4))
    assert one == same != other


def most_likely(likely, counts, presence, frequency):
    """Return the most likely of some tokens once those that were said are penalised."""
    return max(likely, key=lambda name: likely[name] - (presence + frequency * counts.get(name, 0)) * (name in counts))


def penalised(presence, frequency):
    """Penalties change the greedy text as they are defined, by the log probabilities of one token after the other."""

    def check(ask, _):
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
        long = {**GREEDY, **ids, "max_tokens": 40, "ignore_eos": True}
        answer = ask.create("completions", **long, **penalties)
        prompt, found = answer.choices[0].prompt_token_ids, answer.choices[0].token_ids
        expected, counts = [], {}
        for _ in found:
            known = prompt + expected
            one = ask.create("completions", **{**long, "prompt": known, "max_tokens": 1, "logprobs": 20})
            likely = one.choices[0].logprobs.top_logprobs[0]
            name = most_likely(likely, counts, presence, frequency)
            counts[name] = counts.get(name, 0) + 1
            expected.append(int(name.removeprefix("token_id:")))
        assert found == expected
        assert found != ask.create("completions", **long).choices[0].token_ids

    return check


def repetition_is_penalised(ask, route):
    words = ask.greedy(route, repetition_penalty=1.0)
    assert words == ask.greedy(route)
    assert ask.greedy(route, repetition_penalty=1.5) != words


def nothing_is_repeated(ask, _):
    options = {**GREEDY, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "repetition_penalty": 1e6}
    choice = ask.create("completions", **options).choices[0]
    assert len({*choice.token_ids, *choice.prompt_token_ids}) == 60 + len(set(choice.prompt_token_ids))


def typical_token_is_one(ask, route):
    one, other = (ask.text(route, temperature=1, typical_p=1e-6, top_p=1, seed=seed) for seed in (3, 4))
    assert one == other


def token_ids(ask, route, **options):
    fields = {**GREEDY, "return_token_ids": True, **options}
    return ask.create(route, **fields).choices[0].token_ids


def bias_forces_a_token(ask, route):
    assert token_ids(ask, route, logit_bias={"300": 100}) == [300] * NUM_TOKENS


def bias_bans_a_token(ask, route):
    first = token_ids(ask, route)[0]
    assert first not in token_ids(ask, route, logit_bias={str(first): -100})


def only_some_tokens_are_allowed(ask, route):
    assert set(token_ids(ask, route, allowed_token_ids=[300, 301])) <= {300, 301}


def stop_token_ends(ask, route):
    ids = token_ids(ask, route)
    stop = ids[5]
    choice = ask.create(route, **GREEDY, stop_token_ids=[stop], return_token_ids=True).choices[0]
    assert choice.token_ids == ids[: ids.index(stop) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def end_of_text_ends_unless_it_is_ignored(ask, route):
    forced = {"logit_bias": {str(EOS): 100}}
    assert token_ids(ask, route, **forced) == [EOS]
    assert token_ids(ask, route, **forced, ignore_eos=True) == [EOS] * NUM_TOKENS
    ids = token_ids(ask, route, **forced, min_tokens=4)
    assert len(ids) == 5
    assert EOS not in ids[:4]


def special_tokens_are_shown_when_asked_for(ask, route):
    forced = {"logit_bias": {str(EOS): 100}, "ignore_eos": True}
    assert ask.greedy(route, **forced) == ""
    assert (
        ask.greedy(route, **forced, skip_special_tokens=False)
        == ask.post("/detokenize", {"tokens": [EOS]})["prompt"] * NUM_TOKENS
    )


def stop_string_ends(ask, route):
    whole = ask.greedy(route)
    stop = whole.split()[3]
    assert ask.greedy(route, stop=[stop, "never said"]) == whole[: whole.index(stop)]
    if route != "responses":
        shown = ask.greedy(route, stop=stop, include_stop_str_in_output=True)
        assert shown == whole[: whole.index(stop) + len(stop)]


def bad_words_are_not_said(ask, route):
    word = ask.greedy(route).split()[2]
    assert word not in ask.greedy(route, bad_words=[word])


def output_is_one_of_the_choices(ask, route):
    assert ask.greedy(route, structured_outputs={"choice": ["red", "green"]}) in ("red", "green")


def cache_is_found_by_its_salt(ask, route):
    def num_cached(salt):
        long = {"prompt": [300] * 100} if route == "completions" else {"messages": [{"role": "user", "content": "sea " * 100}]}
        return ask.create(route, **long, cache_salt=salt).usage.prompt_tokens_details.cached_tokens

    salt = f"{route} {id(ask)}"
    assert (num_cached(salt), num_cached(salt) > 0, num_cached(salt + "x")) == (0, True, 0)


def many_choices_are_numbered(ask, route):
    options = {"n": 3, "temperature": 1, "seed": 2}
    whole = ask.create(route, **options)
    texts = {choice.index: text_of(whole.model_copy(update={"choices": [choice]})) for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1
    streamed = dict.fromkeys(texts, "")
    for chunk in ask.create(route, **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += (choice.text if route == "completions" else choice.delta.content) or ""
    assert streamed == texts


def usage_comes_as_it_was_asked_for(ask, route):
    def usages(**options):
        return [chunk.usage for chunk in ask.create(route, **GREEDY, stream=True, **options)]

    assert not any(usages())
    last = usages(stream_options={"include_usage": True})
    assert not any(last[:-1])
    assert last[-1].completion_tokens == NUM_TOKENS
    counts = [u.completion_tokens for u in usages(stream_options={"include_usage": True, "continuous_usage_stats": True})]
    assert counts == sorted(counts)
    assert counts[-1] == NUM_TOKENS


def prompt_logprobs_are_those_of_the_prompt(ask, route):
    found = ask.create(route, **GREEDY, prompt_logprobs=2)
    entries = (found if route == "chat" else found.choices[0]).prompt_logprobs
    assert entries[0] is None
    assert len(entries) == found.usage.prompt_tokens
    assert all(len(entry) in (2, 3) for entry in entries[1:])


BOTH = ("completions", "chat")
ALL = (*BOTH, "responses")
SAMPLING = {
    "top_k=1": (ALL, is_greedy(top_k=1)),
    "top_p=1e-6": (ALL, is_greedy(top_p=1e-6)),
    "min_p=1": (ALL, is_greedy(min_p=1)),
    "seed": (ALL, seed_repeats),
    "typical_p": (BOTH, typical_token_is_one),
    "presence_penalty": (BOTH[:1], penalised(1.5, 0)),
    "frequency_penalty": (BOTH[:1], penalised(0, 0.7)),
    "both penalties": (BOTH[:1], penalised(-0.5, 0.9)),
    "repetition_penalty": (ALL, repetition_is_penalised),
    "repetition_penalty=1e6": (BOTH[:1], nothing_is_repeated),
    "logit_bias=100": (BOTH, bias_forces_a_token),
    "logit_bias=-100": (BOTH, bias_bans_a_token),
    "allowed_token_ids": (BOTH, only_some_tokens_are_allowed),
    "stop_token_ids": (BOTH, stop_token_ends),
    "ignore_eos, min_tokens": (BOTH, end_of_text_ends_unless_it_is_ignored),
    "skip_special_tokens": (BOTH, special_tokens_are_shown_when_asked_for),
    "stop": (ALL, stop_string_ends),
    "bad_words": (BOTH, bad_words_are_not_said),
    "structured_outputs": (BOTH, output_is_one_of_the_choices),
    "cache_salt": (BOTH, cache_is_found_by_its_salt),
    "n": (BOTH, many_choices_are_numbered),
    "stream_options": (BOTH, usage_comes_as_it_was_asked_for),
    "prompt_logprobs": (BOTH, prompt_logprobs_are_those_of_the_prompt),
}


@pytest.mark.covering
@pytest.mark.parametrize(
    ("route", "check"),
    [(route, check) for routes, check in SAMPLING.values() for route in routes],
    ids=[f"{route}-{option}" for option, (routes, _) in SAMPLING.items() for route in routes],
)
def test_sampling_option_does_what_it_says(ask_openai, route, check):
    check(ask_openai, route)


@pytest.mark.covering
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_penalty_holds_on_routes_that_show_no_tokens(ask_openai, route, name):
    # So long that a token comes twice: the first of sixteen may well differ, and there is nothing to penalise.
    long = {"max_output_tokens" if route == "responses" else "max_tokens": 6 * NUM_TOKENS}
    penalised, free, zero = (ask_openai.greedy(route, **long, **penalty) for penalty in ({name: 2}, {}, {name: 0}))
    assert penalised != free == zero


# What one route alone has.


def best_choices_are_the_most_likely(ask):
    options = {"temperature": 1, "seed": 6, "logprobs": 0}
    many = ask.create("completions", **options, n=4).choices
    means = {choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs) for choice in many}
    best = ask.create("completions", **options, n=2, best_of=4).choices
    assert [choice.text for choice in best] == sorted(means, key=means.get, reverse=True)[:2]


def prompt_is_echoed_with_its_logprobs(ask):
    found = ask.create("completions", **GREEDY, echo=True, logprobs=2).choices[0]
    plain = ask.create("completions", **GREEDY, logprobs=2).choices[0]
    assert found.text == PROMPT + plain.text
    assert "".join(found.logprobs.tokens) == found.text
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[-NUM_TOKENS:] == plain.logprobs.token_logprobs
    assert found.logprobs.text_offset[-NUM_TOKENS] == len(PROMPT)
    chunks = ask.create("completions", **GREEDY, echo=True, logprobs=2, stream=True)
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.text for piece in pieces) == found.text
    assert [offset for piece in pieces if piece.logprobs for offset in piece.logprobs.text_offset] == found.logprobs.text_offset


def prompts_of_every_kind_are_taken(ask):
    ids = ask.post("/tokenize", {"prompt": PROMPT})["tokens"]
    one = ask.greedy("completions")
    for prompt in (ids, [PROMPT], [ids], [PROMPT, PROMPT]):
        choices = ask.create("completions", **GREEDY, prompt=prompt).choices
        assert {choice.text for choice in choices} == {one}
        assert len(choices) == (2 if prompt == [PROMPT, PROMPT] else 1)


def suffix_is_refused(ask):
    error = ask.refusal("completions.create", model="demo", prompt="a", suffix="b")
    assert (type(error), error.param) == (openai.BadRequestError, "suffix")


def lengths_are_limited_by_either_name(ask):
    for options in ({"max_completion_tokens": 3}, {"max_tokens": 3}):
        answer = ask("chat.completions.create", model="demo", messages=MESSAGES, **GREEDY, **options)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def likely_tokens_are_told(ask):
    content = ask.create("chat", **GREEDY, logprobs=True, top_logprobs=4).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [4] * NUM_TOKENS
    assert all(entry.token == entry.top_logprobs[0].token for entry in content)


def messages_go_on(ask):
    said = [*MESSAGES, {"role": "assistant", "content": "The sea was"}]
    options = {"messages": said, "continue_final_message": True, "add_generation_prompt": False}
    text = ask.greedy("chat", **options)
    assert text == ask.greedy("completions", prompt="Tell me of the sea.\nThe sea was")
    assert ask.greedy("chat", **options, echo=True) == "The sea was" + text


def hints_change_nothing(ask):
    hints = {"user": "ann", "store": False, "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "k"}
    assert ask.greedy("chat", **hints) == ask.greedy("chat")


def tiers_are_served_and_told(ask):
    for tier, told in (("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "priority")):
        assert ask.create("chat", service_tier=tier).service_tier == told
        assert ask.create("responses", service_tier=tier).service_tier == told
        assert ask.create("chat", service_tier=tier, stream=True)[0].service_tier == told


def called(ask, **options):
    answer = ask.create("chat", **{**GREEDY, "max_tokens": 400, "tools": [TOOL, OTHER], **options})
    return answer.choices[0].message.tool_calls or [], answer.choices[0].finish_reason


def tools_are_called_as_chosen(ask):
    for choice, names in (
        ("required", {"weather", "tides"}),
        ({"type": "function", "function": {"name": "tides"}}, {"tides"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER]}}, {"tides"}),
    ):
        calls, reason = called(ask, tool_choice=choice, parallel_tool_calls=False)
        assert reason == "tool_calls"
        assert [call.function.name in names and fits_schema(json.loads(call.function.arguments)) for call in calls] == [True]
    assert called(ask, tool_choice="none")[0] == []


def several_tools_may_be_called_at_once(ask):
    calls, reason = called(ask, tool_choice="required", parallel_tool_calls=True)
    assert len({call.id for call in calls}) == len(calls) > 1
    whole = calls[:-1] if reason == "length" else calls
    assert all(fits_schema(json.loads(call.function.arguments)) for call in whole)


def formats_are_kept(ask):
    long = {"max_tokens": 200}
    assert fits_schema(json.loads(ask.greedy("chat", **long, response_format=JSON_SCHEMA)))
    assert isinstance(json.loads(ask.greedy("chat", **long, response_format={"type": "json_object"})), dict)
    assert ask.greedy("chat", response_format={"type": "text"}) == ask.greedy("chat")


def levels_of_reasoning_change_nothing_where_the_model_does_not_reason(ask):
    assert ask.greedy("chat", reasoning_effort="high") == ask.greedy("chat", reasoning_effort="none") == ask.greedy("chat")


def instructions_come_first(ask):
    with_them = ask.create("responses", **GREEDY, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert with_them.output_text == ask.greedy("chat", messages=messages)
    assert with_them.instructions == "Be brief."


def responses_have_logprobs(ask):
    answer = ask.create("responses", **GREEDY, include=["message.output_text.logprobs"], top_logprobs=3)
    (part,) = answer.output[0].content
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [3] * NUM_TOKENS
    assert "".join(entry.token for entry in part.logprobs) == answer.output_text


def responses_are_kept_as_long_as_asked(ask):
    kept, dropped = (ask.create("responses", **GREEDY, store=store) for store in (True, False))
    assert ask("responses.retrieve", kept.id).output_text == kept.output_text
    assert type(ask.refusal("responses.retrieve", response_id=dropped.id)) is openai.NotFoundError
    following = ask.create("responses", **GREEDY, input="And then?", previous_response_id=kept.id)
    said = [*MESSAGES, {"role": "assistant", "content": kept.output_text}, {"role": "user", "content": "And then?"}]
    assert following.output_text == ask.greedy("chat", messages=said)
    assert following.previous_response_id == kept.id
    assert ask("responses.input_items.list", kept.id).data[0].content[0].text == MESSAGES[0]["content"]
    assert type(ask.refusal("responses.cancel", response_id=kept.id)) is openai.BadRequestError
    ask("responses.delete", kept.id)
    assert type(ask.refusal("responses.retrieve", response_id=kept.id)) is openai.NotFoundError


def functions_are_called_as_chosen(ask):
    options = {**GREEDY, "max_output_tokens": 300, "tools": [FLAT], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "weather"}):
        items = ask.create("responses", **options, tool_choice=choice).output
        assert [fits_schema(json.loads(item.arguments)) for item in items if item.type == "function_call"] == [True]
    assert {item.type for item in ask.create("responses", **options, tool_choice="none").output} == {"message"}


def responses_stream(ask):
    events = ask.create("responses", **GREEDY, stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ask.greedy("responses")


def what_is_said_of_a_response_comes_back(ask):
    fields = {"metadata": {"a": "b"}, "truncation": "disabled", "top_p": 0.5, "parallel_tool_calls": False}
    answer = ask.create("responses", **GREEDY, **fields)
    assert {name: getattr(answer, name) for name in fields} == fields


def vectors_are_the_same_in_both_encodings(ask):
    def vectors(**options):
        return [item.embedding for item in ask("embeddings.create", model="demo", input=["The sea", "wind"], **options).data]

    plain = vectors(encoding_format="float")
    packed = ask("embeddings.with_raw_response.create", model="demo", input=["The sea", "wind"], encoding_format="base64")
    raw = [base64.b64decode(item["embedding"]) for item in packed.http_response.json()["data"]]
    assert [list(struct.unpack(f"<{len(data) // 4}f", data)) for data in raw] == [pytest.approx(one, abs=1e-7) for one in plain]
    assert vectors() == [pytest.approx(one, abs=1e-7) for one in plain]
    for short, long in zip(vectors(dimensions=8), plain, strict=True):
        size = sum(value * value for value in long[:8]) ** 0.5
        assert short == pytest.approx([value / size for value in long[:8]], abs=1e-6)
    unscaled = vectors(extra_body={"normalize": False}, encoding_format="float")
    assert all(sum(value * value for value in one) != pytest.approx(1, abs=1e-3) for one in unscaled)
    assert vectors(extra_body={"pooling": "mean"}, encoding_format="float") != plain


def tokens_are_counted_to_and_fro(ask):
    found = ask.post("/tokenize", {"model": "demo", "prompt": PROMPT, "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert "".join(found["token_strs"]) == PROMPT
    assert ask.post("/detokenize", {"model": "demo", "tokens": found["tokens"]}) == {"prompt": PROMPT}
    chat = ask.post("/tokenize", {"model": "demo", "messages": MESSAGES, "tools": [TOOL]})
    assert chat["count"] == ask.create("chat", tools=[TOOL]).usage.prompt_tokens
    error = ask.refusal("post", path=ask.url + "/tokenize", cast_to=object, body={"model": "demo"})
    assert (type(error), error.param) == (openai.BadRequestError, "prompt")


def models_are_described(ask):
    assert [model.id for model in ask("models.list").data] == ["demo"]
    assert ask("models.retrieve", "demo").object == "model"


def batches_run_on_every_endpoint(ask):
    bodies = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 2},
        "/v1/embeddings": {"input": "a"},
    }
    for url, body in bodies.items():
        line = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "demo", **body}}
        expiry = {"anchor": "created_at", "seconds": 3600}
        made = ask("files.create", file=("in.jsonl", json.dumps(line).encode()), purpose="batch", expires_after=expiry)
        assert made.expires_at - made.created_at == 3600
        fields = {"endpoint": url, "completion_window": "24h", "metadata": {"a": "b"}, "output_expires_after": expiry}
        batch = ask("batches.create", input_file_id=made.id, **fields)
        while (batch := ask("batches.retrieve", batch.id)).status not in ("completed", "failed"):
            pass
        assert (batch.status, batch.request_counts.completed, batch.metadata) == ("completed", 1, {"a": "b"})
        output = ask("files.retrieve", batch.output_file_id)
        assert output.expires_at - output.created_at == 3600
        answer = json.loads(ask("files.content", batch.output_file_id).text)
        assert (answer["custom_id"], answer["response"]["status_code"]) == ("a", 200)


def headers_say_which_request_it_was(ask):
    extra = {"extra_headers": {"X-Request-Id": "mine"}, "extra_body": {"colour": "blue"}}
    raw = ask("chat.completions.with_raw_response.create", model="demo", messages=MESSAGES, max_tokens=2, **extra)
    assert raw.headers["x-request-id"] == raw.headers["x-client-request-id"] == raw.request_id == "mine"
    assert raw.headers["request-id"].startswith("req_")
    assert raw.headers["x-quire-ignored-params"] == "colour"
    assert raw.headers["content-type"] == "application/json"
    assert ask.create("chat")._request_id.startswith("req_")


@pytest.mark.covering
@checks(
    ("completions-best_of", best_choices_are_the_most_likely),
    ("completions-echo, logprobs", prompt_is_echoed_with_its_logprobs),
    ("completions-prompt", prompts_of_every_kind_are_taken),
    ("completions-suffix", suffix_is_refused),
    ("chat-max_completion_tokens", lengths_are_limited_by_either_name),
    ("chat-top_logprobs", likely_tokens_are_told),
    ("chat-continue_final_message, echo", messages_go_on),
    ("chat-user, store, metadata", hints_change_nothing),
    ("service_tier", tiers_are_served_and_told),
    ("chat-tools, tool_choice", tools_are_called_as_chosen),
    ("chat-parallel_tool_calls", several_tools_may_be_called_at_once),
    ("chat-response_format", formats_are_kept),
    ("chat-reasoning_effort", levels_of_reasoning_change_nothing_where_the_model_does_not_reason),
    ("responses-instructions", instructions_come_first),
    ("responses-include, top_logprobs", responses_have_logprobs),
    ("responses-store, previous_response_id", responses_are_kept_as_long_as_asked),
    ("responses-tools, tool_choice", functions_are_called_as_chosen),
    ("responses-stream", responses_stream),
    ("responses-metadata, truncation", what_is_said_of_a_response_comes_back),
    ("embeddings", vectors_are_the_same_in_both_encodings),
    ("tokenize, detokenize", tokens_are_counted_to_and_fro),
    ("models", models_are_described),
    ("files, batches", batches_run_on_every_endpoint),
    ("headers", headers_say_which_request_it_was),
)
def test_route_does_what_its_options_say(ask_openai, check):
    check(ask_openai)


def refused(route, param, kind=openai.BadRequestError, **options):
    return pytest.param(route, param, kind, options, id=f"{route}-{next(iter(options))}")


@pytest.mark.covering
@pytest.mark.parametrize(
    ("route", "param", "kind", "options"),
    [
        refused("completions", "temperature", temperature=3),
        refused("completions", "top_p", top_p=0),
        refused("completions", "n", n=1000),
        refused("completions", "best_of", best_of=1, n=2, temperature=1),
        refused("completions", "best_of", best_of=3, stream=True, temperature=1),
        refused("completions", "logprobs", logprobs=50),
        refused("completions", "max_tokens", max_tokens=0),
        refused("completions", "max_tokens", max_tokens=5000),
        refused("completions", "prompt", prompt=[300] * 2000, max_tokens=1),
        refused("completions", "prompt", prompt=""),
        refused("completions", "stream_options", stream_options={"include_usage": True}),
        refused("completions", "logit_bias", logit_bias={"99999999": 1}),
        refused("completions", "stop_token_ids[0]", stop_token_ids=[-1]),
        refused("completions", "min_p", min_p=2),
        refused("completions", "typical_p", typical_p=0),
        refused("completions", "repetition_penalty", repetition_penalty=0),
        refused("completions", "model", openai.NotFoundError, model="other"),
        refused("chat", "presence_penalty", presence_penalty=3),
        refused("chat", "frequency_penalty", frequency_penalty=-3),
        refused("chat", "top_logprobs", top_logprobs=3),
        refused("chat", "tool_choice", tool_choice="required"),
        refused("chat", "messages", messages=[]),
        refused("chat", "messages[0].role", messages=[{"role": "king", "content": "x"}]),
        refused("chat", "response_format.type", response_format={"type": "xml"}),
        refused("chat", "service_tier", service_tier="slow"),
        refused("chat", "verbosity", verbosity="high"),
        refused("chat", "modalities", modalities=["text", "audio"]),
        refused("chat", "functions", functions=[{"name": "f"}]),
        refused("responses", "background", background=True, store=False),
        refused("responses", "conversation", openai.NotFoundError, conversation="conv_none"),
        refused("responses", "truncation", truncation="auto"),
        refused("responses", "previous_response_id", openai.NotFoundError, previous_response_id="resp_none"),
        refused("responses", "tools[0].type", tools=[{"type": "mcp"}]),
        refused("responses", "include[0]", include=["thoughts"]),
        refused("responses", "max_output_tokens", max_output_tokens=0),
    ],
)
def test_refusal_is_the_exception_of_its_kind_and_names_the_field(ask_openai, route, param, kind, options):
    with pytest.raises(openai.APIStatusError) as caught:
        ask_openai.create(route, **options)
    assert (type(caught.value), caught.value.param) == (kind, param)
    assert caught.value.code
    assert caught.value.request_id.startswith("req_")


@pytest.mark.parametrize("header, status", [("x-request-timeout", 408), ("x-stainless-read-timeout", 408)])
def test_request_ends_at_the_time_that_its_client_states(ask_openai, header, status):
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 5, "extra_headers": {header: "0.000001"}}
    error = ask_openai.refusal("completions.create", **body)
    assert (error.status_code, error.code) == (status, "request_timeout")
