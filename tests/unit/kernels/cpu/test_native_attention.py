"""Native paged attention against float64, and one row against itself in every batch, chunking and number of threads."""

from dataclasses import dataclass, replace

import pytest
import torch

from quire.kernels.reference.kv_formats import LEVELS, THRESHOLDS, dequantize, quantize, rotate, unrotate

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "attend"):
    pytest.skip("the native kernels were built without attention", allow_module_level=True)

ISAS = native.supported_isas()
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i8": torch.int8, "r4": torch.uint8}
DTYPES |= {"k8v4": torch.uint8, "f8": torch.uint8}
CODES = {"i8": ("int8", "int8"), "r4": ("rotated4", "rotated4"), "k8v4": ("int8", "rotated4"), "f8": ("fp8", "fp8")}
ELEMENTS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

# Of max |v|. f32: the rounding of sums of up to 512 products and of e^x. bf16: weights are rounded to 8 bits, each by at most a
# part in 2^9, while their sum is not; the rest as f32. Keys, values and q are rounded in the reference too, so cost nothing.
BUDGET = {False: 1e-5, True: 2.0**-9 + 2e-5}
# A weight times a scale of a value is no longer at most 1: it is rounded by a part in 2^8 of itself.
QUANTISED_BUDGET = 2.0**-8 + 2e-5


@dataclass(frozen=True, slots=True)
class Setup:
    """A model's attention and its cache."""

    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    cache: str = "bf16"
    is_bf16: bool = True
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    scale: float = 0.0
    magnitude: float = 1.0
    is_joined: bool = False  # a row is both key and value, stored once

    @property
    def is_quantised(self):
        return self.cache in CODES

    @property
    def score_scale(self):
        return self.scale or self.head_dim**-0.5


def address(tensor):
    return 0 if tensor is None else tensor.data_ptr()


class Cache:
    """Paged keys and values of some sequences, with NaN wherever nothing was stored."""

    def __init__(self, setup, lengths, seed=0, isa="", num_threads=1):
        self.setup = setup
        generator = torch.Generator().manual_seed(seed)
        num_blocks = [-(-length // setup.block_size) for length in lengths]
        order = torch.randperm(sum(num_blocks) + 2, generator=generator)
        shape = (len(order), setup.kv_heads, setup.block_size)
        if setup.is_quantised:
            sizes = [setup.head_dim // (2 if code == "rotated4" else 1) for code in CODES[setup.cache]]
            self.keys, self.values = (torch.full((*shape, size), 77, dtype=torch.uint8) for size in sizes)
            self.key_scales, self.value_scales = (torch.full(shape, torch.nan) for _ in range(2))
        else:
            kind = DTYPES[setup.cache]
            self.keys, self.values = (torch.full((*shape, setup.head_dim), torch.nan, dtype=kind) for _ in range(2))
            self.key_scales = self.value_scales = None
        if setup.is_joined:
            self.values, self.value_scales = self.keys, self.key_scales
        # Entries past the context point at a block that no sequence owns, and that is full of NaN.
        self.tables = torch.full((len(lengths), max(num_blocks) + 1), int(order[-1]), dtype=torch.int32)
        self.k, self.v, self.slots = [], [], []
        taken = 0
        for index, length in enumerate(lengths):
            self.tables[index, : num_blocks[index]] = order[taken : taken + num_blocks[index]]
            taken += num_blocks[index]
            positions = torch.arange(length)
            blocks = self.tables[index][positions // setup.block_size].long()
            self.slots.append(blocks * setup.block_size + positions % setup.block_size)
            width = setup.kv_heads * setup.head_dim
            self.k.append(torch.randn(length, width, generator=generator) * setup.magnitude)
            self.v.append(self.k[-1] if setup.is_joined else torch.randn(length, width, generator=generator))
            self.store(index, isa, num_threads)

    def layer(self):
        s = self.setup
        pointers = [address(t) for t in (self.keys, self.values, self.key_scales, self.value_scales)]
        return native.KvLayer(s.cache, s.block_size, s.kv_heads, s.head_dim, *pointers)

    def store(self, index, isa="", num_threads=1):
        slots, k, v = self.slots[index], self.k[index], self.v[index]
        native.store_kv(self.layer(), address(slots), len(slots), address(k), address(v), num_threads, isa)

    def stored(self, index):
        """Return what the cache holds for a sequence, keys and values [L, K, D] f64, read by the documented layout."""
        s = self.setup
        runs = (-1, s.kv_heads, s.block_size // 16)
        if s.is_quantised:
            (keys, key_scales), (values, value_scales) = self.codes(index)
            keys, values = (
                dequantize(codes, scales.double(), code)
                for codes, scales, code in zip((keys, values), (key_scales, value_scales), CODES[s.cache], strict=True)
            )
            return keys.double(), (keys if s.is_joined else values).double()
        keys, values = self.keys.double(), self.values.double()
        if s.cache == "bf16":
            keys = keys.view(*runs, s.head_dim // 2, 16, 2).transpose(-2, -3).reshape(-1, s.kv_heads, s.block_size, s.head_dim)
            values = values.view(*runs, 8, s.head_dim, 2).transpose(-1, -2).reshape(-1, s.kv_heads, s.block_size, s.head_dim)
        else:
            keys = keys.view(*runs, s.head_dim, 16).transpose(-1, -2).reshape(-1, s.kv_heads, s.block_size, s.head_dim)
        blocks, offsets = self.slots[index] // s.block_size, self.slots[index] % s.block_size
        return keys[blocks, :, offsets], (keys if s.is_joined else values)[blocks, :, offsets]

    def codes(self, index):
        """Return the codes [L, K, D] and the scales [L, K] of a sequence, of keys and of values, by the documented layout."""
        s = self.setup
        shape, runs = (-1, s.kv_heads, s.block_size), (-1, s.kv_heads, s.block_size // 16)
        key_code, value_code = CODES[s.cache]
        keys, values = self.keys, self.values
        if key_code == "rotated4":  # pairs of neighbours
            keys = keys.view(*runs, s.head_dim // 2, 16).transpose(-1, -2).reshape(*shape, s.head_dim // 2)
            keys = torch.stack((keys & 15, keys >> 4), -1).flatten(-2)
        else:
            keys = keys.view(ELEMENTS[key_code]).view(*runs, s.head_dim, 16).transpose(-1, -2).reshape(*shape, s.head_dim)
        # Values: the two halves of a vector.
        is_rotated = value_code == "rotated4"
        values = torch.cat((values & 15, values >> 4), -1) if is_rotated else values.view(ELEMENTS[value_code])
        blocks, offsets = self.slots[index] // s.block_size, self.slots[index] % s.block_size
        return tuple(
            (codes[blocks, :, offsets], scales[blocks, :, offsets])
            for codes, scales in ((keys, self.key_scales), (values, self.value_scales))
        )


def attend(cache, rows, q, *, sinks=None, num_threads=1, isa="", trees=(None, None), first_value=0):
    """Return the attention of q [T, H * D] for rows, (sequence, context length, number of queries) each.

    trees  [S] i32 how many of the last rows of each are a tree, [T] u64 the ancestors of each row
    """
    s = cache.setup
    starts = torch.tensor([0, *torch.tensor([count for _, _, count in rows]).cumsum(0)], dtype=torch.int32)
    lengths = torch.tensor([length for _, length, _ in rows], dtype=torch.int32)
    tables = cache.tables[[sequence for sequence, _, _ in rows]].contiguous()
    addresses = [address(starts), address(lengths), address(tables), tables.shape[1], *map(address, trees)]
    batch = native.AttentionBatch(len(rows), len(q), *addresses)
    numbers = s.num_heads, s.score_scale, s.window, s.softcap, address(sinks), s.is_bf16, first_value
    job = native.AttentionJob(cache.layer(), *numbers)
    size = native.attention_scratch_bytes(job, batch, num_threads, isa)
    guard = 256
    scratch = torch.full((size + 64 + guard,), 0xFF, dtype=torch.uint8)
    start = -scratch.data_ptr() % 64
    out = torch.full((len(q), q.shape[1] + 3), torch.nan)
    job.set_rows(address(q), q.stride(0), address(out), out.stride(0), scratch.data_ptr() + start)
    native.attend(job, batch, num_threads, isa)
    assert (scratch[start + size :] == 0xFF).all()
    assert out[:, q.shape[1] :].isnan().all()
    return out[:, : q.shape[1]]


def reference(cache, rows, q, sinks=None):
    """Return the same in float64, from the stored keys and values."""
    s = cache.setup
    group = s.num_heads // s.kv_heads
    kind = torch.bfloat16 if s.is_bf16 else torch.float32
    queries = q.view(len(q), s.num_heads, s.head_dim)
    # Where keys are rotated, queries are, too, and rounded after that.
    queries = unrotate(rotate(queries).to(kind).double()) if s.cache == "r4" else queries.to(kind).double()
    outs, start = [], 0
    for sequence, length, count in rows:
        keys, values = (x[:length] if s.is_quantised else x[:length].to(kind).double() for x in cache.stored(sequence))
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries[start : start + count], keys) * s.score_scale
        if s.softcap:
            scores = torch.tanh(scores / s.softcap) * s.softcap
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        is_hidden = (distance < 0) | (distance >= s.window if s.window else torch.zeros_like(distance, dtype=torch.bool))
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        outs.append(torch.einsum("hqk,khd->qhd", weights, values).reshape(count, -1))
        start += count
    return torch.cat(outs)


def queries_of(setup, rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    count = sum(count for _, _, count in rows)
    return torch.randn(count, setup.num_heads * setup.head_dim, generator=generator) * setup.magnitude


def sinks_of(setup):
    return torch.linspace(-2, 3, setup.num_heads) if setup.has_sinks else None


def same(a, b):
    """Return whether two outputs agree bit for bit; NaN equals NaN and -0 equals 0."""
    return torch.equal(a.nan_to_num(1e30, 2e30, 3e30), b.nan_to_num(1e30, 2e30, 3e30))


SETUPS = {
    "bf16": Setup(),
    "f32": Setup(cache="f32", is_bf16=False),
    "i8": Setup(cache="i8", block_size=32),
    "i8-f32": Setup(cache="i8", is_bf16=False),
    "r4": Setup(cache="r4"),
    "r4-f32": Setup(cache="r4", is_bf16=False, block_size=32, has_sinks=True),
    "k8v4": Setup(cache="k8v4", head_dim=64),
    "k8v4-f32-dim18": Setup(cache="k8v4", is_bf16=False, head_dim=18),
    "f8": Setup(cache="f8", head_dim=48),
    "f8-f32-dim18": Setup(cache="f8", is_bf16=False, head_dim=18),
    "dim2-r4": Setup(cache="r4", head_dim=2),
    "dim80-r4-window": Setup(head_dim=80, cache="r4", window=300, softcap=3.0),
    "dim128-r4": Setup(head_dim=128, cache="r4", num_heads=8, kv_heads=1),
    "dim576-k8v4": Setup(head_dim=576, cache="k8v4", num_heads=3, kv_heads=1),
    "bf16-cache-f32": Setup(is_bf16=False),
    "f32-cache-bf16": Setup(cache="f32"),
    "dim2": Setup(head_dim=2),
    "dim6-f32": Setup(head_dim=6, cache="f32", is_bf16=False, num_heads=6),
    "dim72-window": Setup(head_dim=72, block_size=64, window=37),
    "dim80-i8-window": Setup(head_dim=80, cache="i8", window=300),
    "dim128-softcap-sinks": Setup(head_dim=128, softcap=5.0, has_sinks=True, num_heads=8, magnitude=3.0),
    "dim512-group5": Setup(head_dim=512, num_heads=5, kv_heads=1),
    "group32": Setup(num_heads=32, kv_heads=1, window=5, has_sinks=True),
    "group71": Setup(num_heads=71, kv_heads=1, head_dim=16),
    "group3-window1": Setup(num_heads=9, kv_heads=3, window=1),
    "window256-f32": Setup(cache="f32", is_bf16=False, window=256, softcap=2.0),
    "large": Setup(magnitude=30.0),
    "joined": Setup(num_heads=40, kv_heads=1, head_dim=72, is_joined=True),
    "joined-f32": Setup(num_heads=3, kv_heads=1, head_dim=24, cache="f32", is_bf16=False, is_joined=True),
    "joined-i8": Setup(num_heads=4, kv_heads=1, head_dim=18, cache="i8", block_size=32, is_joined=True),
    "joined-f8-f32": Setup(num_heads=2, kv_heads=1, head_dim=40, cache="f8", is_bf16=False, is_joined=True),
    "joined-r4": Setup(num_heads=5, kv_heads=1, head_dim=64, cache="r4", is_joined=True),
    "negative-scale": Setup(scale=-0.2, head_dim=16),
}
ROWS = [(0, 1, 1), (1, 700, 1), (2, 83, 83), (3, 530, 41), (4, 16, 16), (5, 257, 2), (6, 512, 1)]
LENGTHS = [1, 700, 83, 530, 16, 257, 512]
NAMES = pytest.mark.parametrize("name", SETUPS)
JOINED = [name for name, setup in SETUPS.items() if setup.is_joined]
EACH_ISA = pytest.mark.parametrize("isa", ISAS)


@pytest.mark.covering
@EACH_ISA
@NAMES
def test_attention_agrees_with_float64_when_decode_and_prefill_mix(name, isa):
    setup = SETUPS[name]
    cache = Cache(setup, LENGTHS, isa=isa)
    q, sinks = queries_of(setup, ROWS), sinks_of(setup)
    expected = reference(cache, ROWS, q, sinks)
    out = attend(cache, ROWS, q, sinks=sinks, isa=isa, num_threads=2)
    # Scores of hundreds move by 1e-5 of themselves in f32, and the weights with them.
    slack = 4e-3 if setup.magnitude > 10 else 0.0
    budget = budget_of(setup) + slack
    budget *= max(cache.stored(row[0])[1].abs().max() for row in ROWS)
    assert (out.double() - expected).abs().max() <= budget


def budget_of(setup):
    """Return the error that attention may have, in parts of the largest value."""
    return QUANTISED_BUDGET if setup.is_quantised and setup.is_bf16 else BUDGET[setup.is_bf16]


EXTREME_SINKS = [0.0, -torch.inf, -1e30, -100.0, 1e30, 87.0, 12.5, -0.0]


@pytest.mark.covering(strength=2, keep=False)
@EACH_ISA
@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (37, 4.0)])
def test_sinks_of_every_size_agree_with_float64(cache, window, softcap, isa):
    setup = Setup(num_heads=8, kv_heads=2, head_dim=64, cache=cache, window=window, softcap=softcap)
    filled, sinks = Cache(setup, LENGTHS, isa=isa), torch.tensor(EXTREME_SINKS)
    q = queries_of(setup, ROWS)
    out = attend(filled, ROWS, q, sinks=sinks, isa=isa, num_threads=2).view(len(q), 8, 64)
    budget = (QUANTISED_BUDGET if setup.is_quantised else BUDGET[True]) * max(
        filled.stored(row[0])[1].abs().max() for row in ROWS
    )
    expected = reference(filled, ROWS, q, sinks).view(len(q), 8, 64)
    assert (out.double() - expected).abs().max() <= budget
    # Nothing of a sink: the bits of a head without one. All of it: nothing of the values.
    plain = attend(filled, ROWS, q, isa=isa).view(len(q), 8, 64)
    assert same(out[:, 1:3], plain[:, 1:3])
    assert out[:, 4].abs().max() <= 1e-30


@EACH_ISA
def test_a_sink_that_is_nan_spoils_its_own_head_alone(isa):
    setup = Setup(num_heads=8, kv_heads=2, has_sinks=True)
    filled, sinks = Cache(setup, LENGTHS, isa=isa), sinks_of(setup)
    q = queries_of(setup, ROWS)
    expected = attend(filled, ROWS, q, sinks=sinks, isa=isa).view(len(q), 8, -1)
    sinks[5] = torch.nan
    out = attend(filled, ROWS, q, sinks=sinks, isa=isa).view(len(q), 8, -1)
    assert out[:, 5].isnan().all()
    others = [0, 1, 2, 3, 4, 6, 7]
    assert same(out[:, others], expected[:, others])


@pytest.mark.covering
@EACH_ISA
@NAMES
def test_a_row_is_the_same_bits_when_alone_chunked_or_batched_on_any_threads(name, isa):
    setup = SETUPS[name]
    cache = Cache(setup, LENGTHS, seed=3)
    q, sinks = queries_of(setup, ROWS, seed=4), sinks_of(setup)
    whole = attend(cache, ROWS, q, sinks=sinks, isa=isa)
    for num_threads in (2, 3):
        assert same(whole, attend(cache, ROWS, q, sinks=sinks, isa=isa, num_threads=num_threads))
    generator = torch.Generator().manual_seed(5)
    start = 0
    for sequence, length, count in ROWS:
        rows, mine = q[start : start + count], whole[start : start + count]
        for row in {0, count // 2, count - 1}:
            alone = [(sequence, length - count + row + 1, 1)]
            assert same(
                mine[row : row + 1], attend(cache, alone, rows[row : row + 1], sinks=sinks, isa=isa, num_threads=1 + row % 3)
            )
        done = 0
        while done < count:
            size = min(count - done, int(torch.randint(1, 30, (), generator=generator)))
            chunk = [(sequence, length - count + done + size, size)]
            part = attend(cache, chunk, rows[done : done + size], sinks=sinks, isa=isa, num_threads=1 + size % 3)
            assert same(mine[done : done + size], part)
            done += size
        start += count


@EACH_ISA
@pytest.mark.parametrize("name", JOINED)
def test_rows_that_are_key_and_value_give_the_bits_of_both_apart(name, isa):
    joined = Cache(SETUPS[name], LENGTHS, isa=isa)
    apart = Cache(replace(SETUPS[name], is_joined=False), LENGTHS, isa=isa)
    for index, rows in enumerate(joined.k):
        apart.k[index] = apart.v[index] = rows
        apart.store(index, isa)
    q = queries_of(SETUPS[name], ROWS)
    expected = attend(apart, ROWS, q, isa=isa, num_threads=2)
    assert same(attend(joined, ROWS, q, isa=isa, num_threads=2), expected)
    if SETUPS[name].cache != "r4":
        wanted = attend(joined, ROWS, q, isa=isa, first_value=17).view(len(q), -1, SETUPS[name].head_dim)
        assert same(wanted[..., 16:], expected.view_as(wanted)[..., 16:])


@EACH_ISA
def test_long_decode_is_the_same_bits_when_cut_over_threads(isa):
    for setup in (Setup(kv_heads=1, num_heads=3, head_dim=16), Setup(kv_heads=1, num_heads=33, head_dim=4, window=1000)):
        cache = Cache(setup, [3000, 90, 2000])
        rows = [(0, 3000, 1), (1, 90, 1), (2, 2000, 9)]
        q = queries_of(setup, rows)
        outs = [attend(cache, rows, q, num_threads=n, isa=isa) for n in (1, 2, 3, 7)]
        assert all(same(outs[0], out) for out in outs[1:])
        assert same(outs[0][1:2], attend(cache, rows[1:2], q[1:2], isa=isa))
        assert (outs[0].double() - reference(cache, rows, q)).abs().max() <= BUDGET[True] * 5


@pytest.mark.covering
@EACH_ISA
@pytest.mark.parametrize("name", ["bf16", "f32", "i8", "r4", "k8v4", "f8", "dim72-window", "group3-window1", "window256-f32"])
def test_nan_reaches_exactly_the_rows_that_see_it(name, isa):
    setup = SETUPS[name]
    clean = Cache(setup, [600], isa=isa)
    rows = [(0, 600, 600)]
    q = queries_of(setup, rows)
    expected = attend(clean, rows, q, isa=isa)
    heads = setup.num_heads // setup.kv_heads * setup.head_dim  # those that read the kv head that is spoilt
    positions = torch.arange(600)
    for poisoned, tensor in ((0, "v"), (300, "k"), (331, "v"), (599, "k"), (599, "v"), (256, "v")):
        cache = Cache(setup, [600], isa=isa)
        getattr(cache, tensor)[0][poisoned, : setup.head_dim] = torch.nan
        cache.store(0, isa)
        out = attend(cache, rows, q, isa=isa, num_threads=2)
        sees = (positions >= poisoned) & (positions < poisoned + (setup.window or 600))
        assert out[sees, :heads].isnan().all()
        assert same(out[~sees], expected[~sees])
        assert same(out[:, heads:], expected[:, heads:])
        for row in (max(poisoned - 1, 0), poisoned, min(poisoned + 7, 599)):
            alone = attend(cache, [(0, row + 1, 1)], q[row : row + 1], isa=isa)
            assert same(alone, out[row : row + 1])


@EACH_ISA
@pytest.mark.parametrize("cache_format", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(2, 16), (30, 32), (64, 64), (18, 16)])
def test_store_writes_only_its_token_when_others_of_the_run_are_filled(cache_format, head_dim, block_size, isa):
    setup = Setup(head_dim=head_dim, block_size=block_size, cache=cache_format, kv_heads=3, num_heads=3)
    cache = Cache(setup, [150], isa=isa, num_threads=3)
    keys, values = cache.stored(0)
    codes = CODES.get(cache_format, (None, None))
    for stored, given, code in ((keys, cache.k[0], codes[0]), (values, cache.v[0], codes[1])):
        given = given.view(stored.shape)
        if code == "rotated4":
            # A level that lies as near as another may be chosen where sums are rounded in another order.
            expected = dequantize(*quantize(given, code), code)
            is_same = ((stored - expected).abs() <= 1e-5 * given.norm(dim=-1, keepdim=True)).all(-1)
            assert is_same.float().mean() > 0.995
        elif code == "fp8":
            assert torch.equal(stored.float(), dequantize(*quantize(given, code), code))
        elif code == "int8":
            half_steps = given.abs().amax(-1, keepdim=True).double() / 127 * 0.5001
            assert ((stored - given.double()).abs() <= half_steps).all()
        else:
            assert torch.equal(stored, given.to(DTYPES[cache_format]).double())
    before = [t.clone() for t in (cache.keys, cache.values)]
    token = 37
    cache.k[0][token] = torch.randn(3 * head_dim)
    cache.v[0][token] = torch.randn(3 * head_dim)
    slot, k, v = cache.slots[0][token : token + 1], cache.k[0][token : token + 1], cache.v[0][token : token + 1]
    native.store_kv(cache.layer(), address(slot), 1, address(k), address(v), 1, isa)
    again_keys, again_values = cache.stored(0)
    others = torch.arange(150) != token
    assert torch.equal(again_keys[others], keys[others])
    assert torch.equal(again_values[others], values[others])
    changed = sum(
        int((a.nan_to_num(9) != b.nan_to_num(9)).sum()) for a, b in zip(before, (cache.keys, cache.values), strict=True)
    )
    assert 0 < changed <= 2 * 3 * head_dim


@EACH_ISA
def test_values_on_the_levels_of_the_reference_are_kept(isa):
    cache = Cache(Setup(cache="r4", head_dim=128, kv_heads=1, num_heads=1), [16], isa=isa)
    # Every level, as often as in a normal distribution, so that the root mean square is close to 1.
    normal = 2**0.5 * torch.erfinv((torch.arange(128) + 0.5) / 64 - 1)
    expected = torch.bucketize(normal, torch.tensor(THRESHOLDS))
    assert expected.unique().tolist() == list(range(16))
    for token in range(16):
        cache.v[0][token] = unrotate(torch.tensor(LEVELS)[expected].roll(token)) * 3
    cache.store(0, isa)
    _, (codes, scales) = cache.codes(0)
    assert codes[:, 0].tolist() == [expected.roll(token).tolist() for token in range(16)]
    assert torch.allclose(scales, torch.tensor(3.0))
    out = attend(cache, [(0, 1, 1)], torch.zeros(1, 128), isa=isa)
    assert torch.allclose(out, cache.v[0][:1], rtol=2.0**-8, atol=1e-5)


@EACH_ISA
def test_every_code_of_float8_is_stored_and_read_as_torch_does(isa):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes[~codes.float().isnan()].float().abs().unique()
    # All of them, and what lies between two of them or next to that.
    halves = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((numbers, halves, torch.nextafter(halves, numbers[1:]), torch.nextafter(halves, numbers[:-1])))
    x = torch.cat((x, -x, torch.tensor([448.0, 0.0])))
    cache = Cache(Setup(cache="f8", head_dim=len(x), kv_heads=1, num_heads=1), [1], isa=isa)
    cache.k[0][0] = cache.v[0][0] = x
    cache.store(0, isa)
    expected = x.to(torch.float8_e4m3fn).float()
    assert all(torch.equal(stored.view(-1).float(), expected) for stored in cache.stored(0))
    assert torch.equal(attend(cache, [(0, 1, 1)], torch.zeros(1, len(x)), isa=isa)[0], expected)


@EACH_ISA
@pytest.mark.parametrize("cache_format", ["i8", "f8", "r4"])
def test_codes_are_sound_when_a_head_is_zero_tiny_or_not_finite(cache_format, isa):
    setup = Setup(cache=cache_format, kv_heads=1, num_heads=1, head_dim=18)
    cache = Cache(setup, [5], isa=isa)
    cache.k[0][0] = 0
    cache.k[0][1] = 1e-42
    cache.k[0][2, 17] = torch.nan
    cache.k[0][3] = 3e37
    cache.k[0][4, 3] = torch.inf
    cache.store(0, isa)
    keys, _ = cache.stored(0)
    scales = cache.key_scales.view(-1)[cache.slots[0]]
    assert scales[0] == 0
    assert (keys[0] == 0).all()
    assert keys[1].isfinite().all()
    assert keys[1].abs().max() < 1e-37
    assert keys[2].isnan().all()
    assert (keys[3] / cache.k[0][3].double() - 1).abs().max() < (0.3 if cache_format == "r4" else 1e-6)
    assert not scales[4].isfinite()


@EACH_ISA
def test_attention_is_finite_when_values_are_denormal_or_scores_overflow(isa):
    for setup in (Setup(), Setup(cache="f32", is_bf16=False)):
        cache = Cache(setup, [300])
        cache.k[0][:] *= 1e-40
        cache.v[0][:] *= 1e-40
        cache.store(0)
        q = queries_of(setup, [(0, 300, 20)])
        out = attend(cache, [(0, 300, 20)], q, isa=isa)
        assert out.isfinite().all()
        assert out.abs().max() < 1e-37
        cache.k[0][:] = 1e30
        cache.v[0][:] = 1.0
        cache.k[0][5] = -1e30
        cache.store(0)
        out = attend(cache, [(0, 300, 1)], torch.full((1, 128), 1e5), isa=isa)
        assert torch.allclose(out, torch.ones_like(out), rtol=1e-6)
        # A chunk whose scores are all -inf adds nothing.
        cache.k[0][:256] = -1e38
        cache.store(0)
        out = attend(cache, [(0, 300, 1)], torch.full((1, 128), 1e5), isa=isa)
        assert torch.allclose(out, torch.ones_like(out), rtol=1e-6)


def test_what_is_not_supported_is_refused_when_a_layer_or_job_is_made():
    for bad in (
        ("f16", 16, 1, 8),
        ("bf16", 24, 1, 8),
        ("bf16", 16, 1, 7),
        ("bf16", 16, 0, 8),
        ("i8", 16, 1, 8),
        ("r4", 16, 1, 8),
    ):
        with pytest.raises(ValueError):
            native.KvLayer(*bad, 0, 0)
    with pytest.raises(ValueError, match="at most 2048"):
        native.KvLayer("k8v4", 16, 1, 4096, 1, 1, 1, 1)
    layer = native.KvLayer("bf16", 16, 2, 8, 0, 0)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        native.AttentionJob(layer, 3, 1.0)
    with pytest.raises(ValueError, match="window"):
        native.AttentionJob(layer, 4, 1.0, -1)
    with pytest.raises(ValueError, match="one format, got k8v4"):
        native.KvLayer("k8v4", 16, 1, 8, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="supported_isas"):
        native.attention_scratch_bytes(native.AttentionJob(layer, 4, 1.0), native.AttentionBatch(0, 0, 0, 0, 0, 0), 1, "sse9")


@pytest.mark.parametrize("magnitude", [1.0, 2.0**14, 2.0**32, 2.0**60, 2.0**100])
@pytest.mark.parametrize("name", ["bf16", "f32"])
@EACH_ISA
def test_equal_scores_weigh_alike_however_large_they_are(name, magnitude, isa):
    setup = replace(SETUPS[name], magnitude=0.0)
    cache = Cache(setup, [70], isa=isa)
    cache.k[0] += magnitude
    cache.k[0][50:] /= 2  # whose scores are half as large: of large ones nothing is left
    cache.store(0, isa)
    rows = [(0, 70, 1)]
    q = torch.ones(1, setup.num_heads * setup.head_dim)
    found = attend(cache, rows, q, isa=isa)
    torch.testing.assert_close(found.double(), reference(cache, rows, q), atol=5 * BUDGET[setup.is_bf16], rtol=0)
