import pytest

from quire.base.errors import RequestError
from quire.contracts.pooling_params import PoolingParams


def test_defaults_leave_pooling_and_length_to_the_checkpoint():
    params = PoolingParams()
    assert (params.pooling, params.normalize, params.dimensions, params.priority) == (None, None, None, 0)
    assert not params.needs_every_token
    assert PoolingParams(pooling="mean").needs_every_token


@pytest.mark.parametrize(
    "name, value",
    [
        ("task", "token_embed"),
        ("pooling", "max"),
        ("pooling", ["last"]),
        ("normalize", 1),
        ("use_activation", "yes"),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("dimensions", 0),
        ("priority", 2**31),
        ("priority", None),
    ],
)
def test_value_is_refused_by_name_when_it_is_not_allowed(name, value):
    with pytest.raises(RequestError, match=name) as raised:
        PoolingParams(**{name: value})
    assert raised.value.param == name
