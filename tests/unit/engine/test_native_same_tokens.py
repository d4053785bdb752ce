"""With the native kernels a request's tokens depend on nothing but the request, in every precision.

test_same_tokens.py asks the same mostly of the reference, which runs its blocks of 4 tokens; the kernels take multiples of 16.
"""

import pytest

from quire import LLM, SamplingParams
from quire.kernels.native import load_native
from tests.unit.engine.test_same_tokens import KINDS

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

PROMPTS = [
    [7, 8, 9],
    list(range(20, 90)),
    [5] * 17,
    list(range(100, 133)),
    [*range(20, 84), 1, 2, 3],
    [250, 3],
]
LENGTH = 24
PRECISIONS = {
    "f32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "bf16-4-bit-cache": {"dtype": "bfloat16", "kv_cache_dtype": "turboquant_4bit"},
    "bf16-fp8-cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "f32-k8v4-cache-but-for-layer-0": {"dtype": "float32", "kv_cache_dtype": "k8v4", "kv_cache_dtype_skip_layers": (0,)},
}


def start(model, precision, **options):
    options = {"max_num_seqs": 8, "num_kv_blocks": 60, "block_size": 16, **PRECISIONS[precision], **options}
    return LLM(str(model), **options)


def generate(llm, indices=tuple(range(6))):
    params = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, **KINDS[i]) for i in indices]
    outputs = llm.generate([PROMPTS[i] for i in indices], params, use_tqdm=False)
    return outputs, [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request):
    return request.param


@pytest.fixture(scope="module")
def alone(tiny_family, precision):
    """Each prompt by itself, whole, without a cache: the oracle."""
    llm = start(tiny_family, precision, enable_prefix_caching=False)
    tokens = [generate(llm, [index])[1][0] for index in range(len(PROMPTS))]
    llm.close()
    return tokens


@pytest.mark.covering
def test_same_tokens_when_batched_with_strangers(tiny_family, precision, alone):
    llm = start(tiny_family, precision, enable_prefix_caching=False)
    assert generate(llm)[1] == alone
    order = [3, 0, 5, 1]
    assert generate(llm, order)[1] == [alone[i] for i in order]
    llm.close()


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 9}, {"long_prefill_token_threshold": 7}], ids=["budget", "chunk"]
)
def test_same_tokens_when_prompts_are_chunked(tiny_family, precision, alone, options):
    llm = start(tiny_family, precision, **options)
    assert generate(llm)[1] == alone
    llm.close()


@pytest.mark.covering
def test_same_tokens_when_prefixes_are_cached(tiny_family, precision, alone):
    llm = start(tiny_family, precision)
    generate(llm)
    outputs, tokens = generate(llm)
    assert tokens == alone
    assert outputs[1].metrics.num_cached_tokens == 64  # of 70 tokens: four blocks
    llm.close()


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_same_tokens_when_sequences_are_preempted(tiny_family, precision, alone, caching):
    # The prompts need 15 blocks, with their outputs 22.
    llm = start(tiny_family, precision, num_kv_blocks=16, enable_prefix_caching=caching)
    outputs, tokens = generate(llm)
    assert tokens == alone
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    llm.close()
