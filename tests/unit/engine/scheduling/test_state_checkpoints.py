"""Where the scheduler keeps recurrent states, and which sequences start from them."""

from reference_model import make_config, make_request
from scheduling_fakes import Driver


def driver_of(**options):
    return Driver(make_config(**{"num_state_checkpoints": 8, "max_num_drafts": 0, **options}))


def saves_of(driver, first=0):
    return [
        [position for position, _ in saves]
        for plan in driver.worker.plans[first:]
        for saves in (plan.state_saves or {}).values()
    ]


def starts_of(driver, first=0):
    return [(start.num_computed_tokens, start.state_slot) for plan in driver.worker.plans[first:] for start in plan.starts]


def test_equal_prompt_starts_from_the_last_border():
    driver = driver_of()
    driver.add(make_request("a", 10, max_tokens=1))
    driver.run()
    assert saves_of(driver) == [[8]]
    first = len(driver.worker.plans)
    driver.add(make_request("b", 10, max_tokens=1))
    driver.run()
    ((num_computed, slot),) = starts_of(driver, first)
    assert num_computed == 8
    assert slot is not None


def test_next_turn_starts_from_the_last_border_of_the_output():
    driver = driver_of()
    driver.add(make_request("a", 10, max_tokens=12))
    driver.run()
    assert saves_of(driver) == [[8], [12], [16], [20]]
    assert driver.scheduler.kv.states.num_cached == 2  # the prompt's, and the last of the output
    tokens = [*range(100, 110), *driver.outputs["a", 0].tokens]
    first = len(driver.worker.plans)
    driver.add(make_request("b", tokens, max_tokens=1))
    driver.run()
    assert [num_computed for num_computed, _ in starts_of(driver, first)] == [20]


def test_shared_prefix_gets_a_checkpoint_when_it_is_found_a_second_time():
    driver = driver_of()
    computed = []
    for name, tail in (("a", 1), ("b", 2), ("c", 3)):
        first = len(driver.worker.plans)
        driver.add(make_request(name, [*range(12), *[tail] * 9], max_tokens=1))
        driver.run()
        computed += [num_computed for num_computed, _ in starts_of(driver, first)]
    assert computed == [0, 0, 12]


def test_choices_are_forked_from_the_state_before_the_last_prompt_token():
    driver = driver_of(enable_prefix_caching=False)
    driver.add(make_request("a", 10, n=3, max_tokens=5))
    driver.run()
    assert saves_of(driver) == [[9]]
    assert [num_computed for num_computed, _ in starts_of(driver)] == [0, 9, 9]


def test_choices_wait_when_no_checkpoint_is_free():
    driver = driver_of(num_state_checkpoints=0)
    driver.add(make_request("a", 10, n=3, max_tokens=5))
    driver.run()
    assert [num_computed for num_computed, _ in starts_of(driver)] == [0, 0, 0]


def test_least_recently_used_checkpoint_makes_room():
    driver = driver_of(num_state_checkpoints=2)
    for base in (100, 200, 100, 300, 100, 200):
        driver.add(make_request(f"{base}-{len(driver.worker.plans)}", range(base, base + 10), max_tokens=1))
        driver.run()
    assert [num_computed for num_computed, _ in starts_of(driver)] == [0, 0, 8, 0, 8, 0]


def test_preempted_sequence_goes_on_from_its_last_checkpoint():
    driver = driver_of(num_kv_blocks=9)
    for name in "ab":
        driver.add(make_request(name, range(ord(name), ord(name) + 10), max_tokens=16))
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    resumed = starts_of(driver)[2:]
    assert resumed
    assert all(num_computed > 0 for num_computed, _ in resumed)
