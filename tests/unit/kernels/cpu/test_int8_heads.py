"""The best outputs of a head, found by way of its copy in bytes: those that the head gives, to the bit, whatever is asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.kernels.cpu.packed_layers import DENSE_DTYPES, make_inputs, pack_dense

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "Int8Head"):
    pytest.skip("built without the argmax prefilter", allow_module_level=True)

ISAS = native.supported_isas()
BEST = 5
LEAST_ROOM = 128
"""Panels that a thread keeps of a row at least."""


@pytest.fixture(params=DENSE_DTYPES)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def dense_best(head, x: Tensor, isa: str) -> list[int]:
    found = torch.full((len(x),), -7, dtype=torch.int32)
    native.linear(head, None, x.data_ptr(), x.stride(0), len(x), 0, 0, finish=BEST, best_index=found.data_ptr(), isa=isa)
    return found.tolist()


def prefiltered_best(head, x: Tensor, isa: str, threads: int = 1) -> tuple[list[int], int]:
    """Return the best outputs, and of how many rows all were computed."""
    int8_head = native.Int8Head(head, 2, isa)
    assert int8_head.is_bounded
    found = torch.full((len(x),), -7, dtype=torch.int32)
    num_redone = int8_head.best(head, x.data_ptr(), x.stride(0), len(x), found.data_ptr(), threads, isa)
    return found.tolist(), num_redone


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def best_of_copy(w: Tensor, x: Tensor) -> list[int]:
    """Return what would be found if the copy were believed, with a scale for each row."""
    scale = w.abs().amax(1, keepdim=True) / 127
    return (x @ (scale * (w / scale).round()).T).argmax(1).tolist()


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("n, k", [(1, 8), (15, 8), (17, 24), (333, 40), (1000, 264), (700, 1032)])
def test_best_is_that_of_the_head_for_rows_of_every_size(isa, form, n, k, threads):
    head = pack_dense(native, form, random(n, k) * 0.02)
    for m in (1, 2, 7, 16, 29, 50):
        x = make_inputs(m, k, seed=m)
        assert prefiltered_best(head, x, isa, threads)[0] == dense_best(head, x, isa)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(ISAS),
    st.sampled_from([*DENSE_DTYPES]),
    st.integers(1, 600),
    st.integers(1, 70),
    st.integers(1, 20),
    st.integers(0, 10**6),
)
def test_best_is_that_of_the_head_for_any_shape(isa, form, n, k, m, seed):
    k = 8 * k if form == "bf12" else k
    head = pack_dense(native, form, random(n, k, seed=seed) * 0.02)
    x = random(m, k, seed=seed + 1)
    assert prefiltered_best(head, x, isa, 2)[0] == dense_best(head, x, isa)


def test_best_is_exact_where_the_copy_alone_is_wrong(isa, form):
    # Outputs of families of eight, which differ by less than a step of a byte.
    families = random(250, 1, 128).expand(-1, 8, -1) + 1e-3 * random(250, 8, 128, seed=1)
    w = (families.reshape(2000, 128) * 0.02).to(DENSE_DTYPES[form])
    head, x = pack_dense(native, form, w), random(64, 128, seed=2)
    found, num_redone = prefiltered_best(head, x, isa, 2)
    assert found == dense_best(head, x, isa)
    assert num_redone == 0
    wrong = sum(mine != theirs for mine, theirs in zip(best_of_copy(w.float(), x), found, strict=True))
    assert wrong > 20


def test_best_is_exact_where_the_error_of_the_copy_is_as_large_as_can_be(isa):
    # Each row points where an output is off: the bound is met, not only kept.
    w = (random(2048, 64) * 0.02).bfloat16()
    scale = w.float().abs().amax(1, keepdim=True) / 127
    off = w.float() - scale * (w.float() / scale).round()
    x = off[:64] / off[:64].abs().amax(1, keepdim=True) + 0.2 * random(64, 64, seed=3)
    head = pack_dense(native, "bf16", w)
    assert prefiltered_best(head, x.contiguous(), isa, 2)[0] == dense_best(head, x.contiguous(), isa)


def test_best_is_the_lowest_of_equal_outputs(isa, form):
    w = random(40, 64).repeat(30, 1)
    head, x = pack_dense(native, form, w), random(20, 64, seed=1)
    found, _ = prefiltered_best(head, x, isa, 2)
    assert found == dense_best(head, x, isa)
    assert max(found) < 40


@pytest.mark.parametrize("threads", [1, 2])
def test_all_outputs_are_computed_where_all_may_be_the_best(isa, threads):
    num_panels = 2 * 1024 + LEAST_ROOM
    head = pack_dense(native, "bf16", random(1, 16).expand(16 * num_panels, -1))
    x = random(5, 16, seed=1)
    assert prefiltered_best(head, x, isa, threads) == ([0] * 5, 5)


def test_few_outputs_are_computed_of_a_random_head(isa):
    head, x = pack_dense(native, "bf16", random(40_000, 256) * 0.02), random(16, 256, seed=1)
    assert prefiltered_best(head, x, isa, 2)[1] == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_row_that_is_not_finite_is_computed_as_a_whole_and_leaves_others_alone(isa, form, bad):
    head, x = pack_dense(native, form, random(500, 32)), random(9, 32, seed=1)
    want = dense_best(head, x, isa)
    x[4, 7] = bad
    found, num_redone = prefiltered_best(head, x, isa, 2)
    assert found[:4] + found[5:] == want[:4] + want[5:]
    assert num_redone == 1
    assert 0 <= found[4] < 500


def test_rows_of_zeros_have_the_first_output(isa, form):
    head = pack_dense(native, form, random(500, 32))
    assert prefiltered_best(head, torch.zeros(3, 32), isa, 2)[0] == [0, 0, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_a_head_that_is_not_finite_or_huge_has_no_copy(isa, bad):
    w = random(100, 32)
    w[60, 3] = bad
    assert not native.Int8Head(pack_dense(native, "bf16", w), 1, isa).is_bounded


def test_a_head_of_integers_is_refused(isa):
    codes = torch.ones(32, 32, dtype=torch.int8)
    packed = native.Weight("u8", 32, 32, 32)
    packed.pack(codes.data_ptr(), 32, 0, 32)
    with pytest.raises(ValueError, match="dense"):
        native.Int8Head(packed, 1, isa)


def test_a_copy_takes_a_byte_a_weight_and_twelve_an_output():
    int8_head = native.Int8Head(pack_dense(native, "bf16", random(1600, 256)), 1)
    assert int8_head.num_bytes == 1600 * (256 + 12)
