"""Trees that a head drafts: those of EAGLE-2, each path as if it were a chain, whatever happens to the sequences."""

import head_checkpoints as heads
import pytest
import torch
from head_oracle import MAKERS, PROMPTS, Oracle, decoders, one_sequence, spy, start
from proposers import path_to

from quire import SamplingParams
from quire.contracts.request import Request
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.model.heads.build import build_head, read_layer_head
from quire.sampling.drafting import draw_drafts
from quire.sampling.row_state import SamplingRow
from quire.speculate.draft import ROOT, DraftedSequence
from quire.speculate.head_pass import HeadPass
from quire.speculate.head_trees import HeadTrees

needs_native = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")
LENGTH = 9


def sequence(tokens, **params):
    request = Request(request_id="0", prompt_token_ids=tuple(tokens), params=SamplingParams(**params), seed=3)
    return DraftedSequence(0, request, 0, list(tokens), SamplingRow(request, 0, tuple(tokens), heads.VOCAB), None)


class Case:
    """A draft head next to a model, over random features of one sequence."""

    def __init__(self, target, folder, kind):
        self.head = read_layer_head(folder, kind.split()[0], target.spec)
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, heads.VOCAB, (LENGTH + 1,), generator=generator)
        self.features = torch.randn(LENGTH, self.head.feature_size, generator=generator)
        self.model = build_head(self.head, target, 256)
        self.ids = torch.arange(heads.VOCAB) if self.head.vocabulary is None else self.head.vocabulary.long()

    def first(self):
        kv, positions, step = one_sequence(self.head.body, LENGTH)
        return kv, HeadPass(self.tokens[1:], positions, step, self.features)

    def trees(self, kv, top_k, depth):
        return HeadTrees(self.model, kv, None if self.head.vocabulary is None else self.ids, top_k, depth)

    def behind(self, path):
        """Return the logits after a path, computed as a chain."""
        kv, first = self.first()
        logits = self.model.enter(*self.args(first), kv, first.features, [LENGTH - 1])
        for place, token_id in enumerate(path):
            features, at = self.model.recycled(1).clone(), torch.tensor([LENGTH + place])
            step = AttentionMetadata(at, [0, 1], [LENGTH + place + 1], torch.arange(4)[None])
            logits = self.model.enter(torch.tensor([token_id]), at, step, kv, features, [0])
        return logits[0].float()

    @staticmethod
    def args(first):
        return first.token_ids, first.positions, first.attention


def plain_tree(case, top_k, depth, count):
    """EAGLE-2 as plainly as can be: path -> log probability of the tokens that are drafted, the likeliest first."""
    levels = min(depth, count)
    width = min(top_k, max(1, count // max(1, levels - 1)))
    values, level = {}, {(): 0.0}
    for _ in range(levels):
        found = {}
        for path, value in level.items():
            best = case.behind(path).log_softmax(-1).topk(top_k)
            found |= {(*path, int(case.ids[i])): value + float(v) for v, i in zip(best.values, best.indices, strict=True)}
        values |= found
        level = dict(sorted(found.items(), key=lambda pair: -pair[1])[:width])
    return dict(sorted(values.items(), key=lambda pair: -pair[1])[:count])


@pytest.mark.covering
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("top_k", "depth", "count"), [(3, 3, 8), (2, 4, 3), (4, 2, 5), (2, 6, 14), (3, 1, 2)])
def test_tree_is_that_of_eagle_2_with_every_path_as_a_chain(tiny_model, tmp_path, kind, top_k, depth, count):
    folder = MAKERS[kind](tmp_path / "head")
    for target in decoders(tiny_model):
        case = Case(target, folder, kind)
        kv, first = case.first()
        (draft,) = case.trees(kv, top_k, depth).draft([sequence(case.tokens.tolist(), temperature=0.0)], [count], first)
        found = [tuple(draft.tokens[node] for node in path_to(draft, index)) for index in range(len(draft))]
        assert found == list(plain_tree(case, top_k, depth, count))


def test_trees_of_several_sequences_are_those_of_each_alone(tiny_model, tmp_path):
    case = Case(decoders(tiny_model)[-1], MAKERS["eagle3"](tmp_path / "head"), "eagle3")
    counts = [9, 1, 4]
    one = sequence(case.tokens.tolist(), temperature=0.0)
    expected = []
    for count in counts:
        kv, first = case.first()
        expected += case.trees(kv, 3, 4).draft([one], [count], first)
    kv, _ = case.first()
    slots = torch.cat([torch.arange(LENGTH) + 16 * block for block in (0, 1, 3)])
    tables = torch.tensor([[0, 2], [1, 2], [3, 2]])  # a tree of 9 needs a second block; the others only seem to have it
    step = AttentionMetadata(slots, [0, LENGTH, 2 * LENGTH, 3 * LENGTH], [LENGTH] * 3, tables)
    first = HeadPass(case.tokens[1:].repeat(3), torch.arange(LENGTH).repeat(3), step, case.features.repeat(3, 1))
    assert case.trees(kv, 3, 4).draft([one] * 3, counts, first) == expected


def test_likeliest_path_of_a_sampled_request_is_what_a_chain_draws(tiny_model, tmp_path):
    case = Case(decoders(tiny_model)[-1], MAKERS["eagle3"](tmp_path / "head"), "eagle3")
    one = sequence(case.tokens.tolist(), temperature=0.8, seed=4)
    kv, first = case.first()
    (draft,) = case.trees(kv, 3, 4).draft([one], [12], first)
    assert draft.parents.count(ROOT) > 1
    node, path = ROOT, []
    for depth in range(2):
        wide = torch.full((1, heads.VOCAB), -torch.inf)
        wide[0, case.ids] = case.behind(path)
        (token_id,) = draw_drafts(wide, [one.sampling], [len(one.token_ids) + depth])
        node = draft.child(node, token_id)
        assert node is not None
        assert node == min(i for i, parent in enumerate(draft.parents) if parent == draft.parents[node])
        path.append(token_id)


# Behind a cached prefix the features of one place may be the nearest known ones, which can swap two tokens.
@pytest.mark.covering
@needs_native
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 10, "enable_prefix_caching": False},
        {"long_prefill_token_threshold": 5},
        {"max_num_seqs": 2, "enable_prefix_caching": False},
    ],
    ids=["roomy", "recomputed", "chunked", "two seats"],
)
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_engine_drafts_the_tree_of_a_fresh_run_over_the_known_tokens(tiny_model, tmp_path, kind, options):
    folder = MAKERS[kind](tmp_path / "head")
    drafting = {"num_speculative_tokens": 8, "draft_top_k": 3, "draft_depth": 3}
    llm = start(tiny_model, kind, folder, drafting=drafting, **options)
    seen = spy(llm)
    request = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(PROMPTS, request, use_tqdm=False)
    llm.close()
    if "num_kv_blocks" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    oracle = Oracle(tiny_model, folder, kind)
    vocabulary = None if oracle.head.vocabulary is None else oracle.head.vocabulary.long()
    trees = [(tokens, draft) for tokens, draft in seen if not isinstance(draft, tuple) and len(draft) == 8]
    assert len(trees) > 30
    for tokens, draft in trees[::9]:
        first, own = oracle.read(tokens)
        fresh = HeadTrees(oracle.model, own, vocabulary, 3, 3)
        assert fresh.draft([sequence(tokens, temperature=0.0)], [8], first) == [draft]
