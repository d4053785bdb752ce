"""A request's tokens depend on nothing but the request: not on its batch, chunking, cache or preemption."""

import pytest

from quire import LLM, SamplingParams

PROMPTS = [
    [7, 8, 9],
    list(range(20, 60)),
    [5] * 17,
    list(range(100, 133)),
    [*range(20, 52), 1, 2, 3],
    [250, 3],
]
KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 12, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 1.3, "min_p": 0.05, "seed": -3},
    {"temperature": 1.0, "seed": 11},
)
LENGTH = 16


def params(index: int) -> SamplingParams:
    """Alternate greedy and seeded sampling of several kinds."""
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, **KINDS[index])


def generate(model, prompts=PROMPTS, **options) -> list[list[int]]:
    options = {"max_num_seqs": 8, "num_kv_blocks": 200, "block_size": 4, **options}
    llm = LLM(str(model), **options)
    try:
        outputs = llm.generate(prompts, [params(PROMPTS.index(p)) for p in prompts], use_tqdm=False)
    finally:
        llm.close()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(tiny_family):
    """Each prompt by itself, whole, without a cache: the oracle."""
    return [generate(tiny_family, [p], enable_prefix_caching=False)[0] for p in PROMPTS]


@pytest.mark.one_in(2)
def test_same_tokens_when_batched_with_strangers(tiny_family, alone):
    assert generate(tiny_family, enable_prefix_caching=False) == alone


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [1, 7])
def test_same_tokens_when_prompts_are_chunked(tiny_family, alone, chunk):
    assert generate(tiny_family, long_prefill_token_threshold=chunk) == alone


def test_same_tokens_when_the_token_budget_is_small(tiny_family, alone):
    assert generate(tiny_family, max_num_batched_tokens=9) == alone


@pytest.mark.covering
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_same_tokens_at_any_block_size(tiny_family, alone, block_size):
    assert generate(tiny_family, block_size=block_size, num_kv_blocks=1200 // block_size) == alone


@pytest.mark.one_in(2)
def test_same_tokens_when_prefixes_are_cached(tiny_family, alone):
    llm = LLM(str(tiny_family), max_num_seqs=8, num_kv_blocks=200, block_size=4)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == alone
    assert outputs[1].metrics.num_cached_tokens == 36  # of 40 tokens: nine blocks, and never the whole prompt
    llm.close()


@pytest.mark.covering
@pytest.mark.parametrize("caching", [True, False])
def test_same_tokens_when_sequences_are_preempted(tiny_family, alone, caching):
    llm = LLM(str(tiny_family), max_num_seqs=8, num_kv_blocks=22, block_size=4, enable_prefix_caching=caching)
    outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == alone
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    llm.close()


@pytest.mark.one_in(2)
def test_same_tokens_for_each_choice_when_n_is_more_than_one(tiny_family):
    def run(**options):
        llm = LLM(str(tiny_family), block_size=4, **options)
        request = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=LENGTH, ignore_eos=True)
        outputs = llm.generate([PROMPTS[1], PROMPTS[4]], request, use_tqdm=False)
        llm.close()
        return [[choice.token_ids for choice in output.outputs] for output in outputs]

    roomy = run(num_kv_blocks=300, max_num_seqs=16)
    assert len({tuple(tokens) for tokens in roomy[0]}) == 4
    assert run(num_kv_blocks=300, max_num_seqs=2) == roomy
    assert run(num_kv_blocks=20, max_num_seqs=16) == roomy
    assert run(num_kv_blocks=20, max_num_seqs=16, enable_prefix_caching=False) == roomy


def test_choices_share_the_blocks_of_the_prompt(tiny_model):
    llm = LLM(str(tiny_model), block_size=4, num_kv_blocks=30, max_num_seqs=8, enable_prefix_caching=False)
    request = SamplingParams(n=8, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
    # 40 prompt tokens take 10 blocks; eight choices of their own would need 88.
    output = llm.generate([PROMPTS[1]], request, use_tqdm=False)[0]
    assert len(output.outputs) == 8
    assert output.metrics.num_preemptions == 0
    assert llm.llm_engine.stats.num_batched_tokens == 40 + 7 + 8 * 3
    llm.close()
