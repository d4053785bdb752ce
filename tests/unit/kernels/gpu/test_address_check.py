"""The check of addresses finds what a kernel reads and writes outside of its tensors, and nothing else."""

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton.launching import Launch
from tests.unit.kernels.gpu.address_check import extent_bytes
from tests.unit.kernels.gpu.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="only the interpreter's addresses are checked")
N = 8


@triton.jit
def _copy(x_ptr: tl.tensor, out_ptr: tl.tensor, first: tl.tensor, num_read: tl.tensor, num_written: tl.tensor, N: tl.constexpr):
    places = first + tl.arange(0, N)
    x = tl.load(x_ptr + places, mask=places < num_read, other=0.0)
    tl.store(out_ptr + places, x, mask=places < num_written)


@triton.jit
def _load_all(x_ptr: tl.tensor, out_ptr: tl.tensor, first: tl.tensor, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out_ptr + places, tl.load(x_ptr + first + places))


@triton.jit
def _count(counts_ptr: tl.tensor, place: tl.tensor, IS_SWAP: tl.constexpr):
    if IS_SWAP:
        tl.atomic_cas(counts_ptr + place, 0, 1)
    else:
        tl.atomic_add(counts_ptr + place, 1)


@triton.jit
def _copy_described(x_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: tl.tensor, N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [num_rows, N], [N, 1], [N, N])
    tl.store(out_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :], x.load([0, 0]))


@triton.jit
def _follow(addresses_ptr: tl.tensor, out_ptr: tl.tensor):
    x_ptr = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr, tl.load(x_ptr))


def copy(x, out, first=0, num_read=N, num_written=N):
    arguments = {"x_ptr": x, "out_ptr": out, "first": first, "num_read": num_read, "num_written": num_written}
    Launch(_copy, (1,), arguments, {"N": N}).run()


def expect_refused(address_check, words):
    """Return what expects a launch to be refused, with these words."""

    class Expected:
        def __enter__(self):
            self.raised = pytest.raises(Exception, match=words)
            return self.raised.__enter__()

        def __exit__(self, *error):
            assert len(address_check.take_errors()) == 1
            return self.raised.__exit__(*error)

    return Expected()


def test_what_lies_within_is_copied_and_what_a_mask_leaves_out_may_lie_anywhere(address_check):
    x, out = torch.arange(5.0), torch.zeros(5)
    before = address_check.num_launches["_copy"]
    copy(x, out, 0, 5, 5)
    copy(x, out, 1 << 40, 0, 0)
    copy(x, out, -(1 << 40), -(1 << 41), -(1 << 41))
    assert out.tolist() == x.tolist()
    assert address_check.num_launches["_copy"] == before + 3


@pytest.mark.parametrize(
    ("first", "num_read", "num_written", "words"),
    [
        (0, 8, 5, "_copy loads outside of x_ptr: 3 of 8 addresses, the first at byte 20 of 20, 4 bytes wide"),
        (0, 5, 6, "_copy stores outside of out_ptr: 1 of 8 addresses, the first at byte 20 of 20"),
        (-1, 5, 0, "_copy loads outside of x_ptr: 1 of 8 addresses, the first at byte -4 of 20"),
        (1 << 34, 1 << 35, 0, "_copy loads outside of x_ptr: 8 of 8"),
    ],
    ids=["read behind", "written behind", "read before", "read far away"],
)
def test_a_load_and_a_store_outside_are_refused(address_check, first, num_read, num_written, words):
    with expect_refused(address_check, words):
        copy(torch.zeros(5), torch.zeros(5), first, num_read, num_written)


def test_a_neighbour_is_another_tensor(address_check):
    """As where one buffer has all arrays of a step."""
    both = torch.zeros(10)
    with expect_refused(address_check, "loads outside of x_ptr: 3 of 8"):
        copy(both[:5], both[5:], 0, 8, 5)


def test_loads_without_a_mask_are_checked(address_check):
    arguments = {"x_ptr": torch.zeros(N), "out_ptr": torch.zeros(N)}
    Launch(_load_all, (1,), {**arguments, "first": 0}, {"N": N}).run()
    with expect_refused(address_check, "_load_all loads outside of x_ptr: 1 of 8"):
        Launch(_load_all, (1,), {**arguments, "first": 1}, {"N": N}).run()


@pytest.mark.parametrize("is_swap", [False, True], ids=["add", "compare and swap"])
def test_atomic_operations_are_checked(address_check, is_swap):
    counts = torch.zeros(3, dtype=torch.int32)
    Launch(_count, (1,), {"counts_ptr": counts, "place": 2}, {"IS_SWAP": is_swap}).run()
    assert counts.tolist() == [0, 0, 1]
    with expect_refused(address_check, "_count updates outside of counts_ptr: 1 of 1"):
        Launch(_count, (1,), {"counts_ptr": counts, "place": 3}, {"IS_SWAP": is_swap}).run()


def test_a_tensor_descriptor_may_not_say_more_than_there_is(address_check):
    x, out = torch.arange(5.0 * N).view(5, N), torch.full((N, N), -1.0)
    Launch(_copy_described, (1,), {"x_ptr": x, "out_ptr": out, "num_rows": 5}, {"N": N}).run()
    assert torch.equal(out[:5], x)
    assert not out[5:].any()
    with expect_refused(address_check, "_copy_described loads outside of x_ptr: 8 of 64"):
        Launch(_copy_described, (1,), {"x_ptr": x, "out_ptr": out, "num_rows": 6}, {"N": N}).run()


def test_an_address_of_no_argument_is_refused(address_check):
    x = torch.zeros(1)
    with expect_refused(address_check, "_follow loads outside of no tensor"):
        Launch(_follow, (1,), {"addresses_ptr": torch.tensor([x.data_ptr()]), "out_ptr": torch.zeros(1)}, {}).run()


def test_a_view_ends_with_its_last_element(address_check):
    whole = torch.zeros(4, 6)
    assert extent_bytes(whole[:2, 1:4]) == 4 * (6 + 3)
    assert extent_bytes(whole[:0]) == 0
    with expect_refused(address_check, "loads outside of x_ptr: 2 of 8"):
        copy(whole[0, :6], torch.zeros(N))


def test_an_error_fails_the_test_even_where_it_is_caught(address_check):
    with pytest.raises(Exception, match="outside of x_ptr"):
        copy(torch.zeros(5), torch.zeros(N))
    errors = address_check.take_errors()
    assert len(errors) == 1
    assert errors[0].startswith("_copy loads outside of x_ptr")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_unset_memory_is_nan_until_it_is_written(address_check, dtype):
    for unset in (torch.empty(3, dtype=dtype), torch.empty_like(torch.zeros(3, dtype=dtype)), torch.zeros(1).new_empty(2)):
        assert unset.float().isnan().all()


def test_unset_integers_are_no_place_of_anything(address_check):
    for dtype in (torch.int32, torch.int64):
        assert (torch.empty(2, dtype=dtype) > 1 << 30).all()
