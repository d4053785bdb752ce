"""Engines of several ranks, or stages, and of one are asked for the same: what their outputs are."""

import pytest

from quire import SamplingParams, StructuredOutputsParams

PROMPTS = [
    "It was a cold morning when",
    "The detective looked at the door, the door, the door",
    "A",
    "Once upon a time there was",
]
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "log-probabilities": {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2},
    "choices": {"temperature": 1.0, "n": 3},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    "json": {
        "temperature": 0.8,
        "structured_outputs": StructuredOutputsParams(json={"type": "object", "properties": {"a": {"enum": ["x", "yes"]}}}),
    },
}


DRAFTS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix-tree": {"method": "suffix", "suffix_decoding_use_tree_spec": True},
    "lookahead": {"method": "lookahead"},
    "draft-model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 4},
    "eagle3-tree": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 8, "draft_top_k": 3},
    "medusa": {"method": "medusa", "model": "demo-medusa"},
    "mtp": {"method": "mtp", "model": "demo-mtp"},
}
OPTIONS = {
    "int8": {"quantization": "int8"},
    "int4-and-int8-cache": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "4-bit-cache": {"kv_cache_dtype": "turboquant_4bit", "kv_cache_dtype_skip_layers": (-1,)},
    "fp8": {"quantization": "fp8"},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "small-steps": {"max_num_batched_tokens": 8},
    "preempted": {"num_kv_blocks": 8, "max_num_seqs": 4},
    "mixture-of-experts": {"model": "demo-moe"},
    "mixture-of-experts-int8": {"model": "demo-moe", "quantization": "int8"},
}


def outputs_of(llm, prompts=PROMPTS, **params):
    """Return tokens and log probabilities of every choice."""
    params = SamplingParams(**{"max_tokens": 24, "seed": 5, **params})
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.error is None
        prompt_logprobs = [None if entry is None else entry.items() for entry in output.prompt_logprobs or ()]
        found.append((prompt_logprobs, [(list(c.token_ids), [e.items() for e in c.logprobs or ()]) for c in output.outputs]))
    return repr(found)


def cases_of(cases, *quick):
    """Return cases as parameters; those that are not quick run with the slow tests."""
    return [pytest.param(case, id=name, marks=[] if name in quick else pytest.mark.slow) for name, case in cases.items()]
