"""The options of `quire router` and what they mean to the router."""

import dataclasses

import pytest

from quire.base.errors import ConfigError
from quire.cli.main import make_parser
from quire.cli.router import router_config
from quire.router.config import RouterConfig, parse_backend

OPTIONS = (
    "--host 0.0.0.0 --port 1 --backend http://b:2 --backend https://c --admin-key a --backend-key b --allowed-hosts h "
    "--max-body-bytes 1 --max-held-body-bytes 1 --drain-timeout 1 --policy round-robin --alias x=y --prefix-chunk-bytes 1 "
    "--max-prefix-chunks 1 --max-retries 1 --retry-ratio 0.1 --health-interval 2 --health-timeout 1 --max-health-failures 1 "
    "--connect-timeout 1 --idle-timeout 1 --max-resumes 1 --no-page"
)
KV_EVENTS = "--backend http://b:2 --kv-events http://b:2=tcp://b:5557,tcp://b:5558 --kv-events-silence 1 --tokenize-timeout 1"


def config_of(*options):
    return router_config(make_parser().parse_args(["router", *options]))


@pytest.fixture(autouse=True)
def _no_keys_of_the_environment(monkeypatch):
    monkeypatch.delenv("QUIRE_ROUTER_ADMIN_KEY", raising=False)
    monkeypatch.delenv("QUIRE_ROUTER_BACKEND_KEY", raising=False)


def test_every_setting_of_the_router_has_an_option():
    plain, changed = config_of("--backend", "http://a"), config_of(*OPTIONS.split())
    assert plain == RouterConfig(backends=(parse_backend("http://a"),))
    with_events = config_of(*KV_EVENTS.split())
    names = [field.name for field in dataclasses.fields(RouterConfig)]
    both = (changed, with_events)
    left = [name for name in names if all(getattr(plain, name) == getattr(one, name) for one in both)]
    assert left == ["adds_backends"]  # only a server with several models sets it
    assert [one.url for one in changed.backends] == ["http://b:2", "https://c:443"]


def test_keys_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("QUIRE_ROUTER_ADMIN_KEY", "one")
    monkeypatch.setenv("QUIRE_ROUTER_BACKEND_KEY", "two")
    config = config_of()
    assert (config.admin_key, config.backend_key) == ("one", "two")


def test_router_without_backends_says_what_to_give():
    with pytest.raises(ConfigError, match="give at least one --backend"):
        config_of()
