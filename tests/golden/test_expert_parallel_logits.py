"""Logits of mixture models have the same bits on 1, 2, 3 and 4 expert-parallel ranks, for any placement of the experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.contracts.model_spec import MoeSpec
from quire.kernels.native import load_native
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.resolve import resolve_model
from quire.model.tensor_shards import ModelShard
from quire.model.token_runs import TokenRuns, address_of
from quire.parallel.expert_balance import place
from quire.parallel.expert_placement import ExpertPlacement, linear_placement, slot_counts
from quire.worker.expert_parallel import count_experts
from tests.golden import gemma_cases
from tests.golden.make_checkpoints import ALL_CASES, TORCH_CASES
from tests.golden.rank_logits import BLOCK_SIZE, NUM_BLOCKS, compare
from tests.golden.test_quantised_mixtures import write
from tests.rank_threads import RankThreads

pytestmark = [pytest.mark.golden, pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")]

STORED_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "quantised"
CASES = (
    *("mixtral", "qwen3-moe-mlp-only", "qwen2-moe", "gpt-oss", "deepseek-v3", "ernie4-5-moe", "llama4-moe"),
    *("glm4-moe", "olmoe", "granitemoe-shared", "phimoe", "gemma4-moe"),
)


def _linear(spec, shares):
    return {layer: linear_placement(count, slot_counts(count, 0, shares)) for layer, count in count_experts(spec).items()}


def _copied(spec, shares):
    """Random loads, and on every rank one slot more than linear placement needs, where there is room for copies."""
    rng = np.random.default_rng(5)
    found = {}
    for layer, count in count_experts(spec).items():
        counts = slot_counts(count, min(len(shares), count * (len(shares) - 1)), shares)
        found[layer] = place(rng.lognormal(0, 1.5, count), counts, shares)
    return found


def _unequal(spec, shares):
    """The last rank has only the last expert; the first has all, so that all of the others are copies."""
    found = {}
    for layer, count in count_experts(spec).items():
        middle = [(rank, *range(0, rank)) for rank in range(1, len(shares) - 1)]
        found[layer] = ExpertPlacement(count, (tuple(range(count)), *middle, (count - 1,)))
    return found


PLACEMENTS = {"linear": _linear, "copied": _copied, "unequal": _unequal}


def _fits(folder, shares_of_layouts):
    spec = read_model_spec(folder, "float32")
    return [name for name, size in shares_of_layouts.items() if size <= min(count_experts(spec).values())]


def _layouts(folder):
    return _fits(folder, {"two": 2, "three": 3, "four": 4, "two-to-one": 2})


@pytest.mark.covering
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("case", [*CASES[:3], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[3:])])
def test_logits_are_the_same_bits_on_any_number_of_ranks(checkpoint, case, placement):
    folder = checkpoint(case, "v5")
    compare(folder, "float32", _layouts(folder), placements=PLACEMENTS[placement])
    compare(folder, "bfloat16", ["two", "two-to-one"], placements=PLACEMENTS[placement], load=open_parameters)


@pytest.mark.covering
@pytest.mark.parametrize("placement", ["linear", "copied"])
@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "qwen2-moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_logits_of_quantised_weights_are_the_same_bits(checkpoint, case, quantization, placement):
    folder = checkpoint(case, "v5")
    compare(folder, "bfloat16", _layouts(folder), quantization, "int8", placements=PLACEMENTS[placement])
    compare(folder, "float16", ["two"], quantization, placements=PLACEMENTS[placement], load=open_parameters)


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["two", "three", "four"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_logits_of_the_bundled_mixture_are_the_same_bits(quantization, placement, layout):
    folder = resolve_model("demo-moe", None)
    compare(folder, "bfloat16", [layout], quantization, placements=PLACEMENTS[placement], load=open_parameters)


@pytest.mark.covering
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "deepseek-v3"])
def test_logits_are_the_same_bits_where_ranks_share_no_memory(checkpoint, case, placement):
    compare(checkpoint(case, "v5"), "float32", ["two", "three"], exchanges_rows=True, placements=PLACEMENTS[placement])


STORED = [path for path in STORED_FOLDER.glob("*") if "gptoss" in path.name or "moe" in path.name]


@pytest.mark.skipif(not STORED, reason="../shared/data is not there")
@pytest.mark.parametrize("path", sorted(STORED), ids=lambda path: path.name)
def test_logits_of_stored_quantised_experts_are_the_same_bits(path):
    compare(path, "bfloat16", ["two", "three"], load=open_parameters, placements=_copied)
    compare(path, "float32", ["two-to-one"], load=open_parameters, placements=_linear)


@pytest.mark.covering
@pytest.mark.parametrize("method", ["fp8-small", "int8"])
@pytest.mark.parametrize("case", ["qwen2-moe", "deepseek-v3"])
def test_logits_of_experts_that_are_stored_one_by_one_are_the_same_bits(checkpoint, tmp_path, case, method):
    quantised, _ = write(checkpoint(case, "v5"), tmp_path, method)
    compare(quantised, "bfloat16", ["two", "three"], load=open_parameters, placements=_copied)


@pytest.mark.parametrize("value", [float("nan"), 1e38], ids=["not-a-number", "too-large-for-the-dtype"])
def test_an_expert_of_another_rank_that_is_not_finite_makes_all_dense(checkpoint, value):
    def load(folder, spec):
        parameters = load_parameters(folder, spec)
        name = next(name for name in parameters if name.endswith("experts.down.weight"))
        parameters[name] = parameters[name].float().clone()
        parameters[name][-1, 0, 0] = value  # of the last rank's expert
        return parameters

    compare(
        checkpoint("mixtral", "v5"), "float16", ["two", "three"], "int8", load=load, compares_best=False, placements=_linear
    )


def _ranks(folder, placements, shares):
    spec = read_model_spec(folder, "float32")
    return spec, RankThreads(spec, lambda: load_parameters(folder, spec), shares, 64, placements=placements(spec, shares))


def _run_tokens(ranks, token_ids):
    pools = ranks.pools(BLOCK_SIZE, "float32", NUM_BLOCKS)
    table = np.array([3, 7, 1, 9], np.int64)
    runs = TokenRuns(token_ids, [0, len(token_ids)], [len(token_ids)], [table], [address_of(table)])
    ranks.call(lambda decoder, rank: decoder.run(runs, pools[rank], [len(token_ids) - 1]))


def test_a_mixture_of_whole_experts_has_one_barrier_less(checkpoint):
    folder = checkpoint("mixtral", "v5")
    spec, ranks = _ranks(folder, _linear, (1, 1))
    _run_tokens(ranks, [5, 6, 7])
    num_mixtures = sum(isinstance(layer.mlp, MoeSpec) for layer in spec.layers)
    assert num_mixtures > 0
    assert ranks.num_barriers == [4 * len(spec.layers) - num_mixtures + 2] * 2
    ranks.close()


def test_a_rank_holds_its_experts_and_no_others(checkpoint):
    folder = checkpoint("mixtral", "v5")
    _, whole = _ranks(folder, _linear, (1, 1))
    spec, uneven = _ranks(folder, _unequal, (1, 1))
    expert_bytes = 3 * spec.hidden_size * spec.layers[0].mlp.expert.intermediate_size * 4
    num_experts = spec.layers[0].mlp.num_experts
    padding = 16 / min(spec.hidden_size, spec.layers[0].mlp.expert.intermediate_size)
    for rank, num_more in ((0, num_experts - -(-num_experts // 2)), (1, 1 - num_experts // 2)):
        found = uneven.decoders[rank].weight_bytes - whole.decoders[rank].weight_bytes
        assert found == pytest.approx(num_more * len(spec.layers) * expert_bytes, rel=padding)
    whole.close()
    uneven.close()


def test_tokens_of_experts_are_counted_on_every_rank(checkpoint):
    folder = checkpoint("qwen3-moe-mlp-only", "v5")
    spec, ranks = _ranks(folder, _copied, (1, 1))
    _run_tokens(ranks, [5, 6, 7, 5, 9])
    counts = [decoder.plan.expert_tokens() for decoder in ranks.decoders]
    assert counts[0] == counts[1]
    last = len(spec.layers) - 1
    for index, layer in enumerate(spec.layers):
        # After the last attention only the row with logits is computed.
        num_rows = 1 if index == last else 5
        expected = num_rows * layer.mlp.top_k if isinstance(layer.mlp, MoeSpec) else 0
        assert sum(counts[0][index]) == expected
        assert len(counts[0][index]) == (layer.mlp.num_experts if isinstance(layer.mlp, MoeSpec) else 0)
    ranks.close()


def test_more_ranks_than_experts_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at most 4 with enable_expert_parallel.*got 5"):
        slot_counts(4, 0, (1,) * 5)


def test_intermediate_columns_do_not_limit_the_ranks_of_whole_experts(checkpoint):
    spec = read_model_spec(checkpoint("mixtral", "v5"), "float32")
    shard = ModelShard.of(spec, 1, (1, 1), _linear(spec, (1, 1)))
    inner = shard.layers[0].inner
    assert (inner.start, inner.stop) == (0, spec.layers[0].mlp.expert.intermediate_size)


def test_all_mixture_cases_are_known():
    assert not set(CASES) - {*ALL_CASES, *gemma_cases.CASES}
    assert not set(CASES) & set(TORCH_CASES)
