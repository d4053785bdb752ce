"""A model on several tensor-parallel GPUs, interpreted, over gloo: deterministic to the bit, otherwise as close as sums are."""

import logging
from dataclasses import replace

import pytest
import torch

from quire.contracts import expert_options
from quire.contracts.expert_options import LossyRouting
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ExpertGroups, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.triton.launching import collected_launches
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.model import device_decoder, device_experts
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_shards import DeviceShard
from quire.model.device_vocabulary import load_vocabulary
from quire.model.device_weights import load_on_device
from quire.model.parameters import parameter_shapes
from quire.parallel.expert_balance import place
from quire.parallel.expert_placement import slot_counts
from quire.quant.policy import DEVICE_POLICIES
from quire.worker.device.variants import ServedModel, meta_decoder
from tests.device_ranks import DeviceRankThreads, one_launch_at_a_time
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.quantized_checkpoints import write
from tests.unit.kernels.gpu.test_triton_decoder import BARE, MODELS, RMS, attention

pytestmark = pytest.mark.skipif(HAS_GPU, reason="several ranks on one machine are interpreted, over gloo")

TABLES = torch.tensor([[3, 9, 1, 0, 0], [2, 4, 8, 10, 5]])
RUNS = [[[0, 1, 2], [0, 1, 2, 3, 4]], [[3], [5, 6, 7]], [[4], [8]], [[5], [9]]]


@pytest.fixture(autouse=True)
def in_turns(monkeypatch):
    one_launch_at_a_time(monkeypatch)


ALL_MODELS = MODELS | {
    "branches": [
        LayerSpec(
            attention(),
            MoeSpec(
                4,
                2,
                MlpSpec(40, "gelu_tanh"),
                is_weight_f32=True,
                shared=MlpSpec(24, "gelu_tanh"),
                branch_norm=RMS,
                has_expert_scale=True,
            ),
            attn_in=RMS,
            mlp_in=RMS,
        )
    ]
    * 2,
    "dense-first": [  # DeepSeek's layers, without its attention
        LayerSpec(attention(), MlpSpec(72, "silu"), attn_in=RMS, mlp_in=RMS),
        LayerSpec(
            attention(),
            MoeSpec(8, 2, MlpSpec(40, "silu"), groups=ExpertGroups(4, 2), routed_scale=2.5, shared=MlpSpec(56, "silu")),
            attn_in=RMS,
            mlp_in=RMS,
        ),
    ],
    "gated": [LayerSpec(attention(has_output_gate=True), MlpSpec(40, "silu"), attn_in=RMS, mlp_in=RMS)] * 2,
    "gated-heads": [
        LayerSpec(attention(has_output_gate=True, has_head_gate=True), MlpSpec(40, "silu"), attn_in=RMS, mlp_in=RMS)
    ]
    * 2,
    **{
        name: [LayerSpec(attention(**options), MlpSpec(40, "silu"), attn_in=RMS, mlp_in=RMS)]
        for name, options in (
            ("small-values", {"v_dim": 8, "v_scale": 0.6, "alibi_slopes": (0.5, 0.25, 0.1, 0.05)}),
            ("blocks", {"block_indexer": BlockIndexerSpec(2, 20, 2, 2, 1, RMS)}),
        )
    },
    "sparse": [
        LayerSpec(
            attention(),
            MoeSpec(4, 2, MlpSpec(40, "silu"), scoring="sparse", sparse_margin=0.01, has_router_bias=True),
            attn_in=RMS,
            mlp_in=RMS,
        )
    ]
    * 2,
}


def spec_of(name, **options):
    layers = tuple(ALL_MODELS[name])
    final = layers[0].attn_in or RMS
    positions = 64 if name == "gpt" else 0
    if name == "late":
        options = {"embed_norm": BARE, "has_head_bias": True} | options
    return replace(ModelSpec("test", "float32", 61, 48, layers, final, 64, num_learned_positions=positions), **options)


def parameters_of(spec):
    generator = torch.Generator().manual_seed(0)
    return {
        key: 0.2 * torch.randn(shape, generator=generator) + (1.0 if "norm" in key or "_in." in key else 0.0)
        for key, shape in parameter_shapes(spec).items()
    }


def steps():
    """Yield tokens, positions and a step: prompts in chunks, then decode steps of two sequences."""
    lengths = [0, 0]
    for runs in RUNS:
        lengths = [length + len(run) for length, run in zip(lengths, runs, strict=True)]
        positions = torch.tensor(runs[0] + runs[1])
        places = [
            table[place // 4] * 4 + place % 4
            for table, length, run in zip(TABLES, lengths, runs, strict=True)
            for place in range(length - len(run), length)
        ]
        step = AttentionMetadata(torch.stack(places), [0, len(runs[0]), len(positions)], lengths, TABLES)
        yield (positions * 7 + torch.arange(len(positions)) * 3) % 61, positions, step


def logits_of(decoder, pool, device):
    found = []
    for token_ids, positions, step in steps():
        hidden = decoder.forward(token_ids.to(device), positions.to(device), DeviceAttentionMetadata.of(step, device), pool)
        found.append(decoder.logits(hidden))
    return found


def one_rank(spec, device, is_in_order, policy=None):
    decoder = DeviceDecoder(spec, parameters_of(spec), 64, device, policy, is_in_order)
    return logits_of(decoder, DeviceKvPool(KvSpec.on_device(spec, 4, "float32"), 12, device), device)


def on_ranks(spec, device, is_in_order, shares=(1, 1), policy=None, **options):
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), shares, 64, device, is_in_order, policy, **options)
    pools = ranks.pools(4, "float32", 12, device)
    found = ranks.call(lambda decoder, rank: logits_of(decoder, pools[rank], device))
    ranks.close()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), "ranks differ"
    return found[0]


QUICK = ("qwen3", "gpt-oss", "shared-experts", "latent", "gated")
RECURRENT = "relu2-experts"  # only models with a recurrent state have such experts, and these run on one rank
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL_MODELS if name != RECURRENT]
# On a CPU torch's softplus of a number depends on how many there are.
EXACT = [name for name in NAMES if name.values[0] != "gated-heads"]
LAYOUTS = [pytest.param((1, 1), id="two"), pytest.param((2, 1, 1), id="unequal", marks=pytest.mark.slow),
           pytest.param((1, 1, 1, 1), id="four", marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize("shares", LAYOUTS)
@pytest.mark.parametrize("name", EXACT)
def test_deterministic_logits_have_the_bits_of_one_rank(name, shares, device):
    spec = spec_of(name)
    expected, found = one_rank(spec, device, True), on_ranks(spec, device, True, shares)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def has_divided_norms(name):
    return name not in ("branches", "blocks", "small-values") and all(
        not (one.mixer or one.is_parallel or one.is_mlp_only) for one in ALL_MODELS[name]
    )


@pytest.mark.parametrize("shares", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "qwen3" else pytest.mark.slow)
        for name in ALL_MODELS
        if name != RECURRENT and has_divided_norms(name)
    ],
)
def test_large_sums_are_scattered_and_each_rank_norms_a_part_of_the_rows(name, shares, device, monkeypatch):
    spec = spec_of(name)
    expected = one_rank(spec, device, False)
    monkeypatch.setattr(device_decoder, "ORDERED_BYTES", 0)  # as if every step had many tokens
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), shares, 64, device)
    pools = ranks.pools(4, "float32", 12, device)
    found = ranks.call(lambda decoder, rank: logits_of(decoder, pools[rank], device))
    counts = ranks.take_counts()
    ranks.close()
    assert counts["reduce_scatter"] == 2 * len(spec.layers) * len(RUNS)
    for other in found:
        for a, b in zip(expected, other, strict=True):
            torch.testing.assert_close(b, a, atol=3e-5, rtol=3e-5)


@pytest.mark.slow
def test_deterministic_ranks_scatter_no_sums(device, monkeypatch):
    spec = spec_of("qwen3")
    monkeypatch.setattr(device_decoder, "ORDERED_BYTES", 0)
    assert all(torch.equal(a, b) for a, b in zip(one_rank(spec, device, True), on_ranks(spec, device, True), strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("shares", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_one_rank_up_to_the_order_of_sums(name, shares, device):
    spec = spec_of(name)
    expected, found = one_rank(spec, device, False), on_ranks(spec, device, False, shares)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, atol=3e-5, rtol=3e-5)
        assert a.argmax(1).tolist() == b.argmax(1).tolist()


MIXTURES = [
    pytest.param(name, marks=() if name == "shared-experts" else pytest.mark.slow)
    for name, layers in ALL_MODELS.items()
    if name != RECURRENT and any(isinstance(layer.mlp, MoeSpec) for layer in layers)
]


def placed(spec, shares):
    """Return whole experts on ranks: the first have one more than others, which is a copy, where there is room."""
    counts = {index: layer.mlp.num_experts for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoeSpec)}
    return {
        index: place([float(1 + expert % 3) for expert in range(count)], slot_counts(count, 1, shares), shares)
        for index, count in counts.items()
    }


@pytest.mark.parametrize("is_sent", [pytest.param(False, id="all-rows", marks=pytest.mark.slow), pytest.param(True, id="sent")])
@pytest.mark.parametrize("shares", LAYOUTS)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_on_ranks_have_the_bits_of_one_rank(name, shares, is_sent, device, monkeypatch):
    spec = spec_of(name)
    monkeypatch.setattr(device_experts, "ORDERED_BYTES", 0 if is_sent else 1 << 20)
    monkeypatch.setattr(device_experts, "HALVES_ROWS", 1)
    options = {"placements": placed(spec, shares), "hosts": [rank // 2 for rank in range(len(shares))]}
    expected, found = one_rank(spec, device, True), on_ranks(spec, device, True, shares, **options)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("all-rows", "sent")), "divided"])
@pytest.mark.parametrize("shares", LAYOUTS)
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_of_experts_on_ranks_are_those_of_one_rank_up_to_the_order_of_sums(name, shares, mode, device, monkeypatch):
    spec = spec_of(name)
    expected = one_rank(spec, device, False)
    monkeypatch.setattr(device_experts, "ORDERED_BYTES", 1 << 20 if mode == "all-rows" else 0)
    monkeypatch.setattr(device_decoder, "ORDERED_BYTES", 0 if mode == "divided" else 1 << 20)
    found = on_ranks(spec, device, False, shares, placements=placed(spec, shares))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, atol=3e-5, rtol=3e-5)


@pytest.mark.slow
def test_ranks_send_float8_experts_rows_of_half_the_bytes_in_large_steps(device, monkeypatch):
    monkeypatch.setattr(device_experts, "ORDERED_BYTES", 0)
    monkeypatch.setattr(device_decoder, "ORDERED_BYTES", 0)
    layer, policy = LayerSpec(attention(), MoeSpec(4, 2, MlpSpec(32, "silu")), attn_in=RMS, mlp_in=RMS), DEVICE_POLICIES["fp8"]
    spec, shares = ModelSpec("test", "bfloat16", 61, 64, (layer,), RMS, 64), (1, 1, 1)
    tokens, places = torch.arange(12) * 7 % 61, (TABLES[0, :3, None] * 4 + torch.arange(4)).flatten()
    step = DeviceAttentionMetadata.of(AttentionMetadata(places, [0, 12], [12], TABLES[:1]), device)

    def run(decoder, pool):
        return decoder.forward(tokens, torch.arange(12), step, pool)

    one = DeviceDecoder(spec, parameters_of(spec), 64, device, policy)
    options = {"policy": policy, "placements": placed(spec, shares), "hosts": (0, 0, 1)}
    ranks, sent = DeviceRankThreads(spec, lambda: parameters_of(spec), shares, 64, device, **options), []
    for limit in (1 << 20, 0):
        monkeypatch.setattr(expert_options, "FLOAT8_PAIRS", limit)
        expected = run(one, DeviceKvPool(KvSpec.on_device(spec, 4, "bfloat16"), 12, device))
        pools = ranks.pools(4, "bfloat16", 12, device)
        for hidden in ranks.call(lambda decoder, rank, pools=pools: run(decoder, pools[rank])):
            difference = (hidden - expected).norm(dim=1) / expected.norm(dim=1)
            assert difference.max() < (0.02 if limit else 0.06)  # other sums in bf16, which float8 rounds elsewhere
        sent.append(sum(each.counts.pop("all_to_all").num_bytes for each in ranks.communicators))
    ranks.close()
    num_copies, rest = divmod(sent[0], 2 * 64 * 2)  # of a row there, and of what comes back
    assert (num_copies > 12, rest) == (True, 0)
    assert sent[1] == num_copies * (64 + 16 + 64 * 2)


def test_lossy_ranks_do_what_one_rank_does(device, monkeypatch):
    monkeypatch.setattr(device_experts, "ORDERED_BYTES", 0)
    monkeypatch.setattr(device_decoder, "ORDERED_BYTES", 0)
    whole = spec_of("shared-experts")
    spec = replace(whole, layers=whole.layers[:1])
    tokens, places = torch.arange(12) * 7 % 61, (TABLES[0, :3, None] * 4 + torch.arange(4)).flatten()
    step = AttentionMetadata(places, [0, 12], [12], TABLES[:1])

    def run(decoder, pool):
        decoder.watch_experts(LossyRouting(1.0, 0.01, 0.3))
        hidden = decoder.forward(tokens, torch.arange(12), DeviceAttentionMetadata.of(step, device), pool)
        return hidden, decoder.expert_counts()

    one = DeviceDecoder(spec, parameters_of(spec), 64, device)
    expected, counts = run(one, DeviceKvPool(KvSpec.on_device(spec, 4, "float32"), 12, device))
    placements = placed(spec, (1, 1))
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), (1, 1), 64, device, placements=placements)
    pools = ranks.pools(4, "float32", 12, device)
    for hidden, found in ranks.call(lambda decoder, rank: run(decoder, pools[rank])):
        torch.testing.assert_close(hidden, expected, atol=3e-5, rtol=3e-5)
        assert found == counts
    ranks.close()
    assert counts[0].changes[0] > 0


def meta_launches(spec, shares, is_in_order, num_tokens=2, policy=None):
    """Return what a decode step launches on rank 0, and the calls of collectives, without memory."""
    parameters = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(spec).items()}
    decoder = meta_decoder(ServedModel(spec, parameters, policy, is_in_order, shares), 64)
    calls = []
    if decoder.ranks is not None:
        decoder.ranks.communicator = Noting(len(shares), calls)
    places = [torch.empty(num_tokens, dtype=dtype, device="meta") for dtype in (torch.int64, torch.int32, torch.int32)]
    places[1] = torch.empty(num_tokens + 1, dtype=torch.int32, device="meta")
    tables = torch.empty(num_tokens, 4, dtype=torch.int32, device="meta")
    pool = DeviceKvPool(KvSpec.on_device(decoder.spec, 16, "float32"), 4, torch.device("meta"))
    ids = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    with torch.inference_mode(), collected_launches() as launches:
        hidden = decoder.forward(ids, ids, DeviceAttentionMetadata.of_decode(*places, tables, 64), pool)
        decoder.logits(hidden)
    return launches, calls


class Noting:
    """A communicator that notes its calls, and exchanges nothing."""

    def __init__(self, size, calls):
        self.size, self.calls = size, calls

    def all_gather(self, out, part, sizes=None):
        assert out.shape[0] == self.size * part.shape[0]
        self.calls.append("all_gather")

    def all_reduce(self, x, in_order=True):
        self.calls.append("all_reduce")

    def reduce_scatter(self, out, x, sizes=None):
        self.calls.append("reduce_scatter")


QWEN = [LayerSpec(attention(qk_norm=RMS), MlpSpec(40, "silu"), attn_in=RMS, mlp_in=RMS)] * 3


@pytest.mark.parametrize(
    "name, is_in_order, per_layer", [("qwen3", False, 2), ("qwen3", True, 4), ("gemma", False, 2), ("gpt-oss", False, 2),
                                     ("gpt-oss", True, 4), ("olmo", False, 3), ("olmo", True, 5),
                                     ("shared-experts", False, 2), ("shared-experts", True, 5)],
)  # fmt: skip
def test_collectives_of_a_step_are_two_or_four_a_layer_and_one_more_for_a_norm_or_expert_that_is_gathered(
    name, is_in_order, per_layer
):
    spec = spec_of(name)
    _, calls = meta_launches(spec, (1.0, 1.0), is_in_order)
    assert calls == ["all_gather"] * (per_layer * len(spec.layers) + 2)  # and those of the embedding and of the logits


def test_a_layer_of_a_decode_step_of_few_sequences_is_seven_launches_on_a_rank_and_five_on_one():
    spec = ModelSpec("test", "float32", 61, 48, tuple(QWEN), RMS, 64)
    one, _ = meta_launches(spec, (1.0,), False)
    two, _ = meta_launches(spec, (1.0, 1.0), False)
    ends = 1  # the last norm
    assert len(one) - ends == 5 * len(QWEN)
    assert len(two) - ends == 7 * len(QWEN) + 1  # and the sum of the ranks' rows of the embedding
    added = [launch for launch in two if launch.kernel.fn.__name__ == "_add_parts"]
    assert [launch.constants["HAS_RESIDUAL"] for launch in added] == [False, *[True] * 2 * len(QWEN)]


def test_large_sums_are_the_librarys_where_no_order_is_promised():
    spec = ModelSpec("test", "float32", 61, 1024, tuple(QWEN), RMS, 64)
    _, calls = meta_launches(spec, (1.0, 1.0), False, num_tokens=300)
    assert calls.count("reduce_scatter") == 2 * len(QWEN)
    assert calls.count("all_reduce") == 1  # of the embedding
    _, calls = meta_launches(spec, (1.0, 1.0), True, num_tokens=300)
    assert calls.count("all_reduce") == 1  # of the embedding, of which all parts but one are zeros


@pytest.mark.parametrize("policy", [None, "int8", "int4"])
def test_products_have_the_same_constants_at_any_number_of_ranks_when_deterministic(policy):
    layers = [LayerSpec(replace(attention(), num_heads=16, num_kv_heads=4, head_dim=64), MlpSpec(3072, "silu"), attn_in=RMS,
                        mlp_in=RMS)] * 2  # fmt: skip
    spec = ModelSpec("test", "float32", 4096, 1024, tuple(layers), RMS, 64)
    found = []
    for size in (1, 2, 4, 8):
        chosen = None if policy is None else DEVICE_POLICIES[policy]
        launches, _ = meta_launches(spec, (1.0,) * size, True, policy=chosen)
        products = [launch for launch in launches if "NUM_SPLITS" in launch.constants and "STEPS" in launch.constants]
        names = ("NUM_SPLITS", "STEPS", "BLOCK_K", "NUM_COLUMNS")
        found.append([tuple(launch.constants[name] for name in names) for launch in products])
    assert len(found[0]) == 4 * 2 + 1
    assert any(splits > 1 for splits, *_ in found[0])
    assert all(other == found[0] for other in found[1:])


@pytest.mark.covering
@pytest.mark.parametrize("quantization", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4", "fp8"))])
@pytest.mark.parametrize("is_in_order", [True, False], ids=["deterministic", "usual"])
def test_weights_that_are_quantised_while_they_are_loaded_have_the_numbers_of_one_rank(quantization, is_in_order, device):
    spec, policy = narrow_spec(), DEVICE_POLICIES[quantization]
    expected = one_rank(spec, device, is_in_order, policy)
    found = on_ranks(spec, device, is_in_order, policy=policy)
    for a, b in zip(expected, found, strict=True):
        if is_in_order:
            assert torch.equal(a, b)
        else:
            # A product of float8 weights takes float8 inputs, whose scales are those of a rank's columns.
            size = a.abs().max()
            assert (a - b).abs().max() <= size * (0.05 if quantization == "fp8" else 1e-5)


def narrow_spec():
    layers = [LayerSpec(attention(), MlpSpec(128, "silu"), attn_in=RMS, mlp_in=RMS)] * 2
    return ModelSpec("test", "float32", 61, 64, tuple(layers), RMS, 64)


@pytest.mark.parametrize("is_in_order", [True, False], ids=["deterministic", "usual"])
def test_a_tied_embedding_is_cut_once(is_in_order, device):
    spec = spec_of("qwen3", is_tied=True)
    expected, found = one_rank(spec, device, is_in_order), on_ranks(spec, device, is_in_order)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) if is_in_order else torch.allclose(a, b, atol=3e-5, rtol=3e-5)
    shard = DeviceShard.of(spec, 1, (1, 1), is_in_order)
    weights = load_on_device(parameters_of(spec), spec, device, shard=shard)
    assert weights.linears["embed.weight"][0].shape == (29, 48)  # of 61 rows, in panels of 16
    assert "lm_head.weight" not in weights.linears


@pytest.mark.covering
@pytest.mark.parametrize("policy", [None, "int8"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied"])
def test_the_vocabulary_that_a_draft_head_reads_is_whole_and_has_the_numbers_of_one_rank(is_tied, policy, device):
    spec, chosen = replace(narrow_spec(), is_tied=is_tied), None if policy is None else DEVICE_POLICIES[policy]
    one = DeviceDecoder(spec, parameters_of(spec), 64, device, chosen)
    whole = load_vocabulary(parameters_of(spec), spec, device, (), chosen)
    ids, hidden = torch.arange(61, device=device), torch.randn(2, 64, device=device)
    assert torch.equal(whole.embedding.lookup(ids, torch.float32), one.embedding.lookup(ids, torch.float32))
    assert torch.equal(whole.head(hidden), one.logits(hidden))
    without = load_vocabulary(parameters_of(spec), spec, device, ("lm_head.weight",), chosen)
    assert without.head is None
    assert torch.equal(without.embedding.lookup(ids, torch.float32), one.embedding.lookup(ids, torch.float32))
    assert load_vocabulary(parameters_of(spec), spec, device, ("embed.weight",), chosen).embedding is None


CHECKPOINTS = [("qwen3", "awq"), ("qwen3", "gptq"), ("qwen3", "fp8"), ("qwen3_moe", "fp8"), ("qwen3_moe", "awq")]


@pytest.mark.parametrize("family, method", [each if each == CHECKPOINTS[1] else pytest.param(*each, marks=pytest.mark.slow)
                                            for each in CHECKPOINTS])  # fmt: skip
def test_narrow_checkpoints_have_the_numbers_of_one_rank_and_what_cannot_be_cut_by_inputs_is_cut_by_outputs(
    tmp_path, family, method, device, caplog
):
    folder, _ = write(tmp_path, family, method)
    spec = read_model_spec(folder)

    def run(decoder, pool):
        return logits_of(decoder, pool, device)

    for is_in_order in (True, False):
        one = DeviceDecoder(spec, open_parameters(folder, spec), 64, device, None, is_in_order)
        expected = run(one, DeviceKvPool(KvSpec.on_device(spec, 4, "float32"), 12, device))
        with caplog.at_level(logging.WARNING):
            ranks = DeviceRankThreads(spec, lambda: open_parameters(folder, spec), (1, 1), 64, device, is_in_order)
        pools = ranks.pools(4, "float32", 12, device)
        (found, _) = ranks.call(lambda decoder, rank, pools=pools: run(decoder, pools[rank]))
        ranks.close()
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b) if is_in_order else (a - b).abs().max() <= 1e-5 * a.abs().max()
    said = [record.getMessage() for record in caplog.records if "cut by their outputs" in record.getMessage()]
    assert bool(said) == (method == "gptq")  # the experts' columns share one scale, which every rank may have
    if method == "gptq":
        assert "layers.0.o.weight" in said[0]
        assert "order of their own" in said[0]
