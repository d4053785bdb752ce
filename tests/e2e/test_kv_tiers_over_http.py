"""KV tiers over HTTP: prompts that were cached are found after kill -9 and a restart, and are counted in usage and metrics."""

import os
import signal
import time

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from tests.e2e.server_process import serving

pytestmark = pytest.mark.slow

SYSTEM = "You are a careful clerk who answers briefly and never forgets what was said before in the same talk. " * 4
KEY = "secret"


def serving_with_tiers(folder, *ranks):
    tiers = ("--kv-disk-dir", str(folder), "--kv-disk-bytes", str(64 << 20), "--api-key", KEY, "--num-threads", "1")
    return serving(*tiers, *ranks, key=KEY)


def ask_messages(server, *marks):
    system = {"type": "text", "text": SYSTEM, **({"cache_control": {"type": "ephemeral"}} if marks else {})}
    body = {"model": "demo", "max_tokens": 8, "temperature": 0, "system": [system]}
    answer = server.post("/v1/messages", {**body, "messages": [{"role": "user", "content": "Hello"}]})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask_chat(server, name, **more):
    messages = [{"role": "system", "content": f"{name} {SYSTEM}"}, {"role": "user", "content": "Hello"}]
    body = {"model": "demo", "max_tokens": 8, "temperature": 0, "messages": messages, **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def metric(server, name, tier):
    """Return the value of a metric of a tier; 0 before the first heartbeat."""
    return server.metric(f"quire:{name}", tier=tier)


def wait_for_metric(server, name, tier, least):
    server.wait_for(lambda: metric(server, name, tier) >= least, timeout_s=30)


def test_marked_prompts_are_found_after_kill_and_restart(tmp_path):
    folder, ranks = tmp_path / "tier", ("--tensor-parallel-size", "2")
    with serving_with_tiers(folder, *ranks) as server:
        first = ask_messages(server, "mark")
        asked = ask_chat(server, "Kept.", prompt_cache_retention="24h")
        assert first["usage"]["cache_read_input_tokens"] == 0
        num_pages = (first["usage"]["input_tokens"] + asked["usage"]["prompt_tokens"]) // 16 - 2
        wait_for_metric(server, "kv_tier_saved_pages_total", "disk", num_pages)
        time.sleep(0.1)
        os.kill(server.engine_pid(), signal.SIGKILL)
        os.kill(server.process.pid, signal.SIGKILL)
    assert (folder / "cache_secret").stat().st_mode & 0o777 == 0o600
    with serving_with_tiers(folder, *ranks) as server:
        again = ask_messages(server)
        assert again["content"] == first["content"]
        usage = again["usage"]
        assert usage["cache_read_input_tokens"] >= 0.9 * first["usage"]["input_tokens"] - 16
        assert usage["cache_read_input_tokens"] + usage["input_tokens"] == first["usage"]["input_tokens"]
        more = ask_chat(server, "Kept.")
        assert more["choices"][0]["message"] == asked["choices"][0]["message"]
        cached = more["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 0.9 * more["usage"]["prompt_tokens"] - 16
        wait_for_metric(server, "kv_tier_hit_pages_total", "disk", (usage["cache_read_input_tokens"] + cached) // 16 - 8)
        assert metric(server, "kv_tier_loaded_bytes_total", "disk") > 0
        assert metric(server, "kv_tier_load_seconds_total", "disk") > 0
        assert 0 < metric(server, "kv_tier_usage_perc", "disk") < 1
