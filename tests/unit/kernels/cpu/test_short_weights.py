"""bf16 weights in twelve bits: the same bits come out as from plain bf16, whatever they are."""

import os

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.cpu.packed_layers import pack_dense, run_apart

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "suits_bf12"):
    pytest.skip("built without the linear component", allow_module_level=True)

ISAS = native.supported_isas()
SHAPES = [(1, 8), (16, 8), (33, 384), (100, 96), (130, 1024)]
# One tile of each width, its limits, and several passes.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 16, 17, 28, 29, 70)
STORE, ADD, GATE, BEST = 0, 1, 2, 5
SPECIALS = (0.0, -0.0, 1e-40, -1e-39, 3e38, -3e38, float("inf"), 1e-38)


def weights(kind: str, n: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=generator) * 0.02
    places = torch.rand(n, k, generator=generator)
    if kind == "zeros":
        w[places < 0.01] = 0.0
    if kind == "wide":
        w = w * torch.exp2(torch.randint(-60, 60, (n, k), generator=generator).float())
    if kind == "ones":
        w = torch.ones(n, k)
    if kind == "large":
        w = w * 1e30
    if kind == "small":
        w = w * 1e-30
    if kind == "special":
        w[places < 0.02] = torch.tensor(SPECIALS)[torch.randint(0, 8, (n, k), generator=generator)][places < 0.02]
    return w.bfloat16()


KINDS = ("normal", "zeros", "wide", "ones", "large", "small", "special")


def run(packed, x: Tensor, n: int, isa: str, finish: int = STORE, second=None) -> Tensor:
    out = torch.full((len(x), n), float("nan") if finish != ADD else 0.5)
    native.linear(packed, second, x.data_ptr(), x.shape[1], len(x), out.data_ptr(), n, finish=finish, num_threads=2, isa=isa)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_comes_out_as_it_went_in(isa, kind):
    for n, k in SHAPES:
        w, row = weights(kind, n, k), torch.empty(k)
        packed = pack_dense(native, "bf12", w)
        for index in range(n):
            packed.unpack_row(index, row.fill_(float("nan")).data_ptr(), isa)
            assert row.view(torch.int32).equal(w[index].float().view(torch.int32))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", [*(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[:-1]), ISAS[-1]])
def test_results_have_the_bits_of_plain_bf16_at_any_number_of_rows(isa, kind):
    for n, k in SHAPES:
        bias = torch.arange(n) / 7.0
        gate, up = weights(kind, n, k), weights("normal", n, k, seed=1)
        plain, short = (pack_dense(native, format, gate, bias) for format in ("bf16", "bf12"))
        plain_up, short_up = (pack_dense(native, format, up) for format in ("bf16", "bf12"))
        for m in ROWS:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
            for finish, a, b in ((STORE, None, None), (ADD, None, None), (GATE, plain_up, short_up)):
                want, got = run(plain, x, n, isa, finish, a), run(short, x, n, isa, finish, b)
                assert got.nan_to_num(7.0).equal(want.nan_to_num(7.0)), (n, k, m, finish)


def test_best_column_is_that_of_plain_bf16_when_padding_lies_behind_it(isa):
    w = -weights("normal", 33, 64).abs()
    x = torch.rand(5, 64)
    found = []
    for format in ("bf16", "bf12"):
        index = torch.full((5,), -7, dtype=torch.int32)
        packed = pack_dense(native, format, w)
        native.linear(packed, None, x.data_ptr(), 64, 5, 0, 0, finish=BEST, best_index=index.data_ptr(), num_threads=1, isa=isa)
        found.append(index.tolist())
    assert found[0] == found[1]


def test_ordinary_weights_take_three_quarters_of_the_bytes():
    w = weights("normal", 1024, 1024)
    assert native.suits_bf12(w.data_ptr(), 1024, 1024, 1024)
    assert pack_dense(native, "bf12", w).num_bytes < 0.77 * pack_dense(native, "bf16", w).num_bytes


@pytest.mark.parametrize("kind", ["zeros", "wide", "special"])
def test_weights_with_many_exceptions_do_not_suit(kind):
    w = weights(kind, 64, 512)
    assert not native.suits_bf12(w.data_ptr(), 512, 64, 512)


def test_columns_that_are_no_whole_units_are_refused():
    w = weights("normal", 16, 12)
    assert not native.suits_bf12(w.data_ptr(), 12, 16, 12)
    with pytest.raises(ValueError, match="multiple of 8 columns"):
        native.Weight("bf12", 16, 12)


def test_scales_of_columns_are_refused():
    scales = torch.ones(16)
    with pytest.raises(ValueError, match="scales of its own"):
        native.Weight("bf12", 16, 8).set_extras(column_scale=scales.data_ptr())


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer's allocator waits for memory that does not come"
)
def test_packing_that_finds_no_memory_raises_and_leaves_a_weight_that_can_be_packed():
    # In a process of its own: an exception that left the threads' region ended it.
    code = """
import resource
import torch
from quire.kernels.cpu import _native as native
from tests.unit.kernels.cpu.packed_layers import pack_dense
from tests.unit.kernels.cpu.test_short_weights import weights
n, k = 512, 8192
w, few = weights("wide", n, k), weights("normal", n, k)
packed = native.Weight("bf12", n, k)
packed.pack(few.data_ptr(), k, 0, n, num_threads=2)
plain = native.Weight("bf16", n, k)
plain.pack(w.data_ptr(), k, 0, n, num_threads=2)
row, want = torch.empty(k), torch.empty(k)
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), before[1]))
try:
    packed.pack(w.data_ptr(), k, 0, n, num_threads=2)
    raised = False
except MemoryError:
    raised = True
resource.setrlimit(resource.RLIMIT_AS, before)
assert raised
packed.pack(w.data_ptr(), k, 0, n, num_threads=2)
for index in range(0, n, 31):
    packed.unpack_row(index, row.data_ptr())
    plain.unpack_row(index, want.data_ptr())
    assert row.equal(want)
"""
    run_apart(code)
