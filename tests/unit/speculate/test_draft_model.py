"""The draft model's own cache: a model that drafts for itself is never wrong, unless its keys and values are."""

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError
from quire.kernels.native import load_native
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")

PROMPTS = [list(range(20, 90)), [7, 8, 9], [5] * 33, [*range(20, 84), 1, 2, 3], list(range(100, 133))]


def start(model, draft, count=4, **options):
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": count, "adaptive": False}
    config |= {"draft_p_min": 0.0}  # weights are random: such a model is sure of nothing
    return LLM(str(model), **{"max_num_seqs": 8, "num_kv_blocks": 80, "speculative_config": config, **options})


def generate(llm, **options):
    options = {"max_tokens": 30, "ignore_eos": True, **options}
    requests = [SamplingParams(temperature=[0.0, 1.0][i % 2], seed=i, **options) for i in range(len(PROMPTS))]
    return llm.generate(PROMPTS, requests, use_tqdm=False)


def expect_all_accepted(llm):
    stats = llm.llm_engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@pytest.mark.covering
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 10},
        {"num_kv_blocks": 10, "enable_prefix_caching": False},
        {"long_prefill_token_threshold": 5},
        {"max_num_seqs": 2},
    ],
    ids=["roomy", "preempted", "recomputed", "chunked", "two seats"],
)
def test_every_draft_is_accepted_when_the_model_drafts_for_itself(tiny_family, options):
    llm = start(tiny_family, tiny_family, **options)
    for _ in range(2):  # the second time with cached prefixes
        outputs = generate(llm)
        expect_all_accepted(llm)
    if "num_kv_blocks" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    elif not options:
        assert outputs[0].metrics.num_cached_tokens == 64
        assert llm.llm_engine.stats.num_steps < 30
    llm.close()


def test_every_draft_is_accepted_when_choices_fork(tiny_model):
    for options in ({}, {"num_kv_blocks": 14}, {"max_num_seqs": 3}):
        llm = start(tiny_model, tiny_model, **options)
        request = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=26, ignore_eos=True)
        llm.generate(PROMPTS[:2], request, use_tqdm=False)
        expect_all_accepted(llm)
        llm.close()


def test_another_model_s_drafts_are_mostly_refused_and_change_nothing(tiny_model, tmp_path):
    other = write_checkpoint(tmp_path / "other", "qwen3", seed=1)
    plain = LLM(str(tiny_model), num_kv_blocks=80)
    expected = [output.outputs[0].token_ids for output in generate(plain, presence_penalty=0.5)]
    plain.close()
    llm = start(tiny_model, other)
    assert [output.outputs[0].token_ids for output in generate(llm, presence_penalty=0.5)] == expected
    assert llm.llm_engine.stats.num_accepted_tokens < 0.3 * llm.llm_engine.stats.num_draft_tokens
    llm.close()


def test_a_prompt_longer_than_a_catch_up_is_taken_in_over_several_steps(tiny_model, monkeypatch):
    llm = start(tiny_model, tiny_model)
    monkeypatch.setattr(llm.llm_engine.speculator.proposer, "_max_catch_up", 16)
    generate(llm)
    expect_all_accepted(llm)
    llm.close()


@pytest.mark.parametrize("longest", [24, None])
def test_the_log_says_how_far_is_drafted_where_the_model_goes_on(tiny_model, caplog, longest):
    config = {"method": "draft_model", "model": str(tiny_model), "max_model_len": longest}
    with caplog.at_level("INFO", logger="quire"):
        start(tiny_model, tiny_model, max_model_len=64, speculative_config=config).close()
    words = "drafts are limited to the first 24 tokens of a sequence, of 64 at most"
    assert caplog.text.count("drafts are limited") == caplog.text.count(words) == (longest is not None)


def test_a_draft_model_of_another_vocabulary_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="vocabulary of 4096, the model one of 301"):
        start(tiny_model, "demo-draft")


def test_a_draft_model_that_does_not_fit_is_refused(tiny_model, monkeypatch):
    monkeypatch.setattr("quire.worker.memory.available_memory_bytes", lambda: 50_000_000)
    with pytest.raises(ConfigError, match="(what drafts|the model) does not fit"):
        start(tiny_model, tiny_model, num_kv_blocks=90_000)
