"""ParallelConfig: what is accepted, and what an error names."""

import pytest

from quire.base.errors import ConfigError
from quire.contracts.parallel import ParallelConfig


def test_default_is_one_rank():
    config = ParallelConfig()
    assert config.world_size == 1
    assert config.shares == (1.0,)


def test_sizes_multiply_and_replicas_do_not_count():
    config = ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        data_parallel_size=7,
        enable_expert_parallel=True,
    )
    assert config.world_size == 6
    assert ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=2).world_size == 4  # tensor-parallel ranks
    assert ParallelConfig(prefill_context_parallel_size=3, data_parallel_size=2).world_size == 3


def test_shares_may_be_a_list():
    config = ParallelConfig(tensor_parallel_size=2, tensor_parallel_shares=[2, 1])
    assert config.shares == (2, 1)
    assert hash(config) == hash(ParallelConfig(tensor_parallel_size=2, tensor_parallel_shares=(2, 1)))


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer >= 1, got 0"),
        ({"pipeline_parallel_size": 1.5}, "pipeline_parallel_size must be an integer >= 1, got 1.5"),
        ({"data_parallel_size": True}, "data_parallel_size"),
        ({"decode_context_parallel_size": "2"}, "decode_context_parallel_size"),
        ({"enable_dp_attention": None}, "enable_dp_attention must be True or False, got None"),
        ({"enable_dp_attention": True}, "enable_dp_attention is True, but tensor_parallel_size is 1"),
        ({"dp_attention_size": 2, "tensor_parallel_size": 4}, "dp_attention_size is 2, but enable_dp_attention False"),
        ({"enable_dp_attention": True, "dp_attention_size": 3, "tensor_parallel_size": 4}, "divides .*, got 3 and 4"),
        ({"enable_dp_attention": True, "dp_attention_size": 1, "tensor_parallel_size": 4}, "integer >= 2 .*, got 1 and 4"),
        (
            {"enable_dp_attention": True, "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "enable_dp_attention is True and decode_context_parallel_size 2: both together",
        ),
        ({"enable_expert_parallel": 1}, "enable_expert_parallel must be True or False, got 1"),
        ({"tensor_parallel_size": 16, "pipeline_parallel_size": 5}, "at most 64, got 16 \\* 5 \\* 1 = 80 ranks"),
        ({"tensor_parallel_size": 2, "tensor_parallel_shares": (1,)}, "one number for each of the 2"),
        ({"tensor_parallel_size": 2, "tensor_parallel_shares": (1, 0)}, "numbers > 0, got 0"),
        ({"tensor_parallel_size": 2, "tensor_parallel_shares": (1, 10**400)}, "finite"),
        ({"tensor_parallel_shares": "auto"}, "tensor_parallel_shares must be None or a sequence"),
    ],
)
def test_bad_values_are_named(fields, told):
    with pytest.raises(ConfigError, match=told):
        ParallelConfig(**fields)
