"""From an API's words to requests: formats, samples, variables of templates, threads."""

from __future__ import annotations

import pytest

from quire.base.errors import ConfigError, RequestError
from quire.contracts.sampling_params import SamplingParams
from quire.serving.config import ServerConfig
from quire.serving.core.choice_reader import VisiblePositions
from quire.serving.core.plan import ChatInput, GenerationOptions
from quire.serving.core.prepare import make_sampling, prepare_chat, prepare_prompts, render_chat
from quire.serving.core.reasoning_effort import reasoning_variables
from quire.serving.core.served_model import checkpoint_name, load_served_model, make_served_model
from quire.serving.engine_client.messages import TokenLogprob
from tests.unit.serving.fakes import DEMO, OWNER, TOOL_TEMPLATE, engine_info, make_served

NO_OPTIONS = GenerationOptions(sampling={})
USER = [{"role": "user", "content": "hi"}]


def test_formats_come_from_the_template_unless_they_are_named():
    assert make_served().parsers.tool_format == "json"
    found = make_served(TOOL_TEMPLATE).parsers
    assert (found.tool_format, found.reasoning_format) == ("hermes", "qwen3")
    config = ServerConfig(tool_call_parser="mistral", reasoning_parser="none")
    found = make_served(TOOL_TEMPLATE, config).parsers
    assert (found.tool_format, found.reasoning_format) == ("mistral", None)
    with pytest.raises(ConfigError, match="tool_call_parser"):
        make_served(TOOL_TEMPLATE, ServerConfig(tool_call_parser="wizard"))


def test_model_is_loaded_and_named_after_its_folder():
    served = load_served_model(engine_info(model=str(DEMO)), ServerConfig())
    assert (served.name, served.names) == ("demo", ("demo",))
    assert checkpoint_name(engine_info(model="org/model")) == "org/model"
    assert load_served_model(engine_info(), ServerConfig(served_model_names=("*", "b"))).name == "b"
    assert served.fingerprint != load_served_model(engine_info(dtype="bfloat16"), ServerConfig()).fingerprint


def test_model_without_a_tokenizer_takes_token_ids_alone():
    served = make_served_model(engine_info(tokenizer_folder=None), ServerConfig(), None)
    (plan,) = prepare_prompts(served, ["r"], [[5, 6]], NO_OPTIONS, OWNER)
    assert plan.request.prompt_token_ids == (5, 6)
    for work in (
        lambda: prepare_prompts(served, ["r"], ["text"], NO_OPTIONS, OWNER),
        lambda: prepare_chat(served, "r", ChatInput(messages=USER), NO_OPTIONS, OWNER),
    ):
        with pytest.raises(RequestError, match="no tokenizer"):
            work()


def test_requests_without_a_seed_get_different_ones():
    plans = prepare_prompts(make_served(), ["a", "b"], ["x", "x"], NO_OPTIONS, OWNER)
    assert plans[0].request.seed != plans[1].request.seed
    stated = prepare_prompts(make_served(), ["a", "b"], ["x", "x"], GenerationOptions(sampling={"seed": 7}), OWNER)
    assert [plan.request.seed for plan in stated] == [7, 7]


def test_prompt_that_ends_in_reasoning_starts_the_parser_there():
    template = TOOL_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    plan = prepare_chat(make_served(template), "r", ChatInput(messages=USER), NO_OPTIONS, OWNER)
    assert plan.parser is not None
    assert plan.parser.starts_in_reasoning
    off = ChatInput(messages=USER, template_variables={"enable_thinking": False})
    plan = prepare_chat(make_served(TOOL_TEMPLATE), "r", off, NO_OPTIONS, OWNER)
    assert not plan.parser.starts_in_reasoning


def test_message_that_the_template_does_not_show_cannot_be_continued():
    served = make_served("{{ 'nothing of it' }}")
    chat = ChatInput(messages=[*USER, {"role": "assistant", "content": "x"}], continues_final_message=True)
    with pytest.raises(RequestError) as caught:
        render_chat(served, chat)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("x", None, {}),
        ("x", "low", {}),
        ("x", "none", {}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "high", {"enable_thinking": True}),
        ("{{ thinking }}", "low", {"thinking": True}),
        ("{{ reasoning_effort }}", "medium", {"reasoning_effort": "medium"}),
        ("{% if reasoning_effort == 'none' or reasoning_effort == 'high' %}", "none", {"reasoning_effort": "none"}),
    ],
)
def test_effort_becomes_what_the_template_knows(template, effort, expected):
    assert reasoning_variables(template, effort, reasons=False) == expected


@pytest.mark.parametrize(
    ("template", "effort"), [("x", "none"), ("{{ enable_thinking }}", "minimal"), ("reasoning_effort", "none")]
)
def test_effort_that_the_template_does_not_know_is_refused(template, effort):
    with pytest.raises(RequestError) as caught:
        reasoning_variables(template, effort, reasons=True)
    assert caught.value.param == "reasoning_effort"


def test_sampling_takes_the_statement_then_the_recommendation_then_the_default():
    params, is_copied = make_sampling({"top_p": None, "top_k": 3, "max_tokens": None}, {"top_p": 0.5, "top_k": 9}, n=2)
    assert (params.top_p, params.top_k, params.max_tokens, params.n, is_copied) == (0.5, 3, None, 2, False)
    params, is_copied = make_sampling({"n": 4, "best_of": 5}, {"temperature": 0})
    assert (params.n, params.best_of, is_copied) == (1, None, True)


def test_what_was_stated_before_is_not_taken_for_what_only_equals_it():
    stated = {"max_tokens": 1, "stop": "a"}
    first = make_sampling(stated, {})[0]
    assert make_sampling(dict(stated), {})[0] == first == SamplingParams(max_tokens=1, stop="a")
    assert make_sampling({**stated, "seed": 3}, {})[0] == SamplingParams(max_tokens=1, stop="a", seed=3)
    with pytest.raises(RequestError) as caught:
        make_sampling({**stated, "max_tokens": True}, {})
    assert caught.value.param == "max_tokens"


def test_lists_that_are_changed_later_change_no_parameters():
    words = ["red"]
    params = make_sampling({"bad_words": words}, {})[0]
    words.append("blue")
    assert params.bad_words == ("red",)
    assert make_sampling({"bad_words": words}, {})[0].bad_words == ("red", "blue")


def test_visible_positions_skip_what_is_not_visible():
    def mark(number):
        return [TokenLogprob(number, 0.0, 1)]

    visible = VisiblePositions()
    for number, text in enumerate(["<th", "ink>a", "b</th", "ink>", "Vis", "", "é", "ible<to"]):
        visible.add(text, mark(number))
    visible.drop("ab")
    assert visible.take("Vis") == [mark(4)]
    assert visible.take("éib") == [mark(5), mark(6), mark(7)]
    assert visible.take("le") == []
    visible.add("ol_call>", mark(8))
    visible.add("{}", mark(9))
    visible.add("</tool_call>after", mark(10))
    visible.drop_all_but_last()
    assert visible.take("after") == [mark(10)]


def test_prompt_is_refused_when_the_context_cannot_hold_it():
    served = make_served(TOOL_TEMPLATE, max_model_len=64)
    for prompt in ("hello " * 63, [5] * 64):
        with pytest.raises(RequestError, match="max_model_len 64") as caught:
            prepare_prompts(served, ["r"], [prompt], NO_OPTIONS, OWNER)
        assert caught.value.param == "prompt"
    prepare_prompts(served, ["r"], [[5] * 63], NO_OPTIONS, OWNER)
    with pytest.raises(RequestError, match="max_model_len 64"):
        prepare_chat(served, "r", ChatInput(messages=[{"role": "user", "content": "hello " * 63}]), NO_OPTIONS, OWNER)


def test_text_is_refused_before_it_is_tokenised_when_no_tokens_can_spell_it_in_the_context(monkeypatch):
    served = make_served(TOOL_TEMPLATE, max_model_len=64)
    longest = max(range(served.tokenizer.vocab_size), key=lambda token_id: len(served.tokenizer.token_bytes(token_id)))
    (plan,) = prepare_prompts(served, ["r"], [served.tokenizer.token_text(longest) * 60], NO_OPTIONS, OWNER)
    assert plan.num_prompt_tokens < 64
    monkeypatch.setattr(type(served.tokenizer), "encode", lambda *_: pytest.fail("it was tokenised"))
    monkeypatch.setattr(type(served.tokenizer), "encode_rendered", lambda *_: pytest.fail("it was tokenised"))
    for work in (
        lambda: prepare_prompts(served, ["r"], ["a" * 2000], NO_OPTIONS, OWNER),
        lambda: prepare_chat(served, "r", ChatInput(messages=[{"role": "user", "content": "a" * 2000}]), NO_OPTIONS, OWNER),
    ):
        with pytest.raises(RequestError, match="2\\d\\d\\d characters"):
            work()
