"""Sizes as people write them."""

import pytest

from quire.base.errors import ConfigError
from quire.contracts.memory import parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("1048576", 1 << 20), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2GB", 2 * 10**9), ("2g", 2 * 10**9)),
        *(("1TiB", 1 << 40), ("10 KiB", 10240), ("7B", 7), ("0", 0)),
    ],
)
def test_size_is_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 XiB", "4GiBs", "1e9", "1,5GiB", "4iB"])
def test_other_text_is_refused(text):
    with pytest.raises(ConfigError, match="must be a size like 4GiB"):
        parse_bytes(text)
