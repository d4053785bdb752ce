"""Outputs of a model whose tokenizer puts a space before each text (Llama 2): forced, banned and injected texts get none."""

import json
import re

import pytest

pytest.importorskip("llguidance")

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.contracts.sampling_params import BeamSearchParams
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.grammar.tokenizer_kinds import make_tokenizer

PROMPTS = {"text": "he", "special": [1]}
"""After a prompt of special tokens only, the decoder would drop the first space of an output."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function from a kind of tokenizer to an LLM with it."""
    made = {}

    def get(kind):
        if kind not in made:
            size = make_tokenizer(kind, tmp_path_factory.mktemp(kind)).vocab_size
            folder = write_checkpoint(tmp_path_factory.mktemp("models") / kind, "qwen3", vocab_size=size, eos_token_id=2)
            make_tokenizer(kind, folder)
            made[kind] = LLM(str(folder), max_num_seqs=4, num_kv_blocks=64, complete_json_within_max_tokens=True)
        return made[kind]

    yield get
    for llm in made.values():
        llm.close()


def generate(llm, prompt, max_tokens=60, **fields):
    asked = {name: fields.pop(name) for name in ("choice", "regex", "json", "grammar", "structural_tag") if name in fields}
    constraint = StructuredOutputsParams(**asked) if asked else None
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=constraint, **{"seed": 1, **fields})
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("kind", ["llama", "metaspace-first", "wordpiece"])
def test_text_is_the_one_that_the_constraint_allows(models, kind, prompt):
    llm = models(kind)
    texts = ("hello", "yes", "  hello world", "{3}") if kind != "wordpiece" else ("hello", " hello", "yes hello")
    for text in texts:
        for asked in ({"choice": [text]}, {"regex": re.escape(text)}, {"grammar": f"start: {json.dumps(text)}"}):
            output = generate(llm, prompt, **asked)
            assert (output.text, output.finish_reason) == (text, "stop")


@pytest.mark.parametrize("kind", ["llama", "metaspace-first"])
def test_bytes_spell_what_is_in_no_token(models, kind):
    schema = {"type": "object", "properties": {"é": {"const": "日本"}}, "required": ["é"], "additionalProperties": False}
    assert json.loads(generate(models(kind), "he", json=schema).text) == {"é": "日本"}
    assert generate(models(kind), "he", choice=["a\n\t日"]).text == "a\n\t日"


def test_banned_words_have_no_space_before_them(models):
    llm = models("llama")
    assert generate(llm, "he", choice=["hello", "yes"], bad_words=["hello"]).text == "yes"
    for seed in range(4):
        text = generate(llm, "he", regex="[helo ]{8}", bad_words=["ell", " o"], seed=seed).text
        assert re.fullmatch("[hel ]{8}", text)
        assert "ell" not in text


def test_stop_string_is_found_in_what_is_forced(models):
    output = generate(models("llama"), "he", regex="the hello world", stop=["hello"])
    assert (output.text, output.stop_reason) == ("the ", "hello")
    output = generate(models("llama"), [1], regex=" hello world", stop=[" hello"])
    assert (output.text, output.stop_reason) == ("", " hello")


def test_reasoning_is_ended_in_time_by_its_text(models):
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    answer = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 1}}
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [thought, answer]}}
    output = generate(models("llama"), "he", structural_tag=json.dumps(tag), max_tokens=60)
    reasoning, _, rest = output.text.partition("</think>")
    assert output.finish_reason == "stop"
    assert reasoning
    assert all(isinstance(item, bool) for item in json.loads(rest))


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_beams_have_the_text_of_their_constraint(models, prompt):
    prompt = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    asked = BeamSearchParams(
        beam_width=8, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=[" hello", "hello"])
    )
    found = models("llama").beam_search([prompt], asked)[0].sequences
    assert {sequence.text for sequence in found} == {" hello", "hello"}


def test_beams_go_on_with_the_text_of_the_prompt(models):
    """Without a constraint a space at the beginning of an output is kept, as `generate` keeps it."""
    llm = models("llama")
    found = llm.beam_search(["hello"], BeamSearchParams(beam_width=48, max_tokens=2))[0].sequences
    tokenizer = llm.get_tokenizer()
    texts = {b"".join(map(tokenizer.token_bytes, beam.tokens[-2:])): beam.text for beam in found}
    spaced = {text: shown for text, shown in texts.items() if text.startswith(b" ") and text.isascii()}
    assert spaced
    assert all(shown == text.decode() for text, shown in spaced.items())


def test_forced_tokens_are_drafts_that_are_accepted(models):
    engine = models("llama").llm_engine
    before = engine.stats.num_accepted_tokens, engine.stats.num_draft_tokens
    generate(models("llama"), "he", choice=["hello world, the hello"])
    num_accepted, num_drafted = (engine.stats.num_accepted_tokens - before[0], engine.stats.num_draft_tokens - before[1])
    assert num_accepted >= num_drafted - 1 >= 8  # the last one may come when the output has ended
