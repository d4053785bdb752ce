"""The names by which clients may call a served model."""

import pytest

from quire.serving.config import ServerConfig
from tests.unit.serving.fakes import make_served


@pytest.mark.parametrize("name", ["tiny", "/models/tiny"])
def test_a_checkpoint_is_called_by_its_last_part_or_by_the_path_that_was_given(name):
    served = make_served(model="/models/tiny")
    assert served.name == "tiny"
    assert served.is_called(name)
    assert not served.is_called("/models/other")


def test_given_names_replace_the_path():
    served = make_served(config=ServerConfig(served_model_names=("a", "b")), model="/models/tiny")
    assert [name for name in ("a", "b", "tiny", "/models/tiny") if served.is_called(name)] == ["a", "b"]
