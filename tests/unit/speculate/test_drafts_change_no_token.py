"""Speculation changes no token, with any method, any sampling, and any scheduling of the sequences."""

from pathlib import Path

import head_checkpoints
import pytest
from bundled_runs import said
from proposers import PROPOSERS, install

from quire import LLM, SamplingParams
from quire.contracts.sampling_params import BeamSearchParams
from quire.engine.scheduling import check_invariants
from quire.kernels.native import load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")

PROMPTS = [
    [7, 8, 9],
    list(range(20, 90)),
    [5] * 17,
    list(range(100, 133)),
    [*range(20, 84), 1, 2, 3],
    [250, 3, 250, 3, 250, 3],
    [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9],
    [11, 12],
]
KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 12, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.3, "logprobs": 1},
    {"temperature": 1.3, "min_p": 0.05, "seed": -3, "logit_bias": {4: 3.0, 9: -2.0}},
    {"temperature": 1.0, "seed": 11, "typical_p": 0.8},
    {"temperature": 0.7, "seed": 5, "min_tokens": 9, "stop_token_ids": list(range(40, 90)), "ignore_eos": False},
    {"temperature": 1.0, "seed": 6, "allowed_token_ids": list(range(12))},
)
ALL = tuple(range(len(PROMPTS)))
LENGTH = 26
HEADS = {
    **{"eagle": head_checkpoints.eagle1, "eagle tree": head_checkpoints.eagle1},
    **{"eagle3": head_checkpoints.eagle3, "eagle3 tree": head_checkpoints.eagle3},
    **{"mtp": head_checkpoints.mtp, "mtp tree": head_checkpoints.mtp},
    **{"medusa": head_checkpoints.medusa, "medusa tree": head_checkpoints.medusa},
    **{"eagle3 merged": head_checkpoints.eagle3, "medusa tree merged": head_checkpoints.medusa},
}
COUNT = 5
CACHES = {"bf16": {"dtype": "bfloat16"}, "f32": {"dtype": "float32"}, "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"}}


def params(index: int, **options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, **KINDS[index], **options})


def start(model, cache, **options) -> LLM:
    return LLM(str(model), **{"max_num_seqs": 8, "num_kv_blocks": 80, "block_size": 16, **CACHES[cache], **options})


def generate(llm, indices=ALL, **options):
    outputs = llm.generate([PROMPTS[i] for i in indices], [params(i, **options) for i in indices], use_tqdm=False)
    check_invariants(llm.llm_engine.scheduler)
    return [output.outputs[0] for output in outputs], outputs


@pytest.fixture(scope="module", params=CACHES)
def cache(request):
    return request.param


@pytest.fixture(scope="module")
def plain(tiny_family, cache):
    """Each prompt by itself, without drafts: the oracle, in both senses."""
    llm = start(tiny_family, cache, enable_prefix_caching=False)
    found = [generate(llm, [index])[0][0] for index in range(len(PROMPTS))]
    llm.close()
    return found


@pytest.fixture(scope="module")
def outputs_by_prompt(plain):
    return {(tuple(prompt), 0): choice.token_ids for prompt, choice in zip(PROMPTS, plain, strict=True)}


def speculating(model, cache, kind, outputs_by_prompt, **options):
    if kind in PROPOSERS:
        llm = start(model, cache, **options)
        install(llm, PROPOSERS[kind](COUNT, outputs_by_prompt), COUNT)
        return llm
    if kind in HEADS:
        if kind.startswith("mtp") and Path(model).name in ("gemma2", "qwen3_moe", "gpt_oss"):
            pytest.skip("a layer for multi-token prediction is one of the model, and must be dense and pre-norm")
        folder = Path(model).parent / f"head-{kind}"
        if not folder.is_dir():
            # A layer for multi-token prediction is one of the model.
            HEADS[kind](folder, **({"qk_norm": Path(model).name == "qwen3"} if kind.startswith("mtp") else {}))
        config = {"method": kind.split()[0], "model": str(folder), "num_speculative_tokens": COUNT, "adaptive": False}
        config |= {"draft_top_k": 3} if "tree" in kind else {"draft_p_min": 0.0}
        config |= {"num_speculative_tokens": 12} if "tree" in kind and "medusa" not in kind else {}
        if kind.endswith("merged"):
            config |= {"method": [kind.split()[0], "ngram", "suffix"], "num_speculative_tokens": 12, "prompt_lookup_min": 1}
        return start(model, cache, speculative_config=config, **options)
    if kind == "draft_model":
        config = {"method": kind, "model": str(model), "num_speculative_tokens": COUNT, "adaptive": False}
        config |= {"draft_p_min": 0.0}
        return start(model, cache, speculative_config=config, **options)
    if kind in CONFIGS or kind in TOGETHER:
        config = {"adaptive": False, **(CONFIGS | TOGETHER)[kind], **with_model(kind, model)}
        return start(model, cache, speculative_config=config, **options)
    config = {"method": kind, "num_speculative_tokens": COUNT, "adaptive": False, "prompt_lookup_min": 1}
    return start(model, cache, speculative_config=config, **options)


def expect_same(found, plain):
    assert [said(choice) for choice in found] == [said(choice) for choice in plain]


CONFIGS = {
    "merged": {"method": ["ngram", "suffix"], "prompt_lookup_min": 1},
    "merged with a model": {"method": ["draft_model", "ngram"], "num_speculative_tokens": 8, "prompt_lookup_min": 1},
    "lookahead": {"method": "lookahead"},
    "self": {"method": "self", "skipped_layers": [1], "num_speculative_tokens": COUNT},
}


# Several that draft with a model or a head: each reads something else of the model.
TOGETHER = {
    "lookahead merged": {"method": ["ngram", "lookahead", "suffix"], "prompt_lookup_min": 1},
    "suffix tree": {"method": "suffix", "suffix_decoding_use_tree_spec": True, "prompt_lookup_min": 1},
    "eagle3 with draft_model": {"method": ["eagle3", "draft_model"], "num_speculative_tokens": 9},
    "medusa with eagle3 tree": {"method": ["medusa", "eagle3", "ngram"], "draft_top_k": 2, "num_speculative_tokens": 20},
    "six with each other": {
        "method": ["lookahead", "eagle", "medusa", "draft_model", "eagle3", "self"],
        "skipped_layers": [1],
    },
}


def with_model(kind, model):
    if kind not in TOGETHER:
        return {"model": str(model)} if "model" in kind else {}
    models = {}
    for method in TOGETHER[kind]["method"]:
        if method in HEADS:
            models[method] = str(Path(model).parent / f"together-{method}")
            if not Path(models[method]).is_dir():
                HEADS[method](Path(models[method]))
        elif method == "draft_model":
            models[method] = str(model)
    return {"model": models} if models else {}


KIND_NAMES = (*PROPOSERS, "ngram", "suffix", "draft_model", *HEADS, *CONFIGS, *TOGETHER)


@pytest.mark.covering
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_same_outputs_when_cold_and_when_the_prefix_is_cached(tiny_family, cache, plain, outputs_by_prompt, kind):
    llm = speculating(tiny_family, cache, kind, outputs_by_prompt)
    expect_same(generate(llm)[0], plain)
    stats = llm.llm_engine.stats
    if kind == "oracle":
        assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens  # what is left is drafted past the ends
    elif kind == "oracle tree":
        assert stats.num_accepted_tokens > 0.2 * stats.num_draft_tokens
    elif kind == "adversary":
        assert stats.num_accepted_tokens == 0 < stats.num_draft_tokens
    found, outputs = generate(llm)
    expect_same(found, plain)
    assert outputs[1].metrics.num_cached_tokens == 64
    assert llm.llm_engine.scheduler.kv.pool.num_free == 80
    llm.close()


@pytest.mark.covering
@pytest.mark.parametrize(
    "kind",
    [
        "oracle",
        "fickle",
        "oracle tree",
        "fickle tree",
        "ngram",
        "draft_model",
        "eagle3",
        "eagle3 tree",
        "mtp tree",
        "medusa tree",
        "eagle3 merged",
        *CONFIGS,
        "six with each other",
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 18},
        {"num_kv_blocks": 18, "enable_prefix_caching": False},
        {"long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 9},
        {"max_num_seqs": 2},
        {"max_model_len": 100},
    ],
    ids=["preempted", "recomputed", "chunked", "small budget", "two seats", "short"],
)
def test_same_outputs_whatever_happens_to_the_sequences(tiny_family, cache, plain, outputs_by_prompt, kind, options):
    llm = speculating(tiny_family, cache, kind, outputs_by_prompt, **options)
    found, outputs = generate(llm)
    expect_same(found, plain)
    if "num_kv_blocks" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    llm.close()


def choose(llm):
    """Return the outputs of two prompts with four choices each; the engine is closed."""
    request = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=LENGTH, ignore_eos=True, logprobs=1)
    outputs = llm.generate([PROMPTS[1], PROMPTS[3]], request, use_tqdm=False)
    check_invariants(llm.llm_engine.scheduler)
    llm.close()
    return outputs


@pytest.fixture(scope="module")
def plain_choices(tiny_model):
    return choose(start(tiny_model, "f32"))


CHOOSING = [{}, {"max_num_seqs": 3}, {"num_kv_blocks": 14}]
CHOOSING_ALWAYS = ("oracle", "fickle", "oracle tree", "draft_model", "eagle3", "eagle3 merged")
# Each kind with one of the options, in turn; some with all.
CHOOSING_CASES = [
    (kind, options)
    for index, kind in enumerate(KIND_NAMES)
    for place, options in enumerate(CHOOSING)
    if kind in CHOOSING_ALWAYS or place == index % len(CHOOSING)
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("kind", "options"), CHOOSING_CASES)
def test_same_choices_when_n_is_more_than_one(tiny_model, plain_choices, kind, options):
    by_prompt = {
        (tuple(output.prompt_token_ids), choice.index): choice.token_ids
        for output in plain_choices
        for choice in output.outputs
    }
    found = choose(speculating(tiny_model, "f32", kind, by_prompt, **options))
    assert [[said(c) for c in o.outputs] for o in found] == [[said(c) for c in o.outputs] for o in plain_choices]


@pytest.mark.parametrize("kind", ["oracle", "fickle", "adversary", "oracle tree"])
def test_same_end_when_a_stop_string_or_a_stop_token_is_within_an_accepted_run(tiny_model, kind):
    llm = start(tiny_model, "f32")
    free = llm.generate(PROMPTS[:4], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    texts = [output.outputs[0].text for output in free]
    common = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    requests = [
        SamplingParams(**common, stop=[text[7:10]], include_stop_str_in_output=i % 2 == 0) for i, text in enumerate(texts)
    ] + [SamplingParams(**common, stop_token_ids=[output.outputs[0].token_ids[8]]) for output in free]
    prompts = PROMPTS[:4] * 2
    plain = [o.outputs[0] for o in llm.generate(prompts, requests, use_tqdm=False)]
    llm.close()
    assert {choice.finish_reason for choice in plain} == {"stop"}
    by_prompt = {(tuple(o.prompt_token_ids), 0): o.outputs[0].token_ids for o in free}
    llm = speculating(tiny_model, "f32", kind, by_prompt)
    found = llm.generate(prompts, requests, use_tqdm=False)
    expect_same([o.outputs[0] for o in found], plain)
    # What was computed behind the end is never found by another request as if it were its own.
    expect_same([o.outputs[0] for o in llm.generate(prompts, requests, use_tqdm=False)], plain)
    llm.close()


@pytest.mark.parametrize("kind", ["oracle", "fickle", "oracle tree"])
def test_same_outputs_when_words_are_banned(tiny_model, kind):
    llm = start(tiny_model, "f32")
    free = llm.generate(PROMPTS[:4], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    by_prompt = {(tuple(o.prompt_token_ids), 0): o.outputs[0].token_ids for o in free}
    words = [llm.llm_engine.tokenizer.decode(o.outputs[0].token_ids[5:7]) for o in free]
    request = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, bad_words=[word for word in words if word])
    plain = [o.outputs[0] for o in llm.generate(PROMPTS[:4], request, use_tqdm=False)]
    llm.close()
    llm = speculating(tiny_model, "f32", kind, by_prompt)
    expect_same([o.outputs[0] for o in llm.generate(PROMPTS[:4], request, use_tqdm=False)], plain)
    llm.close()


def test_beam_search_says_that_methods_draft_nothing_there(tiny_model, caplog):
    found, asked = [], BeamSearchParams(beam_width=3, max_tokens=6)
    for drafting in ({}, {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}}):
        caplog.clear()
        llm = start(tiny_model, "f32", **drafting)
        with caplog.at_level("INFO", logger="quire"):
            outputs = [output for _ in range(2) for output in llm.beam_search(PROMPTS[4:6], asked)]
        found.append([[(beam.tokens, beam.cumulative_logprob) for beam in output.sequences] for output in outputs])
        assert llm.llm_engine.stats.num_drafts == 0
        assert caplog.text.count("beam search only drafts tokens that constraints force") == 2 * bool(drafting)
        llm.close()
    assert found[0] == found[1]


def test_prompt_logprobs_are_the_same_beside_drafts(tiny_model):
    def run(llm):
        requests = [params(0, prompt_logprobs=2), params(1), params(2, prompt_logprobs=1), params(3)]
        outputs = llm.generate(PROMPTS[:4], requests, use_tqdm=False)
        llm.close()
        return [(o.prompt_logprobs, said(o.outputs[0])) for o in outputs]

    plain = run(start(tiny_model, "f32"))
    by_prompt = {(tuple(prompt), 0): out[1][0] for prompt, out in zip(PROMPTS, plain, strict=False)}
    assert run(speculating(tiny_model, "f32", "oracle", by_prompt, max_num_batched_tokens=24)) == plain
