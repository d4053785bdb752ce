"""Keys on several GPU ranks, and prompts divided among ranks, interpreted, over gloo: the bits of one rank."""

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from quire import LLM, SamplingParams
from quire.contracts import memory as contracts_memory
from quire.contracts.expert_options import LossyRouting
from quire.contracts.kv_spec import KvSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.triton import attention
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.model import device_context, device_rows
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_rows import RowRanks, divide_runs
from quire.parallel.communicator import CountingCommunicator
from quire.worker import context_parallel, parallel_launch
from quire.worker import memory as worker_memory
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import HostStep
from quire.worker.device.launched_step import Kept, StepSizes
from tests.device_ranks import DeviceRankThreads, gloo_communicators, one_launch_at_a_time
from tests.ranks import run_threads
from tests.thread_workers import ThreadWorkers
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.test_recorded_prompts import LogRecorder, Operations
from tests.unit.kernels.gpu.test_tensor_parallel_decoder import parameters_of, spec_of
from tests.unit.kernels.gpu.test_tensor_parallel_engine import COMMON, OPTIONS, outputs_of, tokens_of
from tests.unit.speculate.proposers import PROPOSERS, install

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="several ranks on one machine are interpreted, over gloo"),
    pytest.mark.usefixtures("few_programs"),
]

BLOCK, CHUNK, BLOCKS_PER_RANK = 8, 32, 20
FIRSTS = (1, 0)  # the ranks of the sequences' first chunks
RUNS = [(33, 2), (1, 1)]  # new tokens of both sequences in each step
MORE_RUNS = [(40, 3), (1, 29), (26, 2)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    one_launch_at_a_time(monkeypatch)
    monkeypatch.setattr(attention, "CHUNK", CHUNK)
    monkeypatch.setattr(device_context, "CHUNK", CHUNK)


def tables_of(size, firsts=FIRSTS):
    """Return block tables whose chunks are on the ranks in turn."""
    taken, tables = [0] * size, torch.zeros(len(firsts), 96 // BLOCK, dtype=torch.int64)
    for sequence, first in enumerate(firsts):
        for index in range(tables.shape[1]):
            rank = (first + index * BLOCK // CHUNK) % size
            tables[sequence, index] = rank * BLOCKS_PER_RANK + taken[rank]
            taken[rank] += 1
    return tables


def logits_of(decoder, pool, device, size, all_runs=MORE_RUNS):
    """Return the logits of prompts in chunks, with and beside sequences that have few tokens."""
    tables, lengths, found = tables_of(size), [0, 0], []
    for counts in all_runs:
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        runs = [torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
        slots = [table[run // BLOCK] * BLOCK + run % BLOCK for table, run in zip(tables, runs, strict=True)]
        positions = torch.cat(runs)
        step = AttentionMetadata(torch.cat(slots), [0, counts[0], sum(counts)], lengths, tables)
        ids = (positions * 7 + torch.arange(len(positions)) * 3) % 61
        step = DeviceAttentionMetadata.of(step, device)
        found.append(decoder.logits(decoder.forward(ids.to(device), positions.to(device), step, pool)))
    return found


def on_one(spec, device, size, dtype, is_in_order, all_runs=MORE_RUNS):
    decoder = DeviceDecoder(spec, parameters_of(spec), 128, device, None, is_in_order)
    pool = DeviceKvPool(KvSpec.on_device(spec, BLOCK, dtype), size * BLOCKS_PER_RANK, device)
    return logits_of(decoder, pool, device, size, all_runs)


def check(expected, found, is_in_order):
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) if is_in_order else torch.allclose(a, b, atol=3e-5, rtol=3e-5)


def short(name):
    """Return a model of one layer, or of two, the first of which has a window."""
    spec = spec_of(name)
    return replace(spec, layers=spec.layers[: 2 if name in ("gemma", "gpt-oss") else 1])


# Recorded decode steps

RECORDING = threading.local()
LINES = (1, 0, 1)  # the ranks of the first chunks of three sequences
SIZES = StepSizes(4, 40, 96)
FEW_STEPS = [{0: 1, 1: 1}] * 2
# Contexts grow past the ends of chunks; there are ranks without a key of a sequence, padding, and sequences that end and begin.
STEPS = [
    *FEW_STEPS,
    {0: 1, 1: 1, 2: 1},
    {2: 1, 0: 1, 1: 1},
    {1: None},
    {1: 2, 0: 1},
    {1: 1},
    {2: 1, 1: 1},
    {1: 1},
]


class RankRecorder(LogRecorder):
    """Records what one thread does."""

    def log_of(self, step):
        RECORDING.log = []
        with Operations(RECORDING.log):
            step()
        return vars(RECORDING).pop("log")


def noted(run, *arguments):
    """Do something that no operation of torch does, and note it."""
    if (log := getattr(RECORDING, "log", None)) is not None:
        log.append(partial(run, *arguments))
    with _disable_current_modes():
        run(*arguments)


def fill_caches(pool, pools):
    """Have keys and values of earlier tokens, the same on one rank and on several."""
    generator = torch.Generator().manual_seed(2)
    for layer, cache in enumerate(pool.caches):
        for number, part in enumerate(cache):
            if part is not None:
                values = torch.rand(part.shape, generator=generator) * (0.02 if number > 1 else 1)
                part.copy_(values * 127 if part.dtype == torch.int8 else values)
                for rank, own in enumerate(pools):
                    own.caches[layer][number][:BLOCKS_PER_RANK] = part[rank * BLOCKS_PER_RANK :][:BLOCKS_PER_RANK]


def decoded(stepper, size, steps):
    """Return the logits of steps, each as new tokens of sequences; None: the sequence ends."""
    tables, lengths, found = tables_of(size, LINES).numpy(), [31, 3, 63], []
    changes = BlockTableUpdates([(line, 0, tuple(table.tolist())) for line, table in enumerate(tables)])
    with torch.inference_mode():
        for runs in steps:
            if None in runs.values():
                lengths = [0 if line in runs else length for line, length in enumerate(lengths)]
                continue
            positions = [np.arange(lengths[line], lengths[line] + count) for line, count in runs.items()]
            slots = [tables[line, own // BLOCK] * BLOCK + own % BLOCK for line, own in zip(runs, positions, strict=True)]
            for line, count in runs.items():
                lengths[line] += count
            ends, lines = np.array([lengths[line] for line in runs], np.int32), np.array(list(runs), np.int32)
            ids, counts = (np.concatenate(positions) * 7 + 3) % 61, tuple(runs.values())
            of_tokens = ids, np.concatenate(positions), np.concatenate(slots), np.cumsum(counts) - 1
            step = HostStep(counts, lines, ends, *of_tokens, lines, ends.astype(np.int64))
            launched = stepper.launch(step, "plain", changes, Kept(logits=True))
            stepper.read_sampled(launched)
            found.append(launched.logits[: len(runs)].clone())
            changes = BlockTableUpdates([])
    return found


@pytest.mark.parametrize(
    ("name", "size", "dtype", "is_in_order", "steps"),
    [
        ("qwen3", 2, "float32", True, FEW_STEPS),
        *(
            pytest.param(*case, STEPS, marks=pytest.mark.slow)
            for case in (("qwen3", 3, "int8", False), ("latent", 2, "fp8", False), ("gpt-oss", 2, "float32", True),
                         ("gemma", 3, "float32", False))
        ),
    ],
)  # fmt: skip
def test_recorded_steps_give_the_logits_of_one_rank_when_ranks_share_the_tokens(
    name, size, dtype, is_in_order, steps, device, monkeypatch
):
    spec, run = short(name), Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: noted(run, launch))
    decoder = DeviceDecoder(spec, parameters_of(spec), 96, device, None, is_in_order)
    pool = DeviceKvPool(KvSpec.on_device(spec, BLOCK, dtype), size * BLOCKS_PER_RANK, device)
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), (1,) * size, 96, device, is_in_order, context_size=size)
    pools = ranks.pools(BLOCK, dtype, BLOCKS_PER_RANK + 1, device)
    fill_caches(pool, pools)
    expected = decoded(GpuStepExecutor(decoder, pool, SIZES, StepGraphs()), size, steps)
    recorders = [RankRecorder(monkeypatch) for _ in range(size)]
    for each in ranks.communicators:
        each.all_gather = partial(noted, each.all_gather)

    def act(decoder, rank):
        stepper = recorders[rank].stepper = GpuStepExecutor(decoder, pools[rank], SIZES, StepGraphs(recorders[rank]))
        return decoded(stepper, size, steps)

    for found in ranks.call(act):
        check(expected, found, is_in_order)
    num_decoded = sum(set(each.values()) == {1} for each in steps)
    num_kinds = len({1 << (len(each) - 1).bit_length() for each in steps if set(each.values()) == {1}})
    assert {(each.num_recorded, each.num_replayed) for each in recorders} == {(num_kinds, num_decoded - num_kinds)}
    ranks.close()


QUICK = ("qwen3", 2, "float32", True)
CASES = [("qwen3", 2, "fp8", True), ("latent", 2, "float32", True), ("gpt-oss", 3, "float32", False),
         ("gemma", 2, "float32", True), ("olmo", 3, "int8", False)]  # fmt: skip


def cases(*names):
    return [pytest.param(*case, MORE_RUNS, marks=pytest.mark.slow) for case in CASES if case[0] in names]


@pytest.mark.parametrize(
    ("name", "size", "dtype", "is_in_order", "all_runs"), cases("qwen3", "latent", "gpt-oss", "gemma", "olmo")
)
def test_logits_are_those_of_one_rank_when_ranks_share_the_tokens(name, size, dtype, is_in_order, all_runs, device):
    spec = short(name)
    expected = on_one(spec, device, size, dtype, is_in_order, all_runs)
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), (1,) * size, 128, device, is_in_order, context_size=size)
    pools = ranks.pools(BLOCK, dtype, BLOCKS_PER_RANK + 1, device)
    for found in ranks.call(lambda decoder, rank: logits_of(decoder, pools[rank], device, size, all_runs)):
        check(expected, found, is_in_order)
    ranks.close()


@pytest.mark.parametrize(("name", "size", "dtype", "is_in_order", "all_runs"), [(*QUICK, RUNS), *cases("latent", "olmo")])
def test_logits_are_those_of_one_rank_when_ranks_divide_prompts(name, size, dtype, is_in_order, all_runs, device, monkeypatch):
    monkeypatch.setattr(device_rows, "LEAST_DIVIDED_TOKENS", 26)
    spec = short(name)
    expected = on_one(spec, device, size, dtype, is_in_order, all_runs)
    communicators = [CountingCommunicator(each) for each in gloo_communicators(size)]

    def run(rank):
        rows = RowRanks(communicators[rank], rank)
        decoder = DeviceDecoder(spec, parameters_of(spec), 128, device, None, is_in_order, rows=rows)
        pool = DeviceKvPool(KvSpec.on_device(spec, BLOCK, dtype), size * BLOCKS_PER_RANK, device)
        return logits_of(decoder, pool, device, size, all_runs)

    for found in run_threads(size, run, timeout_s=300):
        check(expected, found, is_in_order)
    per_step = len(spec.layers) * (1 if name == "latent" else 2) * (2 if dtype == "int8" else 1) + 1
    num_divided = sum(max(counts) >= 26 for counts in all_runs)
    assert communicators[0].counts["all_gather"].num_calls == num_divided * per_step
    for each in communicators:
        each.close()


@pytest.mark.parametrize("lossy", [LossyRouting(), pytest.param(LossyRouting(min_share=0.6), marks=pytest.mark.slow)])
def test_the_tokens_of_experts_are_counted_once_when_ranks_share_the_tokens(lossy, device):
    spec = replace(spec_of("shared-experts"), layers=spec_of("shared-experts").layers[:1])

    def run(decoder, pool):
        decoder.watch_experts(lossy)
        return logits_of(decoder, pool, device, 2, RUNS), decoder.expert_counts()

    pool = DeviceKvPool(KvSpec.on_device(spec, BLOCK, "float32"), 2 * BLOCKS_PER_RANK, device)
    expected, counts = run(DeviceDecoder(spec, parameters_of(spec), 128, device, None, not lossy), pool)
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), (1, 1), 128, device, not lossy, context_size=2)
    pools = ranks.pools(BLOCK, "float32", BLOCKS_PER_RANK + 1, device)
    for found in ranks.call(lambda decoder, rank: run(decoder, pools[rank])):
        check(expected, found[0], not lossy)
        assert found[1] == counts
    ranks.close()


def test_runs_are_divided_evenly_and_every_token_once():
    for size in (2, 3, 8):
        counts = (1, 200, 7, 64, 300, 1, 30)
        pieces = divide_runs(counts, size)
        tokens = sorted((piece.sequence, token) for own in pieces for piece in own for token in range(*piece[1:]))
        assert tokens == [(sequence, token) for sequence, count in enumerate(counts) for token in range(count)]
        keys = [sum(piece.last**2 - piece.first**2 for piece in own if counts[piece.sequence] >= 64) for own in pieces]
        assert max(keys) <= 1.05 * sum(keys) / size
    assert divide_runs((63, 1), 2) is None


def test_prompts_from_some_length_on_give_all_ranks_the_same_work():
    for size, least in ((2, 64), (3, 74), (4, 114), (8, 274)):
        for count in range(least, least + 600):
            pieces = divide_runs((count,), size)
            tokens = [sum(piece.last - piece.first for piece in own) for own in pieces]
            pairs = [
                sum(piece.last * (piece.last + 1) - piece.first * (piece.first + 1) for piece in own) // 2 for own in pieces
            ]
            for context in (0, 1000):  # tokens before the run, which all its tokens attend to
                work = [one + context * other for one, other in zip(pairs, tokens, strict=True)]
                assert max(work) <= 1.05 * sum(work) / size
            assert max(tokens) <= 1.05 * count / size


# Engines

DCP, PCP = "decode_context_parallel_size", "prefill_context_parallel_size"


@pytest.fixture
def threads(monkeypatch):
    """Let workers be threads, and chunks small, also for the scheduler."""
    monkeypatch.setattr(parallel_launch, "spawn_workers", ThreadWorkers)
    for module in (contracts_memory, worker_memory, context_parallel):
        monkeypatch.setattr(module, "CONTEXT_CHUNK_TOKENS", CHUNK)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("context") / "qwen3", "qwen3", num_hidden_layers=1)


PROMPTS = [list(range(9, 55)), [5, 9, 31], [*range(9, 41), 7]]


def engine(folder, **options):
    defaults = {"deterministic": True, "num_kv_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 40}
    return LLM(str(folder), **(OPTIONS | defaults | options))


def params_of(max_tokens):
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, **COMMON)
    sampled = SamplingParams(temperature=0.9, logprobs=2, prompt_logprobs=1, max_tokens=max_tokens, **COMMON)
    return [greedy, sampled, greedy]


LAYOUTS = {
    "tokens-2": {"tensor_parallel_size": 2, DCP: 2},
    "tokens-3": {"tensor_parallel_size": 3, DCP: 3},
    "tokens-2-of-4": {"tensor_parallel_size": 4, DCP: 2},
    "rows-2": {PCP: 2},
    "rows-2-of-2": {PCP: 2, "tensor_parallel_size": 2},
}


@pytest.mark.slow
def test_outputs_are_those_of_one_rank_with_cached_prefixes_and_chunked_prompts(qwen, threads, monkeypatch):
    monkeypatch.setattr(device_rows, "LEAST_DIVIDED_TOKENS", 26)
    expected = None
    for layout in ({}, *LAYOUTS.values()):
        llm = engine(qwen, num_kv_blocks=24, **layout)
        found = outputs_of(llm, PROMPTS, params_of(3))
        assert llm.llm_engine.scheduler.prefix_cache_hits > 0
        ranks = llm.llm_engine.stats.ranks
        assert llm.llm_engine.report.memory.num_block_places == layout.get(DCP, 1)
        assert sum(rank.share for rank in ranks) == (pytest.approx(layout.get(PCP, 1)) if layout else 0)
        llm.close()
        expected = expected or found
        assert found == expected, layout


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUTS["tokens-2"], LAYOUTS["rows-2"]], ids=["tokens", "rows"])
def test_tokens_are_those_of_one_rank_when_blocks_are_copied_sequences_preempted_and_drafts_verified(
    qwen, threads, layout, monkeypatch
):
    monkeypatch.setattr(device_rows, "LEAST_DIVIDED_TOKENS", 26)
    prompts = [list(range(first, first + count)) for first, count in ((9, 30), (70, 31), (130, 29))]
    choices = SamplingParams(temperature=1.3, n=2, max_tokens=3, **COMMON)
    expected, copied = [], []
    drafts = {"speculative_config": {"method": "ngram"}, "deterministic": False}
    drafting = [drafts] if DCP in layout else []  # rows of short runs are not divided
    for more in ({}, layout, *drafting):
        llm = engine(qwen, num_kv_blocks=8, max_num_seqs=3, **(layout | more if more else {}))
        if "speculative_config" in more:
            by_prompt = {(tuple(prompt), 0): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
            install(llm, PROPOSERS["fickle"](4, by_prompt), 4)
        else:
            copied.append(tokens_of(llm, [prompts[0][:20]], choices))
        tokens = tokens_of(llm, prompts, params_of(8)[0])
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert ("speculative_config" in more) == (llm.llm_engine.stats.num_draft_tokens > 0)
        llm.close()
        expected = expected or tokens
        assert tokens == expected
    assert copied[0] == copied[1]
