"""Paged attention on the device against a dense loop in float64."""

import dataclasses
import itertools

import pytest
import torch

from quire.base.errors import InvariantError
from quire.contracts.model_spec import AttentionSpec, LatentSpec, NormSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.triton import attention, tiles
from quire.kernels.triton.attention import KvCache, attend, attend_launches
from quire.kernels.triton.device_traits import HOPPER, DeviceTraits, using_traits
from quire.kernels.triton.step import DeviceAttentionMetadata, list_tiles, send_together
from quire.kernels.triton.tiles import CHUNK, most_chunks
from tests.unit.kernels.gpu.paged_cases import dense_attention, make_case

STEPS = {
    "decode": ([5, 300, 64], [1, 1, 1]),
    "prompts": ([7, 70], [7, 70]),
    "mixed": ([90, 1, 33, 520], [40, 1, 3, 1]),
}


def run(case, spec, device, sinks=None):
    cache = KvCache(case.k_cache.to(device), case.v_cache.to(device))
    step = DeviceAttentionMetadata.of(case.step, device)
    slopes = torch.tensor(spec.alibi_slopes, device=device) if spec.alibi_slopes else None
    return attend(case.q.to(device), cache, step, spec, None if sinks is None else sinks.to(device), slopes=slopes).cpu()


def check(case, spec, device, sinks=None):
    expected = dense_attention(case, spec, sinks)[..., : spec.value_size]
    torch.testing.assert_close(run(case, spec, device, sinks).double(), expected, atol=3e-6, rtol=3e-6)


def launches_of(case, spec, device):
    q, cache = case.q.to(device), KvCache(case.k_cache.to(device), case.v_cache.to(device))
    return attend_launches(torch.empty_like(q), q, cache, DeviceAttentionMetadata.of(case.step, device), spec)


@pytest.mark.covering
@pytest.mark.parametrize("lengths, counts", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(
    "heads, head_dim, block_size, options",
    [
        ((4, 2), 64, 64, {}),
        ((5, 1), 80, 16, {"window": 21}),
        ((4, 2), 24, 16, {"v_dim": 20, "alibi_slopes": (0.5, 0.25, 0.05, 0.02)}),
        pytest.param((2, 2), 16, 5, {"softcap": 3.0}, marks=pytest.mark.slow),
        pytest.param((4, 1), 256, 128, {"window": 280, "softcap": 2.0}, marks=pytest.mark.slow),
        pytest.param((7, 1), 112, 64, {"window": 70}, marks=pytest.mark.slow),
        pytest.param((3, 3), 128, 32, {}, marks=pytest.mark.slow),
        pytest.param((12, 1), 192, 16, {"softcap": 5.0}, marks=pytest.mark.slow),
    ],
    ids=["gqa", "mqa-window", "small-values-alibi", "mha-softcap", "wide-both", "seven", "three", "twelve"],
)
def test_attend_equals_a_dense_loop_in_f32(lengths, counts, heads, head_dim, block_size, options, device):
    spec = AttentionSpec(*heads, head_dim, head_dim**-0.5, **options)
    case = make_case(lengths, counts, spec, block_size)
    check(case, spec, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_attend_is_close_to_float64_when_rounded_to_half(dtype, device):
    spec = AttentionSpec(6, 2, 96, 96**-0.5)
    case = make_case([300, 45, 9], [1, 45, 2], spec, 16, dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(run(case, spec, device).double(), dense_attention(case, spec), atol=tolerance, rtol=tolerance)


def latent_case(num_heads, lengths, counts, **options):
    """Return a step whose cached rows are keys of 44 elements, the last 36 of which are the values, and their attention."""
    spec = AttentionSpec(num_heads, 1, 44, 44**-0.5, latent=LatentSpec(None, 36, 12, 8, 16, NormSpec("rms", 1e-6)))
    case = make_case(lengths, counts, spec, 16, **options)
    case = dataclasses.replace(case, v_cache=case.k_cache, v=case.k)
    return case, spec, dense_attention(case, spec)[..., 8:]


def attend_latent(case, spec, device, is_in_order=False):
    rows = case.k_cache.to(device)
    step = DeviceAttentionMetadata.of(case.step, device)
    return attend(case.q.to(device), KvCache(rows, rows), step, spec, is_in_order=is_in_order).cpu()


@pytest.mark.parametrize(
    "num_heads, lengths, counts, trees",
    [
        (3, *STEPS["mixed"], None),
        pytest.param(80, [300, 20], [1, 2], None, marks=pytest.mark.slow),  # several groups of heads
        pytest.param(4, [60, 300], [5, 4], [[-1, 0, 0, 1], [-1, 0, -1]], marks=pytest.mark.slow),
    ],
    ids=["mixed", "many-heads", "trees"],
)
@pytest.mark.parametrize("is_in_order", [False, True])
def test_latent_rows_are_keys_and_values(num_heads, lengths, counts, trees, is_in_order, device):
    case, spec, expected = latent_case(num_heads, lengths, counts, trees=trees)
    found = attend_latent(case, spec, device, is_in_order)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=3e-6, rtol=3e-6)


def test_latent_attention_refuses_a_second_cache_for_values(device):
    case, spec, _ = latent_case(3, [5], [1])
    step = DeviceAttentionMetadata.of(case.step, device)
    with pytest.raises(InvariantError, match="one cache of rows"):
        attend(case.q.to(device), KvCache(case.k_cache.to(device), case.k_cache.clone().to(device)), step, spec)


@pytest.mark.parametrize("window, counts", [(None, [1, 33]), (37, [1, 33]), (None, [2, 40])])
def test_sinks_take_their_share_when_split_and_whole(window, counts, device):
    spec = AttentionSpec(4, 2, 32, 32**-0.5, window=window)
    case = make_case([301, 44], counts, spec, 16)
    sinks = torch.tensor([0.5, -2.0, 3.0, 1.0])
    check(case, spec, device, sinks)


@pytest.fixture
def long_chunk(monkeypatch):
    """The chunk of long runs, as short as a test can bear; their partial results are merged four tiles at a time."""
    monkeypatch.setattr(attention, "LONG_CHUNK", 64)
    monkeypatch.setattr(attention, "_PARTIAL_BYTES", 1)
    return 64


@pytest.mark.parametrize(
    "heads, options, sinks",
    [((4, 2), {}, None), ((5, 1), {"window": 100, "softcap": 3.0}, None), ((4, 2), {}, [0.5, -2.0, 3.0, 1.0])],
    ids=["gqa", "window", "sinks"],
)
def test_runs_of_queries_behind_long_prefixes_are_split_over_their_keys(heads, options, sinks, long_chunk, device):
    spec = AttentionSpec(*heads, 32, 32**-0.5, **options)
    case = make_case([333, 20, 80], [45, 20, 1], spec, 16)
    sinks = None if sinks is None else torch.tensor(sinks)
    launches = launches_of(case, spec, device)
    assert [launch.grid[2] for launch in launches if len(launch.grid) == 3][-1] == (3 if options else 6)
    check(case, spec, device, sinks)


def test_windows_within_a_long_chunk_are_not_split_for_runs_of_queries(long_chunk, device):
    spec = AttentionSpec(4, 2, 32, 32**-0.5, window=long_chunk)
    case = make_case([200], [45], spec, 16)
    launches = launches_of(case, spec, device)
    assert [launch.grid for launch in launches] == [(3, 2, 1)]
    check(case, spec, device)


@pytest.mark.parametrize("window", [None, 70])
def test_bits_of_split_runs_do_not_change_with_their_neighbours_or_the_cuts_of_their_prompts(window, long_chunk, device):
    spec = AttentionSpec(4, 2, 32, 32**-0.5, window=window)
    case = make_case([150, 400], [150, 20], spec, 16, torch.bfloat16)
    together = run(case, spec, device)
    for first, last in ((0, 50), (50, 110), (110, 150)):
        rows = slice(first, last)
        single = AttentionMetadata(case.step.slots[rows], [0, last - first], [last], case.step.block_tables[:1])
        alone = dataclasses.replace(case, step=single, q=case.q[rows])
        assert torch.equal(run(alone, spec, device), together[rows])


def test_runs_that_fill_the_device_are_not_split(long_chunk, monkeypatch, device):
    monkeypatch.setattr(tiles, "device_traits", lambda: dataclasses.replace(HOPPER, num_multiprocessors=2))
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    case = make_case([300], [200], spec, 16)
    launches = launches_of(case, spec, device)
    assert [launch.grid for launch in launches] == [(13, 2, 1)]
    check(case, spec, device)


def test_a_device_is_filled_by_several_rounds_of_programs_of_which_the_last_is_nearly_full():
    programs = (132, 328, 396, 528, 529, 574, 575, 1024, 1056, 10000)
    found = {}
    for traits in (HOPPER, DeviceTraits.of_arch(86)):
        with using_traits(traits):
            found[traits.num_multiprocessors] = [count for count in programs if tiles.is_filled(count)]
    assert found == {132: [528, 574, 575, 1024, 1056, 10000], 82: [328, 396, 528, 529, 574, 575, 1024, 1056, 10000]}


def test_runs_that_see_most_keys_come_first():
    assert list_tiles([40, 1, 20], 16, 4, [40, 900, 300]).long == [(2, 16), (2, 0), (0, 32), (0, 16), (0, 0)]


PARENTS = [-1, -1, 0, 1, 2, 2, 3, 0, 4, 8]


@pytest.mark.covering
@pytest.mark.parametrize("window", [None, 3, 64, "alibi"])
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=["split", "whole"])
def test_drafts_see_their_ancestors_alone_when_they_are_a_tree(heads, window, device):
    slopes = tuple(0.5 / (head + 1) for head in range(heads[0]))
    options = {"alibi_slopes": slopes} if window == "alibi" else {"window": window}
    spec = AttentionSpec(*heads, 16, 0.25, **options)
    trees = [PARENTS, [], [-1, 0, -1], []]
    case = make_case([290, 30, 40, 9], [11, 5, 9, 1], spec, 8, trees=trees)
    check(case, spec, device)


@pytest.mark.parametrize("counts", [[4, 2, 1, 1], [1, 1, 1, 1]], ids=["several", "one each"])
def test_drafts_see_their_ancestors_alone_when_the_first_ones_are_cached(counts, device):
    trees = [[-1], PARENTS[:6], [-1, 0, -1, 1], []]
    spec = AttentionSpec(4, 2, 16, 0.25)
    case = make_case([30, 40, 29, 9], counts, spec, 8, trees=trees)
    check(case, spec, device)
    with pytest.raises(InvariantError, match="compute them again"):
        run(case, dataclasses.replace(spec, window=3), device)


def test_padding_gives_zeros_and_changes_nothing_when_a_context_is_empty(device):
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    case = make_case([270, 20], [1, 1], spec, 16)
    plain = run(case, spec, device)
    lengths = torch.tensor([270, 0, 20, 0], dtype=torch.int32)
    tables = torch.stack([case.step.block_tables[0], torch.full_like(case.step.block_tables[0], -1)] * 2).to(torch.int32)
    tables[2] = case.step.block_tables[1]
    empty = torch.zeros(4, dtype=torch.int64)
    step = DeviceAttentionMetadata(empty, torch.arange(5, dtype=torch.int32), lengths, tables, None, None, None, (1,) * 4, 300)
    q = torch.full((4, 4, 32), torch.nan)
    q[0], q[2] = case.q
    cache = KvCache(case.k_cache.to(device), case.v_cache.to(device))
    moved = DeviceAttentionMetadata(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in _fields(step)))
    out = attend(q.to(device), cache, moved, spec).cpu()
    assert torch.equal(out[[0, 2]], plain)
    assert torch.equal(out[[1, 3]], torch.zeros(2, 4, 32))


def _fields(step):
    return [getattr(step, name) for name in DeviceAttentionMetadata.__dataclass_fields__ if name != "_tiles"]


def test_bits_of_a_sequence_do_not_change_with_its_neighbours_or_the_cuts_of_its_prompt(device):
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    case = make_case([600, 150, 20], [1, 100, 1], spec, 16, torch.bfloat16)
    together = run(case, spec, device)
    starts = case.step.query_starts
    for index, cuts in enumerate([[0, 1], [0, 37, 100], [0, 1]]):
        for first, last in itertools.pairwise(cuts):
            rows = slice(starts[index] + first, starts[index] + last)
            length = case.step.context_lens[index] - (cuts[-1] - last)
            single = AttentionMetadata(
                case.step.slots[rows], [0, last - first], [length], case.step.block_tables[index : index + 1]
            )
            alone = dataclasses.replace(case, step=single, q=case.q[rows])
            assert torch.equal(run(alone, spec, device), together[rows])


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("q_dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "heads, head_dim, options",
    [
        ((4, 2), 64, {}),
        pytest.param((7, 1), 112, {"window": 70}, marks=pytest.mark.slow),
        pytest.param((10, 2), 256, {"softcap": 5.0}, marks=pytest.mark.slow),
    ],
    ids=["even", "seven-window", "wide-softcap"],
)
def test_attend_reads_quantised_caches(heads, head_dim, options, dtype, q_dtype, device):
    spec = AttentionSpec(*heads, head_dim, head_dim**-0.5, **options)
    case = make_case([280, 40], [1, 40], spec, 16, q_dtype)
    caches, scales = [], []
    for cache, dense in ((case.k_cache, case.k), (case.v_cache, case.v)):
        loose = torch.linspace(0.5, 2.0, heads[1])[:, None]  # scales need not be tight
        size = cache.float().nan_to_num().abs().amax(-1) * loose
        scale = (size / (127 if dtype == torch.int8 else 448)).clamp(min=1e-9)
        stored = cache.float().nan_to_num() / scale[..., None]
        stored = stored.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else stored.clamp(-448, 448).to(dtype)
        caches.append(stored)
        scales.append(scale)
        back = stored.float() * scale[..., None]
        for index, blocks in enumerate(case.step.block_tables):
            rows = back[blocks].transpose(1, 2).flatten(0, 1)
            dense[index] = rows[: len(dense[index])]
    cache = KvCache(*(part.to(device) for part in (*caches, *scales)))
    out = attend(case.q.to(device), cache, DeviceAttentionMetadata.of(case.step, device), spec).cpu()
    tolerance = 3e-6 if q_dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), dense_attention(case, spec), atol=tolerance, rtol=tolerance)


def test_attend_refuses_what_it_would_misread(device):
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    case = make_case([20], [1], spec, 16)
    step = DeviceAttentionMetadata.of(case.step, device)
    cache = KvCache(case.k_cache.to(device), case.v_cache.to(device))
    q = case.q.to(device)
    with pytest.raises(InvariantError, match="q must be"):
        attend(q[:, :2], cache, step, spec)
    with pytest.raises(InvariantError, match="heads of a token"):
        attend(torch.zeros(1, 4, 64, device=device)[..., :32], cache, step, spec)
    with pytest.raises(InvariantError, match="k_scales"):
        attend(q, KvCache(cache.k.to(torch.int8), cache.v.to(torch.int8)), step, spec)


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({}, torch.int8),
        pytest.param({}, torch.float32, marks=pytest.mark.slow),
        pytest.param({"window": 280}, torch.float32, marks=pytest.mark.slow),
        pytest.param({"window": 280}, torch.int8, marks=pytest.mark.slow),
        pytest.param({}, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["int8", "plain", "window", "int8-window", "bf16"],
)
def test_a_query_has_the_same_bits_alone_and_in_a_prompt_when_sums_are_in_order(options, dtype, device):
    spec = AttentionSpec(4, 2, 32, 32**-0.5, **options)
    whole = make_case([600, 30], [40, 30], spec, 64, torch.float32 if dtype == torch.int8 else dtype)
    sinks = torch.tensor([0.5, -2.0, 3.0, 1.0])
    parts = [whole.k_cache, whole.v_cache]
    if dtype == torch.int8:
        scales = [part.abs().amax(-1) / 127 for part in parts]
        parts = [(part / size[..., None]).round().to(torch.int8) for part, size in zip(parts, scales, strict=True)] + scales
    cache = KvCache(*(part.to(device) for part in parts))
    tables = whole.step.block_tables

    def attended(first, last, lengths, tables):
        slots = torch.zeros(last - first, dtype=torch.int64)
        step = DeviceAttentionMetadata.of(AttentionMetadata(slots, [0, last - first], lengths, tables), device)
        return attend(whole.q[first:last].to(device), cache, step, spec, sinks.to(device), is_in_order=True).cpu()

    together = attend(
        whole.q.to(device), cache, DeviceAttentionMetadata.of(whole.step, device), spec, sinks.to(device), is_in_order=True
    ).cpu()
    expected = dense_attention(whole, spec, sinks)
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(together.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(attended(39, 40, [600], tables[:1]), together[39:40])
    assert torch.equal(attended(3, 5, [565], tables[:1]), together[3:5])
    assert torch.equal(attended(7, 31, [591], tables[:1]), together[7:31])
    assert torch.equal(attended(40, 70, [30], tables[1:]), together[40:])
    assert torch.equal(attended(60, 61, [21], tables[1:]), together[60:61])


@pytest.mark.parametrize("window", [None, 700])
def test_chunks_of_long_contexts_are_larger_and_as_many_as_there_may_be(window, device):
    lengths = [0, 1, 256, 257, 8192, 8193, 40000, 131072]
    count, num_kv_heads = len(lengths), 8
    spec = AttentionSpec(8, num_kv_heads, 16, 0.25, window=window)
    tensors = [torch.tensor(values, dtype=torch.int32, device=device) for values in (range(count + 1), lengths, [[0]] * count)]
    step = DeviceAttentionMetadata(
        torch.zeros(count, dtype=torch.int64), *tensors, None, None, None, (1,) * count, max(lengths)
    )
    q, kv = torch.zeros(count, 8, 16, device=device), torch.zeros(1, num_kv_heads, 16, 16, device=device)
    plan, *_ = attend_launches(torch.empty_like(q), q, KvCache(kv, kv), step, spec)
    plan.run()
    (chunks,) = step.plans.values()
    counts = []
    for length in lengths:
        first, size = max(0, length - (window or length)), CHUNK
        while -(-length // size) - first // size > most_chunks(num_kv_heads):
            size *= 2
        counts.append(-(-length // size) - first // size if length else 0)
    assert max(counts) == (32 if window is None else 4)
    assert chunks.starts.tolist() == [0, *itertools.accumulate(counts)]
    assert chunks.tiles[: sum(counts)].tolist() == [index for index, number in enumerate(counts) for _ in range(number)]
    assert len(chunks.tiles) >= sum(counts)


@pytest.mark.slow
def test_a_context_of_more_keys_than_chunks_of_the_smallest_size_hold_is_attended(device):
    spec = AttentionSpec(8, 8, 16, 0.25)
    case = make_case([32 * CHUNK + 77, 3], [1, 2], spec, 64)
    check(case, spec, device)


def test_tensors_that_are_sent_together_arrive_whole_and_aligned(device):
    tensors = [torch.arange(5), torch.arange(7, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)]
    tensors += [torch.arange(6, dtype=torch.int32).reshape(2, 3).T, torch.arange(3)]
    for tensor, sent in zip(tensors, send_together(tensors, device), strict=True):
        assert sent.dtype == tensor.dtype
        assert torch.equal(sent.cpu(), tensor)
        assert sent.data_ptr() % 16 == 0
