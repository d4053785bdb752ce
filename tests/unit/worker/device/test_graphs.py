"""Which decode steps are captured, when, and for how many sequences; without a GPU a list stands for its graphs."""

import contextlib
import logging
from collections import Counter
from weakref import WeakSet

import pytest
import torch

from quire.kernels.native import load_native
from quire.parallel.communicator import all_agree
from quire.worker.device.graphs import CaptureSizes, CudaGraphCapturer, GraphKey, PromptCaptureSizes, PromptKey, StepGraphs
from tests.ranks import SharedGroup, run_threads


class Capturer:
    """Captures what a step appends to a log, and appends it again."""

    def __init__(self, log):
        self.log = log
        self.num_captured = 0

    def capture(self, step):
        before = len(self.log)
        step()
        launched = self.log[before:]
        del self.log[before:]  # capturing runs nothing
        self.num_captured += 1
        return lambda: self.log.extend(launched)


KEY = GraphKey(4, "plain")
DEVICE = torch.device("cuda", 0)


def test_a_step_runs_once_and_is_captured_after_that_when_its_kind_is_new():
    log = []
    capturer = Capturer(log)
    graphs = StepGraphs(capturer)
    for _ in range(3):
        graphs.run(KEY, lambda: log.append("step"))
    assert log == ["step"] * 3
    assert capturer.num_captured == graphs.num_captured == 1
    graphs.run(GraphKey(8, "plain"), lambda: log.append("other"))
    assert log[3:] == ["other"]
    assert graphs.num_captured == 2


def test_every_step_is_launched_one_by_one_when_there_is_no_capturer():
    log = []
    graphs = StepGraphs()
    for number in range(3):
        graphs.run(KEY, lambda number=number: log.append(number))
    assert log == [0, 1, 2]
    assert graphs.num_captured == 0


class Broken:
    """Fails to capture what a step appends to a log, but for steps of two lines."""

    def __init__(self, log, error):
        self.log, self.error, self.num_tried = log, error, 0

    def capture(self, step):
        before = len(self.log)
        self.num_tried += 1
        step()
        launched = self.log[before:]
        del self.log[before:]
        if len(launched) == 1:
            raise self.error
        return lambda: self.log.extend(launched)


EXHAUSTED = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: out of memory"),  # of the driver, which makes the graph
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", EXHAUSTED, ids=lambda error: type(error).__name__)
def test_steps_of_a_kind_go_on_one_by_one_when_there_is_no_memory_to_capture_them(caplog, error):
    log = []
    capturer = Broken(log, error)
    graphs = StepGraphs(capturer)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            graphs.run(KEY, lambda: log.append("step"))
            graphs.run(GraphKey(2, "cuts"), lambda: log.extend("ab"))
    assert log == ["step", "a", "b"] * 3
    assert (capturer.num_tried, graphs.num_captured) == (2, 1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "steps of 4 sequences" in message
    assert "lower gpu_memory_utilization" in message


def test_steps_of_a_kind_go_on_one_by_one_when_they_cannot_be_captured_and_the_log_says_why_once(caplog):
    log = []
    capturer = Broken(log, RuntimeError("operation not permitted when stream is capturing"))
    graphs = StepGraphs(capturer)
    for _ in range(3):
        graphs.run(KEY, lambda: log.append("step"))
    assert log == ["step"] * 3
    assert (capturer.num_tried, graphs.num_captured) == (1, 0)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info[1] is capturer.error


class Unlaunchable(Capturer):
    """What it captures cannot be launched the first times: nothing runs then."""

    def __init__(self, log, error, num_times):
        super().__init__(log)
        self.error, self.num_times = error, num_times

    def capture(self, step):
        replay = super().capture(step)

        def launch():
            if self.num_times:
                self.num_times -= 1
                raise self.error
            replay()

        return launch


@pytest.mark.parametrize("error", EXHAUSTED, ids=lambda error: type(error).__name__)
def test_every_step_runs_once_when_memory_ends_as_its_graph_is_launched_first(caplog, error):
    log = []
    capturer = Unlaunchable(log, error, 1)
    graphs = StepGraphs(capturer)
    for name in "abc":
        graphs.run(KEY, lambda name=name: log.append(name))
    for _ in range(2):
        graphs.run(GraphKey(2, "cuts"), lambda: log.append("other"))
    assert log == [*"abc", "other", "other"]
    assert (capturer.num_captured, graphs.num_captured) == (2, 1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "steps of 4 sequences" in message


def test_what_else_goes_wrong_when_a_graph_is_launched_is_raised():
    graphs = StepGraphs(Unlaunchable([], RuntimeError("an illegal memory access was encountered"), 2))
    graphs.run(KEY, lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal"):
            graphs.run(KEY, lambda: None)
    assert graphs.num_captured == 1


def test_what_a_step_raises_itself_is_raised_and_it_is_captured_when_it_runs():
    graphs = StepGraphs(Capturer([]))

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(KEY, fail)
    assert graphs.num_captured == 0
    graphs.run(KEY, lambda: None)
    assert graphs.num_captured == 1


def test_further_graphs_of_a_step_are_launched_and_stay_until_all_are_cleared():
    log, kept = [], WeakSet()

    class Kept(Capturer):
        def capture(self, step):
            replay = super().capture(step)
            kept.add(replay)
            return replay

    graphs = StepGraphs(Kept(log))
    graphs.run(KEY, lambda: log.append("step"))
    graphs.capture_more(KEY, lambda: log.append("step"), 3)
    assert log == ["step"] * 4
    assert len(kept) == 4
    assert graphs.num_captured == 1
    graphs.clear()
    assert len(kept) == 0
    for uncaptured in (graphs, StepGraphs()):
        uncaptured.capture_more(KEY, lambda: log.append("never"), 3)
    assert log == ["step"] * 4


def test_rows_of_a_step_are_sent_on_before_ranks_agree_on_its_graph():
    log = []

    @contextlib.contextmanager
    def exchange():
        log.append("receive")
        yield
        log.append("send")

    def agree(says_yes):
        log.append("agree")
        return says_yes

    graphs = StepGraphs(Capturer(log), agree)
    for _ in range(2):
        graphs.run(KEY, lambda: log.append("step"), exchange())
    assert log == ["receive", "step", "send", "agree", "receive", "step", "send"]


def test_what_was_captured_is_forgotten_when_it_is_cleared():
    log = []
    capturer = Capturer(log)
    graphs = StepGraphs(capturer)
    graphs.run(KEY, lambda: log.append("old"))
    graphs.clear()
    graphs.run(KEY, lambda: log.append("new"))
    graphs.run(KEY, lambda: log.append("never"))
    assert log == ["old", "new", "new"]


class Cuda:
    """What captures ask of torch.cuda, with the allocator's rule: a pool whose last graph has gone is never used again."""

    def __init__(self):
        self.pools = Counter()
        self.used = []
        self.num_emptied = 0
        self.failing = ""

    def empty_cache(self):
        self.num_emptied += 1

    def graph_pool_handle(self):
        return (0, len(self.used) + 1)

    def graph(self):
        owner = self

        class Graph:
            pool = None

            def capture_begin(self, pool, capture_error_mode):
                assert pool not in owner.pools or owner.pools[pool] > 0
                owner.pools[pool] += 1
                owner.used.append(pool)
                self.pool = pool
                if owner.failing == "capture_begin":
                    raise RuntimeError("operation not permitted when stream is capturing")

            def capture_end(self):
                if owner.failing == "capture_end":
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self):
                pass

            def __del__(self):
                owner.pools[self.pool] -= 1

        return Graph()


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", found.graph_pool_handle)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.graph)
    monkeypatch.setattr(torch.cuda, "empty_cache", found.empty_cache)
    return found


def test_graphs_share_a_pool_until_all_of_them_have_gone_and_those_after_them_another(cuda):
    graphs = StepGraphs(CudaGraphCapturer(DEVICE))
    for _ in range(2):
        for count in (8, 4, 1):
            graphs.run(GraphKey(count, "plain"), lambda: None)
        graphs.clear()
    first, second = cuda.used[0], cuda.used[3]
    assert first != second
    assert cuda.used == [first] * 3 + [second] * 3


def test_a_step_is_captured_once_more_when_the_allocator_has_given_back_what_it_kept(cuda):
    def fail():
        if cuda.used and not cuda.num_emptied:
            raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = StepGraphs(CudaGraphCapturer(DEVICE))
    graphs.run(GraphKey(8, "plain"), fail)
    assert (graphs.num_captured, cuda.num_emptied, len(cuda.used)) == (1, 2, 2)  # once for the pool of the graph that went


def test_a_capture_goes_on_when_the_one_before_it_has_ended_in_an_error(cuda):
    def fail():
        if cuda.used:
            raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = StepGraphs(CudaGraphCapturer(DEVICE))
    graphs.run(GraphKey(8, "plain"), fail)
    graphs.run(GraphKey(4, "plain"), lambda: None)
    assert graphs.num_captured == 1
    assert len(set(cuda.used)) == len(cuda.used) == 3  # the first was tried twice


@pytest.mark.parametrize("failing", ["capture_begin", "step", "capture_end"])
def test_the_allocator_is_told_of_the_end_when_a_capture_fails(cuda, monkeypatch, failing):
    ended = []

    def end(device_index, pool):
        ended.append((device_index, pool))
        raise RuntimeError("not currently capturing to mempool_id")  # where torch has told it already

    def step():
        if cuda.used and failing == "step":
            raise RuntimeError("operation not permitted when stream is capturing")

    cuda.failing = failing
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    graphs = StepGraphs(CudaGraphCapturer(torch.device("cuda", 3)))
    graphs.run(KEY, step)
    assert ended == [(3, cuda.used[0])]
    assert graphs.num_captured == 0


@pytest.mark.parametrize("max_num_seqs", [1, 3, 100, 128, 300, 4000])
def test_the_grid_holds_every_step_with_little_padding(max_num_seqs):
    grid = CaptureSizes(max_num_seqs)
    assert grid.max_rows == min(max_num_seqs, 512)
    for count in range(1, grid.max_rows + 1):
        key = grid.key(count, "cuts")
        assert count <= key.num_rows <= min(2 * count, grid.max_rows)
        assert key in grid.keys
    assert grid.keys[0] == GraphKey(grid.max_rows, "cuts")
    assert len(grid.keys) == len(set(grid.keys)) <= 30


def test_the_grid_holds_every_division_of_a_step_among_homes():
    grid = CaptureSizes(100, ("plain",), num_homes=4)
    assert len(grid.keys) == len(set(grid.keys)) <= 30
    for count in range(1, 101):
        for most in range(-(-count // 4), count + 1):
            key = grid.key(count, "plain", most)
            assert most <= key.home_rows <= key.num_rows
            assert key in grid.keys
    assert grid.key(64, "plain", 16).home_rows == 16
    assert grid.key(64, "plain", 17).home_rows == 32


@pytest.mark.one_in(2)
@pytest.mark.parametrize("max_tokens", [1, 40, 64, 100, 512, 2048, 6000, 8192])
def test_the_grid_of_steps_with_prompts_holds_those_up_to_its_end_with_little_padding(max_tokens):
    grid = PromptCaptureSizes(max_tokens, (100, 3000))
    for count in range(1, max_tokens + 1):
        key = grid.key(count, 100, "single")
        assert key in grid.keys
        assert (key.max_context_len, key.short_runs) == (100, "single")
        assert count <= key.num_tokens <= max(min(64, max_tokens), 2 * count if count < 256 else 1.25 * count)
    assert grid.key(1, 101, "any").max_context_len == 3000
    assert grid.key(max_tokens + 1, 100, "none") is None
    assert grid.key(1, 3001, "none") is None
    assert grid.keys[0] == PromptKey(max_tokens, 3000, "any")
    assert len(grid.keys) == len(set(grid.keys)) <= 140


def test_no_step_with_prompts_is_captured_where_none_is_to_be():
    grid = PromptCaptureSizes(0, (100,))
    assert grid.keys == []
    assert grid.key(1, 1, "any") is None


def test_small_steps_and_trees_have_kinds_of_their_own_where_drafts_are_expected():
    plain, chains, trees = (PromptCaptureSizes(128, [96], *has) for has in ((), (True,), (True, True)))
    assert plain.key(5, 90, "any") == PromptKey(64, 96, "any")
    assert chains.key(5, 90, "any") == PromptKey(8, 96, "any")
    assert chains.key(5, 90, "any", has_trees=True) is None  # launched one by one
    assert trees.key(5, 90, "none", has_trees=True) == PromptKey(8, 96, "any", True)
    assert trees.keys[0] == PromptKey(128, 96, "any", True)
    assert len(trees.keys) == len(set(trees.keys)) == len(chains.keys) * 4 // 3


@pytest.mark.skipif(load_native() is None, reason="ranks agree in shared memory, which needs the native extension")
@pytest.mark.parametrize("failing", [None, 0, 1])
def test_one_rank_that_cannot_capture_makes_all_launch_one_by_one(failing, caplog):
    group = SharedGroup(2)
    error = RuntimeError("operation not permitted when stream is capturing")

    def rank_of(rank):
        log = []
        capturer = Broken(log, error) if rank == failing else Capturer(log)
        communicator = group.communicator(rank)
        graphs = StepGraphs(capturer, lambda says_yes: all_agree(communicator, says_yes))
        for _ in range(3):
            graphs.run(KEY, lambda: log.append("step"))
        return log, graphs.num_captured

    found = run_threads(2, rank_of)
    assert [log for log, _ in found] == [["step"] * 3] * 2
    assert [num_captured for _, num_captured in found] == [1 if failing is None else 0] * 2
    assert ("another rank cannot capture" in caplog.text) == (failing is not None)


def test_a_graph_that_cannot_be_launched_ends_the_step_when_other_ranks_may_have_launched_theirs():
    graphs = StepGraphs(Unlaunchable([], torch.OutOfMemoryError("CUDA out of memory"), 2), lambda says_yes: says_yes)
    graphs.run(KEY, lambda: None)  # which captures it
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(KEY, lambda: None)
