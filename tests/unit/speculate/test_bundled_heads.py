"""The bundled heads draft well: a wrong hidden state would change no token, and be seen here alone."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.model.resolve import BUNDLED_HEADS

# Prose of our own in the manner of the books that the demo model was trained on.
PROMPTS = [
    "It was late in the autumn when the old gentleman returned to the house, and he found that nobody had expected him. "
    "The servants had gone to the village, and the fire in the parlour was",
    'My friend rose from his chair and walked to the window. "You see," said he, "that the man who came here last night was '
    "not a sailor at all. There was no",
    "Emma could not think of it without some pain. She had been so very sure of her brother's good opinion, and now it "
    "seemed that he had never",
    "The boys went down to the river as soon as it was dark, and they took the old boat that was tied under the trees. Tom "
    "said that he did not",
]
FLOORS = {"demo-eagle3": [0.5, 0.35, 0.25], "demo-mtp": [0.5, 0.35, 0.25], "demo-medusa": [0.25, 0.08, 0.02]}


def start(head, **options):
    config = {"method": head.removeprefix("demo-"), "model": head, "num_speculative_tokens": 3, "adaptive": False}
    return LLM("demo", num_kv_blocks=64, speculative_config=config, **options)


def generate(llm):
    return llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False)


def acceptance(llm):
    """Run the prompts; return the share of accepted drafts by position."""
    stats = llm.llm_engine.stats
    before = stats.num_drafts, list(stats.accepted_per_pos) or [0, 0, 0]
    outputs = generate(llm)
    accepted = [now - then for now, then in zip(stats.accepted_per_pos, before[1], strict=True)]
    return [count / (stats.num_drafts - before[0]) for count in accepted], outputs


@pytest.mark.parametrize("head", BUNDLED_HEADS)
def test_acceptance_is_above_its_floor_cold_and_with_cached_prefixes(head):
    llm = start(head)
    cold, _ = acceptance(llm)
    cached, outputs = acceptance(llm)
    assert min(output.metrics.num_cached_tokens for output in outputs) >= 16
    assert all(share > floor for share, floor in zip(cold, FLOORS[head], strict=True)), cold
    assert all(abs(a - b) < 0.05 for a, b in zip(cold, cached, strict=True)), (cold, cached)
    llm.close()


@pytest.mark.parametrize("head", ["demo-eagle3", "demo-mtp"])
def test_acceptance_falls_when_the_features_are_those_of_the_place_before(head):
    llm = start(head)
    right, _ = acceptance(llm)
    llm.close()
    llm = start(head)
    proposer = llm.llm_engine._runner._speculator._proposer
    feed, last = proposer.feed, {}

    def feed_late(sequence, first, features):
        before = last.get(id(sequence), features[:1])
        last[id(sequence)] = features[-1:].clone()
        feed(sequence, first, torch.cat((before, features[:-1])))

    proposer.feed = feed_late
    wrong, _ = acceptance(llm)
    assert wrong[0] < 0.8 * right[0], (right, wrong)
    llm.close()
