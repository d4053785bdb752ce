"""The bundled heads draft well: a wrong hidden state would change no token, and be seen here alone."""

from dataclasses import replace

import pytest

from quire import LLM, SamplingParams
from quire.model.resolve import BUNDLED_HEADS
from quire.speculate import build

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
FLOORS = {"demo-eagle3": [0.71, 0.53, 0.42], "demo-mtp": [0.72, 0.5, 0.36], "demo-medusa": [0.42, 0.19, 0.09]}
"""Of the share of drafts that are accepted, by position: 0.03 below what 1,000 of them or more had."""


def start(head, **options):
    config = {"method": head.removeprefix("demo-"), "model": head, "num_speculative_tokens": 3, "adaptive": False}
    config |= {"draft_p_min": 0.0} | options.pop("drafting", {})
    return LLM("demo", **{"num_kv_blocks": 64, "speculative_config": config, **options})


def generate(llm):
    return llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False)


def generate_many(llm):
    """Texts that differ, though not by much, so that more drafts are seen than those of the likeliest ones."""
    options = {"temperature": 0.3, "seed": 1, "n": 22, "max_tokens": 40, "ignore_eos": True}
    return llm.generate(PROMPTS, SamplingParams(**options), use_tqdm=False)


def acceptance(llm, generate=generate):
    """Run the prompts; return the share of accepted drafts by position."""
    stats = llm.llm_engine.stats
    num_before, before = stats.num_drafts, _three(stats.accepted_per_pos)
    outputs = generate(llm)
    accepted = [now - then for now, then in zip(_three(stats.accepted_per_pos), before, strict=True)]
    return [count / (stats.num_drafts - num_before) for count in accepted], outputs


def acceptance_of_many(head, feed=None):
    """Return the share of accepted drafts by position, of a thousand drafts or more; feed: changes what is fed."""
    llm = start(head, num_kv_blocks=200, max_num_seqs=16)
    if feed is not None:
        proposer = llm.llm_engine.speculator.proposer
        proposer.on_hidden_states = feed(proposer.on_hidden_states)
    found, _ = acceptance(llm, generate_many)
    assert llm.llm_engine.stats.num_drafts >= 1000
    llm.close()
    return found


def _three(counts):
    """The counts of three positions; there are none of positions where nothing was accepted yet."""
    return [*counts, 0, 0, 0][:3]


def slow(*heads):
    return [pytest.param(head, marks=pytest.mark.slow) for head in heads]


def is_above(found, head):
    return all(share > floor for share, floor in zip(found, FLOORS[head], strict=True))


# Of the others test_bundled_heads_divergence.py tells every time what this does.
@pytest.mark.slow
@pytest.mark.parametrize("head", [*slow("demo-eagle3", "demo-mtp"), "demo-medusa"])
def test_acceptance_is_above_its_floor(head):
    found = acceptance_of_many(head)
    assert is_above(found, head), found


@pytest.mark.parametrize("head", BUNDLED_HEADS)
def test_acceptance_is_the_same_with_cached_prefixes(head):
    llm = start(head)
    cold, _ = acceptance(llm)
    cached, outputs = acceptance(llm)
    assert min(output.metrics.num_cached_tokens for output in outputs) >= 16
    assert all(abs(a - b) < 0.05 for a, b in zip(cold, cached, strict=True)), (cold, cached)
    llm.close()


def flipped(feed_all):
    """Feed features in the wrong order."""
    return lambda fed, features: feed_all(fed, features.flip(-1))


def shifted(feed_all):
    """Feed the features of the place before."""
    before = {}

    def feed(fed, features):
        wrong, row = features.clone(), 0
        for sequence, _, count in fed:
            wrong[row + 1 : row + count] = features[row : row + count - 1]
            wrong[row] = before.get(id(sequence), wrong[row])
            before[id(sequence)] = features[row + count - 1].clone()
            row += count
        feed_all(fed, wrong)

    return feed


HEAVY = pytest.mark.slow


@pytest.mark.parametrize(
    ("head", "feed"),
    [
        pytest.param("demo-eagle3", shifted, marks=HEAVY),
        pytest.param("demo-eagle3", flipped, marks=HEAVY),
        pytest.param("demo-mtp", shifted, marks=HEAVY),
        pytest.param("demo-mtp", flipped, marks=HEAVY),
        pytest.param("demo-medusa", shifted, marks=HEAVY),
        pytest.param("demo-medusa", flipped, marks=HEAVY),
    ],
)
def test_acceptance_is_below_its_floor_when_other_features_are_fed(head, feed):
    found = acceptance_of_many(head, feed)
    assert found[0] < FLOORS[head][0] - 0.1, found


WRONG = [
    pytest.param("demo-eagle3", {"aux_hidden_state_layers": (2, 5, 6)}, marks=HEAVY),
    pytest.param("demo-eagle3", {"aux_hidden_state_layers": (1, 4, 6)}, marks=HEAVY),
    pytest.param("demo-eagle3", {"recycles_normed": True}, marks=HEAVY),
    pytest.param("demo-eagle3", {"is_residual_normed": True}, marks=HEAVY),
]


@pytest.mark.parametrize(("head", "change"), WRONG)
def test_acceptance_is_below_its_floor_when_a_head_is_read_wrongly(monkeypatch, head, change):
    find = build.find_layer_head

    def find_wrong(*args):
        folder, found = find(*args)
        return folder, replace(found, **change)

    monkeypatch.setattr(build, "find_layer_head", find_wrong)
    found = acceptance_of_many(head)
    assert not is_above(found, head), found


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
    llm = start(head, drafting={"draft_p_min": 0.5})
    model = llm.llm_engine.speculator.proposer.model
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
