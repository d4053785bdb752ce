"""check_invariants must see the faults that it is for: each test breaks one thing by hand."""

import pytest
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import InvariantError
from quire.base.ids import BlockId
from quire.engine.scheduling import check_invariants
from quire.engine.scheduling.sequence import SequenceStatus


@pytest.fixture
def scheduler():
    driver = Driver(make_config(block_size=4, max_num_seqs=2))
    for name in range(3):
        driver.add(make_request(name, 9, seed=name, n=2, max_tokens=20))
    driver.step()
    driver.step()
    check_invariants(driver.scheduler)
    return driver.scheduler


def first(scheduler):
    return scheduler.running.first


def break_reference_count(scheduler):
    scheduler.kv.pool.share([first(scheduler).block_ids[0]])


def break_block_table(scheduler):
    first(scheduler).block_ids.append(first(scheduler).block_ids[0])


def break_free_block(scheduler):
    first(scheduler).block_ids.append(next(scheduler.kv.pool.iter_free()))


def break_coverage(scheduler):
    scheduler.kv.pool.free(first(scheduler).block_ids[1:])
    del first(scheduler).block_ids[1:]


def break_computed(scheduler):
    first(scheduler).num_computed_tokens = first(scheduler).num_tokens


def break_tokens(scheduler):
    first(scheduler).token_ids[1] += 1


def break_content(scheduler):
    content = first(scheduler).block_contents[0]
    first(scheduler).block_contents[0] = type(content)(content.key, content.root, (9, 9, 9, 9))


def break_entry(scheduler):
    _, _, entry = next(scheduler.kv.index.iter_entries())
    entry.content = type(entry.content)(entry.content.key, entry.content.root, (9, 9, 9, 9))


def break_entry_block(scheduler):
    _, _, entry = next(scheduler.kv.index.iter_entries())
    entry.block_id = BlockId(entry.block_id + 1)


def break_running_queue(scheduler):
    first(scheduler).status = SequenceStatus.WAITING


def break_waiting_queue(scheduler):
    scheduler.waiting.remove(scheduler.waiting.first)


def break_order(scheduler):
    scheduler.running.first.order_key, scheduler.running.last.order_key = (
        scheduler.running.last.order_key,
        scheduler.running.first.order_key,
    )


def break_row(scheduler):
    scheduler.waiting.first.is_known = True


def break_status(scheduler):
    scheduler.waiting.first.status = SequenceStatus.FINISHED


def break_links(scheduler):
    block = scheduler.kv.pool.blocks[next(scheduler.kv.pool.iter_free())]
    block.next.prev = block.prev


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("break_something", BREAKS, ids=lambda function: function.__name__)
def test_invariants_are_found_broken(scheduler, break_something):
    break_something(scheduler)
    with pytest.raises(InvariantError):
        check_invariants(scheduler)
