"""A CUDA driver that notes what is launched, and runs nothing."""

import ctypes

from quire.kernels.triton.bound import _Config

FUNCTION, OUT_OF_MEMORY, INVALID_VALUE = 77, 2, 1


class NotingDriver:
    """Stands for the driver's library.

    sizes     of the arguments of every kernel, those that Triton appends too; None: it is too old to tell them
    statuses  of the first launches; the others succeed
    launched  grid, threads, shared bytes, stream, whether it begins ahead, and the packed arguments of each launch
    """

    def __init__(self, sizes=None, statuses=()):
        self.sizes, self.statuses, self.launched = sizes, list(statuses), []

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if self.sizes is None:
            raise AttributeError("an old driver")
        if index >= len(self.sizes):
            return INVALID_VALUE
        ends = 0
        for each in self.sizes[: index + 1]:
            start = -(-ends // each) * each
            ends = start + each
        ctypes.c_size_t.from_address(offset).value, ctypes.c_size_t.from_address(size).value = start, self.sizes[index]
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        status = self.statuses.pop(0) if self.statuses else 0
        found, (_, buffer, _, size, end) = _Config.from_address(config), (ctypes.c_void_p * 5).from_address(extra)
        content = ctypes.string_at(buffer, ctypes.c_size_t.from_address(size).value)
        assert (function.value, parameters, end) == (FUNCTION, None, None)
        if status == 0:
            grid = found.grid_x, found.grid_y, found.grid_z
            is_ahead = found.num_attributes == 1 and found.attributes[0].id == 6 and found.attributes[0].value == 1
            self.launched.append((grid, found.block_x, found.shared_bytes, found.stream, is_ahead, content))
        return status

    def cuGetErrorString(self, status, text):
        ctypes.c_char_p.from_address(text).value = b"out of memory" if status == OUT_OF_MEMORY else b"invalid argument"
