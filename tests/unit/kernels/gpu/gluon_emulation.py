"""Runs Gluon code for Hopper on the CPU, which Triton's interpreter does not.

Partitions are threads, tensors are torch's, and barriers count arrivals and bytes as mbarriers do. A product of matrices is
computed when it is waited for, so that shared memory that was released too early holds something else by then. Layouts are left
out, except that of tiles in shared memory, of which copies fill parts: columns are stored 64 at a time.
"""

import math
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.experimental import gluon
from triton.language import constexpr

from quire.kernels.triton.tma_tensor import TmaTensor

_COLUMNS = 64
_WAIT_S = 20.0


class Pointer:
    """A place, or places, in a tensor."""

    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, offset

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)

    def flat(self):
        """Return the offsets, and the tensor as it is stored; places outside raise an IndexError."""
        offsets = torch.as_tensor(self.offset).long()
        count = 1 + sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        if offsets.numel() and not 0 <= int(offsets.min()) <= int(offsets.max()) < count:
            raise IndexError(f"offsets {int(offsets.min())} to {int(offsets.max())} of {count} elements")
        return offsets, self.tensor.as_strided((count,), (1,))


class Shared:
    """A tile in shared memory, or several."""

    def __init__(self, flat, shape, is_transposed=False):
        self.flat, self.shape, self.dtype, self.is_transposed = flat, shape, flat.dtype, is_transposed

    def index(self, index):
        tiles = self.flat.view(self.shape[0], -1)
        return Shared(tiles[range(self.shape[0])[int(index)]], self.shape[1:])

    def reinterpret(self, dtype, shape, layout):
        assert (dtype, math.prod(shape)) == (self.dtype, self.flat.numel())
        return Shared(self.flat, shape)

    _reinterpret = reinterpret

    def permute(self, order):
        assert order == (1, 0)
        return Shared(self.flat, self.shape, True)

    def load(self, layout=None):
        rows, columns = self.shape
        x = self.flat.view(-1, rows, min(_COLUMNS, columns)).transpose(0, 1).reshape(rows, columns)
        return x.T if self.is_transposed else x.clone()

    def store(self, x):
        rows, columns = self.shape
        width = min(_COLUMNS, columns)
        self.flat.view(-1, rows, width).copy_(x.view(rows, -1, width).transpose(0, 1))


class IncompleteError(AssertionError):
    """A barrier misses arrivals or bytes, maybe as another partition has failed."""


class Barrier:
    """A phase ends with the last arrival, when all bytes that are expected are there."""

    def __init__(self):
        self._changed, self._phase, self._count, self._missing, self._bytes = threading.Condition(), 0, 0, 0, 0

    def init(self, count):
        self._count = self._missing = count

    def update(self, arrivals, num_bytes):
        with self._changed:
            self._missing -= arrivals
            self._bytes += num_bytes
            assert self._missing >= 0
            if self._missing == self._bytes == 0:
                self._phase, self._missing = self._phase + 1, self._count
                self._changed.notify_all()

    def wait(self, parity):
        with self._changed:
            if not self._changed.wait_for(lambda: self._phase & 1 != int(parity), _WAIT_S):
                raise IncompleteError("a barrier is never completed")


class Product:
    """What an asynchronous product becomes; only another product can begin with it before it is waited for."""

    def __init__(self, compute):
        self.compute, self.value = compute, None


class GluonEmulation:
    """The kernels of a module."""

    def __init__(self, module):
        self._own = threading.local()
        self._program, self._num_programs = 0, 1
        scope = {name: value.value if isinstance(value, constexpr) else value for name, value in vars(module).items()}
        scope |= {
            "gl": self._language(),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: "barriers",
                init=lambda barrier, count: barrier.init(count),
                wait=lambda barrier, phase: barrier.wait(phase),
                expect=lambda barrier, num_bytes: barrier.update(1, num_bytes),
                arrive=lambda barrier: barrier.update(1, 0),
            ),
            "copy_box": self._copy,
            "synchronise": lambda: None,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_init": lambda acc: acc,
            "warpgroup_mma_wait": self._wait,
        }
        for name, value in vars(module).items():
            if isinstance(value, gluon._runtime.GluonJITFunction):
                scope[name] = types.FunctionType(value.fn.__code__, scope, name)
        scope["_split_pairs"] = _split_pairs
        self._scope = scope

    def run(self, launch):
        """Run the programs of a Launch one after the other."""
        arguments = {
            name: Pointer(value) if isinstance(value, torch.Tensor) else value for name, value in launch.arguments.items()
        }
        for name, boxes in launch.arguments.items():
            if isinstance(boxes, TmaTensor):
                arguments[name] = types.SimpleNamespace(dtype=boxes.tensor.dtype, matrix=boxes.tensor.view(boxes.shape))
        self._num_programs = launch.grid[0]
        for self._program in range(*launch.grid):
            self._scope[launch.kernel.fn.__name__](**arguments, **launch.constants)

    def _language(self):
        as_tensor = torch.as_tensor
        layouts = ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "NVMMASharedLayout")
        return types.SimpleNamespace(
            **dict.fromkeys(layouts, lambda *arguments: None),
            constexpr=object,
            float32=torch.float32,
            int64=torch.int64,
            program_id=lambda axis: torch.tensor(self._program),
            num_programs=lambda axis: self._num_programs,
            load=_load,
            store=_store,
            arange=lambda first, end, layout: torch.arange(first, end),
            minimum=lambda a, b: torch.minimum(as_tensor(a), as_tensor(b)),
            maximum=lambda a, b: torch.maximum(as_tensor(a), as_tensor(b)),
            where=lambda mask, a, b: torch.where(as_tensor(mask), a, b),
            exp2=torch.exp2,
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            full_like=torch.full_like,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            zeros_like=torch.zeros_like,
            fma=lambda a, b, c: (a.double() * b.double() + c.double()).float(),
            join=lambda a, b: torch.stack((a, b), -1),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            static_range=range,
            allocate_shared_memory=_allocate,
            warp_specialize=_specialise,
        )

    def _copy(self, desc, place, barrier, box):
        row, column = (int(at) for at in place)
        if not 0 <= row < len(desc.matrix):
            raise IndexError(f"row {row} of {len(desc.matrix)}")
        rows = desc.matrix[row : row + box.shape[0], column : column + box.shape[1]]
        box.store(torch.cat((rows, rows.new_zeros(box.shape[0] - len(rows), box.shape[1]))))
        barrier.update(0, -math.prod(box.shape) * box.dtype.itemsize)

    def _multiply(self, a, b, acc, use_acc=True, is_async=False):
        def compute():
            product = (a.load() if isinstance(a, Shared) else a).float() @ b.load().float()
            return (acc.value if isinstance(acc, Product) else acc) + product if use_acc else product

        if not is_async:
            return compute()
        product = Product(compute)
        self._own.__dict__.setdefault("started", []).append(product)
        return product

    def _wait(self, num_outstanding, deps):
        while len(self._own.started) > num_outstanding:
            product = self._own.started.pop(0)
            product.value = product.compute()
        (product,) = deps
        return product if product.value is None else product.value


def _load(pointer, mask=None, other=None):
    if mask is None:
        return torch.take(*reversed(pointer.flat()))
    found = torch.full(mask.shape, other, dtype=pointer.tensor.dtype)
    found[mask] = _load(Pointer(pointer.tensor, pointer.offset[mask]))
    return found


def _split_pairs(codes, base):
    """As the kernel's, whose assembly test_nibbles.py executes."""
    bits = codes.int() & 0xFFFF
    magnitudes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.float32)
    numbers = torch.arange(16.0) if base is not None else torch.cat((magnitudes, -magnitudes))
    return tuple(numbers[bits >> shift & 15] for shift in (0, 8, 4, 12))


def _store(pointer, x, mask):
    mask = mask.expand(x.shape)
    offsets, flat = Pointer(pointer.tensor, pointer.offset.expand(x.shape)[mask]).flat()
    flat[offsets] = x[mask]


def _allocate(dtype, shape, layout):
    if layout == "barriers":
        barriers = [Barrier() for _ in range(shape[0])]
        return types.SimpleNamespace(index=lambda index: barriers[int(index)])
    return Shared(torch.full((math.prod(shape),), torch.nan if dtype.is_floating_point else -1, dtype=dtype), shape)


def _specialise(partitions, worker_num_warps, worker_num_regs):
    with ThreadPoolExecutor(len(partitions)) as pool:
        started = [pool.submit(function, *arguments) for function, arguments in partitions]
    errors = [error for partition in started if (error := partition.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, IncompleteError))
