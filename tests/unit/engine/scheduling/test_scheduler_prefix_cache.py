from dataclasses import replace

import pytest
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.ids import RequestId


def cached_after(prompt, request, **options):
    """Return how many tokens `request` finds when one with `prompt` has run before it."""
    driver = Driver(make_config(block_size=4, **options))
    driver.add(make_request("first", prompt, max_tokens=1))
    driver.run()
    driver.add(request)
    plan = driver.step()
    driver.run()
    driver.check_outputs()
    return plan.starts[0].num_computed_tokens


@pytest.mark.parametrize("num_tokens, expected", [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_hit_covers_full_blocks_but_never_the_whole_prompt(num_tokens, expected):
    assert cached_after(12, make_request("r", num_tokens, max_tokens=1)) == expected


def test_nothing_is_found_when_caching_is_off():
    assert cached_after(12, make_request("r", 12), enable_prefix_caching=False) == 0


def test_nothing_is_found_under_another_salt():
    assert cached_after(12, make_request("r", 12, salt="other")) == 0


@pytest.mark.parametrize("salt", ["", "tenant", "adapter key "])
def test_nothing_is_found_under_another_adapter(salt):
    driver = Driver(make_config(block_size=4))
    adapted = replace(make_request("adapted", 12, salt=salt, max_tokens=1), adapter_key="key")
    for request, expected in (
        (adapted, 0),
        (make_request("base", 12, salt=salt, max_tokens=1), 0),
        (replace(adapted, request_id=RequestId("again")), 8),
        (replace(adapted, request_id=RequestId("other"), adapter_key="other"), 0),
    ):
        driver.add(request)
        assert driver.step().starts[0].num_computed_tokens == expected
        driver.run()


def test_output_is_cached_too():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("first", 6, max_tokens=8))
    driver.run()
    output = driver.outputs[RequestId("first"), 0].tokens
    driver.add(make_request("r", [*range(100, 106), *output], max_tokens=1))
    assert driver.step().starts[0].num_computed_tokens == 12  # 13 of 14 tokens were computed


def test_prompt_log_probabilities_need_every_prompt_token():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("first", 12, max_tokens=1))
    driver.run()
    driver.add(make_request("r", 12, max_tokens=1, prompt_logprobs=0, n=2))
    starts = {start.choice: start for plan in iter(driver.step, None) for start in plan.starts}
    assert starts[0].num_computed_tokens == 0
    driver.check_outputs()
    assert driver.scheduler.prefix_cache_queries == 12  # the look-up that was left out does not count


def test_hit_on_free_blocks_is_counted_as_needing_them():
    """Blocks that only the cache holds are free: to revive them takes as many from the pool as to allocate anew."""
    driver = Driver(make_config(block_size=4, num_kv_blocks=4))
    driver.add(make_request("first", 12, max_tokens=1))
    driver.run()
    driver.add(make_request("other", range(200, 206), max_tokens=3))  # 2 of 4 blocks
    driver.step()
    driver.add(make_request("again", 12, max_tokens=1))  # 3 blocks, of which 2 may be cached: 2 are free
    plan = driver.step()
    assert not plan.starts
    driver.run()
    driver.check_outputs()


def test_running_sequences_share_a_hit():
    driver = Driver(make_config(block_size=4, num_kv_blocks=7))
    driver.add(make_request("first", 12, max_tokens=1))
    driver.run()
    for name in range(3):
        driver.add(make_request(name, 12, seed=name, max_tokens=2))
    plan = driver.step()
    assert [start.block_ids[:2] for start in plan.starts] == [(0, 1)] * 3
    driver.run()
    driver.check_outputs()


def test_equal_prompts_of_one_step_keep_their_own_blocks():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("a", 12, seed=1, max_tokens=3))
    driver.add(make_request("b", 12, seed=2, max_tokens=3))
    a, b = driver.step().starts
    assert not set(a.block_ids) & set(b.block_ids)
    assert len(driver.scheduler.kv.index) == 3
    driver.run()
    driver.check_outputs()


def test_recently_used_prefix_outlives_an_older_one():
    driver = Driver(make_config(block_size=4, num_kv_blocks=6))
    for name, base in (("old", 100), ("new", 200)):
        driver.add(make_request(name, range(base, base + 8), max_tokens=1))
        driver.run()
    driver.add(make_request("presses", range(300, 316), max_tokens=1))  # takes the 2 unused blocks and those of "old"
    driver.run()
    driver.add(make_request("new again", range(200, 209), max_tokens=1))
    assert driver.step().starts[0].num_computed_tokens == 8


def test_chain_heals_when_the_equal_blocks_it_stood_on_are_reused():
    driver = Driver(make_config(block_size=2, num_kv_blocks=12))
    driver.add(make_request("a", 4, seed=1, max_tokens=1))
    driver.add(make_request("b", 4, seed=2, max_tokens=12))  # its first blocks equal those of "a", which are published
    driver.step()
    driver.add(make_request("presses", range(200, 216), max_tokens=1))  # reuses the blocks of "a"
    driver.step()
    driver.step()
    (b,) = driver.scheduler.running
    found = driver.scheduler.kv.index.match(b.block_contents)
    assert [entry.block_id for entry in found] == [0, *b.block_ids[1:3]]  # of "a", only the tail has been reused
    driver.run()
    driver.check_outputs()
