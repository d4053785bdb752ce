"""Captured steps with tokens of prompts: what is launched is the same for every step of a kind, and finds what the step's own
launches find.

Without a GPU a log stands for a graph: the launches and torch's operations of a step, in order, done again on the same tensors.
"""

import dataclasses
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from quire.kernels.triton import attention
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.step import list_tiles
from quire.kernels.triton.tiles import AttentionTile
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.parameters import parameter_shapes
from quire.model.token_runs import TreePlaces
from quire.speculate.draft import Draft
from quire.worker.device import step_launcher as stepper_module
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import CudaGraphCapturer, GraphKey, PromptKey, StepGraphs
from quire.worker.device.host_step import HostStep, fill
from quire.worker.device.launched_step import Kept, StepSizes
from quire.worker.device.mixed_step import MixedSizes, fill_tiles, most_captured_tokens, padded_sizes, short_runs

RMS = NormSpec("rms", 1e-6)
BLOCK_SIZE, BLOCKS_PER_LINE, MAX_LEN = 16, 4, 60
SIZES = StepSizes(3, 24, MAX_LEN)


def layer(mlp=None, **options):
    own = AttentionSpec(2, 1, 16, 0.25, RopeSpec(16, 1e4), **options)
    return LayerSpec(own, mlp or MlpSpec(24, "silu"), attn_in=RMS, mlp_in=RMS)


LAYERS = {
    "plain": [layer(qk_norm=RMS)],
    "windows": [layer(window=20), layer(softcap=5.0, window=40)],
    "experts": [layer(MoeSpec(4, 2, MlpSpec(24, "silu")))],
}


class Operations(TorchDispatchMode):
    """Does what is asked for, and notes what does it again into the same tensors."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero"), "the host reads what a graph computes"
        out = func(*args, **(kwargs or {}))
        if not func.name().startswith("aten::empty"):
            self.log.append(partial(self.again, func, args, kwargs or {}, out))
        return out

    @staticmethod
    def again(func, args, kwargs, out):
        found = func(*args, **kwargs)
        for old, new in zip(*(part if isinstance(part, tuple | list) else (part,) for part in (out, found)), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


CAPTURING = threading.local()


def noted(run, *arguments):
    """Do something that no operation of torch does, and note it if this thread captures."""
    log = vars(CAPTURING).pop("log", None)
    with _disable_current_modes():
        run(*arguments)
    if log is not None:
        log.append(partial(run, *arguments))
        CAPTURING.log = log


class LogCapturer:
    """Captures without a GPU; `stepper` is to be set. What a step changes for good is undone, since a capture runs nothing.

    more  tensors that it changes, beside the stepper's
    """

    def __init__(self, monkeypatch):
        self.stepper, self.num_captured, self.num_replayed, self.more = None, 0, 0, []
        run = Launch.run
        monkeypatch.setattr(Launch, "run", lambda launch: noted(run, launch))

    def capture(self, step):
        own = self.stepper
        lasting = [*own.lasting_tensors, *self.more]
        lasting += [part for cache in own.kv_pool.caches for part in cache if part is not None]
        before = [part.clone() for part in lasting]
        log = CAPTURING.log = []
        with Operations(log):
            step()
        del CAPTURING.log
        for part, old in zip(lasting, before, strict=True):
            part.copy_(old)
        self.num_captured += 1

        def replay():
            self.num_replayed += 1
            for operation in log:
                operation()

        return replay


def make_stepper(device, layers, capturer, is_in_order=False, kv_dtype="float32", sizes=SIZES):
    """Return a stepper. The last one of several layers keeps keys and values in float32."""
    spec = ModelSpec("test", "float32", 61, 32, tuple(layers), RMS, MAX_LEN)
    generator = torch.Generator().manual_seed(3)
    parameters = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in parameter_shapes(spec).items()}
    decoder = DeviceDecoder(spec, parameters, MAX_LEN, device, None, is_in_order)
    kv = KvSpec.of(spec, BLOCK_SIZE, kv_dtype)
    kv = kv if len(layers) == 1 else kv.with_layers((len(layers) - 1,), "float32")
    pool = DeviceKvPool(kv, 3 * BLOCKS_PER_LINE, device)
    for cache in pool.caches:
        for part in cache:
            if part is not None and part.is_floating_point() and part.dtype != torch.float8_e4m3fn:
                part.fill_(torch.nan)
    stepper = GpuStepExecutor(decoder, pool, sizes, StepGraphs(capturer))
    if isinstance(capturer, LogCapturer):
        capturer.stepper = stepper
    return stepper


def dequantised(cache):
    if cache.k_scales is None or cache.v_scales is None:
        return torch.stack((cache.k, cache.v))
    return torch.stack((cache.k * cache.k_scales[..., None], cache.v * cache.v_scales[..., None]))


def mixed_step(runs):
    """Return a step of runs (line, tokens that are cached, ids), of which all get a next token."""
    lines = np.array([line for line, _, _ in runs], np.int32)
    counts = [len(ids) for _, _, ids in runs]
    lengths = np.array([cached + len(ids) for _, cached, ids in runs], np.int32)
    positions = np.concatenate([np.arange(cached, cached + len(ids)) for _, cached, ids in runs])
    starts = np.repeat(lines.astype(np.int64) * BLOCKS_PER_LINE * BLOCK_SIZE, counts)
    ids = np.concatenate([np.array(ids) for _, _, ids in runs])
    ends, places = np.cumsum(counts) - 1, lengths.astype(np.int64)
    return HostStep(tuple(counts), lines, lengths, ids, positions, starts + positions, ends, lines, places)


def ids_of(count, first=1):
    return [(first + 7 * place) % 61 for place in range(count)]


# Every kind of step, and then again with other sequences: any few queries, those of one token, none; short and long contexts.
STEPS = [
    [(0, 0, ids_of(3)), (1, 0, ids_of(20, 5))],
    [(0, 3, [-1]), (1, 20, ids_of(20, 9))],
    [(0, 4, [-1]), (2, 0, ids_of(11, 8))],
    [(2, 11, ids_of(24, 2))],
    [(0, 5, [-1]), (1, 40, [-1])],
    [(0, 0, ids_of(9, 4)), (2, 0, ids_of(2, 3)), (1, 0, ids_of(12, 8))],
    [(2, 2, [-1]), (1, 12, ids_of(21, 3)), (0, 9, [-1])],
    [(0, 10, ids_of(14, 7)), (2, 3, [-1])],
    [(1, 33, ids_of(10, 7)), (0, 24, ids_of(9, 2))],
]


FEW_STEPS = [STEPS[0], STEPS[5]]  # of one kind


def found_by(stepper, steps=STEPS):
    """Return what each step gives: its tokens, and its hidden states where there are any."""
    per_line = BLOCKS_PER_LINE
    changes = BlockTableUpdates([(line, 0, tuple(range(line * per_line, (line + 1) * per_line))) for line in range(3)])
    found = []
    with torch.inference_mode():
        for index, runs in enumerate(steps):
            launched = stepper.launch(mixed_step(runs), "plain", changes, Kept(hidden=index in (1, 3, 8)))
            hidden = None if launched.hidden is None else launched.hidden.clone()
            found.append((stepper.read_sampled(launched)[0], hidden))
            changes = BlockTableUpdates([])
    return found


@pytest.fixture
def short_chunks(monkeypatch):
    """Have contexts of a few tens of tokens cut as long ones are, in tiles of as few queries as there can be."""
    tiles = {True: AttentionTile(16, 32, 4, 1), False: AttentionTile(32, 32, 4, 1)}
    monkeypatch.setattr(attention, "prefill_attention_tile", lambda dim, dtype, kv_dtype: tiles[dtype == kv_dtype])
    monkeypatch.setattr(attention, "LONG_CHUNK", 32)
    monkeypatch.setattr(attention, "CHUNK", 32)
    monkeypatch.setattr(stepper_module, "LONG_CHUNK", 32)


@pytest.mark.parametrize(
    ("name", "is_in_order", "kv_dtype", "steps", "num_kinds"),
    [
        ("plain", False, "float32", FEW_STEPS, 1),
        pytest.param("plain", False, "float32", STEPS, 5, marks=pytest.mark.slow),
        pytest.param("plain", True, "float32", STEPS, 5, marks=pytest.mark.slow),
        pytest.param("windows", False, "int8", STEPS, 5, marks=pytest.mark.slow),
        pytest.param("experts", False, "float32", STEPS, 5, marks=pytest.mark.slow),
    ],
)
def test_captured_steps_find_what_those_launched_one_by_one_find(
    name, is_in_order, kv_dtype, steps, num_kinds, device, monkeypatch, short_chunks, few_programs
):
    capturer = CudaGraphCapturer(device) if device.type == "cuda" else LogCapturer(monkeypatch)
    padded = make_stepper(device, LAYERS[name], capturer, is_in_order, kv_dtype)
    exact = make_stepper(device, LAYERS[name], None, is_in_order, kv_dtype)
    tolerance = {"atol": 0.0, "rtol": 0.0} if is_in_order else {"atol": 1e-4, "rtol": 1e-4}
    for (tokens, hidden), (wanted_tokens, wanted) in zip(found_by(padded, steps), found_by(exact, steps), strict=True):
        assert tokens == wanted_tokens
        if wanted is not None:
            torch.testing.assert_close(hidden, wanted, **tolerance)
    for own, other in zip(padded.kv_pool.caches, exact.kv_pool.caches, strict=True):
        torch.testing.assert_close(dequantised(own), dequantised(other), equal_nan=True, **tolerance)
    if isinstance(capturer, LogCapturer):
        assert capturer.num_captured == padded.graphs.num_captured == num_kinds
        assert capturer.num_replayed == len(steps) - num_kinds


DRAFTS = [Draft((4, 5, 6, 7), (-1, 0, -1, 2)), Draft((9, 8, 7), (-1, -1, 0)), Draft.chain((3, 2))]
DRAFTED = [[(0, 10, DRAFTS[0]), (1, 7, DRAFTS[2])], [(1, 8, DRAFTS[1])], [(2, 5, DRAFTS[1]), (0, 11, Draft())]]


def drafted_step(runs):
    """Return a step of runs (line, tokens that are cached, draft), with a known token before each draft."""
    step = mixed_step([(line, cached, [1 + cached, *draft.tokens]) for line, cached, draft in runs])
    ancestors, positions = np.zeros(len(step.given_ids), np.uint64), step.positions.copy()
    rows, lines, ends = [], [], np.cumsum(step.counts)
    for (line, cached, draft), end in zip(runs, ends, strict=True):
        first = end - len(draft)
        ancestors[first:end] = draft.ancestors()
        positions[first:end] = cached + np.array(draft.depths(), np.int64)
        rows += range(first, end)
        lines += [line] * len(draft)
    num_drafts = np.array([len(draft) for _, _, draft in runs], np.int32)
    logit_rows = np.array([*(ends - 1 - num_drafts), *rows])
    sampled = np.array([*step.rows, *lines], np.int32)
    trees = TreePlaces(positions, num_drafts, ancestors)
    changes = {"positions": positions, "logit_rows": logit_rows, "sampled_rows": sampled, "num_drafts": len(rows)}
    return dataclasses.replace(step, sample_positions=positions[logit_rows] + 1, trees=trees, **changes)


def test_captured_trees_find_what_those_launched_one_by_one_find(device, monkeypatch, short_chunks, few_programs):
    capturer = CudaGraphCapturer(device) if device.type == "cuda" else LogCapturer(monkeypatch)
    sizes = SIZES._replace(max_num_drafts=8, has_drafts=True, has_trees=True)
    padded, exact = (make_stepper(device, LAYERS["plain"], own, sizes=sizes) for own in (capturer, None))
    found = []
    for stepper in (padded, exact):
        for cache in stepper.kv_pool.caches:
            for part in (cache.k, cache.v):
                part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(part.numel())))
        blocks = [(line, 0, tuple(range(line * BLOCKS_PER_LINE, (line + 1) * BLOCKS_PER_LINE))) for line in range(3)]
        changes, tokens = BlockTableUpdates(blocks), []
        with torch.inference_mode():
            for runs in DRAFTED:
                launched = stepper.launch(drafted_step(runs), "plain", changes, Kept(logits=True))
                tokens.append((stepper.read_sampled(launched)[0], launched.logits.clone()))
                changes = BlockTableUpdates([])
        found.append(tokens)
    for (tokens, logits), (wanted_tokens, wanted) in zip(*found, strict=True):
        assert tokens == wanted_tokens
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert {key for key in padded.frames if isinstance(key, PromptKey)} == {PromptKey(8, 32, "any", True)}
    assert padded.graphs.num_captured == 1


def test_steps_with_prompts_are_launched_one_by_one_when_nothing_is_captured_or_a_library_attends(device, monkeypatch):
    class Library:
        def attend(self, q, k, v, step, spec):
            return attention.attend(q, attention.KvCache(k, v), dataclasses.replace(step, library=None), spec)

    stepper = make_stepper(device, LAYERS["plain"], None)
    assert stepper.prompts.keys == []
    assert all(isinstance(key, GraphKey) for key in stepper.keys)
    graphs = StepGraphs(LogCapturer(monkeypatch))
    library = GpuStepExecutor(stepper.decoder, stepper.kv_pool, SIZES, graphs, Library())
    assert library.prompts.keys == []


def test_what_takes_most_memory_is_captured_first_and_stores_nothing(device, monkeypatch, few_programs):
    capturer = CudaGraphCapturer(device) if device.type == "cuda" else LogCapturer(monkeypatch)
    stepper = make_stepper(device, LAYERS["plain"], capturer)
    with torch.inference_mode():
        stepper.capture_largest()
    assert stepper.graphs.num_captured == 2
    assert stepper.keys[0] == PromptKey(24, MAX_LEN, "any")
    decode = stepper.frames[stepper.capture_sizes.keys[0]].staged.host
    assert decode["context_lens"].tolist() == [1] * 3  # whatever the longest is, that takes no time
    assert all(bool(cache.k.isnan().all()) and bool(cache.v.isnan().all()) for cache in stepper.kv_pool.caches)


@pytest.mark.slow
def test_samples_and_copies_of_captured_steps_store_nothing_and_are_forgotten_with_the_pool(device, monkeypatch, few_programs):
    capturer = CudaGraphCapturer(device) if device.type == "cuda" else LogCapturer(monkeypatch)
    stepper = make_stepper(device, LAYERS["plain"], capturer)
    with torch.inference_mode():
        stepper.capture_samples()
        samples = stepper.graphs.num_captured
        found_by(stepper, FEW_STEPS)  # the device holds another step's arrays now
        for cache in stepper.kv_pool.caches:
            cache.k.fill_(0.5), cache.v.fill_(0.5)
        stepper.capture_copies(2)
    families = (stepper.prompts.keys, stepper.capture_sizes.keys)
    assert samples == len({keys[place] for keys in families for place in (0, len(keys) // 2, -1)})
    assert all(bool((cache.k == 0.5).all()) and bool((cache.v == 0.5).all()) for cache in stepper.kv_pool.caches)
    if isinstance(capturer, LogCapturer):
        assert capturer.num_captured == stepper.graphs.num_captured + 2
    stepper.give_pool(stepper.kv_pool)
    assert stepper.graphs.num_captured == 0


KINDS = [(64, 8), (18, 2), (16, 1)]


@pytest.mark.parametrize("seed", range(4))
def test_every_query_of_a_step_and_of_its_padding_is_in_one_tile(seed):
    rng = np.random.default_rng(seed)
    max_num_seqs = int(rng.choice([1, 5, 40]))
    for _ in range(40):
        counts = rng.choice([1, 1, 2, 7, 8, 9, 17, 65, 200], int(rng.integers(1, max_num_seqs + 1)))
        num_tokens = int(counts.sum())
        runs = [(line, int(rng.integers(0, 50)), [1] * int(count)) for line, count in enumerate(counts)]
        step = mixed_step(runs)
        lists = [list_tiles(step.counts, *kind, step.context_lens.tolist()) for kind in KINDS]
        key = PromptKey(num_tokens + int(rng.choice([0, 1, 5, 63, 300])), 1 << 20, short_runs(lists))
        sizes = padded_sizes(key, max_num_seqs, KINDS)
        host = arrays_of(sizes)
        fill(host, step, 77)
        fill_tiles(host, step, lists, KINDS)
        starts, lengths = host["query_starts"], host["context_lens"]
        assert starts[-1] == key.num_tokens
        assert lengths[len(counts) :].tolist() == [0] * (len(lengths) - len(counts))
        for index, (num_queries, most_short) in enumerate(KINDS):
            longest = most_short if key.short_runs == "any" else 1
            covered = np.zeros(key.num_tokens, int)
            for run, length in (("short", longest), ("long", num_queries)):
                pairs = zip(host[f"{run}_sequences{index}"], host[f"{run}_offsets{index}"], strict=True)
                for sequence, offset in pairs:
                    first, end = starts[sequence] + offset, starts[sequence + 1]
                    covered[first : min(first + length, end)] += 1
            assert covered.tolist() == [1] * key.num_tokens


def arrays_of(sizes: MixedSizes):
    return {part.name: np.full(part.count, -99) for part in sizes.parts}


def test_larger_models_capture_smaller_steps():
    def spec(hidden_size, inner):
        wide = LayerSpec(AttentionSpec(16, 8, 128, 0.1), MlpSpec(inner, "silu"), attn_in=RMS, mlp_in=RMS)
        return ModelSpec("test", "bfloat16", 1000, hidden_size, (wide,) * 3, RMS, MAX_LEN)

    small, large, huge = (most_captured_tokens(spec(*sizes), 8192) for sizes in ((1024, 3072), (4096, 12288), (65536, 99999)))
    assert 8192 > small > 4096 > large > 256 > huge >= 64
    assert most_captured_tokens(spec(1024, 3072), 2000) == 2000
