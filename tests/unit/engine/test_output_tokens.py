"""Requests that go on from given output tokens: what follows is what an unbroken run has, wherever it is cut."""

import json
from dataclasses import replace

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 20},
    "stop_strings": {"temperature": 0, "stop": ["zzz", "qqq"]},
    "bad_words": {"temperature": 0, "bad_words": ["little", "girl"]},
    "json_schema": {"temperature": 1.0, "seed": 5, "constraint": json.dumps(SCHEMA)},
    "regex": {"temperature": 1.0, "seed": 9, "constraint": r"[a-z]{5} [0-9]{3}-[a-z ]{10,30}\."},
}


def params_of(name):
    options = dict(CASES[name])
    if name in ("json_schema", "regex"):
        options["constraint"] = Constraint(kind=name, source=options["constraint"], fit_max_tokens=name == "json_schema")
    return SamplingParams(max_tokens=32, **options)


@pytest.fixture(scope="module")
def engine():
    made = LLM("demo", max_num_seqs=8, max_model_len=256)
    yield made.llm_engine
    made.llm_engine.close()


def run(engine, request):
    """Return the tokens and the text of all deltas, and why it ended."""
    engine.submit(request, "delta")
    token_ids, text, reason = [], "", None
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            for choice in output.outputs:
                token_ids += choice.token_ids
                text += choice.text
                reason = choice.finish_reason or reason
    return token_ids, text, reason


@pytest.mark.parametrize("name", CASES)
def test_output_is_that_of_an_unbroken_run(engine, name):
    request = engine.make_request("whole", PROMPT, params_of(name))
    whole_ids, whole_text, reason = run(engine, request)
    assert len(whole_ids) > 8
    for cut in sorted({1, 2, 5, len(whole_ids) // 2, len(whole_ids) - 1}):
        part = replace(request, request_id=f"cut {cut}", output_token_ids=tuple(whole_ids[:cut]))
        token_ids, text, resumed_reason = run(engine, part)
        assert token_ids == whole_ids[cut:]
        assert resumed_reason == reason
        assert whole_text.endswith(text)
        if name == "json_schema":
            json.loads(whole_text)


def test_text_of_the_given_output_and_of_what_follows_make_the_whole(engine):
    from quire.engine.output import OutputStream

    request = engine.make_request("whole", PROMPT, SamplingParams(max_tokens=24, temperature=1.5, seed=11, stop=["zzz"]))
    whole_ids, whole_text, _ = run(engine, request)
    for cut in range(1, len(whole_ids)):
        part = replace(request, request_id=f"cut {cut}", output_token_ids=tuple(whole_ids[:cut]))
        begun = OutputStream(part, engine.tokenizer, "delta").resume()
        assert begun + run(engine, part)[1] == whole_text


def test_cumulative_output_has_the_given_tokens_too(engine):
    request = engine.make_request("whole", PROMPT, SamplingParams(max_tokens=8, temperature=0))
    whole_ids, whole_text, _ = run(engine, request)
    part = replace(request, request_id="part", output_token_ids=tuple(whole_ids[:3]))
    engine.submit(part, "cumulative")
    last = None
    while engine.has_unfinished_requests():
        last = [*engine.step(), last][0]
    assert (last.outputs[0].token_ids, last.outputs[0].text) == (whole_ids, whole_text)


@pytest.mark.parametrize(
    ("options", "output", "message"),
    [
        ({"n": 2}, (5,), "one choice"),
        ({"logprobs": 1}, (5,), "log probabilities"),
        ({"prompt_logprobs": 1}, (5,), "log probabilities"),
        ({"max_tokens": 2}, (5, 6), "nothing is left"),
        ({"stop_token_ids": [6]}, (5, 6), "has ended"),
        ({}, (5, 1 << 30), "token ids must be from 0"),
        ({"max_tokens": None}, (5,) * 300, "nothing is left"),
    ],
)
def test_request_that_cannot_go_on_is_refused(engine, options, output, message):
    params = SamplingParams(**{"max_tokens": 16, **options})
    request = replace(engine.make_request("refused", PROMPT, params), output_token_ids=output)

    def submit():
        engine.check_request(request)
        engine.submit(request, "delta")

    with pytest.raises(RequestError, match=message) as found:
        submit()
    assert found.value.param == "output_token_ids"
    assert not engine.has_unfinished_requests()
