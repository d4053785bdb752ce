"""Heads that draft: what they compute, in every layout, and that the engine feeds them what they were made for."""

from dataclasses import replace

import head_checkpoints as heads
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from head_oracle import MAKERS, PROMPTS, Oracle, decoders, one_sequence, run_of, spy, start
from proposers import PausedController, path_to

from quire import LLM, SamplingParams
from quire.base.errors import UnsupportedError
from quire.contracts.kv_spec import KvSpec
from quire.kernels.native import load_native
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import load_model
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import build_head, read_layer_head, read_parallel_head
from quire.model.heads.parallel_model import ParallelModel
from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import draft_greedily
from quire.model.stored_tensors import open_tensors
from quire.model.token_runs import TokenRuns, address_of
from quire.quant.policy import POLICIES
from quire.speculate.acceptance import AcceptanceRecord
from quire.speculate.medusa import likeliest_tree

needs_native = pytest.mark.skipif(load_native() is None, reason="needs the native kernels, whose sums have one order")
LENGTH = 9


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def plain_layer(t, x, attended, positions):
    """A Llama layer over one sequence, as plainly as can be."""

    def split(name):
        y = (attended @ t[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, heads.HEAD_DIM)
        norm = t.get(f"self_attn.{name}_norm.weight")
        return y if norm is None else rms(y, norm)

    def rotate(y):
        angles = positions[:, None] * 10000.0 ** -(torch.arange(0, heads.HEAD_DIM, 2) / heads.HEAD_DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q, k, v = rotate(split("q")), rotate(split("k")), split("v")
    out = torch.zeros(len(x), heads.HEADS, heads.HEAD_DIM)
    for head in range(heads.HEADS):
        own = head * heads.KV_HEADS // heads.HEADS
        scores = q[:, head] @ k[:, own].T * heads.HEAD_DIM**-0.5
        out[:, head] = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ v[:, own]
    x = x + out.flatten(1) @ t["self_attn.o_proj.weight"].T
    y = rms(x, t["post_attention_layernorm.weight"])
    return x + (F.silu(y @ t["mlp.gate_proj.weight"].T) * (y @ t["mlp.up_proj.weight"].T)) @ t["mlp.down_proj.weight"].T


def expected_logits(kind, folder, target, token_ids, positions, features):
    t = {name: tensor.float() for name, tensor in open_tensors(folder).items()}
    embed = t.get("embed_tokens.weight", target.parameter("embed.weight"))[token_ids]
    if kind == "eagle":
        layer = {name.removeprefix("layers.0."): tensor for name, tensor in t.items()}
        x = torch.cat((embed, features), -1) @ t["fc.weight"].T + t["fc.bias"]
        return target.logits(plain_layer(layer, x, x, positions))
    if kind == "mtp":
        layer = {name.removeprefix("mtp.layers.0."): tensor for name, tensor in t.items()}
        both = rms(embed, t["mtp.pre_fc_norm_embedding.weight"]), rms(features, t["mtp.pre_fc_norm_hidden.weight"])
        x = torch.cat(both, -1) @ t["mtp.fc.weight"].T
        return target.logits(
            rms(plain_layer(layer, x, rms(x, layer["input_layernorm.weight"]), positions), t["mtp.norm.weight"])
        )
    layer = {name.removeprefix("midlayer."): tensor for name, tensor in t.items()}
    g = features @ t["fc.weight"].T if features.shape[1] == t["fc.weight"].shape[1] != heads.HIDDEN else features
    normed = rms(g, layer["hidden_norm.weight"])
    attended = torch.cat((rms(embed, layer["input_layernorm.weight"]), normed), -1)
    x = plain_layer(layer, normed if kind.endswith("residual") else g, attended, positions)
    return rms(x, t["norm.weight"]) @ t["lm_head.weight"].T


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if "narrow" not in kind])
def test_a_head_computes_what_its_layout_means(tiny_model, tmp_path, kind):
    folder = MAKERS[kind](tmp_path / "head")
    for target in decoders(tiny_model):
        head = read_layer_head(folder, kind.split()[0], target.spec)
        generator = torch.Generator().manual_seed(1)
        token_ids = torch.randint(0, heads.VOCAB, (LENGTH,), generator=generator)
        features = torch.randn(LENGTH, head.feature_size, generator=generator)
        model = build_head(head, target, 256)
        kv, positions, step = one_sequence(head.body, LENGTH)
        found = model.enter(token_ids, positions, step, kv, features, list(range(LENGTH)))
        expected = expected_logits(kind, folder, load_model(tiny_model), token_ids, positions, features)
        torch.testing.assert_close(found.float(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", MAKERS)
def test_drafts_are_the_most_likely_tokens_one_after_the_other(tiny_model, tmp_path, kind):
    folder = MAKERS[kind](tmp_path / "head")
    for target in decoders(tiny_model):
        head = read_layer_head(folder, kind.split()[0], target.spec)
        generator = torch.Generator().manual_seed(2)
        token_ids = torch.randint(0, heads.VOCAB, (LENGTH,), generator=generator)
        features = torch.randn(LENGTH, head.feature_size, generator=generator)
        model = build_head(head, target, 256)
        kv, positions, step = one_sequence(head.body, LENGTH)
        drafted = model.draft(run_of(token_ids.tolist()), [0], kv, features, [4])
        ids = torch.arange(heads.VOCAB) if head.vocabulary is None else head.vocabulary.long()
        kv, _, step = one_sequence(head.body, LENGTH)
        rows = [LENGTH - 1]
        for place in range(4):
            best = int(ids[model.enter(token_ids, positions, step, kv, features, rows).argmax(-1)])
            assert drafted[0][place] == best
            features, token_ids, rows = model.recycled(1).clone(), torch.tensor([best]), [0]
            positions = torch.tensor([LENGTH + place])
            step = AttentionMetadata(positions, [0, 1], [LENGTH + place + 1], torch.arange(4)[None])


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "draft_model"])
def test_a_sequence_that_has_its_drafts_writes_nothing_more_while_others_get_theirs(tiny_model, tmp_path, kind):
    """Its last known place, or a draft that is accepted, would hold another token's keys and values."""
    generator = torch.Generator().manual_seed(4)
    token_ids = torch.randint(0, heads.VOCAB, (2 * LENGTH,), generator=generator)
    tables = np.arange(8).reshape(2, 4)
    runs = TokenRuns(token_ids.tolist(), [0, LENGTH, 2 * LENGTH], [LENGTH] * 2, list(tables), [address_of(t) for t in tables])
    for target in decoders(tiny_model):
        if kind == "draft_model":
            if not isinstance(target, NativeDecoder):
                continue
            body, draft = target.spec, lambda kv, counts, model=target: draft_greedily(model, kv, runs, counts)
        else:
            head = read_layer_head(MAKERS[kind](tmp_path / "head"), kind, target.spec)
            body, model = head.body, build_head(head, target, 256)
            features = torch.randn(2 * LENGTH, head.feature_size, generator=torch.Generator().manual_seed(5))
            draft = lambda kv, counts, m=model, f=features: m.draft(runs, [0, 0], kv, f, counts)  # noqa: E731
        found = []
        for counts in ([1, 1], [1, 4], [3, 3], [3, 1], [3, 5]):
            kv = KvPool(KvSpec.of(body, 16, "float32"), 8)
            drafts = draft(kv, counts)
            assert [len(tokens) for tokens in drafts] == counts
            found.append((drafts[0], [part[0].clone() for part in (*kv.k, *kv.v)]))
        for one, *others in (found[:2], found[2:]):
            for other in others:
                assert other[0] == one[0]
                torch.testing.assert_close(other[1], one[1])  # the sums of torch differ in the last bits


@pytest.mark.covering
@needs_native
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 10, "enable_prefix_caching": False}, {"long_prefill_token_threshold": 5}, {"max_num_seqs": 2}],
    ids=["roomy", "recomputed", "chunked", "two seats"],
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_the_engine_drafts_what_a_fresh_run_over_the_known_tokens_drafts(tiny_model, tmp_path, kind, options):
    folder = MAKERS[kind](tmp_path / "head")
    llm = start(tiny_model, kind, folder, **options)
    seen = spy(llm)
    request = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(PROMPTS, request, use_tqdm=False)
    llm.close()
    if "num_kv_blocks" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    oracle = Oracle(tiny_model, folder, kind)
    assert len(seen) > 60
    for tokens, drafts in seen[::7]:
        assert drafts == oracle.draft(tokens, len(drafts))


@needs_native
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_cached_prefixes_are_drafted_like_others(tiny_model, tmp_path, kind):
    folder = MAKERS[kind](tmp_path / "head")
    llm = start(tiny_model, kind, folder)
    request = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    llm.generate(PROMPTS[:2], request, use_tqdm=False)
    seen = spy(llm)
    outputs = llm.generate(PROMPTS[:2], request, use_tqdm=False)
    assert outputs[0].metrics.num_cached_tokens == 64
    llm.close()
    oracle = Oracle(tiny_model, folder, kind)
    equal = [drafts == oracle.draft(tokens, len(drafts)) for tokens, drafts in seen]
    assert sum(equal) == len(equal) > 20


@needs_native
def test_drafts_of_sampled_requests_use_the_noise_of_their_places(tiny_model, tmp_path):
    """A head drafts for itself as it would be verified: with one vocabulary for both nothing else could differ."""
    folder = heads.eagle3(tmp_path / "head")
    llm = start(tiny_model, "eagle3", folder)
    seen = spy(llm)
    requests = [
        SamplingParams(temperature=[0.0, 1.0][i % 2], seed=i, max_tokens=20, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, requests, use_tqdm=False)]
    llm.close()
    plain = LLM(str(tiny_model), num_kv_blocks=80)
    assert found == [o.outputs[0].token_ids for o in plain.generate(PROMPTS, requests, use_tqdm=False)]
    plain.close()
    said = set(read_layer_head(folder, "eagle3", read_model_spec(tiny_model)).vocabulary.tolist())
    assert {token for _, drafts in seen for token in drafts} <= said


def test_the_likeliest_paths_are_drafted_first():
    tokens, shares = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.9, 0.05, 0.05]]
    paths = {}
    for a in range(3):
        paths[a,] = shares[0][a]
        for b in range(3):
            paths[a, b] = paths[a,] * shares[1][b]
            for c in range(3):
                paths[a, b, c] = paths[a, b] * shares[2][c]
    draft = likeliest_tree(tokens, shares, 12)
    found = [
        tuple(tokens[level].index(draft.tokens[node]) for level, node in enumerate(path_to(draft, index)))
        for index in range(12)
    ]
    assert len(set(found)) == 12
    assert [paths[path] for path in found] == pytest.approx(sorted(paths.values(), reverse=True)[:12])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_heads_draft_beside_a_model_that_torch_runs(tiny_model, tmp_path, monkeypatch, kind):
    for module in ("quire.model.build", "quire.model.heads.build"):
        monkeypatch.setattr(f"{module}.load_native", lambda: None)
    folder = MAKERS[kind](tmp_path / "head")
    request = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = LLM(str(tiny_model), num_kv_blocks=80)
    expected = [o.outputs[0].token_ids for o in plain.generate(PROMPTS, request, use_tqdm=False)]
    plain.close()
    llm = start(tiny_model, kind, folder)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, request, use_tqdm=False)] == expected
    assert llm.llm_engine.stats.num_draft_tokens > 0
    llm.close()


def test_a_sleeping_head_is_fed_again_before_it_wakes(tiny_model, tmp_path):
    folder = heads.eagle3(tmp_path / "head")
    llm = start(tiny_model, "eagle3", folder)
    speculator = llm.llm_engine.speculator
    controller = speculator.controller = PausedController(3, AcceptanceRecord)
    controller.disabled_left = 1000
    assert speculator.inputs == ()
    controller.disabled_left = 10
    assert speculator.inputs == ("layers",)
    llm.close()


@needs_native
def test_medusa_says_the_same_natively_and_by_torch(tiny_model, tmp_path):
    head = read_parallel_head(heads.medusa(tmp_path / "head"), read_model_spec(tiny_model))
    hidden = torch.randn(4, heads.HIDDEN, generator=torch.Generator().manual_seed(1))
    native, plain = (ParallelModel(head, module).logits(hidden, 3) for module in (load_native(), None))
    for said, expected, block, output in zip(native, plain, head.blocks, head.heads, strict=True):
        torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)
        weight, bias = block[0]
        torch.testing.assert_close(expected, (hidden + F.silu(hidden @ weight.T + bias)) @ output.T, atol=1e-4, rtol=1e-4)


@needs_native
def test_medusa_finds_the_best_outputs_of_its_heads(tiny_model, tmp_path):
    head = read_parallel_head(heads.medusa(tmp_path / "head"), read_model_spec(tiny_model))
    hidden = torch.randn(5, heads.HIDDEN, generator=torch.Generator().manual_seed(3))[1:]
    for module in (load_native(), None):
        model = ParallelModel(head, module)
        best = model.logits(hidden, 2).argmax(-1).T
        assert model.best(hidden, 4, 2) == best.tolist()
        assert model.best(hidden, 3, 2) == best[:3].tolist()
        named = ParallelModel(replace(head, vocabulary=torch.arange(model.vocab_size, dtype=torch.int32) * 2 + 1), module)
        assert named.best(hidden, 4, 2) == (best * 2 + 1).tolist()


@needs_native
def test_medusa_in_int8_says_nearly_the_same(tiny_model, tmp_path):
    head = read_parallel_head(heads.medusa(tmp_path / "head"), read_model_spec(tiny_model))
    hidden = torch.randn(4, heads.HIDDEN, generator=torch.Generator().manual_seed(1))
    said = ParallelModel(head, load_native(), POLICIES["int8"]).logits(hidden, 3)
    expected = ParallelModel(head, None).logits(hidden, 3)
    # 127 levels for weights and for inputs, through two layers.
    assert float((said - expected).norm() / expected.norm()) < 0.03
    with pytest.raises(UnsupportedError, match="native kernels"):
        ParallelModel(head, None, POLICIES["int8"])


@needs_native
def test_paused_drafts_change_nothing_and_come_back(tiny_model, tmp_path):
    llm = start(tiny_model, "eagle3", heads.eagle3(tmp_path / "head"))
    request = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine, tokens, drafted = llm.llm_engine, [], []
    drafting = engine.speculator
    for is_paused in (False, True, True, False, False):
        engine.use_speculator(drafting.with_proposer(None) if is_paused else drafting)
        before = engine.stats.num_draft_tokens
        outputs = llm.generate(PROMPTS, request, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
        drafted.append(engine.stats.num_draft_tokens - before)
    llm.close()
    assert all(one == tokens[0] for one in tokens)
    assert drafted[1] == drafted[2] == 0
    assert drafted[0] > 0
    assert drafted[3] > 0.9 * drafted[0]
