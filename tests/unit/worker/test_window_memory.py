"""The memory plan of models whose layers with a window keep only the last tokens; the numbers are worked out by hand."""

import json
from dataclasses import replace

import pytest

from quire import EngineConfig
from quire.contracts.kv_spec import KvSpec, peak_window_blocks
from quire.contracts.memory import MemoryPlan
from quire.worker.inspect import inspect_model
from quire.worker.memory import divide_blocks
from tests.tiny_checkpoint import write_checkpoint

# Six layers of 2 heads of 8 in f32: 2 * 2 * 8 * 4 = 128 bytes a token and layer, 2,048 a block of 16 tokens and layer.
LAYER_BLOCK = 2048
FIVE_OF_SIX = KvSpec(16, "float32", ((2, 8),) * 6, window_tokens=64, is_windowed=(True,) * 5 + (False,))
ALL = replace(FIVE_OF_SIX, is_windowed=(True,) * 6)
CONFIG = EngineConfig(model="-", max_num_seqs=2)


def divided(kv, num_blocks, config=CONFIG):
    """Sequences of 4,096 tokens, 256 blocks, in steps of 32 tokens."""
    return divide_blocks(config, MemoryPlan(1 << 30, 0, 0, kv, num_blocks, 4096), 32)


def test_bytes_of_the_groups():
    assert FIVE_OF_SIX.bytes_per_token == 6 * 128
    assert FIVE_OF_SIX.bytes_per_block == LAYER_BLOCK
    assert FIVE_OF_SIX.window_bytes_per_block == 5 * LAYER_BLOCK
    assert ALL.bytes_per_block == 0
    assert FIVE_OF_SIX.part(4, 6).is_windowed == (True, False)
    assert FIVE_OF_SIX.part(4, 6).pool_bytes(7, 3) == 10 * LAYER_BLOCK


def test_a_sequence_holds_its_window_and_the_tokens_of_its_step():
    assert FIVE_OF_SIX.window_blocks_per_sequence(4096) == 64 // 16 + 2
    assert FIVE_OF_SIX.window_blocks_per_sequence(48) == 3  # no more than it has tokens
    assert peak_window_blocks(64, 32, 16) == (64 + 32) // 16 + 2
    assert peak_window_blocks(11, 1, 16) == 1 + 2


def test_memory_that_windows_leave_goes_to_the_other_layers():
    plan = divided(FIVE_OF_SIX, 100)
    # Twice 2 sequences of 6 blocks, and a step of 2: of the other 74 the 5 layers' memory makes 370 blocks of one layer.
    assert plan.num_window_blocks == 2 * 2 * 6 + 2
    assert plan.num_kv_blocks == 100 + 74 * 5
    assert plan.kv_bytes == 100 * 6 * LAYER_BLOCK
    assert plan.num_long_sequences == pytest.approx(470 / 256)
    assert plan.num_unlimited_sequences == pytest.approx(100 / 256)
    assert "1.8 sequences of 4,096" in plan.describe()
    assert "windows     26 blocks for 5 of 6 layers, which keep the last 64 tokens" in plan.describe()
    assert "0.4 sequences would fit" in plan.describe()


def test_the_pool_is_no_larger_than_every_sequence_needs():
    plan = divided(FIVE_OF_SIX, 400)
    assert (plan.num_kv_blocks, plan.num_window_blocks) == (2 * 256, 26)
    assert plan.kv_bytes < 400 * 6 * LAYER_BLOCK


def test_windows_on_every_layer_limit_sequences_by_their_number_only():
    plan = divided(ALL, 100)
    assert (plan.num_kv_blocks, plan.num_window_blocks) == (2 * 256, 26)
    assert plan.kv_bytes == 26 * 6 * LAYER_BLOCK
    assert plan.num_long_sequences == 2.0


def test_too_little_memory_for_one_window_is_divided_as_without_groups():
    plan = divided(FIVE_OF_SIX, 5)
    assert (plan.num_kv_blocks, plan.num_window_blocks) == (5, 5)


def test_given_blocks_are_not_changed():
    plan = divided(FIVE_OF_SIX, 100, replace(CONFIG, num_kv_blocks=100))
    assert (plan.num_kv_blocks, plan.num_window_blocks) == (100, 26)


@pytest.fixture(scope="module")
def window_model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("window") / "model", "mistral", sliding_window=32)


def kv_of(model, **options):
    return inspect_model(EngineConfig(model=str(model), **options)).memory


def test_a_model_with_a_window_has_a_group(window_model):
    memory = kv_of(window_model, max_model_len=256, block_size=16)
    assert memory.kv.window_tokens == 32
    assert all(memory.kv.is_windowed)
    assert memory.table_width == 2 * 16


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 32},
        {"max_model_len": 256, "kv_host_bytes": 1 << 24},
        {"max_model_len": 256, "speculative_config": {"method": "self", "skipped_layers": [1], "num_speculative_tokens": 2}},
    ],
    ids=["window-as-long-as-sequences", "tiers", "layer-skipping"],
)
def test_there_is_one_group_where_windows_are_not_limited(window_model, options):
    memory = kv_of(window_model, block_size=16, **options)
    assert memory.kv.window_tokens is None
    assert memory.num_window_blocks == 0
    assert memory.table_width == -(-options["max_model_len"] // 16)


def test_ranks_on_a_host_hold_both_groups(tmp_path):
    """The model has two key-value heads: each of two ranks holds one, and so does each of four."""
    folder = write_checkpoint(tmp_path / "gemma2", "gemma2")
    options = {"max_model_len": 256, "block_size": 16, "num_kv_blocks": 60, "max_num_seqs": 1, "max_num_batched_tokens": 23}
    one, two, four = (kv_of(folder, tensor_parallel_size=size, **options) for size in (1, 2, 4))
    assert (one.num_kv_blocks, one.num_window_blocks) == (two.num_kv_blocks, two.num_window_blocks) == (60, 8)
    assert one.kv_bytes == (60 + 8) * LAYER_BLOCK
    assert two.kv_bytes == one.kv_bytes
    assert four.kv_bytes == 2 * one.kv_bytes
    assert four.host_window_bytes_per_block == 2 * LAYER_BLOCK
    assert four.num_unlimited_sequences == pytest.approx(one.num_unlimited_sequences)


def test_a_budget_in_bytes_is_divided_over_both_groups_of_all_ranks(tmp_path):
    folder = write_checkpoint(tmp_path / "gemma2", "gemma2")
    options = {"max_model_len": 256, "block_size": 16, "kv_cache_memory_bytes": 20 * 2 * LAYER_BLOCK, "max_num_seqs": 1}
    one, four = (kv_of(folder, tensor_parallel_size=size, max_num_batched_tokens=23, **options) for size in (1, 4))
    # Twenty blocks of both layers: the pool of the window group needs eight, and the longest sequence sixteen of the others.
    assert (one.num_kv_blocks, one.num_window_blocks) == (20, 8)
    # Ten of them, where four ranks hold two heads: two more than the window group needs, which become two of the others.
    assert (four.num_kv_blocks, four.num_window_blocks) == (12, 8)
    assert four.kv_bytes == 20 * 2 * LAYER_BLOCK


def test_a_model_without_windows_has_one_group(tiny_model):
    memory = kv_of(tiny_model, block_size=16)
    assert (memory.kv.window_tokens, memory.kv.is_windowed, memory.num_window_blocks) == (None, (), 0)
    assert "windows" not in memory.describe()


# The shapes of released models: layers of full attention, of all, and the window.
_GEMMA3_12B = {
    **{"model_type": "gemma3_text", "hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16, "head_dim": 256},
    **{"sliding_window": 1024, "sliding_window_pattern": 6, "intermediate_size": 15360, "vocab_size": 262208},
}
_GPT_OSS_20B = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "sliding_window": 128}
_COMMAND_R7B = {
    **{"model_type": "cohere2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
    **{"sliding_window": 4096, "sliding_window_pattern": 4, "intermediate_size": 14336, "vocab_size": 256000},
}


@pytest.mark.parametrize(
    ("config", "num_full", "factor"),
    [(_GEMMA3_12B, 8, 4.7), (_GPT_OSS_20B, 12, 1.98), (_COMMAND_R7B, 8, 3.1)],
    ids=["gemma3-12b", "gpt-oss-20b", "command-r7b"],
)
def test_windows_of_released_models_leave_room_for_more_long_sequences(tmp_path, config, num_full, factor):
    """In 16 GiB of KV cache, with four sequences at once of 131,072 tokens."""
    config = {**config, "num_key_value_heads": 8, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory = kv_of(tmp_path, max_num_seqs=4, kv_cache_memory_bytes=16 << 30)
    assert memory.kv_bytes <= 16 << 30
    assert memory.kv.is_windowed.count(False) == num_full
    assert memory.num_long_sequences >= factor * memory.num_unlimited_sequences
