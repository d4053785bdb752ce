import pytest
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import InvariantError
from quire.engine.scheduling.admission import order_key
from quire.engine.scheduling.sequence_queue import SequenceQueue


def request(priority=0, arrival=0.0):
    return make_request("r", 3, priority=priority, arrival=arrival)


def test_fcfs_orders_by_arrival_time_then_arrival_then_choice():
    keys = [
        order_key("fcfs", request(priority=9, arrival=1.0), 5, 0),
        order_key("fcfs", request(priority=0, arrival=2.0), 1, 0),
        order_key("fcfs", request(priority=-9, arrival=2.0), 2, 0),
        order_key("fcfs", request(priority=-9, arrival=2.0), 2, 1),
    ]
    assert keys == sorted(keys)


def test_priority_orders_by_value_first():
    keys = [
        order_key("priority", request(priority=-1, arrival=2.0), 2, 0),
        order_key("priority", request(priority=0, arrival=1.0), 1, 0),
        order_key("priority", request(priority=0, arrival=1.0), 3, 0),
        order_key("priority", request(priority=1, arrival=0.0), 0, 0),
    ]
    assert keys == sorted(keys)


def test_queue_keeps_order_when_added_in_any_order():
    driver = Driver(make_config(policy="priority"))
    for name, priority in enumerate((3, 1, 2, 1)):
        driver.add(make_request(name, 3, priority=priority))
    queue = SequenceQueue()
    sequences = list(driver.scheduler.iter_sequences())
    for sequence in sequences:
        queue.add(sequence)
    assert [s.request.request_id for s in queue] == ["1", "3", "2", "0"]
    queue.remove(queue.first)
    assert (queue.first.request.request_id, queue.last.request.request_id, len(queue)) == ("3", "0", 3)


def test_queue_raises_when_the_sequence_is_not_in_it():
    driver = Driver(make_config())
    driver.add(make_request(0, 3))
    with pytest.raises(InvariantError, match="sequence 0"):
        SequenceQueue().remove(driver.scheduler.waiting.first)


def test_admission_follows_priority_and_never_preempts():
    driver = Driver(make_config(policy="priority", max_num_seqs=1))
    driver.add(make_request("running", 3, priority=5, max_tokens=4))
    driver.step()
    driver.add(make_request("low", 3, priority=2, max_tokens=1))
    driver.add(make_request("high", 3, priority=1, max_tokens=1))
    order = []
    while (plan := driver.step()) is not None:
        order += [start.request.request_id for start in plan.starts]
    assert order == ["high", "low"]
    assert driver.scheduler.num_preemptions == 0
