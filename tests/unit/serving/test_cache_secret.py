"""The secret of cache salts: it outlives a server, nobody else may read it, and what is wrong with its file is named."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.serving.auth import SECRET_NAME, Authenticator, cache_secret, hash_key, read_cache_secret
from quire.serving.config import ApiKey, ServerConfig

KEYS = (ApiKey("a", hash_key("a")), ApiKey("b", hash_key("b")))


def salts(config, secret):
    authenticator = Authenticator(config, secret)
    return [authenticator.owner_named(name).cache_salt for name in ("a", "b", "removed")]


def test_salts_are_the_same_after_a_restart_and_differ_between_keys(tmp_path):
    config = ServerConfig(api_keys=KEYS, cache_secret_file=tmp_path / "secret")
    first, second = (salts(config, cache_secret(config, None)) for _ in range(2))
    assert first[:2] == second[:2]
    assert len({*first, second[2]}) == 4
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["secret"]


def test_file_is_in_the_folder_of_the_disk_tier_where_none_is_named(tmp_path):
    config, folder = ServerConfig(api_keys=KEYS), tmp_path / "tier"
    secret = cache_secret(config, str(folder))
    assert secret == cache_secret(config, str(folder)) == read_cache_secret(folder / SECRET_NAME)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_secret(config, None) is None
    assert cache_secret(ServerConfig(), str(folder)) is None  # without keys there are no salts
    assert salts(config, None) != salts(config, None)


def test_servers_that_start_together_have_the_same_secret(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: read_cache_secret(tmp_path / "secret"), range(32)))
    assert len(found) == 1
    assert os.listdir(tmp_path) == ["secret"]


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (lambda path: write(path, "ab" * 32, 0o640), "has mode 640"),
        (lambda path: write(path, "ab" * 31), "must have 64 hexadecimal digits"),
        (lambda path: write(path, "no digits at all"), "must have 64 hexadecimal digits"),
        (lambda path: path.mkdir(), "Is a directory"),
    ],
    ids=["mode", "short", "text", "folder"],
)
def test_files_that_cannot_be_used_are_refused_by_name(tmp_path, prepare, match):
    path = tmp_path / "secret"
    prepare(path)
    with pytest.raises(ConfigError, match=match) as caught:
        cache_secret(ServerConfig(cache_secret_file=path), None)
    assert f"--cache-secret-file {path}" in str(caught.value)
    assert "ab" * 31 not in str(caught.value)


def test_folder_that_does_not_exist_is_an_error_when_it_was_named():
    with pytest.raises(ConfigError, match="--cache-secret-file /nowhere/secret: No such file"):
        cache_secret(ServerConfig(cache_secret_file=Path("/nowhere/secret")), None)


def test_secret_of_another_user_is_refused(tmp_path, monkeypatch):
    read_cache_secret(tmp_path / "secret")
    os.chown(tmp_path / "secret", 4321, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(ConfigError, match="belongs to user"):
        read_cache_secret(tmp_path / "secret")


def test_server_runs_without_the_file_when_the_disk_tier_cannot_hold_it(tmp_path):
    (tmp_path / "tier").write_text("no folder")
    assert cache_secret(ServerConfig(api_keys=KEYS), str(tmp_path / "tier")) is None
