"""Recurrent states by the native kernels on every instruction set, against torch in float64; bits do not depend on the cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.cpu.recurrent import recur, recur_native
from quire.kernels.reference import recurrent as reference
from quire.kernels.reference.recurrent import Recurrence, StateRows

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "recur"):
    pytest.skip("built without the recurrence component", allow_module_level=True)

# (k heads, v heads, k_dim, v_dim): around one, two and four vectors of 16, more columns than a tile has, and sizes of models.
SHAPES = [
    (1, 1, 1, 1),
    (2, 6, 12, 20),
    (1, 2, 5, 16),
    (2, 2, 7, 33),
    (1, 3, 20, 64),
    (1, 1, 3, 131),
    (2, 4, 128, 128),
    (1, 1, 256, 70),
]
KINDS = ("delta", "delta by row", "head", "row", "channel")
LENGTHS = (9, 1, 14, 3)
STARTS = [0, 9, 10, 24, 27]


def make_inputs(kind: str, shape: tuple[int, int, int, int], num_tokens: int = STARTS[-1]) -> Recurrence:
    k_heads, v_heads, k_dim, v_dim = shape
    generator = torch.Generator().manual_seed(len(kind) + sum(shape))

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(num_tokens, *sizes, generator=generator)

    q, k, v = random(k_heads, k_dim) * k_dim**-0.5, random(k_heads, k_dim) * k_dim**-0.5, random(v_heads, v_dim)
    if kind == "channel":
        rates = -torch.randn(v_heads, k_dim, v_dim, generator=generator).exp()
        return Recurrence(q, k, v, random(v_heads, v_dim).abs(), rates=rates)
    decay = random(v_heads, k_dim) if "row" in kind else random(v_heads)
    return Recurrence(q, k, v, decay.sigmoid(), random(v_heads).sigmoid() if "delta" in kind else None)


def make_pool(inputs: Recurrence, num_rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_rows, *inputs.state_shape, generator=generator)


def doubled(inputs: Recurrence) -> Recurrence:
    names = ("q", "k", "v", "decay", "beta", "rates")
    return replace(inputs, **{name: None if (part := getattr(inputs, name)) is None else part.double() for name in names})


def cut(inputs: Recurrence, tokens: list[int]) -> Recurrence:
    names = ("q", "k", "v", "decay", "beta")
    return replace(inputs, **{name: None if (part := getattr(inputs, name)) is None else part[tokens] for name in names})


# Rows 0 and 1 are read by one run and written by another, row 4 is read and written by the same; the last run has none.
ROWS = StateRows([0, 1, 4, -1], [[(0, 5), (4, 1), (9, 6)], [(1, 0)], [(14, 4)], [(2, 7), (3, 2)]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "taps", "has_bias"), [(1, 2, False), (35, 4, True), (64, 3, True)])
def test_convolution_is_that_of_torch(isa, channels, taps, has_bias, dtype):
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(STARTS[-1], channels, generator=generator).to(dtype).float()
    weight, pool = torch.randn(channels, taps, generator=generator), torch.randn(9, channels, taps - 1, generator=generator)
    bias = torch.randn(channels, generator=generator) if has_bias else None
    saves = [[(0, 5), (4, 1), (9, 6)], [(1, 8)], [(14, 4)], [(2, 7), (3, 2)]]
    rows = StateRows([0, 3, 4, -1], saves)
    want_pool = pool.to(dtype)
    own = want_pool.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    want = reference.causal_conv(x.to(dtype), weight, bias, want_pool, STARTS, rows).float()
    out, taps_first = torch.empty_like(x), weight.T.contiguous()
    size = own.stride(0) * own.element_size()
    native.convolve(
        (x.data_ptr(), taps_first.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        (channels, taps),
        dtype == torch.bfloat16,
        STARTS,
        [0 if row < 0 else own.data_ptr() + row * size for row in rows.sources],
        [[(count, own.data_ptr() + row * size) for count, row in saved] for saved in saves],
        2,
        isa,
    )
    torch.testing.assert_close(out.to(dtype).float(), want, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(own.transpose(1, 2), want_pool)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_outputs_are_those_of_torch(isa, kind, shape, num_threads):
    inputs = make_inputs(kind, shape)
    pool = make_pool(inputs)
    want_pool = pool.double()
    want = reference.recur(doubled(inputs), want_pool, STARTS, ROWS)
    found = recur_native(native, inputs, pool, STARTS, ROWS, num_threads=num_threads, isa=isa)
    torch.testing.assert_close(found.double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pool.double(), want_pool, atol=2e-5, rtol=2e-5)
    assert torch.equal(pool[3], make_pool(inputs)[3])


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_where_a_run_is_cut_or_on_its_neighbours(isa, kind):
    inputs = make_inputs(kind, (2, 4, 20, 70))
    pool = make_pool(inputs)
    whole = recur_native(native, inputs, pool, [0, STARTS[-1]], StateRows([-1], [[(27, 0)]]), num_threads=2, isa=isa)
    for size in (1, 7):
        parts, row = [], -1
        for first in range(0, STARTS[-1], size):
            tokens = list(range(first, min(first + size, STARTS[-1])))
            # A neighbour stands before the run, and starts from the state that the run reads.
            count = len(tokens)
            rows = StateRows([row, row], [[], [(count, 3)]])
            both = recur_native(native, cut(inputs, [0, *tokens]), pool, [0, 1, 1 + count], rows, num_threads=1, isa=isa)
            parts.append(both[1:])
            row = 3
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(pool[3], pool[0])


def test_more_rows_than_the_kernel_takes_are_left_to_torch():
    inputs = make_inputs("delta", (1, 1, native.MAX_STATE_ROWS + 1, 4))
    pool = make_pool(inputs)
    want_pool = pool.clone()
    want = reference.recur(inputs, want_pool, STARTS, ROWS)
    assert torch.equal(recur(inputs, pool, STARTS, ROWS), want)
    assert torch.equal(pool, want_pool)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shape": (2, 3, 4, 4)}, "v_heads: got 3"),
        ({"shape": (1, 1, 257, 4)}, "k_dim: got 257"),
        ({"kind": 3}, "kind: got 3"),
        ({"starts": [0]}, "starts, sources, saves"),
        ({"saves": [[(3, 0)]]}, "saves: got a count of 3"),
        ({"saves": [[(1, 0), (0, 0)]]}, "saves: got a count of 0"),
        ({"tensors": (0, 0, 0, 0, 0, 8, 0), "kind": 2}, "beta"),
        ({"isa": "sse2"}, "isa: got 'sse2'"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(change, named):
    call = {"tensors": (0,) * 7, "shape": (1, 1, 4, 4), "kind": 0, "starts": [0, 2], "sources": [0], "saves": [[]]}
    with pytest.raises(ValueError, match=named):
        native.recur(**{**call, **change})
