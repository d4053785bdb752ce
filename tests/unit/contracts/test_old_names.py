"""Old names of options: they work for one release, with a warning."""

import argparse
import dataclasses

import pytest

from quire.base.errors import ConfigError
from quire.cli.options import add_engine_options, engine_arguments, engine_config
from quire.contracts.config import EngineConfig
from quire.contracts.speculative import SpeculativeConfig
from quire.engine.config import make_config

HEADS = {"method": "eagle3", "model": "demo-eagle3"}


@pytest.mark.parametrize("make", [EngineConfig, make_config])
@pytest.mark.parametrize("value", [True, False])
def test_fit_structured_outputs_is_complete_json_within_max_tokens(make, value):
    with pytest.warns(FutureWarning, match="fit_structured_outputs is deprecated, use complete_json_within_max_tokens"):
        config = make(model="demo", fit_structured_outputs=value)
    assert config == EngineConfig(model="demo", complete_json_within_max_tokens=value)
    assert dataclasses.replace(config, seed=1).complete_json_within_max_tokens is value


@pytest.mark.parametrize("give", [lambda options: SpeculativeConfig(**options), SpeculativeConfig.read])
def test_draft_min_share_is_draft_p_min(give):
    with pytest.warns(FutureWarning, match="draft_min_share is deprecated, use draft_p_min"):
        config = give(HEADS | {"draft_min_share": 0.0})
    assert config == SpeculativeConfig(**HEADS, draft_p_min=0.0)


def test_no_name_is_old_when_none_is_given(recwarn):
    assert not EngineConfig(model="demo").complete_json_within_max_tokens
    assert SpeculativeConfig(**HEADS).draft_p_min is None
    assert not recwarn.list


def test_old_and_new_name_are_refused_together_when_they_differ():
    with pytest.raises(ConfigError, match=r"both are given, 0\.5 and 0\.2; give draft_p_min only"):
        SpeculativeConfig(**HEADS, draft_p_min=0.2, draft_min_share=0.5)
    problem = pytest.raises(ConfigError, match="complete_json_within_max_tokens must be True or False, got 'yes'")
    with problem, pytest.warns(FutureWarning):
        EngineConfig(model="demo", fit_structured_outputs="yes")


@pytest.mark.parametrize("prefix, value", [("--", True), ("--no-", False)])
def test_old_switch_of_the_command_line_sets_the_new_option(prefix, value):
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    add_engine_options(parser)
    old, new = f"{prefix}fit-structured-outputs", f"{prefix}complete-json-within-max-tokens"
    with pytest.warns(FutureWarning, match=f"{old} is deprecated, use {new}"):
        args = parser.parse_args([old])
    assert engine_config(args).complete_json_within_max_tokens is value
    assert engine_arguments(args) == ([new] if value else [])
    assert "fit-structured-outputs" not in parser.format_help()
