"""KV tiers on a GPU: an engine with a host tier gives the tokens of one without, and loads what the pool has lost."""

import pytest

from quire import LLM
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.test_device_engine import DEVICE, greedy, tokens

pytestmark = pytest.mark.usefixtures("few_programs")
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "num_kv_blocks": 5, "max_model_len": 64}
PROMPTS = [[(7 * n + 31 * k) % 290 for n in range(13)] for k in range(3)]
TURNS = [*PROMPTS, PROMPTS[0], PROMPTS[1] + [5, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiers") / "qwen3", "qwen3")


def run(folder, device=DEVICE, **options):
    """Return the tokens of the turns, one after the other, the cached tokens of each, and what the tiers have done."""
    llm = LLM(str(folder), device=device, max_num_seqs=2, max_num_batched_tokens=16, **OPTIONS | options)
    outputs = [llm.generate([turn], greedy(3), use_tqdm=False)[0] for turn in TURNS]
    tiers = llm.llm_engine.stats.tiers
    llm.close()
    return tokens(outputs), [output.metrics.num_cached_tokens for output in outputs], tiers


def test_tokens_are_those_of_an_engine_without_tiers(folder):
    expected, cold, _ = run(folder)
    found, cached, tiers = run(folder, kv_host_bytes=1 << 20, kv_save="all")
    assert found == expected
    assert cold == [0] * 5
    assert cached == [0, 0, 0, 12, 12]
    assert tiers[0].num_loaded == 6
