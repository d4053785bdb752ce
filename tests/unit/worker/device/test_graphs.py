"""Which decode steps are recorded, when, and for how many sequences; without a GPU a list stands for its graphs."""

import logging

import pytest

from quire.worker.device.graphs import GraphGrid, GraphKey, StepGraphs


class Recorder:
    """Records what a step appends to a log, and appends it again."""

    def __init__(self, log):
        self.log = log
        self.num_recorded = 0

    def record(self, step):
        before = len(self.log)
        step()
        launched = self.log[before:]
        del self.log[before:]  # recording runs nothing
        self.num_recorded += 1
        return lambda: self.log.extend(launched)


KEY = GraphKey(4, 1024, "plain")


def test_a_step_runs_once_and_is_recorded_after_that_when_its_kind_is_new():
    log = []
    recorder = Recorder(log)
    graphs = StepGraphs(recorder)
    for _ in range(3):
        graphs.run(KEY, lambda: log.append("step"))
    assert log == ["step"] * 3
    assert recorder.num_recorded == graphs.num_recorded == 1
    graphs.run(GraphKey(8, 1024, "plain"), lambda: log.append("other"))
    assert log[3:] == ["other"]
    assert graphs.num_recorded == 2


def test_every_step_is_launched_one_by_one_when_there_is_no_recorder():
    log = []
    graphs = StepGraphs()
    for number in range(3):
        graphs.run(KEY, lambda number=number: log.append(number))
    assert log == [0, 1, 2]
    assert graphs.num_recorded == 0


def test_steps_go_on_one_by_one_when_recording_fails(caplog):
    class Broken:
        def record(self, step):
            raise RuntimeError("operation not permitted when stream is capturing")

    log = []
    graphs = StepGraphs(Broken())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            graphs.run(KEY, lambda: log.append("step"))
    assert log == ["step"] * 3
    assert sum("cannot be recorded" in record.message for record in caplog.records) == 1


def test_what_was_recorded_is_forgotten_when_it_is_cleared():
    log = []
    recorder = Recorder(log)
    graphs = StepGraphs(recorder)
    graphs.run(KEY, lambda: log.append("old"))
    graphs.clear()
    graphs.run(KEY, lambda: log.append("new"))
    graphs.run(KEY, lambda: log.append("never"))
    assert log == ["old", "new", "new"]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 100, 128, 300, 4000])
def test_the_grid_holds_every_step_with_little_padding(max_num_seqs):
    grid = GraphGrid(max_num_seqs, 40960)
    assert grid.max_rows == min(max_num_seqs, 512)
    for count in range(1, grid.max_rows + 1):
        key = grid.key(count, 77, "cuts")
        assert count <= key.num_rows <= min(2 * count, grid.max_rows)
        assert key.max_context_len == 1024
    assert len({grid.key(1, length, "plain") for length in range(1, 40961)}) == 4
    assert all(grid.key(1, length, "plain").max_context_len >= length for length in range(1, 40961))
    assert grid.largest == GraphKey(grid.max_rows, 40960, "cuts")


def test_one_length_is_enough_when_the_longest_sequence_is_short():
    assert GraphGrid(8, 96).key(3, 96, "none") == GraphKey(4, 96, "none")
