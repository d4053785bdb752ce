"""SamplingParams and BeamSearchParams: bad values name their field, good ones pass, lists become tuples."""

import dataclasses
import math

import pytest

from quire.base.errors import RequestError
from quire.contracts.constraint import GuidedDecodingParams, StructuredOutputsParams
from quire.contracts.sampling_params import (
    MAX_BEAM_WIDTH,
    MAX_CHOICES,
    MAX_STRING_LENGTH,
    MAX_STRINGS,
    BeamSearchParams,
    SamplingParams,
)

NAN, INF = math.nan, math.inf
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NOT_NUMBERS = (NAN, INF, -INF, True, False, "1", None, [1.0], 10**400)
NOT_INTS = (True, False, 1.0, 1.5, "1", NAN, [1])

BAD = (
    [(name, value) for name in NUMBERS for value in NOT_NUMBERS]
    + [("kv_compression", {"method": "streaming"}), ("kv_compression", 64)]
    + [("temperature", -0.1), ("temperature", -1e-300)]
    + [("top_p", value) for value in (0, 0.0, -0.5, 1.0001, 2)]
    + [("typical_p", value) for value in (0, -0.5, 1.0001)]
    + [("min_p", value) for value in (-1e-9, 1.0001)]
    + [("repetition_penalty", value) for value in (0, 0.0, -1)]
    + [(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.01, 2.01)]
    + [
        (name, value)
        for name in ("n", "best_of", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "priority")
        for value in NOT_INTS
    ]
    + [("n", value) for value in (0, -1, MAX_CHOICES + 1, None)]
    + [("best_of", value) for value in (0, -1, MAX_CHOICES + 1)]
    + [("top_k", value) for value in (-2, None)]
    + [("max_tokens", value) for value in (0, -1)]
    + [("min_tokens", value) for value in (-1, 17, None)]  # 17: more than the default max_tokens
    + [("seed", value) for value in (2**64, -(2**63) - 1)]
    + [(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-2, 1.5)]
    + [(name, value) for name in ("stop", "bad_words") for value in (["x"] * (MAX_STRINGS + 1), "x" * (MAX_STRING_LENGTH + 1))]
    + [("priority", value) for value in (2**31, -(2**31) - 1, None)]
    + [("logit_bias", value) for value in ([(1, 2.0)], "1", {"1": 1.0}, {-1: 1.0}, {True: 1.0}, {1.0: 1.0})]
    + [("logit_bias", {1: value}) for value in (100.5, -101, NAN, INF, True, "1", None)]
    + [("allowed_token_ids", value) for value in ([], (), [-1], ["1"], [True], [1.0], "ab", 3, {1, 2})]
    + [("stop_token_ids", value) for value in ([-1], ["1"], [False], [1.0], "ab", 3)]
    + [(name, value) for name in ("stop", "bad_words") for value in ("", [""], [1], ["a", None], 3, {"a"})]
    + [
        (name, value)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
        for value in (0, 1, None, "true")
    ]
    + [("constraint", {"regex": "a"}), ("structured_outputs", {"regex": "a"})]
    + [("kv_compression", value) for value in ("snapkv", {"method": "streaming"}, 3)]
)

GOOD = [
    {},
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1e-9},
    {"temperature": 1e300},
    {"top_p": 1e-9, "top_k": -1, "min_p": 0, "typical_p": 1},
    {"top_p": 1, "top_k": 10**30, "min_p": 1, "typical_p": 0.2},
    {"repetition_penalty": 0.1, "presence_penalty": -2, "frequency_penalty": 2},
    {"n": MAX_CHOICES},
    {"n": 2, "best_of": 2},
    {"n": 1, "best_of": MAX_CHOICES},
    {"max_tokens": None, "min_tokens": 10**6},
    {"max_tokens": 5, "min_tokens": 5},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
    {"logprobs": -1, "prompt_logprobs": 0},
    {"logprobs": 50, "prompt_logprobs": -1},
    {"logit_bias": {}},
    {"logit_bias": {0: 100, 5: -100.0}},
    {"stop": ("x",), "detokenize": True},
    {"detokenize": False, "stop": []},
    {"priority": -3},
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}-{str(value)[:20]!r}" for name, value in BAD])
def test_error_names_the_field_when_its_value_is_bad(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(name)


def test_every_field_has_a_bad_value():
    assert {name for name, _ in BAD} == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_good_values_pass_unchanged(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == (value if value != [] else ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"temperature": 0, "n": 2}, "n"),
        ({"temperature": 0.0, "best_of": 2}, "best_of"),
    ],
    ids=str,
)
def test_error_names_the_field_when_two_contradict(fields, param):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_lists_become_tuples():
    params = SamplingParams(stop=["a", "b"], bad_words=["c"], stop_token_ids=[1, 2], allowed_token_ids=[3, 4])
    assert params.stop == ("a", "b")
    assert params.bad_words == ("c",)
    assert params.stop_token_ids == (1, 2)
    assert params.allowed_token_ids == (3, 4)


def test_missing_lists_are_empty_and_a_single_string_is_a_list_of_one():
    params = SamplingParams(stop="end")
    assert params.stop == ("end",)
    assert params.bad_words == ()
    assert params.stop_token_ids == ()
    assert params.allowed_token_ids is None


@pytest.mark.parametrize(
    ("fields", "num_sequences", "needs_logprob"),
    [
        ({}, 1, False),
        ({"logprobs": 0}, 1, True),
        ({"n": 3}, 3, False),
        ({"n": 3, "best_of": 3}, 3, False),
        ({"n": 1, "best_of": 4}, 4, True),
        ({"prompt_logprobs": 2}, 1, False),
    ],
    ids=str,
)
def test_sequences_and_log_probabilities_that_a_request_needs(fields, num_sequences, needs_logprob):
    params = SamplingParams(**fields)
    assert params.num_sequences == num_sequences
    assert params.needs_logprob is needs_logprob


def test_params_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_width", value) for value in (0, MAX_BEAM_WIDTH + 1, True, 1.0, None)]
    + [("max_tokens", value) for value in (0, None, False)]
    + [("ignore_eos", value) for value in (0, None)]
    + [("length_penalty", value) for value in (NAN, INF, 10.5, -11, True, "1")],
)
def test_beam_search_error_names_the_field_when_its_value_is_bad(name, value):
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | {name: value}))
    assert caught.value.param == name


def test_beam_search_takes_good_values():
    params = BeamSearchParams(beam_width=10, max_tokens=1, ignore_eos=True, length_penalty=0)
    assert (params.beam_width, params.length_penalty) == (10, 0)


def test_logit_bias_is_a_copy_of_the_callers():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = "broken"
    assert params.logit_bias == {3: 1.0}


def test_guided_decoding_is_another_name_of_structured_outputs():
    asked = GuidedDecodingParams(regex="a+")
    params = SamplingParams(guided_decoding=asked)
    assert params.constraint == StructuredOutputsParams(regex="a+").constraint()
    assert SamplingParams(guided_decoding=StructuredOutputsParams(regex="a+")).constraint == params.constraint
    assert dataclasses.replace(params, n=2).structured_outputs == asked
    with pytest.raises(RequestError, match="give one"):
        SamplingParams(guided_decoding=asked, structured_outputs=asked)


@pytest.mark.parametrize("name", ["guided_decoding", "structured_outputs"])
def test_constraint_of_another_type_is_refused_with_what_to_write(name):
    with pytest.raises(RequestError, match=r"StructuredOutputsParams\(json=schema\)") as caught:
        SamplingParams(**{name: {"json": {"type": "object"}}})
    assert caught.value.param == name
