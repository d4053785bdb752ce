import pytest

from quire.base.errors import RequestError
from quire.contracts.pooling_params import PoolingParams


def test_defaults_are_the_last_token_normalised_and_whole():
    params = PoolingParams()
    assert (params.pooling, params.normalize, params.dimensions, params.priority) == ("last", True, None, 0)
    assert not params.needs_every_token
    assert PoolingParams(pooling="mean").needs_every_token


@pytest.mark.parametrize(
    "name, value",
    [
        ("pooling", "cls"),
        ("pooling", None),
        ("pooling", ["last"]),
        ("normalize", 1),
        ("normalize", None),
        ("dimensions", 0),
        ("dimensions", -3),
        ("dimensions", 2.0),
        ("dimensions", True),
        ("priority", 2**31),
        ("priority", None),
    ],
)
def test_value_is_refused_by_name_when_it_is_not_allowed(name, value):
    with pytest.raises(RequestError, match=name) as raised:
        PoolingParams(**{name: value})
    assert raised.value.param == name
