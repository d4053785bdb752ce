"""quire bench conversations: all cases run, give the same tokens, and find the history where there are tiers."""

import json

import pytest

from quire.base.errors import ConfigError
from quire.bench.conversations import ConversationOptions, measure_conversations
from quire.cli.main import main
from quire.contracts.config import EngineConfig
from quire.engine import disk_tier
from quire.kernels.native import load_native

OPTIONS = ConversationOptions(num_turns=3, first_tokens=64, turn_tokens=16, output_tokens=4, working_set=3.0)
ENGINE = {"model": "demo", "num_threads": 1, "num_kv_blocks": 12, "max_model_len": 128}


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_later_turns_find_their_history_in_the_tiers(tmp_path, monkeypatch):
    for name, value in {"_MIN_WAIT_S": 30.0, "_MAX_SHARE": 1e9}.items():  # this machine may be busy
        monkeypatch.setattr(disk_tier, name, value)
    tiers = {"kv_disk_dir": str(tmp_path / "tier"), "kv_disk_bytes": 64 << 20, "kv_save": "all"}
    found = measure_conversations(EngineConfig(**ENGINE, **tiers), OPTIONS)
    assert [case.case for case in found.cases] == ["off", "tiers", "restarted", "killed"]
    assert all(case.is_same for case in found.cases)
    assert found.num_users == 5
    off, with_tiers, restarted, killed = found.cases
    assert off.cached_share < 0.3
    assert with_tiers.cached_share > 0.5
    assert [len(case.first_token_s) for case in (off, restarted, killed)] == [10, 5, 5]
    assert killed.cached_share > 0.3
    assert list((tmp_path / "tier").iterdir()) == []
    assert json.loads(found.to_json())["medians"].keys() == {"off", "tiers", "restarted", "killed"}
    assert found.describe().count("median time to first token") == 4


def test_options_that_make_no_sense_are_refused(capsys):
    with pytest.raises(ConfigError, match="num_turns must be at least 2, got 1"):
        ConversationOptions(num_turns=1)
    with pytest.raises(ConfigError, match="working_set must be above 0"):
        ConversationOptions(working_set=0.0)
    long = EngineConfig(**{**ENGINE, "max_model_len": 64, "kv_host_bytes": 64 << 20})
    with pytest.raises(ConfigError, match="a conversation has 104 tokens, but only 64 fit"):
        measure_conversations(long, ConversationOptions(num_turns=2, first_tokens=64, turn_tokens=8))
    with pytest.raises(ConfigError, match="measures one engine, got data_parallel_size 2"):
        measure_conversations(EngineConfig(**ENGINE, kv_host_bytes=64 << 20, data_parallel_size=2), OPTIONS)
    assert main(["bench", "conversations"]) == 1
    assert "--kv-host-bytes" in capsys.readouterr().err
