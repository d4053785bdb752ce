"""The whole engine on the device against the CPU's torch reference: the same tokens from the same checkpoints."""

import re
import weakref

import pytest
import torch

from quire import LLM, LLMEngine, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.sampling.sampler import sample
from quire.worker import step_driver
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.engine.held_masks import Gate, run, submit
from tests.unit.kernels.gpu.conftest import HAS_GPU, needs_llguidance

pytestmark = pytest.mark.usefixtures("few_programs")
DEVICE = "cuda" if HAS_GPU else "interpreter"
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 16, "num_kv_blocks": 40, "max_model_len": 96}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
PROMPTS = [[5, 9, 31, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [200, 3]]


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **options)


def outputs_of(folder, prompts, params, device, num_times=1, **options):
    llm = LLM(str(folder), device=device, **(OPTIONS | options))
    try:
        for _ in range(num_times):
            found = llm.generate(prompts, params, use_tqdm=False)
        return found, llm.llm_engine.scheduler.num_preemptions
    finally:
        llm.close()


def tokens(outputs):
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def both(folder, prompts, params, **options):
    """Return what the CPU and the device make of the same, and how often the device preempted."""
    expected, _ = outputs_of(folder, prompts, params, "cpu", **options)
    found, num_preemptions = outputs_of(folder, prompts, params, DEVICE, **options)
    return expected, found, num_preemptions


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("device") / "qwen3", "qwen3")


def test_greedy_tokens_are_the_cpus_when_prompts_come_in_chunks_beside_decode_steps(qwen):
    expected, found, _ = both(qwen, PROMPTS, greedy(5), max_num_seqs=3, max_num_batched_tokens=6)
    assert tokens(found) == tokens(expected)


def test_tokens_are_the_cpus_when_sequences_are_preempted(qwen):
    options = {"block_size": 4, "num_kv_blocks": 7, "max_model_len": 24, "max_num_seqs": 3}
    expected, found, num_preemptions = both(qwen, PROMPTS, greedy(9), **options)
    assert tokens(found) == tokens(expected)
    assert num_preemptions > 0


def test_cached_prefixes_and_copied_blocks_are_right_when_choices_share_a_prompt(qwen):
    params = SamplingParams(n=3, temperature=1.3, seed=11, max_tokens=4, ignore_eos=True, detokenize=False)
    expected, found, _ = both(qwen, PROMPTS[:2], params, block_size=4, max_num_seqs=4, num_times=2)
    assert tokens(found) == tokens(expected)
    assert len({tuple(choice) for choice in tokens(found)[0]}) > 1
    assert found[1].metrics.num_cached_tokens == 8


def test_tokens_and_log_probabilities_are_the_cpus_when_every_way_of_sampling_is_in_one_batch(qwen):
    common = {"max_tokens": 4, "ignore_eos": True, "detokenize": False, "seed": 5}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.9, top_k=7, top_p=0.8, **common),
        SamplingParams(temperature=1.2, min_p=0.05, logprobs=2, prompt_logprobs=1, **common),
        SamplingParams(temperature=0.8, typical_p=0.7, **common),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, logit_bias={9: 2.0}, presence_penalty=0.5, **common),
        SamplingParams(temperature=1.0, min_tokens=2, allowed_token_ids=[4, 8, 15, 16, 23, 42], **common),
    ]
    prompts = [[*PROMPTS[0], index] for index in range(len(params))]
    expected, found, _ = both(qwen, prompts, params, max_num_seqs=6)
    assert tokens(found) == tokens(expected)
    for mine, its in zip(found[2].outputs[0].logprobs, expected[2].outputs[0].logprobs, strict=True):
        assert mine.keys() == its.keys()
        assert all(abs(mine[token].logprob - its[token].logprob) < 1e-4 for token in mine)
    for mine, its in zip(found[2].prompt_logprobs[1:], expected[2].prompt_logprobs[1:], strict=True):
        assert all(abs(mine[token].logprob - its[token].logprob) < 1e-4 for token in mine)


def test_only_the_rows_that_need_it_go_to_the_sampler_of_the_host(qwen, monkeypatch):
    seen = []

    def noted(logits, rows, draw):
        if draw is not None:  # else it is the CPU's
            seen.append((len(logits), [row.params.typical_p for row in rows]))
        return sample(logits, rows, draw)

    monkeypatch.setattr(step_driver, "sample", noted)
    drawn = {"seed": 3, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
    params = [greedy(4, logprobs=1), SamplingParams(typical_p=0.8, **drawn), SamplingParams(repetition_penalty=1.2, **drawn)]
    expected, found, _ = both(qwen, PROMPTS, params, max_num_seqs=3)
    assert tokens(found) == tokens(expected)
    assert seen == [(1, [0.8])] * 4


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"seed": 3, "temperature": 0.9, "top_p": 0.9}], ids=["greedy", "drawn"])
def test_penalised_tokens_are_the_cpus_alone_and_in_a_batch_with_chunks_and_preemptions(qwen, options):
    options = {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": list(range(0, 300, 3)), **options}
    params = SamplingParams(max_tokens=9, logprobs=2, logit_bias={9: 1.5, 31: -2.0}, **PENALTIES, **options, ignore_eos=True)
    expected, _ = outputs_of(qwen, PROMPTS, params, "cpu")
    alone = [outputs_of(qwen, [prompt], params, DEVICE)[0][0] for prompt in PROMPTS]
    crowded = {"block_size": 4, "num_kv_blocks": 7, "max_model_len": 24, "max_num_seqs": 3, "max_num_batched_tokens": 6}
    together, num_preemptions = outputs_of(qwen, PROMPTS, params, DEVICE, **crowded)
    assert tokens(together) == tokens(alone) == tokens(expected)
    assert num_preemptions > 0
    for mine, its in zip(scored(together), scored(expected), strict=True):
        torch.testing.assert_close(torch.tensor([value for _, value in mine]), torch.tensor([value for _, value in its]))


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "k8v4", "turboquant_4bit"])
def test_most_tokens_are_those_of_whole_keys_and_values_when_these_are_quantised(tmp_path, kv_cache_dtype):
    folder = write_checkpoint(tmp_path / "qwen3", "qwen3", head_dim=16)  # codes of four bits need heads of 16 or more
    whole, _ = outputs_of(folder, PROMPTS, greedy(4), DEVICE)
    narrow, _ = outputs_of(folder, PROMPTS, greedy(4), DEVICE, kv_cache_dtype=kv_cache_dtype)
    pairs = [pair for a, b in zip(tokens(whole), tokens(narrow), strict=True) for pair in zip(a[0], b[0], strict=True)]
    assert sum(a == b for a, b in pairs) >= len(pairs) // 2


DRAWN = SamplingParams(n=2, temperature=1.3, seed=11, max_tokens=5, ignore_eos=True, detokenize=False)
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (-1,)}
CROWDED = {"block_size": 4, "num_kv_blocks": 7, "max_model_len": 24, "max_num_seqs": 3, "max_num_batched_tokens": 6}


@pytest.mark.parametrize(
    ("kv_cache_dtype", "layer", "params", "options"),
    [
        ("k8v4", 0, greedy(6), CROWDED),
        pytest.param("fp8", -1, DRAWN, CROWDED, marks=pytest.mark.slow),
        pytest.param("k8v4", -1, greedy(9), {"speculative_config": NGRAM}, marks=pytest.mark.slow),
        pytest.param("turboquant_4bit", 0, DRAWN, {"max_num_seqs": 1}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_cpus_when_a_layer_is_not_quantised(tmp_path, kv_cache_dtype, layer, params, options):
    folder = write_checkpoint(tmp_path / "qwen3", "qwen3", head_dim=16)
    mixed = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_dtype_skip_layers": (layer,)}
    expected, _ = outputs_of(folder, PROMPTS, params, "cpu", **mixed)
    found, num_preemptions = outputs_of(folder, PROMPTS, params, DEVICE, **mixed, **options)
    assert tokens(found) == tokens(expected)
    assert (num_preemptions > 0) == (options is CROWDED)


def test_weights_and_cache_are_freed_when_an_engine_closes(qwen):
    llm = LLM(str(qwen), device=DEVICE, **OPTIONS)
    llm.generate(PROMPTS[:1], greedy(2, logprobs=1), use_tqdm=False)
    executor = llm.llm_engine.runner.executor
    held = [weakref.ref(part) for part in (executor, executor.kv_pool, executor.decoder)]
    del executor
    llm.close()
    assert [part() for part in held] == [None] * 3


@pytest.mark.slow
def test_embeddings_are_the_cpus(qwen):
    vectors = []
    for device in ("cpu", DEVICE):
        llm = LLM(str(qwen), device=device, **OPTIONS)
        outputs = llm.embed(PROMPTS, [PoolingParams(), PoolingParams(pooling="mean"), PoolingParams()], use_tqdm=False)
        vectors.append(torch.tensor([output.outputs.embedding for output in outputs]))
        llm.close()
    torch.testing.assert_close(vectors[1], vectors[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@needs_llguidance
def test_outputs_match_their_constraint(qwen):
    options = {"skip_tokenizer_init": False, "max_num_seqs": 2}
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}x")),
        greedy(4),
    ]
    expected, found, _ = both(qwen, PROMPTS[:2], params, **options)
    assert re.fullmatch("[0-9]{3}x", found[0].outputs[0].text)
    assert tokens(found) == tokens(expected)


@pytest.mark.slow
@needs_llguidance
@pytest.mark.parametrize(("regex", "drafts"), [("[0-9]{3}xyz", None), ("12[0-9]{2}34x", NGRAM)], ids=["plain", "drafted"])
def test_others_go_on_and_tokens_stay_the_same_when_a_mask_is_missing(qwen, regex, drafts):
    constrained = SamplingParams(
        temperature=1.0, seed=3, max_tokens=12, structured_outputs=StructuredOutputsParams(regex=regex)
    )
    free = greedy(5)
    expected, _ = outputs_of(qwen, PROMPTS[:2], [constrained, free], DEVICE, **OPTIONS | {"skip_tokenizer_init": False})
    gate = Gate()
    engine = LLMEngine(str(qwen), device=DEVICE, speculative_config=drafts, **OPTIONS | {"skip_tokenizer_init": False})
    try:
        submit(engine, "slow", PROMPTS[0], constrained, gate)
        submit(engine, "free", PROMPTS[1], free)
        found = run(engine, until=lambda outputs: "free" in outputs and outputs["free"].finished)
        assert "slow" not in found
        assert gate.num_held == 1
        gate.open()
        found |= run(engine)
    finally:
        gate.open()
        engine.close()
    assert gate.violations == []
    assert engine.stats.num_draft_tokens > 0  # what the regex forces, if nothing else
    assert tokens([found["slow"], found["free"]]) == tokens(expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3_moe"])
def test_greedy_tokens_are_the_cpus_when_the_model_has_windows_soft_caps_or_experts(tmp_path, family):
    folder = write_checkpoint(tmp_path / family, family)
    expected, found, _ = both(folder, PROMPTS, greedy(6), max_num_seqs=3, max_num_batched_tokens=9)
    assert tokens(found) == tokens(expected)


def scored(outputs):
    """Return the tokens of each output with their log probabilities, to the bit."""
    return [
        [(token, options[token].logprob) for token, options in zip(choice.token_ids, choice.logprobs, strict=True)]
        for output in outputs
        for choice in output.outputs
    ]


@pytest.mark.parametrize("options", [{}, pytest.param(INT8, marks=pytest.mark.slow)], ids=["dense", "int8"])
def test_deterministic_tokens_have_the_same_bits_alone_and_in_a_batch_with_chunks_and_preemptions(qwen, options):
    params = SamplingParams(temperature=0.8, seed=5, logprobs=1, max_tokens=6, ignore_eos=True, detokenize=False)
    options = {"deterministic": True, **options}
    llm = LLM(str(qwen), device=DEVICE, **(OPTIONS | options))
    alone = [outcome for prompt in PROMPTS for outcome in scored(llm.generate([prompt], params, use_tqdm=False))]
    llm.close()
    together, num_preemptions = outputs_of(qwen, PROMPTS, params, DEVICE, **options, **CROWDED)
    assert scored(together) == alone
    assert num_preemptions > 0
