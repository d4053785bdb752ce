"""Behind drafts the cache holds what a fresh prefill would put there."""

from types import SimpleNamespace

import head_checkpoints as heads
import pytest
import torch
from cache_layout import by_token
from proposers import PROPOSERS, install

from quire import LLM, SamplingParams
from quire.engine.scheduling import check_invariants
from quire.kernels.native import load_native

REAL = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model"},
    "self": {"method": "self", "skipped_layers": [1]},
    "lookahead": {"method": "lookahead"},
    "eagle": {"method": "eagle"},
    "eagle3 tree": {"method": "eagle3", "draft_top_k": 3, "num_speculative_tokens": 12},
    "mtp tree": {"method": "mtp", "draft_top_k": 3, "num_speculative_tokens": 12},
    "medusa tree": {"method": "medusa", "draft_top_k": 3},
    "merged": {"method": ["eagle3", "ngram", "suffix"], "prompt_lookup_min": 1},
}
MAKERS = {"eagle": heads.eagle1, "eagle3": heads.eagle3, "mtp": heads.mtp, "medusa": heads.medusa}
CACHED = [(kind, dtype) for kind in PROPOSERS for dtype in ("auto", "int8")]
CACHED += [
    pytest.param(kind, dtype, marks=[] if (index + place) % 2 else pytest.mark.slow)
    for index, kind in enumerate(REAL)
    for place, dtype in enumerate(("auto", "int8"))
]


def real_config(kind, model, folder):
    config = {"adaptive": False, **REAL[kind]}
    method = config["method"] if isinstance(config["method"], str) else config["method"][0]
    if method in (*MAKERS, "draft_model") and config.get("draft_top_k", 1) == 1:
        config |= {"draft_p_min": 0.0}
    if method in MAKERS:
        return {**config, "model": str(MAKERS[method](folder))}
    return {**config, "model": str(model)} if method == "draft_model" else config


@pytest.mark.one_in(5)
@pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")
@pytest.mark.parametrize(("kind", "kv_cache_dtype"), CACHED)
def test_cache_holds_after_every_step_what_a_fresh_prefill_would(tiny_model, tmp_path, kind, kv_cache_dtype):
    options = {"block_size": 16, "num_kv_blocks": 40, "kv_cache_dtype": kv_cache_dtype, "dtype": "bfloat16"}
    prompts = [list(range(20, 50)), [7, 8, 9]]
    requests = [SamplingParams(temperature=i * 0.9, seed=i, max_tokens=40, ignore_eos=True) for i in range(2)]
    fresh = LLM(str(tiny_model), enable_prefix_caching=False, **options)
    outputs = fresh.generate(prompts, requests, use_tqdm=False)
    by_prompt = {(tuple(o.prompt_token_ids), 0): o.outputs[0].token_ids for o in outputs}
    config = {"method": "ngram"} if kind in PROPOSERS else real_config(kind, tiny_model, tmp_path / "head")
    llm = LLM(str(tiny_model), speculative_config=config, **options)
    if kind in PROPOSERS:
        install(llm, PROPOSERS[kind](5, by_prompt), 5)
    engine = llm.llm_engine
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        engine.add_request(str(index), prompt, request)
    num_compared = 0
    while engine.has_unfinished_requests():
        engine.step()
        for sequence in engine.scheduler.running:
            num_compared += 1
            expect_same_cache(fresh, engine, sequence)
        check_invariants(engine.scheduler)
    assert num_compared > 10
    assert engine.scheduler.kv.pool.num_free == 40
    if kind in REAL:
        expect_same_behind_other_tokens(fresh, llm, by_prompt)
    fresh.close()
    llm.close()


def expect_same_behind_other_tokens(fresh, llm, by_prompt):
    """Published blocks can be found: full blocks of verified tokens, independent of drafts after them."""
    request = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for (prompt, _), known in by_prompt.items():
        for count in (9, 33):
            other = [*prompt, *known[:count], (known[count] + 1) % 300, 3]
            alone, again = (one.generate([other], request, use_tqdm=False)[0].outputs[0].token_ids for one in (fresh, llm))
            assert alone == again


def expect_same_cache(fresh, engine, sequence):
    """Prefill the computed tokens elsewhere and compare every layer's keys, values and scales, token by token."""
    computed = sequence.token_ids[: sequence.num_computed_tokens]
    other = fresh.llm_engine
    other.add_request("fresh", computed, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    other.step()
    (alone,) = other.scheduler.running
    pairs = ((engine, sequence), (other, alone))
    caches = [SimpleNamespace(kv=e.runner.executor.target.kv, table=s.block_ids) for e, s in pairs]
    for first in range(0, len(computed), 16):
        count = min(16, len(computed) - first)
        blocks = [cache.table[first // 16] for cache in caches]
        for layer in range(len(caches[0].kv.k)):
            for part in ("k", "v"):
                ours, theirs = (by_token(part, getattr(c.kv, part)[layer][b]) for c, b in zip(caches, blocks, strict=True))
                assert torch.equal(ours[:, :count], theirs[:, :count])
            for kind in range(2 if caches[0].kv.scales else 0):
                ours, theirs = (c.kv.scales[layer][kind][b] for c, b in zip(caches, blocks, strict=True))
                assert torch.equal(ours[:, :count], theirs[:, :count])
    other.abort_request("fresh")
