"""Homes: where a sequence is admitted, what a home computes in a step, and who is preempted for whom."""

import pytest
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import ConfigError, RequestError
from quire.engine.scheduling.admission import check_servable


def _driver(**options):
    options = {"num_homes": 2, "num_kv_blocks": 32, "max_num_batched_tokens": 64, "max_model_len": 60, **options}
    return Driver(make_config(**options))


def _homes(driver):
    """Return the home of the running sequences by the name of their request."""
    return {str(sequence.request.request_id): sequence.home for sequence in driver.scheduler.running}


def _tokens_by_home(driver, plan):
    counts = [0] * driver.config.num_homes
    for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
        counts[driver.scheduler.sequence(sequence_id).home] += num_tokens
    return counts


def test_sequences_are_admitted_where_the_step_has_the_fewest_tokens():
    driver = _driver()
    for name, length in (("a", 20), ("b", 8), ("c", 8), ("d", 3), ("e", 1)):
        driver.add(make_request(name, [ord(name)] * length, max_tokens=4, ignore_eos=True))
    plan = driver.schedule()
    assert _homes(driver) == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 1}
    assert _tokens_by_home(driver, plan) == [20, 20]
    driver.commit(plan, driver.worker.execute(plan))
    driver.run()
    driver.check_outputs()


def test_a_home_computes_no_more_than_its_part_of_the_budget():
    driver = _driver(max_num_batched_tokens=24, max_num_seqs=4)
    driver.add(make_request("a", 40, max_tokens=2, ignore_eos=True))
    driver.add(make_request("b", [7] * 30, max_tokens=2, ignore_eos=True))
    driver.add(make_request("c", [9] * 5, max_tokens=2, ignore_eos=True))
    plan = driver.schedule()
    assert _tokens_by_home(driver, plan) == [12, 12]
    assert _homes(driver) == {"a": 0, "b": 1}  # no home has tokens left for c
    driver.commit(plan, driver.worker.execute(plan))
    driver.run()
    driver.check_outputs()


def test_a_cached_prefix_decides_where_a_sequence_is_admitted():
    driver = _driver()
    prompt = list(range(16))
    driver.add(make_request("first", [*prompt, 20], max_tokens=1, ignore_eos=True))
    driver.run()
    driver.add(make_request("hit", [*prompt, 21], max_tokens=8, ignore_eos=True))
    driver.step()
    assert _homes(driver) == {"hit": 0}
    assert driver.scheduler.prefix_cache_hits == 16
    driver.add(make_request("other", [30] * 9, max_tokens=2, ignore_eos=True))
    driver.step()
    assert _homes(driver) == {"hit": 0, "other": 1}
    driver.add(make_request("busy", [31] * 13, max_tokens=2, ignore_eos=True, arrival=-1.0))
    driver.add(make_request("again", [*prompt, 22], max_tokens=8, ignore_eos=True))
    driver.step()
    assert _homes(driver)["again"] == 0, "16 cached tokens outweigh the 13 tokens that home has in the step"
    driver.run()
    driver.check_outputs()


def test_sequences_with_a_common_prefix_are_spread_over_all_homes():
    driver = _driver(num_homes=4, num_kv_blocks=400, max_num_batched_tokens=256, max_num_seqs=40, max_model_len=100)
    for number in range(40):
        driver.add(make_request(f"r{number}", [*range(60), 100 + number], max_tokens=30, ignore_eos=True))
        driver.step()
        if number == 2:
            assert set(_homes(driver).values()) == {0, 1}, "the second one takes the cached prefix"
    counts = [list(_homes(driver).values()).count(home) for home in range(4)]
    assert max(counts) - min(counts) <= 4, counts
    driver.run()
    driver.check_outputs()


def test_a_prefix_is_cached_at_both_homes_if_both_have_computed_it():
    driver = _driver(num_kv_blocks=20)
    driver.scheduler.kv.index.changes = []
    prompt = list(range(16))
    for name in "ab":  # together in one step, when neither is cached
        driver.add(make_request(name, [*prompt, ord(name)], max_tokens=2, ignore_eos=True))
    driver.run()
    index = driver.scheduler.kv.index
    entries = [entry for _, _, entry in index.iter_entries() if entry.content.token_ids[0] < 16]
    assert sorted(entry.place for entry in entries) == [0] * 4 + [1] * 4
    assert len(index.changes) == 4, "a content is published once, with the first home that has it"
    for entry in entries:
        index.drop(entry.block_id)
    assert [is_published for _, is_published in index.changes] == [True] * 4 + [False] * 4


def test_only_sequences_of_the_same_home_are_preempted():
    driver = _driver(num_kv_blocks=8, max_model_len=17, max_num_seqs=4)
    for name in "abc":
        driver.add(make_request(name, [ord(name)] * 4, max_tokens=12, ignore_eos=True))
    driver.step()
    assert _homes(driver) == {"a": 0, "b": 1, "c": 0}
    preempted = set()
    while driver.scheduler.has_unfinished:
        driver.step()
        preempted |= {str(s.request.request_id) for s in driver.scheduler.iter_sequences() if s.num_preemptions > 0}
    assert preempted == {"c"}
    driver.check_outputs()


def test_a_sequence_must_fit_in_one_home():
    config = make_config(num_homes=2, num_kv_blocks=8, max_model_len=64)
    with pytest.raises(RequestError, match=r"the KV pool of each of 2 homes holds 16 tokens \(4 blocks of 4\)"):
        check_servable(make_request("a", 17), config)
    check_servable(make_request("a", 16, max_tokens=1), config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_homes": 0}, "num_homes must be an integer >= 1, got 0"),
        ({"num_homes": 3}, "num_kv_blocks must be a multiple of 3 here, got 32"),
        ({"num_homes": 2, "num_host_pages": 4}, "num_host_pages must be 0"),
        ({"num_homes": 2, "num_block_places": 2}, "num_block_places must be 1 with num_homes, got 2"),
        (
            {"num_homes": 2, "computes_whole_prompts": True, "enable_prefix_caching": False},
            "computes_whole_prompts must be False",
        ),
    ],
)
def test_what_homes_do_not_have_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**options)
