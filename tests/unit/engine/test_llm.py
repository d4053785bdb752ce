"""LLM.generate, chat and beam_search: outputs, log probabilities, stopping, and refusals."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams, ConfigError, EngineConfig, LLMEngine, QuireError, RequestError, SamplingParams
from quire.base.errors import ModelFormatError
from quire.base.seeds import mix_seed
from quire.model.build import load_model, whole_prompt_logits
from tests.tiny_checkpoint import END_OF_TEXT, VOCAB_SIZE, write_checkpoint


@pytest.fixture(scope="module")
def llm(tiny_model):
    llm = LLM(str(tiny_model), num_kv_blocks=200, block_size=4, max_num_seqs=8)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def decoder(tiny_model):
    return load_model(tiny_model)


def greedy(**options) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **options)


def run(llm, prompt, params):
    return llm.generate(prompt, params, use_tqdm=False)[0]


def greedy_by_recomputing(decoder, prompt, length):
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(whole_prompt_logits(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_tokens_equal_a_full_recomputation(llm, decoder):
    prompt = list(range(30, 55))
    assert run(llm, [prompt], greedy(max_tokens=30)).outputs[0].token_ids == greedy_by_recomputing(decoder, prompt, 30)


def test_output_has_the_fields_that_users_know(llm):
    output = run(llm, "the quick fox", greedy(max_tokens=5))
    assert output.prompt == "the quick fox"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("the quick fox")
    assert output.finished
    choice = output.outputs[0]
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "length", None)
    assert choice.text == llm.get_tokenizer().decode(choice.token_ids)
    assert choice.logprobs is None
    assert choice.cumulative_logprob is None
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


def test_prompts_may_be_text_ids_or_dicts_alone_or_in_a_list(llm):
    ids = llm.get_tokenizer().encode("the dog")
    forms = ["the dog", ids, {"prompt": "the dog"}, {"prompt_token_ids": ids}, ["the dog"], [ids]]
    outputs = [run(llm, form, greedy(max_tokens=4)) for form in forms]
    assert all(output.outputs[0].token_ids == outputs[0].outputs[0].token_ids for output in outputs)


def test_outputs_come_in_the_order_of_the_prompts_with_params_of_their_own(llm):
    prompts = [[1, 2], [3, 4], [5, 6]]
    outputs = llm.generate(prompts, [greedy(max_tokens=n) for n in (9, 1, 4)], use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 4]


def test_logprobs_are_of_the_raw_logits_with_the_chosen_token_in_each(llm, decoder):
    prompt = [9, 8, 7]
    output = run(llm, [prompt], SamplingParams(temperature=1.5, seed=3, max_tokens=6, logprobs=3, ignore_eos=True))
    choice = output.outputs[0]
    logprobs = torch.log_softmax(whole_prompt_logits(decoder, prompt + choice.token_ids).float(), -1)
    total = 0.0
    for step, (token_id, entries) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        row = logprobs[len(prompt) - 1 + step]
        assert len(entries) in (3, 4)
        assert set(row.topk(3).indices.tolist()) <= set(entries)
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[other]).sum())
            assert entry.decoded_token == llm.get_tokenizer().token_text(other)
        total += entries[token_id].logprob
    assert choice.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("chunk", [0, 5])
def test_prompt_logprobs_cover_the_prompt_also_when_it_is_cached_or_chunked(tiny_model, decoder, chunk):
    llm = LLM(str(tiny_model), num_kv_blocks=60, block_size=4, long_prefill_token_threshold=chunk)
    prompt = list(range(40, 60))
    logprobs = torch.log_softmax(whole_prompt_logits(decoder, prompt).float(), -1)
    for _ in range(2):
        output = run(llm, [prompt], greedy(max_tokens=2, prompt_logprobs=2))
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            entries = output.prompt_logprobs[position]
            assert entries[prompt[position]].logprob == pytest.approx(float(logprobs[position - 1, prompt[position]]), abs=1e-4)
    llm.close()


def test_prompt_logprobs_survive_preemption(tiny_model):
    def outputs(num_kv_blocks):
        llm = LLM(str(tiny_model), num_kv_blocks=num_kv_blocks, block_size=4, long_prefill_token_threshold=6)
        prompts = [list(range(n, n + 24)) for n in range(0, 60, 10)]
        found = llm.generate(prompts, greedy(max_tokens=20, prompt_logprobs=0), use_tqdm=False)
        llm.close()
        return found

    roomy, tight = outputs(200), outputs(16)
    assert sum(o.metrics.num_preemptions for o in tight) > 0
    for a, b in zip(roomy, tight, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert {t: e.logprob for t, e in x.items()} == pytest.approx({t: e.logprob for t, e in y.items()}, abs=1e-4)


def test_best_of_returns_the_choices_with_the_highest_mean_logprob(llm):
    request = {"temperature": 1.0, "seed": 8, "max_tokens": 6, "ignore_eos": True}
    every = run(llm, [[4, 5, 6]], SamplingParams(n=5, logprobs=0, **request)).outputs
    best = run(llm, [[4, 5, 6]], SamplingParams(n=2, best_of=5, **request)).outputs
    ranked = sorted(every, key=lambda c: -c.cumulative_logprob / len(c.token_ids))
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best] == [0, 1]


def test_tokens_of_choices_that_are_not_returned_are_told_when_best_of_drops_some(llm):
    params = {"temperature": 1.0, "seed": 8, "max_tokens": 6, "ignore_eos": True}
    assert run(llm, [[4, 5, 6]], SamplingParams(n=2, best_of=5, **params)).metrics.num_unreturned_tokens == 18
    assert run(llm, [[4, 5, 6]], SamplingParams(n=2, **params)).metrics.num_unreturned_tokens == 0


def test_tokens_of_dropped_choices_are_told_when_a_request_of_best_of_is_aborted(llm):
    engine = llm.llm_engine
    engine.add_request("aborted", [4, 5, 6], SamplingParams(best_of=3, seed=8, max_tokens=50, ignore_eos=True))
    for _ in range(8):
        engine.step()
    output = engine.abort_request("aborted")
    num_returned = len(output.outputs[0].token_ids)
    assert num_returned > 2
    assert abs(output.metrics.num_unreturned_tokens - 2 * num_returned) <= 2  # some may be a step ahead


def test_end_of_sequence_ends_the_output_and_is_not_in_the_text(llm):
    biased = {"logit_bias": {END_OF_TEXT: 100.0}}
    choice = run(llm, "the", SamplingParams(temperature=0.0, **biased)).outputs[0]
    assert (choice.token_ids, choice.text) == ([END_OF_TEXT], "")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    ignored = run(llm, "the", greedy(max_tokens=3, **biased)).outputs[0]
    assert (ignored.token_ids, ignored.finish_reason) == ([END_OF_TEXT] * 3, "length")


def test_min_tokens_delays_every_end(llm):
    biased = {"logit_bias": {END_OF_TEXT: 100.0}}
    choice = run(llm, "the", SamplingParams(temperature=0.0, min_tokens=4, **biased)).outputs[0]
    assert len(choice.token_ids) == 5
    assert choice.token_ids[-1] == END_OF_TEXT
    assert END_OF_TEXT not in choice.token_ids[:-1]


def test_stop_token_is_named_and_left_out_of_the_text(llm):
    plain = run(llm, [[3, 1, 4]], greedy(max_tokens=10)).outputs[0]
    stop = plain.token_ids[4]
    first = plain.token_ids.index(stop)
    choice = run(llm, [[3, 1, 4]], greedy(max_tokens=10, stop_token_ids=[stop])).outputs[0]
    assert choice.token_ids == plain.token_ids[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == llm.get_tokenizer().decode(plain.token_ids[:first])


@pytest.mark.parametrize("is_included", [False, True])
def test_stop_string_cuts_the_text_also_over_token_borders(llm, is_included):
    spelled = llm.get_tokenizer().encode("abcdef", add_special_tokens=False)
    assert len(spelled) > 2
    params = {"temperature": 0.0, "max_tokens": len(spelled) + 4, "ignore_eos": True}
    bias = dict.fromkeys(spelled, 50.0)
    text = run(llm, "the", SamplingParams(**params, logit_bias=bias)).outputs[0].text
    stop = text[1:4]
    choice = run(
        llm, "the", SamplingParams(**params, logit_bias=bias, stop=[stop], include_stop_str_in_output=is_included)
    ).outputs[0]
    end = text.index(stop) + (len(stop) if is_included else 0)
    assert choice.text == text[:end]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert len(choice.token_ids) < params["max_tokens"]


def test_bad_words_are_never_generated(llm):
    plain = run(llm, "the", greedy(max_tokens=12)).outputs[0].text
    word = next(c for c in plain if c.isascii() and c.isalpha())
    assert word not in run(llm, "the", greedy(max_tokens=12, bad_words=[word])).outputs[0].text


def test_allowed_token_ids_bound_the_output(llm):
    choice = run(llm, "the", SamplingParams(temperature=1.0, seed=1, max_tokens=20, allowed_token_ids=[5, 6, 7])).outputs[0]
    assert set(choice.token_ids) <= {5, 6, 7}


def test_output_without_detokenising_has_no_text(llm):
    assert run(llm, "the", greedy(max_tokens=3, detokenize=False)).outputs[0].text == ""


def test_unlimited_output_ends_at_the_length_of_the_model(tiny_model):
    llm = LLM(str(tiny_model), max_model_len=20, num_kv_blocks=50, block_size=4)
    choice = run(llm, [[1, 2, 3]], greedy(max_tokens=None)).outputs[0]
    assert (len(choice.token_ids), choice.finish_reason) == (17, "length")
    llm.close()


def test_chat_renders_the_template_and_answers(llm):
    messages = [{"role": "user", "content": "the fox"}]
    output = llm.chat(messages, greedy(max_tokens=3), use_tqdm=False)[0]
    assert output.prompt == "[user] the fox\n[assistant]"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
    both = llm.chat([messages, messages], greedy(max_tokens=3), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in both] == [output.outputs[0].token_ids] * 2


def test_default_sampling_params_are_those_of_the_checkpoint(tiny_model, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "do_sample": true}')
    llm = LLM(str(folder), num_kv_blocks=20)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
    llm.close()


def test_beam_search_finds_what_exhaustive_search_finds(llm, decoder):
    prompt, length = [10, 11, 12], 2
    first = torch.log_softmax(whole_prompt_logits(decoder, prompt)[-1].float(), -1)
    found = []
    for token in first.topk(8).indices.tolist():
        second = torch.log_softmax(whole_prompt_logits(decoder, [*prompt, token])[-1].float(), -1)
        found += [(float(first[token] + second[t]), [token, t]) for t in second.topk(8).indices.tolist()]
    found.sort(reverse=True)
    output = llm.beam_search([prompt], BeamSearchParams(beam_width=8, max_tokens=length, ignore_eos=True))[0]
    best = output.sequences[0]
    assert best.tokens == prompt + found[0][1]
    assert best.cumulative_logprob == pytest.approx(found[0][0], abs=1e-4)
    assert [s.score for s in output.sequences] == sorted((s.score for s in output.sequences), reverse=True)
    assert len(output.sequences) == 8


def test_beam_of_width_one_is_greedy(llm):
    plain = run(llm, [[10, 11, 12]], greedy(max_tokens=8)).outputs[0].token_ids
    output = llm.beam_search([[10, 11, 12]], BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))[0]
    assert output.sequences[0].tokens == [10, 11, 12, *plain]


@pytest.mark.parametrize(
    "prompt, param, message",
    [
        ("", "prompt", "empty"),
        ([[]], "prompt_token_ids", "empty"),
        ([[1, VOCAB_SIZE]], "prompt_token_ids", f"0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE} at position 1"),
        ([[-1]], "prompt_token_ids", "got -1"),
        ([[1.5]], "prompt_token_ids", "got 1.5"),
        ([[True]], "prompt_token_ids", "got True"),
        ([3.5], "prompt", "got float"),
        ({"text": "x"}, "prompt", "text"),
        ({"cache_salt": "x"}, "prompt", "cache_salt"),
        ({"prompt": 3, "prompt_token_ids": [1]}, "prompt", "got int"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids", "got str"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt", "string"),
        ([[1] * 256], "prompt", "256"),
        ([], "prompts", "empty"),
    ],
)
def test_bad_prompt_is_refused_with_the_field_and_what_was_got(llm, prompt, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        run(llm, prompt, greedy(max_tokens=1))
    assert caught.value.param == param
    assert not llm.llm_engine.has_unfinished_requests()


def test_prompt_longer_than_the_pool_is_refused_with_the_numbers(tiny_model):
    llm = LLM(str(tiny_model), num_kv_blocks=5, block_size=4)
    with pytest.raises(RequestError, match="21 tokens.*20 tokens") as caught:
        run(llm, [[1] * 21], greedy(max_tokens=1))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="max_tokens"):
        run(llm, [[1] * 10], greedy(max_tokens=50))
    with pytest.raises(RequestError, match="21 tokens"):
        llm.generate([[1] * 3, [1] * 21], greedy(max_tokens=1))
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.stats.num_steps == 0
    assert run(llm, [[1] * 10], greedy(max_tokens=None)).outputs[0].finish_reason == "length"
    llm.close()


@pytest.mark.parametrize(
    "field, value",
    [("stop_token_ids", [VOCAB_SIZE]), ("allowed_token_ids", [VOCAB_SIZE]), ("logit_bias", {VOCAB_SIZE: 1.0})],
)
def test_token_ids_beyond_the_vocabulary_are_refused_in_params(llm, field, value):
    with pytest.raises(RequestError, match=str(VOCAB_SIZE)) as caught:
        run(llm, "the", SamplingParams(**{field: value}))
    assert caught.value.param == field


def test_one_bad_prompt_of_many_stops_the_call_before_anything_runs(llm):
    steps = llm.llm_engine.stats.num_steps
    with pytest.raises(RequestError):
        llm.generate([[1, 2], [VOCAB_SIZE]], greedy(max_tokens=2), use_tqdm=False)
    assert llm.llm_engine.stats.num_steps == steps


def test_number_of_params_must_match_the_prompts(llm):
    with pytest.raises(RequestError, match="2 for 3 prompts"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()], use_tqdm=False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_modl_len": 5}, "unknown option max_modl_len.*max_model_len"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer >= 1, got 0"),
        ({"max_model_len": 100_000}, "at most 256"),
        ({"num_kv_blocks": 5, "kv_cache_memory_bytes": 100}, "give one of them"),
        ({"kv_cache_memory_bytes": 10}, "one block of 16 tokens takes"),
        ({"num_kv_blocks": 10**12}, "does not fit.*lower num_kv_blocks"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "must be at least max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_bad_option_is_refused_with_what_is_allowed(tiny_model, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), **options)


def test_seeds_of_requests_without_one_come_from_the_engine(tiny_model):
    def run_once(seed):
        llm = LLM(str(tiny_model), num_kv_blocks=50, seed=seed)
        outputs = llm.generate([[1, 2]] * 2, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        llm.close()
        return [o.outputs[0].token_ids for o in outputs]

    first, second = run_once(0)
    assert first != second
    assert run_once(0) == [first, second]
    assert run_once(1) != [first, second]


def test_scores_follow_the_length_penalty(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True, length_penalty=0.5)
    for sequence in llm.beam_search("the", params)[0].sequences:
        assert sequence.score == pytest.approx(sequence.cumulative_logprob / math.sqrt(4))


def test_beams_of_several_prompts_are_those_of_each_alone(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    prompts = [[1, 2, 3], [4], [5, 6]]
    together = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.beam_search([prompt], params)[0]
        assert [s.tokens for s in output.sequences] == [s.tokens for s in alone.sequences]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21])
def test_more_logprobs_than_the_engine_allows_are_refused(llm, field, value):
    with pytest.raises(RequestError, match="max_logprobs") as caught:
        run(llm, "the", SamplingParams(**{field: value}))
    assert caught.value.param == field


def test_whole_vocabulary_of_logprobs_is_returned_where_the_engine_allows_it(tiny_model):
    llm = LLM(str(tiny_model), num_kv_blocks=20, max_logprobs=-1)
    output = run(llm, [[1, 2]], greedy(max_tokens=1, logprobs=-1, prompt_logprobs=-1))
    assert len(output.outputs[0].logprobs[0]) == VOCAB_SIZE
    assert len(output.prompt_logprobs[1]) == VOCAB_SIZE
    assert sum(math.exp(e.logprob) for e in output.outputs[0].logprobs[0].values()) == pytest.approx(1, abs=1e-5)
    llm.close()


def test_priority_is_refused_where_the_policy_knows_none(llm):
    with pytest.raises(RequestError, match="scheduling_policy") as caught:
        run(llm, "the", SamplingParams(priority=1))
    assert caught.value.param == "priority"


def test_params_of_a_wrong_type_are_refused(llm):
    for wrong in (5, "x", [5]):
        with pytest.raises(RequestError) as caught:
            run(llm, "the", wrong)
        assert caught.value.param == "sampling_params"


def test_best_of_prefers_choices_that_did_not_fail(llm, monkeypatch):
    from quire.worker import step_driver

    real = step_driver.sample

    def fail_first_choice(logits, rows, draw):
        found = real(logits, rows, draw)
        return [
            one._replace(token_id=None, error="broken") if row.seed == mix_seed(8, 0) else one
            for one, row in zip(found, rows, strict=True)
        ]

    monkeypatch.setattr(step_driver, "sample", fail_first_choice)
    request = SamplingParams(n=2, best_of=3, temperature=1.0, seed=8, max_tokens=6, ignore_eos=True)
    output = run(llm, [[4, 5, 6]], request)
    assert [c.finish_reason for c in output.outputs] == ["length", "length"]
    assert "broken" in output.error


def test_generate_leaves_requests_of_others_alone(llm):
    engine = llm.llm_engine
    last = run(llm, [[1]], greedy(max_tokens=1)).request_id
    taken = f"llm-{int(last.removeprefix('llm-')) + 1}"
    engine.add_request(taken, [1, 2], greedy(max_tokens=4))
    with pytest.raises(RequestError, match="in use"):
        run(llm, "the", greedy(max_tokens=1))
    last = None
    while engine.has_unfinished_requests():
        last = engine.step()[-1]
    assert (last.request_id, last.outputs[0].finish_reason) == (taken, "length")


def test_stop_string_ends_an_output_after_min_tokens(llm):
    # Bytes that start a character are held back until the end, where they become U+FFFD.
    half = llm.get_tokenizer().encode("\u00e9", add_special_tokens=False)[:1]
    params = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True, "allowed_token_ids": half, "stop": ["\ufffd"]}
    assert run(llm, "the", SamplingParams(**params, min_tokens=2)).outputs[0].finish_reason == "length"
    token = llm.get_tokenizer().encode("x", add_special_tokens=False)
    params |= {"max_tokens": 6, "allowed_token_ids": token, "stop": ["xxx"]}
    choice = run(llm, "the", SamplingParams(**params, min_tokens=4)).outputs[0]
    assert (choice.text, len(choice.token_ids), choice.stop_reason) == ("xx", 5, "xxx")


def test_engine_takes_what_llm_takes(tiny_model):
    engine = LLMEngine(tiny_model, num_kv_blocks=20)
    engine.add_request("a", "the")
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[-1].finished
    engine.close()
    with pytest.raises(ConfigError, match="not both"):
        LLMEngine(EngineConfig(model="demo"), seed=1)


def test_number_of_threads_is_set(tiny_model):
    before = torch.get_num_threads()
    LLM(str(tiny_model), num_kv_blocks=20, num_threads=1).close()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.mark.parametrize("params", [SamplingParams(), None, 4])
def test_beam_search_wants_its_own_params(llm, params):
    with pytest.raises(RequestError, match="BeamSearchParams"):
        llm.beam_search("the", params)


def test_conversation_of_a_wrong_type_is_refused(llm):
    with pytest.raises(RequestError, match="got str"):
        llm.chat("hello")


def test_closed_llm_says_so(tiny_model):
    llm = LLM(str(tiny_model), num_kv_blocks=20)
    llm.close()
    llm.close()
    with pytest.raises(QuireError, match="closed"):
        run(llm, "the", greedy(max_tokens=1))


def test_missing_head_is_refused_unless_it_is_allowed(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "headless", "qwen3")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    options = {"num_kv_blocks": 20, "skip_tokenizer_init": True}
    with pytest.raises(ModelFormatError, match=r"headless: the weights have no lm_head\.weight.*allow_missing_head"):
        LLM(str(folder), **options)
    with pytest.raises(ConfigError, match="allow_missing_head must be True or False, got 'yes'"):
        LLM(str(folder), allow_missing_head="yes", **options)
    llm = LLM(str(folder), allow_missing_head=True, **options)
    assert "the embedding is used" in caplog.text
    found = run(llm, [list(range(9))], SamplingParams(temperature=0.0, max_tokens=8, detokenize=False, ignore_eos=True))
    llm.close()
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")
    assert found.outputs[0].token_ids == greedy_by_recomputing(load_model(folder), list(range(9)), 8)
