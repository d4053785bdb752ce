"""Constrained outputs through the engine: what they match, and that they depend on nothing but the request."""

import asyncio
import contextlib
import json
import re

import pytest

pytest.importorskip("llguidance")

from quire import LLM, AsyncLLM, LLMEngine, RequestError, SamplingParams, StructuredOutputsParams
from quire.contracts.sampling_params import BeamSearchParams
from quire.grammar.compiler import GrammarCompiler
from tests.tiny_checkpoint import END_OF_TEXT, VOCAB_SIZE
from tests.unit.engine.held_masks import HeldCompiler
from tests.unit.engine.one_compiler import one_compiler

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "tag": {"enum": ["x", "yy", "zzz"]}},
    "required": ["id", "tag"],
    "additionalProperties": False,
}
WORDS = ["cab", "cabbage", "cat", "dog", "do"]
ASKED = [
    {"json": SCHEMA},
    {"regex": "[ab]{3,9}c"},
    {"choice": WORDS},
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"grammar": 'start: ("on" | "off") ("," ("on" | "off")){2,4}'},
    {"json_object": True},
]
OPTIONS = {"max_num_seqs": 8, "block_size": 4, "num_kv_blocks": 200}


def params(index, **more):
    kinds = ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.95}, {"repetition_penalty": 1.1})
    fields = {"max_tokens": 40, "seed": index, **kinds[index % len(kinds)], **more}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**ASKED[index]), **fields)


PROMPTS = [[7, 8, 9], list(range(20, 60)), [5] * 17, [*range(20, 52), 1], [250, 3], [1, 2]]


def run(model, prompts, all_params, **options):
    llm = LLM(str(model), **{**OPTIONS, **options})
    try:
        return llm.generate(prompts, all_params, use_tqdm=False), llm.llm_engine.scheduler.num_preemptions
    finally:
        llm.close()


@pytest.fixture(scope="module")
def llm(tiny_model):
    llm = LLM(str(tiny_model), **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Each request by itself: the oracle."""
    with one_compiler():
        return [run(tiny_model, [prompt], params(index))[0][0].outputs[0] for index, prompt in enumerate(PROMPTS)]


def generate(llm, asked, prompt=(7, 8, 9), **fields):
    more = {"max_tokens": 40, **fields}
    return llm.generate(
        [list(prompt)], SamplingParams(structured_outputs=StructuredOutputsParams(**asked), **more), use_tqdm=False
    )[0]


def matches(index, text):
    if "json" in ASKED[index]:
        value = json.loads(text)
        return list(value) == ["id", "tag"] and 0 <= value["id"] <= 999 and value["tag"] in ("x", "yy", "zzz")
    pattern = ("", "[ab]{3,9}c", "|".join(WORDS), "", "o(n|ff)(,o(n|ff)){2,4}")[index]
    return re.fullmatch(pattern, text) is not None


def test_outputs_match_when_they_end_by_themselves(alone):
    ended = [index for index, output in enumerate(alone) if output.finish_reason == "stop"]
    assert {1, 2, 3, 4} <= set(ended)
    assert all(matches(index, alone[index].text) for index in ended if index < 5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 7, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 9},
        {"num_kv_blocks": 26},
    ],
    ids=["batched", "chunked", "small-steps", "preempted"],
)
def test_same_tokens_when_run_with_others(tiny_model, alone, options):
    outputs, num_preemptions = run(tiny_model, PROMPTS, [params(index) for index in range(len(PROMPTS))], **options)
    assert [output.outputs[0].token_ids for output in outputs] == [output.token_ids for output in alone]
    assert [output.outputs[0].finish_reason for output in outputs] == [output.finish_reason for output in alone]
    assert (num_preemptions > 0) == ("num_kv_blocks" in options)


def test_tokens_are_those_of_brute_force_when_one_of_some_words_is_wanted(llm):
    """Token by token, with the words' next bytes as allowed_token_ids."""
    for seed in range(12):
        output = generate(llm, {"choice": WORDS}, seed=seed).outputs[0]
        tokenizer = llm.get_tokenizer()
        token_ids, text = [], b""
        while True:
            allowed = [
                token_id
                for token_id in range(VOCAB_SIZE)
                if token_id != END_OF_TEXT
                and (piece := tokenizer.token_bytes(token_id))
                and any(word.encode().startswith(text + piece) for word in WORDS)
            ]
            if text.decode() in WORDS:
                if not allowed:
                    break
                allowed.append(END_OF_TEXT)
            step = SamplingParams(max_tokens=1, seed=seed, allowed_token_ids=allowed)
            (drawn,) = llm.generate([[7, 8, 9, *token_ids]], step, use_tqdm=False)[0].outputs[0].token_ids
            token_ids.append(drawn)
            if drawn == END_OF_TEXT:
                break
            text += tokenizer.token_bytes(drawn)
        assert output.token_ids == token_ids
        assert output.text == text.decode()
        assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_choices_differ_and_all_match_when_several_are_wanted(llm):
    output = generate(llm, ASKED[1], n=5, seed=3, logprobs=2, prompt=[5] * 30)
    assert all(matches(1, choice.text) for choice in output.outputs)
    assert len({choice.text for choice in output.outputs}) > 1
    assert all(len(choice.logprobs) == len(choice.token_ids) for choice in output.outputs)
    best = generate(llm, ASKED[1], n=2, best_of=6, seed=3)
    assert len(best.outputs) == 2
    assert all(matches(1, choice.text) for choice in best.outputs)


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 30}, {"ignore_eos": True, "stop_token_ids": [5]}])
def test_output_ends_when_nothing_can_follow(llm, more):
    output = generate(llm, {"regex": "[ab]{4}"}, seed=1, **more).outputs[0]
    assert re.fullmatch("[ab]{4}", output.text)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_output_goes_on_to_min_tokens_when_it_could_end_before(llm):
    output = generate(llm, {"regex": "[ab]*"}, seed=1, min_tokens=12).outputs[0]
    assert len(output.token_ids) >= 12


def test_stop_string_ends_the_output_within_the_grammar(llm):
    output = generate(llm, {"regex": "(a|b){30}"}, seed=1, stop=["ab"]).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", "ab")
    assert "ab" not in output.text


def test_request_ends_with_an_error_that_says_why_when_nothing_is_left(llm):
    tokens = [token_id for token_id in range(VOCAB_SIZE) if llm.get_tokenizer().token_bytes(token_id)[:1] != b"a"]
    output = generate(llm, {"regex": "a+"}, allowed_token_ids=tokens)
    assert output.outputs[0].finish_reason == "error"
    assert "constraint" in output.error
    assert "allowed_token_ids" in output.error
    assert generate(llm, {"regex": "a{2}"}, bad_words=["b"]).outputs[0].text == "aa"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"json": SCHEMA, "disable_any_whitespace": True}, ["}"]),
        ({"grammar": 'start: "a" /[0-9]{3}/ ("bad" | "ba")'}, ["ba"]),
    ],
    ids=["brace", "grammar"],
)
def test_output_never_ends_as_if_it_were_complete_when_banned_words_let_nothing_follow(llm, asked, words):
    for seed in range(4):
        output = generate(llm, asked, seed=seed, bad_words=words)
        assert output.outputs[0].finish_reason == "error"
        assert "bad_words" in output.error


TOO_COMPLEX = "[a-z]{30}(a|aa)+(b?){30}c{1000}{1000}"
"""Masks show that it has too many states, but only behind more than is looked at when it is compiled."""


@pytest.mark.parametrize("n", [1, 2])
def test_output_ends_with_its_field_when_its_constraint_turns_out_too_complex(llm, n):
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex=TOO_COMPLEX), n=n, max_tokens=60, seed=1)
    bad, good = llm.generate([[7, 8, 9], PROMPTS[1]], [asked, params(1)], use_tqdm=False)
    assert (bad.error_param, bad.outputs[0].finish_reason) == ("structured_outputs.regex", "error")
    assert bad.error.startswith("structured_outputs.regex: the grammar cannot go on: ")
    assert (good.error, good.outputs[0].finish_reason) == (None, "stop")


def test_beam_search_names_the_field_when_its_constraint_turns_out_too_complex(llm):
    asked = BeamSearchParams(beam_width=2, max_tokens=60, structured_outputs=StructuredOutputsParams(regex=TOO_COMPLEX))
    for _ in range(2):  # masks that the first has asked for are known to the second, which finds out by a token
        with pytest.raises(RequestError, match="cannot go on") as caught:
            llm.beam_search([{"prompt_token_ids": [7, 8, 9]}], asked)
        assert caught.value.param == "structured_outputs"


def test_request_is_refused_when_banned_words_leave_nothing_of_its_constraint(llm):
    pattern = {"type": "string", "pattern": "^[0-9]{2}(xa|ya)$"}
    for asked in ({"json": SCHEMA}, {"regex": "a[0-9]{3}(xa|ya)"}, {"choice": ["ax", "yya"]}, {"json": pattern}):
        with pytest.raises(RequestError, match="bad_words"):
            generate(llm, asked, bad_words=["x", "yy", "zzz", "ya"])


def test_request_is_refused_before_anything_runs_when_its_constraint_is_wrong(llm):
    with pytest.raises(RequestError, match="not cannot be enforced") as caught:
        generate(llm, {"json": {"properties": {"a": {"not": {"minimum": 1}}}}})
    assert caught.value.param == "structured_outputs.json"
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.fixture
def held_engine(tiny_model):
    engine = LLMEngine(str(tiny_model), **OPTIONS)
    engine.grammars.close()
    sandbox = HeldCompiler()
    engine.grammars = GrammarCompiler(engine.grammars.read_vocabulary, sandbox)
    yield engine, sandbox
    engine.close()


def constrained(pattern, **fields):
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=pattern), max_tokens=12, **fields)


def run_until(engine, wanted):
    """Step until a request has ended; return the last outputs of all that have."""
    ended = {}
    while wanted not in ended:
        ended.update({output.request_id: output for output in engine.step() if output.finished})
    return ended


def test_others_go_on_when_a_constraint_is_still_being_compiled(held_engine):
    engine, sandbox = held_engine
    engine.add_request("slow", [1, 2], constrained("slow|slower", seed=1))
    engine.add_request("plain", [1, 2], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add_request("quick", [1, 2], constrained("quick", seed=1))
    ended = {**run_until(engine, "plain")}
    if "quick" not in ended:
        ended |= run_until(engine, "quick")
    assert set(ended) == {"plain", "quick"}
    assert engine.has_unfinished_requests()
    sandbox.go_on.set()
    assert run_until(engine, "slow")["slow"].outputs[0].text in ("slow", "slower")
    assert not engine.has_unfinished_requests()


def test_request_ends_with_its_field_when_its_constraint_turns_out_wrong_later(held_engine):
    engine, sandbox = held_engine
    engine.add_request("bad", [1, 2], constrained("slow wrong"))
    assert engine.step() == []
    sandbox.go_on.set()
    output = run_until(engine, "bad")["bad"]
    assert output.outputs[0].finish_reason == "error"
    assert (output.error_param, output.outputs[0].token_ids) == ("structured_outputs.regex", [])
    assert "/here" in output.error
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("is_cached", [False, True], ids=["new", "cached"])
@pytest.mark.parametrize(
    ("fields", "bad_words", "param"),
    [
        ({"regex": "wrong"}, (), "structured_outputs.regex"),
        ({"choice": ["cab", "cabbage"]}, ("a",), "structured_outputs.choice"),
        ({}, tuple(f"{index:02}" + "a" * 4000 for index in range(20)), "bad_words"),
    ],
    ids=["constraint", "both", "bad-words"],
)
def test_refusal_of_a_constraint_is_an_output_whether_it_is_known_already_or_not(
    held_engine, fields, bad_words, param, is_cached
):
    engine, _ = held_engine
    constraint = StructuredOutputsParams(**fields) if fields else None
    asked = SamplingParams(structured_outputs=constraint, bad_words=bad_words, max_tokens=12)
    if is_cached:
        with contextlib.suppress(RequestError):
            engine.start_compilation(engine.make_request("first", [1, 2], asked)).result()
    engine.add_request("bad", [1, 2], asked)
    assert engine.has_unfinished_requests()
    output = run_until(engine, "bad")["bad"]
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids, output.error_param) == ("error", [], param)
    assert output.error.startswith(f"{param}: ")
    assert not engine.has_unfinished_requests()


def test_request_whose_refusal_is_known_can_be_aborted_before_it_is_told(held_engine):
    engine, _ = held_engine
    with pytest.raises(RequestError):
        engine.start_compilation(engine.make_request("first", [1, 2], constrained("wrong"))).result()
    engine.add_request("bad", [1, 2], constrained("wrong"))
    assert engine.abort_request("bad").outputs[0].finish_reason == "abort"
    assert engine.step() == []
    assert not engine.has_unfinished_requests()


def test_request_is_gone_when_it_is_aborted_while_its_constraint_is_compiled(held_engine):
    engine, sandbox = held_engine
    engine.add_request("slow", [1, 2], constrained("slow"))
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("slow", [1, 2], constrained("slow"))
    output = engine.abort_request("slow")
    assert output.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished_requests()
    sandbox.go_on.set()
    engine.add_request("slow", [1, 2], constrained("slow"))
    assert run_until(engine, "slow")["slow"].outputs[0].text == "slow"


def test_async_requests_stream_and_are_refused_like_others(tiny_model):
    async def ask(engine, pattern):
        return "".join([output.outputs[0].text async for output in engine.generate([1, 2], constrained(pattern, seed=2))])

    async def main():
        engine = AsyncLLM(str(tiny_model), **OPTIONS)
        try:
            results = await asyncio.gather(
                *(ask(engine, pattern) for pattern in ("[ab]{5}", "(", "x{3}")), return_exceptions=True
            )
        finally:
            engine.close()
        return results

    first, refused, last = asyncio.run(main())
    assert re.fullmatch("[ab]{5}", first)
    assert isinstance(refused, RequestError)
    assert refused.param == "structured_outputs.regex"
    assert last == "xxx"


def test_constraint_is_refused_when_the_model_has_no_tokenizer(tiny_model):
    engine = LLMEngine(str(tiny_model), skip_tokenizer_init=True, **OPTIONS)
    try:
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.add_request("a", [1, 2], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), max_tokens=2))
    finally:
        engine.close()
