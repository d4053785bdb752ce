"""Keys on several GPU ranks, and prompts divided among ranks, interpreted, over gloo: the bits of one rank."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts import memory as contracts_memory
from quire.contracts.expert_options import LossyRouting
from quire.contracts.kv_spec import KvSpec
from quire.kernels.triton import attention
from quire.kv.device_pool import DeviceKvPool
from quire.model import device_context, device_rows
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_rows import RowRanks, divide_runs
from quire.parallel.communicator import CountingCommunicator
from quire.worker import context_parallel, parallel_launch
from quire.worker import memory as worker_memory
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import CaptureSizes, StepGraphs
from quire.worker.device.launched_step import Kept, StepSizes
from tests.device_ranks import DeviceRankThreads, gloo_communicators, one_launch_at_a_time
from tests.ranks import run_threads
from tests.thread_workers import ThreadWorkers
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.test_captured_prompts import LogCapturer, ids_of, mixed_step, noted
from tests.unit.kernels.gpu.test_tensor_parallel_decoder import parameters_of, spec_of
from tests.unit.kernels.gpu.test_tensor_parallel_engine import COMMON, OPTIONS, outputs_of, tokens_of
from tests.unit.speculate.proposers import PROPOSERS, install

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="several ranks on one machine are interpreted, over gloo"),
    pytest.mark.usefixtures("few_programs"),
]

BLOCK, CHUNK, BLOCKS_PER_RANK = 8, 32, 20
FIRSTS = (1, 0, 1)  # the ranks of the sequences' first chunks
SIZES = StepSizes(4, 64, 96)
# New tokens of sequences in each step; None: the sequence ends.
QUICK_STEPS = [{0: 32, 1: 2}, {0: 1, 1: 1}, {0: 1, 1: 1}]
PROMPTS_OF_STEPS = [{0: 40, 1: 3}, {0: 1, 1: 29}, {0: 26, 1: 2}]
# Contexts grow past the ends of chunks; there are ranks without a key of a sequence, padding, and sequences that end and begin.
STEPS = [*PROMPTS_OF_STEPS, {2: 62}, {0: 1, 1: 1, 2: 1}, {2: 1, 0: 1, 1: 1}, {1: None}, {1: 2, 0: 1}, {2: 1, 1: 1}, {1: 1},
         {0: 1, 1: 1}, {1: 1}]  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    one_launch_at_a_time(monkeypatch)
    monkeypatch.setattr(attention, "CHUNK", CHUNK)
    monkeypatch.setattr(device_context, "CHUNK", CHUNK)


def tables_of(size):
    """Return block tables whose chunks are on the ranks in turn."""
    taken, tables = [0] * size, np.zeros((len(FIRSTS), 96 // BLOCK), np.int64)
    for sequence, first in enumerate(FIRSTS):
        for index in range(tables.shape[1]):
            rank = (first + index * BLOCK // CHUNK) % size
            tables[sequence, index] = rank * BLOCKS_PER_RANK + taken[rank]
            taken[rank] += 1
    return tables


def found_by(decoder, pool, size, steps, capturer=None):
    """Return the logits of decode steps, and the hidden states of the others."""
    tables, lengths, found = tables_of(size), [0, 0, 0], []
    changes = BlockTableUpdates([(line, 0, tuple(table.tolist())) for line, table in enumerate(tables)])
    stepper = GpuStepExecutor(decoder, pool, SIZES, StepGraphs(capturer))
    if capturer is not None:
        capturer.stepper = stepper
    with torch.inference_mode():
        for new in steps:
            if None in new.values():
                lengths = [0 if line in new else length for line, length in enumerate(lengths)]
                continue
            step = mixed_step([(line, lengths[line], ids_of(count, lengths[line])) for line, count in new.items()])
            lengths = [length + new.get(line, 0) for line, length in enumerate(lengths)]
            rows, places = np.repeat(step.rows, step.counts), step.positions
            step = replace(step, slots=tables[rows, places // BLOCK] * BLOCK + places % BLOCK)
            launched = stepper.launch(step, "plain", changes, Kept(logits=True, hidden=not step.is_decode))
            stepper.read_sampled(launched)
            found.append((launched.logits[: len(new)] if step.is_decode else launched.hidden).clone())
            changes = BlockTableUpdates([])
    return found


def on_one(spec, device, size, dtype, is_in_order, steps):
    decoder = DeviceDecoder(spec, parameters_of(spec), 128, device, None, is_in_order)
    pool = DeviceKvPool(KvSpec.on_device(spec, BLOCK, dtype), size * BLOCKS_PER_RANK, device)
    return found_by(decoder, pool, size, steps)


def check(expected, found, is_in_order):
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) if is_in_order else torch.allclose(a, b, atol=3e-5, rtol=3e-5)


def short(name):
    """Return a model of one layer, or of two, the first of which has a window."""
    spec = spec_of(name)
    return replace(spec, layers=spec.layers[: 2 if name in ("gemma", "gpt-oss") else 1])


CASES = [("qwen3", 2, "fp8", True), ("latent", 2, "fp8", False), ("latent", 2, "float32", True),
         ("gpt-oss", 2, "float32", True), ("gemma", 3, "float32", False), ("olmo", 3, "int8", False)]  # fmt: skip


def cases(quick, steps, *names):
    quick = "qwen3", 2, "float32", True, quick
    return [quick, *(pytest.param(*case, steps, marks=pytest.mark.slow) for case in CASES if case[0] in names)]


@pytest.mark.parametrize(
    ("name", "size", "dtype", "is_in_order", "steps"), cases(QUICK_STEPS, STEPS, "qwen3", "latent", "gpt-oss", "gemma", "olmo")
)
def test_captured_and_other_steps_are_those_of_one_rank_when_ranks_share_the_tokens(
    name, size, dtype, is_in_order, steps, device, monkeypatch
):
    spec = short(name)
    expected = on_one(spec, device, size, dtype, is_in_order, steps)
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), (1,) * size, 128, device, is_in_order, context_size=size)
    pools = ranks.pools(BLOCK, dtype, BLOCKS_PER_RANK + 1, device)
    capturers = [LogCapturer(monkeypatch) for _ in range(size)]
    for each in ranks.communicators:
        each.all_gather = partial(noted, each.all_gather)
    for found in ranks.call(lambda decoder, rank: found_by(decoder, pools[rank], size, steps, capturers[rank])):
        check(expected, found, is_in_order)
    decoded = [len(new) for new in steps if set(new.values()) == {1}]
    num_kinds = len({1 << (count - 1).bit_length() for count in decoded})
    assert {(each.num_captured, each.num_replayed) for each in capturers} == {(num_kinds, len(decoded) - num_kinds)}
    ranks.close()


@pytest.mark.parametrize(
    ("name", "size", "dtype", "is_in_order", "steps"), cases(QUICK_STEPS[:2], PROMPTS_OF_STEPS, "latent", "olmo")
)
def test_logits_are_those_of_one_rank_when_ranks_divide_prompts(name, size, dtype, is_in_order, steps, device, monkeypatch):
    monkeypatch.setattr(device_rows, "LEAST_DIVIDED_TOKENS", 26)
    spec = short(name)
    expected = on_one(spec, device, size, dtype, is_in_order, steps)
    communicators = [CountingCommunicator(each) for each in gloo_communicators(size)]

    def run(rank):
        rows = RowRanks(communicators[rank], rank)
        decoder = DeviceDecoder(spec, parameters_of(spec), 128, device, None, is_in_order, rows=rows)
        pool = DeviceKvPool(KvSpec.on_device(spec, BLOCK, dtype), size * BLOCKS_PER_RANK, device)
        return found_by(decoder, pool, size, steps)

    for found in run_threads(size, run, timeout_s=300):
        # The bits of a row in a product by OpenBLAS may depend on its place among others, which is another on ranks.
        check(expected, found, is_in_order and name != "latent")
    per_step = len(spec.layers) * (1 if name == "latent" else 2) * (2 if dtype in ("int8", "fp8") else 1) + 1
    num_divided = sum(max(new.values()) >= 26 for new in steps)
    assert communicators[0].counts["all_gather"].num_calls == num_divided * per_step
    for each in communicators:
        each.close()


@pytest.mark.parametrize("lossy", [LossyRouting(), pytest.param(LossyRouting(min_share=0.6), marks=pytest.mark.slow)])
def test_the_tokens_of_experts_are_counted_once_when_ranks_share_the_tokens(lossy, device):
    spec = replace(spec_of("shared-experts"), layers=spec_of("shared-experts").layers[:1])

    def run(decoder, pool):
        decoder.watch_experts(lossy)
        return found_by(decoder, pool, 2, [{0: 5, 1: 2}, {0: 1, 1: 1}]), decoder.expert_counts()

    pool = DeviceKvPool(KvSpec.on_device(spec, BLOCK, "float32"), 2 * BLOCKS_PER_RANK, device)
    expected, counts = run(DeviceDecoder(spec, parameters_of(spec), 128, device, None, not lossy), pool)
    ranks = DeviceRankThreads(spec, lambda: parameters_of(spec), (1, 1), 128, device, not lossy, context_size=2)
    pools = ranks.pools(BLOCK, "float32", BLOCKS_PER_RANK + 1, device)
    for found in ranks.call(lambda decoder, rank: run(decoder, pools[rank])):
        check(expected, found[0], not lossy)
        assert found[1] == counts
    ranks.close()


def test_deterministic_steps_are_captured_while_their_results_are_few():
    attention = short("latent").layers[0].attention
    num_bytes = 4 * 2 * attention.num_heads * attention.latent.kv_rank * 2048 // CHUNK
    found = device_context.ContextRanks(SimpleNamespace(size=2), 0).most_captured([short("latent")] * 2, 2048)
    assert found == device_context.CAPTURED_BYTES // num_bytes
    assert CaptureSizes(0).keys == []


def test_every_token_of_runs_is_divided_once():
    for size in (2, 3, 8):
        counts = (1, 200, 7, 64, 300, 1, 30)
        pieces = divide_runs(counts, size)
        tokens = sorted((piece.sequence, token) for own in pieces for piece in own for token in range(*piece[1:]))
        assert tokens == [(sequence, token) for sequence, count in enumerate(counts) for token in range(count)]
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
