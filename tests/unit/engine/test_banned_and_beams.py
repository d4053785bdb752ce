"""Banned phrases, beams under a constraint and JSON that fits its tokens, through the engine."""

import heapq
import json
import math

import pytest

pytest.importorskip("llguidance")

from quire import LLM, RequestError, SamplingParams, StructuredOutputsParams
from quire.contracts.sampling_params import BeamSearchParams
from quire.engine import beam_search
from tests.tiny_checkpoint import END_OF_TEXT, VOCAB_SIZE

OPTIONS = {"max_num_seqs": 8, "block_size": 4, "num_kv_blocks": 200}


@pytest.fixture(scope="module")
def llm(tiny_model):
    llm = LLM(str(tiny_model), **OPTIONS)
    yield llm
    llm.close()


def output_bytes(llm, output):
    tokenizer = llm.get_tokenizer()
    return b"".join(tokenizer.token_bytes(token_id) for token_id in output.token_ids)


def test_phrase_never_comes_however_it_is_cut_into_tokens(llm):
    """Ban what the outputs would hold: any three bytes of them, within tokens and across their borders."""
    params = [SamplingParams(max_tokens=24, seed=seed, ignore_eos=True) for seed in range(6)]
    plain = llm.generate([[7, 8, 9]] * 6, params, use_tqdm=False)
    phrases = []
    for output in plain:
        text = output.outputs[0].text
        phrases += [
            part for at in range(0, 12, 2) if (part := text[at : at + 3]).strip() and "�" not in part and len(part) == 3
        ]
    assert len(phrases) > 10
    banned = [SamplingParams(max_tokens=24, seed=seed, ignore_eos=True, bad_words=phrases) for seed in range(6)]
    outputs = llm.generate([[7, 8, 9]] * 6, banned, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] != [o.outputs[0].token_ids for o in plain]
    for output in outputs:
        assert output.error is None
        assert not any(phrase.lstrip().encode() in output_bytes(llm, output.outputs[0]) for phrase in phrases)


def test_other_requests_are_not_touched_when_one_bans_phrases(llm):
    free = SamplingParams(max_tokens=12, seed=3)
    alone = llm.generate([[7, 8, 9]], free, use_tqdm=False)[0].outputs[0]
    beside = llm.generate([[7, 8, 9]] * 2, [free, SamplingParams(max_tokens=12, seed=3, bad_words=["e"])], use_tqdm=False)
    assert beside[0].outputs[0].token_ids == alone.token_ids
    assert b"e" not in output_bytes(llm, beside[1].outputs[0])


def test_words_are_refused_with_their_field_when_they_are_too_many(llm):
    words = [f"{index:05}" + "x" * 4000 for index in range(20)]
    with pytest.raises(RequestError, match="banned words") as caught:
        llm.generate([[1]], SamplingParams(bad_words=words), use_tqdm=False)
    assert caught.value.param == "bad_words"


def best_words(llm, prompt, pattern_words, length):
    """Return every tokenisation of some words and its log probability: brute force, best first."""
    tokenizer = llm.get_tokenizer()
    pieces = {t: tokenizer.token_bytes(t) for t in range(VOCAB_SIZE) if t != END_OF_TEXT and tokenizer.token_bytes(t)}
    found, waiting = [], [((), b"", 0.0)]
    while waiting:
        tokens, text, total = waiting.pop()
        if text in pattern_words:
            found.append((total, tokens))
        allowed = [t for t, piece in pieces.items() if any(word.startswith(text + piece) for word in pattern_words)]
        if not allowed or len(tokens) == length:
            continue
        step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True)
        entries = llm.generate([[*prompt, *tokens]], step, use_tqdm=False)[0].outputs[0].logprobs[0]
        waiting += [((*tokens, t), text + pieces[t], total + entries[t].logprob) for t in allowed]
    return heapq.nlargest(len(found), found)


def test_beams_are_those_of_brute_force_when_one_of_some_words_is_wanted(tiny_model):
    words = [b"cab", b"dog", b"ox"]  # none begins another, so that every output ends by itself
    llm = LLM(str(tiny_model), max_logprobs=-1, **OPTIONS)
    try:
        expected = best_words(llm, [7, 8, 9], words, 4)
        asked = StructuredOutputsParams(choice=[word.decode() for word in words])
        params = BeamSearchParams(beam_width=40, max_tokens=4, length_penalty=0.0, structured_outputs=asked)
        output = llm.beam_search([[7, 8, 9]], params)[0]
    finally:
        llm.close()
    found = [(sequence.cumulative_logprob, tuple(sequence.tokens[3:])) for sequence in output.sequences]
    assert len(found) == len(expected) > 3
    assert {tokens for _, tokens in found} == {tokens for _, tokens in expected}
    for (total, _), (wanted, _) in zip(found, expected, strict=True):
        assert math.isclose(total, wanted, abs_tol=1e-3)
    assert all(sequence.finish_reason == "stop" for sequence in output.sequences)


def test_beams_end_where_the_grammar_lets_them(llm):
    params = BeamSearchParams(beam_width=4, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="(ab){1,3}"))
    output = llm.beam_search([[7, 8, 9], [5] * 9], params)
    for one in output:
        assert one.sequences
        assert all(sequence.text in ("ab", "abab", "ababab") for sequence in one.sequences)


@pytest.mark.parametrize("max_tokens", [5, 9, 30])
def test_tokens_that_a_grammar_forces_are_computed_together_and_beams_are_those_of_a_token_a_step(llm, max_tokens, monkeypatch):
    asked = StructuredOutputsParams(regex="(abcabcabcab|cabcabcab){1,2}d?")
    params = BeamSearchParams(beam_width=3, max_tokens=max_tokens, structured_outputs=asked)
    prompts = [[7, 8, 9], [5] * 9]
    steps, found = [], []
    for is_stepwise in (False, True):
        if is_stepwise:
            monkeypatch.setattr(beam_search._Beam, "num_forced", lambda beam, most: 0)
        before = llm.llm_engine.stats.num_steps
        output = llm.beam_search(prompts, params)
        steps.append(llm.llm_engine.stats.num_steps - before)
        found.append([(beam.tokens, beam.finish_reason) for one in output for beam in one.sequences])
    assert found[0] == found[1]
    assert steps[0] < 0.75 * steps[1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("config", [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft_model", "model": "ITSELF"}])
def test_beams_are_the_same_when_drafts_are_on(tiny_model, config):
    config = {**config, **({"model": str(tiny_model)} if "model" in config else {}), "adaptive": False}
    options = {**OPTIONS, "block_size": 16, "num_kv_blocks": 80}
    llm, drafting = LLM(str(tiny_model), **options), LLM(str(tiny_model), speculative_config=config, **options)
    try:
        for asked in (None, StructuredOutputsParams(regex="(ab){1,3}c*")):
            params = BeamSearchParams(beam_width=3, max_tokens=7, structured_outputs=asked)
            prompts = [[7, 8, 9, 7, 8, 9], [5] * 9]
            plain, drafted = (one.beam_search(prompts, params) for one in (llm, drafting))
            for one, other in zip(plain, drafted, strict=True):
                assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]
                assert [beam.score for beam in one.sequences] == pytest.approx(
                    [beam.score for beam in other.sequences], abs=1e-3
                )
    finally:
        llm.close()
        drafting.close()


def test_json_is_completed_within_max_tokens_only_when_the_request_or_the_engine_asks_for_it(tiny_model, llm):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}

    def run(model, **more):
        asked = StructuredOutputsParams(json=schema, **more)
        params = [SamplingParams(structured_outputs=asked, max_tokens=48, seed=seed) for seed in range(6)]
        return [output.outputs[0] for output in model.generate([[7, 8, 9]] * 6, params, use_tqdm=False)]

    fitted, left = run(llm, fit_max_tokens=True), run(llm)
    assert all(choice.finish_reason == "stop" and list(json.loads(choice.text)) == ["a"] for choice in fitted)
    assert any(choice.finish_reason == "length" for choice in left)
    other = LLM(str(tiny_model), complete_json_within_max_tokens=True, **OPTIONS)
    try:
        assert [choice.token_ids for choice in run(other)] == [choice.token_ids for choice in fitted]
        assert [choice.token_ids for choice in run(other, fit_max_tokens=False)] == [choice.token_ids for choice in left]
    finally:
        other.close()
