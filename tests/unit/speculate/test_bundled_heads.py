"""The bundled heads draft well: a wrong hidden state would change no token, and be seen here alone."""

import pytest

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
FLOORS = {"demo-eagle3": [0.65, 0.5, 0.4], "demo-mtp": [0.65, 0.5, 0.4], "demo-medusa": [0.45, 0.2, 0.1]}


def start(head, **options):
    config = {"method": head.removeprefix("demo-"), "model": head, "num_speculative_tokens": 3, "adaptive": False}
    config |= {"draft_min_share": 0.0} | options.pop("drafting", {})
    return LLM("demo", **{"num_kv_blocks": 64, "speculative_config": config, **options})


def generate(llm):
    return llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False)


def acceptance(llm):
    """Run the prompts; return the share of accepted drafts by position."""
    stats = llm.llm_engine.stats
    num_before, before = stats.num_drafts, _three(stats.accepted_per_pos)
    outputs = generate(llm)
    accepted = [now - then for now, then in zip(_three(stats.accepted_per_pos), before, strict=True)]
    return [count / (stats.num_drafts - num_before) for count in accepted], outputs


def _three(counts):
    """The counts of three positions; there are none of positions where nothing was accepted yet."""
    return [*counts, 0, 0, 0][:3]


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
def test_acceptance_falls_when_the_features_are_in_a_wrong_order(head):
    llm = start(head)
    right, _ = acceptance(llm)
    llm.close()
    llm = start(head)
    proposer = llm.llm_engine._runner._speculator._proposer
    feed = proposer.feed_all
    proposer.feed_all = lambda fed, features: feed(fed, features.flip(-1))
    wrong, _ = acceptance(llm)
    assert wrong[0] < 0.8 * right[0], (right, wrong)
    llm.close()


def test_a_long_prompt_is_drafted_behind_when_a_block_is_longer_than_what_waits():
    prompt, request = [[5 + i % 200 for i in range(788)]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"block_size": 512, "num_kv_blocks": 4}
    plain = LLM("demo", **options)
    expected = plain.generate(prompt, request, use_tqdm=False)[0].outputs[0].token_ids
    plain.close()
    llm = start("demo-eagle3", **options)
    assert llm.generate(prompt, request, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert llm.llm_engine.stats.num_draft_tokens > 0
    llm.close()


@pytest.mark.parametrize("head", ["demo-eagle3", "demo-mtp"])
def test_drafts_end_where_the_head_doubts(head):
    """They are the beginnings of what it drafts otherwise, and no token changes."""
    plain = LLM("demo", num_kv_blocks=64)
    expected = [output.outputs[0].token_ids for output in generate(plain)]
    plain.close()
    llm = start(head, drafting={"draft_min_share": 0.5})
    model = llm.llm_engine._runner._speculator._proposer._model
    draft, seen = model.draft, []

    def note(*args):
        found = [draft(*args[:-1], least_share) for least_share in (0.0, 0.2, args[-1], 1.0)]
        seen.extend(zip(*found, strict=True))
        return found[2]

    model.draft = note
    assert [output.outputs[0].token_ids for output in generate(llm)] == expected
    llm.close()
    for full, long, short, none in seen:
        assert len(full) == 3 or len(none) <= len(short) <= len(long) <= len(full)
        assert full[: len(long)] == long
        assert long[: len(short)] == short
    assert 0 < sum(len(short) for _, _, short, _ in seen) < sum(len(full) for full, *_ in seen)
