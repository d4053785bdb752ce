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
