"""Drafts on the device: with every method the tokens equal plain decoding, and the cache equals that of a fresh prefill."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.engine.scheduling import check_invariants
from quire.kernels.triton.launching import collected_launches
from quire.kv.device_pool import DeviceKvPool
from quire.kv.pool import KvPool
from quire.model.build import load_model
from quire.model.token_runs import TokenRuns, address_of
from quire.worker.device.build import step_sizes
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU, needs_llguidance

sys.path.insert(0, str(Path(__file__).parents[2] / "speculate"))
from proposers import PROPOSERS, install

pytestmark = pytest.mark.usefixtures("few_programs")
DEVICE = "cuda" if HAS_GPU else "interpreter"
OPTIONS = {"dtype": "float32", "block_size": 16, "num_kv_blocks": 40, "max_model_len": 96, "max_num_seqs": 3}
PROMPTS = [[5, 9, 31, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [200, 3]]
COMMON = {"max_tokens": 7, "ignore_eos": True, "detokenize": False}
KINDS = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.9, seed=4, **COMMON),
    SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.2, logprobs=1, **COMMON),
]
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("drafts") / "qwen3", "qwen3", **SHAPE)


def said(outputs):
    return [(choice.token_ids, choice.finish_reason) for output in outputs for choice in output.outputs]


def plain_outputs(model, params, **options):
    """What the CPU says without drafts, and that by prompt and choice."""
    llm = LLM(str(model), device="cpu", **OPTIONS | options)
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    llm.close()
    return said(outputs), {
        (tuple(output.prompt_token_ids), choice.index): choice.token_ids for output in outputs for choice in output.outputs
    }


def drafting(model, kind, by_prompt, count=4, **options):
    llm = LLM(str(model), device=DEVICE, **OPTIONS | options)
    install(llm, PROPOSERS[kind](count, by_prompt), count)
    return llm


def expect_plain(model, kind, params=KINDS, num_times=1, **options):
    """Compare with the CPU; return the engine's counts, its preemptions, and the last outputs."""
    expected, by_prompt = plain_outputs(model, params, **options)
    llm = drafting(model, kind, by_prompt, **options)
    for _ in range(num_times):
        outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
        assert said(outputs) == expected
        check_invariants(llm.llm_engine.scheduler)
    assert llm.llm_engine.scheduler.kv.pool.num_free == (OPTIONS | options)["num_kv_blocks"]
    llm.close()
    return llm.llm_engine.stats, llm.llm_engine.scheduler.num_preemptions, outputs


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


OTHERS = [kind for kind in PROPOSERS if kind not in ("oracle", "fickle tree")]


@pytest.mark.parametrize("kind", ["oracle", "fickle tree", *slow(*OTHERS)])
def test_tokens_are_those_of_plain_decoding_whoever_drafts(model, kind):
    stats, _, _ = expect_plain(model, kind)
    if kind == "oracle":
        assert stats.num_steps <= 3
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    elif kind == "adversary":
        assert stats.num_accepted_tokens == 0 < stats.num_draft_tokens
    elif kind != "random tree":
        assert stats.num_accepted_tokens > 0


PREEMPTED = {"block_size": 4, "num_kv_blocks": 7, "max_model_len": 24}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [PREEMPTED, {"max_num_batched_tokens": 6}, {"dtype": "bfloat16"}, {"deterministic": True}],
    ids=["preempted", "chunked", "bfloat16", "deterministic"],
)
def test_tokens_are_those_of_plain_decoding_whatever_happens_to_the_sequences(model, options):
    if "num_kv_blocks" in options:
        _, num_preemptions, _ = expect_plain(model, "fickle", **options)
        assert num_preemptions > 0
        return
    # The CPU's sums have other bits: the same device without drafts says what is right. bfloat16 is very slow if interpreted.
    prompts, params = (
        (PROMPTS[::2], [replace(one, max_tokens=5) for one in KINDS[::2]]) if "dtype" in options else (PROMPTS, KINDS)
    )
    llm = LLM(str(model), device=DEVICE, **OPTIONS | options)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    by_prompt = {(tuple(output.prompt_token_ids), 0): output.outputs[0].token_ids for output in outputs}
    llm = drafting(model, "fickle", by_prompt, **options)
    assert said(llm.generate(prompts, params, use_tqdm=False)) == said(outputs)
    assert llm.llm_engine.stats.num_accepted_tokens > 0
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fickle", "oracle tree"])
def test_tokens_are_those_of_plain_decoding_when_choices_share_a_prompt_and_prefixes_are_cached(model, kind):
    params = [SamplingParams(n=2, temperature=1.3, seed=11, **COMMON)] * 2
    _, _, outputs = expect_plain(model, kind, params, num_times=2, block_size=4, max_num_seqs=4)
    assert outputs[1].metrics.num_cached_tokens == 8


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["fickle", "fickle tree"])
def test_tokens_are_those_of_plain_decoding_when_the_model_has_windows_soft_caps_or_experts(tmp_path, family, kind):
    expect_plain(write_checkpoint(tmp_path / family, family), kind)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "prompt_lookup_min": 1},
        *slow(
            {"method": "suffix", "prompt_lookup_min": 1},
            {"method": "lookahead", "lookahead_window": 2, "lookahead_ngram": 3, "lookahead_guesses": 2},
            {"method": ["ngram", "suffix"], "prompt_lookup_min": 1},
        ),
    ],
    ids=lambda config: str(config["method"]),
)
def test_tokens_are_those_of_plain_decoding_with_every_method_that_there_is(model, config):
    prompts = [[4, 4, 4, 4, 4]]
    # A guess of lookahead is three tokens long, and the last token of an output is not drafted.
    params = [replace(KINDS[0], max_tokens=7 if config["method"] == "lookahead" else 4)]
    llm = LLM(str(model), device="cpu", **OPTIONS)
    expected = said(llm.generate(prompts, params, use_tqdm=False))
    llm.close()
    llm = LLM(str(model), device=DEVICE, speculative_config={**config, "adaptive": False}, **OPTIONS)
    assert said(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert llm.llm_engine.stats.num_draft_tokens > 0
    llm.close()


@needs_llguidance
def test_what_a_constraint_forces_is_drafted_and_the_output_is_that_without_drafts(model):
    regex = StructuredOutputsParams(regex="[0-9]forced[ab]")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, structured_outputs=regex)
    found = []
    for device in ("cpu", DEVICE):
        llm = LLM(str(model), device=device, **OPTIONS)
        outputs = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        found.append(said(outputs))
        assert re.fullmatch("[0-9]forced[ab]", outputs[0].outputs[0].text)
        assert llm.llm_engine.stats.num_accepted_tokens > 0
        llm.close()
    assert found[1] == found[0]


@pytest.mark.slow
@needs_llguidance
@pytest.mark.parametrize("kind", ["oracle", "fickle tree"])
def test_outputs_are_those_without_drafts_when_a_grammar_and_a_proposer_meet(model, kind):
    regex = StructuredOutputsParams(regex="[a-m]{4}-forced-[0-9]{3}")
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40, structured_outputs=regex) for seed in range(2)]
    stats, _, _ = expect_plain(model, kind, params)
    assert stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_likely_drafts_are_taken_when_acceptance_is_typical(model):
    """With every threshold at zero whatever can be sampled is."""
    config = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False, "num_speculative_tokens": 4}
    config |= {"acceptance_method": "typical_acceptance_sampler", "posterior_threshold": 0.0, "posterior_alpha": 0.0}
    llm = LLM(str(model), device=DEVICE, speculative_config=config, **OPTIONS)
    params = [SamplingParams(temperature=1.0, seed=3, **COMMON)]
    (output,) = llm.generate([[4] * 9], params, use_tqdm=False)
    stats = llm.llm_engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert len(output.outputs[0].token_ids) == 7
    llm.close()


def test_cache_holds_after_every_step_what_a_fresh_prefill_would(model):
    _, by_prompt = plain_outputs(model, KINDS[:2])
    llm = drafting(model, "oracle tree", by_prompt)
    engine, decoder = llm.llm_engine, load_model(model, "float32")
    stepper = engine.runner.executor
    for index, request in enumerate(KINDS[:2]):
        engine.add_request(str(index), PROMPTS[index], request)
    num_moved = num_compared = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_moved += 0 if stepper.moves is None else len(stepper.moves.sources)
        stepper.flush()  # as the next step would begin
        for sequence in engine.scheduler.running:
            computed = sequence.token_ids[: sequence.num_computed_tokens]
            expect_same_cache(stepper.kv_pool, sequence.block_ids, prefilled(decoder, computed), len(computed))
            num_compared += 1
    assert num_compared > 2
    assert num_moved > 0
    llm.close()


def test_accepted_drafts_are_moved_when_memory_ends_while_the_next_ones_are_drafted(model, monkeypatch):
    """The blocks that they stand in may be seen by others, when the sequence itself has failed."""
    _, by_prompt = plain_outputs(model, KINDS[:1])
    llm = drafting(model, "oracle tree", by_prompt)
    engine = llm.llm_engine
    engine.add_request("0", PROMPTS[0], KINDS[0])
    while engine.runner.executor.moves is None:
        engine.step()
    (sequence,) = engine.scheduler.running
    computed, block_ids = sequence.token_ids[: sequence.num_computed_tokens], list(sequence.block_ids)

    def fail(wanted):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(engine.speculator.proposer, "propose", fail)
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "error"
    stepper = engine.runner.executor
    assert stepper.moves is not None
    stepper.flush()  # as the next step would begin
    expect_same_cache(stepper.kv_pool, block_ids, prefilled(load_model(model, "float32"), computed), len(computed))
    llm.close()


def prefilled(decoder, token_ids):
    """Return a cache into which the reference has put these tokens, from block 0 on."""
    pool = KvPool(KvSpec.of(decoder.spec, 16, "float32"), 6)
    table = np.arange(6)
    runs = TokenRuns(token_ids, [0, len(token_ids)], [len(token_ids)], [table], [address_of(table)])
    decoder.run(runs, pool, [len(token_ids) - 1])
    return pool


def expect_same_cache(pool, block_ids, fresh, count):
    for layer, cache in enumerate(pool.caches):
        for ours, theirs in ((cache.k, fresh.k[layer]), (cache.v, fresh.v[layer])):
            for first in range(0, count, 16):
                places = slice(0, min(16, count - first))
                own = ours[block_ids[first // 16]].cpu()[:, places]
                torch.testing.assert_close(own, theirs[first // 16][:, places], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_accepted_tokens_are_moved_with_their_scales_and_nothing_else_is(device, dtype):
    attention = AttentionSpec(4, 2, 24, 0.25, None)
    layers = (LayerSpec(attention, MlpSpec(8, "silu")),) * 2
    spec = ModelSpec("test", "float32", 61, 32, layers, NormSpec("rms", 1e-6), 64)
    pool = DeviceKvPool(KvSpec.of(spec, 4, dtype), 6, device)
    generator = torch.Generator().manual_seed(1)
    for part in (part for cache in pool.caches for part in cache if part is not None):
        part.view(torch.uint8).copy_(torch.randint(0, 256, part.view(torch.uint8).shape, generator=generator))
    runs = [([1, 3, 9], [0, 1, 2]), ([14], [13]), ([20, 23], [19, 20])]  # what is moved to may be what was moved before
    expected = [[None if part is None else part.view(torch.uint8).clone() for part in cache] for cache in pool.caches]
    for cache in expected:
        for part in (part for part in cache if part is not None):
            for sources, targets in runs:
                for source, target in zip(sources, targets, strict=True):
                    part[target // 4, :, target % 4 * (part.shape[2] // 4) :][:, : part.shape[2] // 4] = part[
                        source // 4, :, source % 4 * (part.shape[2] // 4) :
                    ][:, : part.shape[2] // 4]
    sources, targets = (torch.tensor([slot for run in runs for slot in run[side]], device=device) for side in (0, 1))
    pool.move_tokens(sources, targets, torch.tensor([0, 3, 4, 6], dtype=torch.int32, device=device))
    for cache, wanted in zip(pool.caches, expected, strict=True):
        for part, bits in zip(cache, wanted, strict=True):
            assert bits is None or torch.equal(part.view(torch.uint8), bits)


@pytest.mark.skipif(HAS_GPU, reason="without launches the results of the dry run would be read")
def test_the_next_step_waits_for_what_drafts_follow_and_for_nothing_else(model, monkeypatch):
    outputs = {(tuple(PROMPTS[0]), 0): [0] * 20}  # as nothing is computed
    llm = drafting(model, "oracle", outputs)
    engine, allowed = llm.llm_engine, []
    monkeypatch.setattr(engine.runner.executor.decoder, "forward", lambda ids, *_: torch.zeros(len(ids), 32, device=ids.device))
    launch = engine.runner.launch

    def noted(plan):
        launched = launch(plan)
        allowed.append((launched.allows_next, engine.runner.num_in_flight))
        return launched

    monkeypatch.setattr(engine.runner, "launch", noted)
    with collected_launches():
        llm.generate(PROMPTS[:1], KINDS[:1], use_tqdm=False)
    assert set(allowed) == {(False, 1)}
    assert len(allowed) < 7
    allowed.clear()
    engine.use_speculator(engine.speculator.with_proposer(None))
    with collected_launches():
        llm.generate(PROMPTS[:1], replace(KINDS[0], max_tokens=3), use_tqdm=False)
    assert [allows_next for allows_next, _ in allowed] == [True] * 3
    assert [count for _, count in allowed] == [1, 2, 2]
    llm.close()


NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("config", "max_num_seqs", "num_tokens", "expected"),
    [(NGRAM, 64, 8192, 256), (NGRAM, 1024, 8192, 883), (NGRAM, 64, 100, 99), (NGRAM, 4, 8192, 110), (None, 64, 8192, 110)],
    ids=["all that are wanted", "what memory allows", "what the step allows", "what constraints force", "without drafts"],
)
def test_a_step_has_room_for_the_drafts_of_all_sequences_when_there_is_memory(config, max_num_seqs, num_tokens, expected):
    options = EngineConfig(model="demo", max_num_seqs=max_num_seqs, speculative_config=config)
    report = SimpleNamespace(spec=SimpleNamespace(vocab_size=151936), memory=SimpleNamespace(max_model_len=4096))
    sizes = step_sizes(options, report, num_tokens)
    assert sizes.max_num_drafts == expected
    assert sizes.max_num_batched_tokens == num_tokens


def test_a_step_has_no_more_tokens_than_all_sequences_have():
    options = EngineConfig(model="demo", max_num_seqs=3, speculative_config=NGRAM)
    report = SimpleNamespace(spec=SimpleNamespace(vocab_size=151936), memory=SimpleNamespace(max_model_len=10))
    sizes = step_sizes(options, report, 8192)
    assert (sizes.max_num_batched_tokens, sizes.max_num_drafts) == (30, 29)
