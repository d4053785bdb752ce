"""Logits of every golden model have the same bits on 1, 2, 3 and 4 tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.kernels.native import load_native
from quire.model.checkpoint import load_parameters, open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.token_runs import TokenRuns, address_of
from tests.golden.make_checkpoints import STRUCTURES, TORCH_CASES, case_params
from tests.golden.rank_logits import BLOCK_SIZE, NUM_BLOCKS, compare
from tests.golden.recurrent_cases import MIXED_CASES
from tests.rank_threads import RankThreads

pytestmark = [pytest.mark.golden, pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")]

STORED_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "quantised"
STORED = sorted(path for path in STORED_FOLDER.glob("*") if path.is_dir() or path.suffix == ".gguf")


GEMMA_CASES = ("gemma4-dense", "gemma4-moe")


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", [*case_params(case for case in STRUCTURES if case not in TORCH_CASES), *GEMMA_CASES])
def test_logits_are_the_same_bits_on_any_number_of_ranks(checkpoint, case):
    compare(checkpoint(case, "v5"), "float32", ["two-to-one", "four"])
    compare(checkpoint(case, "v5"), "bfloat16", ["three"])


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", MIXED_CASES)
def test_logits_of_recurrent_layers_are_the_same_bits_on_any_number_of_ranks(checkpoint, case):
    compare(checkpoint(case), "float32", ["two-to-one"])
    compare(checkpoint(case), "bfloat16", ["three"], "int8", exchanges_rows=True)


@pytest.mark.covering
@pytest.mark.parametrize(
    "case",
    [
        *("llama-mqa", "qwen3-bias", "gemma2", "qwen3-moe-mlp-only", "gpt-oss", "gpt2-scaled"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen2-moe", "glm4-moe", "deepseek-v3", "minicpm3")),
        pytest.param("gemma4-moe", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_logits_of_quantised_weights_are_the_same_bits_on_any_number_of_ranks(checkpoint, case, quantization):
    compare(checkpoint(case, "v5"), "bfloat16", ["three"], quantization, "int8")
    compare(checkpoint(case, "v5"), "float16", ["two-to-one"], quantization)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", ["llama-mqa", "gemma2", "olmo2", "mixtral", "gpt-oss", "gpt2-scaled"])
def test_logits_are_the_same_bits_where_ranks_share_no_memory(checkpoint, case):
    compare(checkpoint(case, "v5"), "float32", ["two", "three"], exchanges_rows=True)
    compare(checkpoint(case, "v5"), "bfloat16", ["two-to-one"], exchanges_rows=True)


ADAPTED = ("gemma2", "qwen3-bias", "gpt2-scaled", "glm4-moe", "deepseek-v32", "minicpm3", "olmo2", "qwen3-next", "jamba")


@pytest.mark.parametrize("case", ["llama4-moe", *(pytest.param(case, marks=pytest.mark.slow) for case in ADAPTED)])
def test_logits_with_an_adapter_are_the_same_bits_on_any_number_of_ranks(checkpoint, case):
    compare(checkpoint(case, "v5"), "float32", ["three", "four"], adapters=["a", ""])
    compare(checkpoint(case, "v5"), "bfloat16", ["two-to-one"], adapters=["a", ""])


@pytest.mark.one_in(8)
@pytest.mark.skipif(not STORED, reason="../shared/data is not there")
@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_logits_of_stored_quantised_weights_are_the_same_bits_on_any_number_of_ranks(path):
    compare(path, "bfloat16", ["three"], load=open_parameters)
    compare(path, "float32", ["two-to-one"], load=open_parameters)


@pytest.mark.parametrize("value", [float("nan"), 1e38], ids=["not-a-number", "too-large-for-the-dtype"])
def test_a_weight_that_is_not_finite_takes_the_same_way_on_all_ranks(checkpoint, value):
    def load(folder, spec):
        parameters = load_parameters(folder, spec)
        name = "lm_head.weight" if "lm_head.weight" in parameters else "embed.weight"
        parameters[name] = parameters[name].float().clone()
        parameters[name][-1, 0] = value  # of the last rank's part; the other logits stay finite
        return parameters

    compare(checkpoint("llama-bias", "v5"), "float16", ["two", "three"], "int8", load=load, compares_best=False)


def test_a_step_has_four_barriers_a_layer_and_two_more(checkpoint):
    folder = checkpoint("llama-mqa", "v5")
    spec = read_model_spec(folder, "float32")
    ranks = RankThreads(spec, lambda: load_parameters(folder, spec), (1, 1), 64)
    pools = ranks.pools(BLOCK_SIZE, "float32", NUM_BLOCKS)
    table = np.array([3, 7, 1, 9], np.int64)
    runs = TokenRuns([5, 6, 7], [0, 3], [3], [table], [address_of(table)])
    ranks.call(lambda decoder, rank: decoder.run(runs, pools[rank], [2]))
    assert ranks.num_barriers == [4 * len(spec.layers) + 2] * 2
    ranks.close()
