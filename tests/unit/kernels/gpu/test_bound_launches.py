"""Launches with packed arguments, by a driver that notes what it is asked for: no kernel runs, and none is compiled."""

import ctypes
import logging
import struct
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import triton

from quire.kernels.triton import cache_keys
from quire.kernels.triton.bound import BoundLauncher, _Attribute, _Config
from quire.kernels.triton.launching import Launch
from quire.worker.device.faults import is_out_of_memory
from tests.unit.kernels.gpu.conftest import HAS_GPU
from tests.unit.kernels.gpu.noting_driver import FUNCTION, INVALID_VALUE, OUT_OF_MEMORY
from tests.unit.kernels.gpu.noting_driver import NotingDriver as Driver
from tests.unit.kernels.gpu.serving_variants import run_without_interpreter

METADATA = {
    "num_warps": 4,
    "shared": 1024,
    "launch_pdl": False,
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.float64: "*fp64"}


def kind_of(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if value is None or value == 1:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


class Kernel:
    """Stands for a JITFunction: `num` is specialised, and `count` is not, whose kind Triton sees for 1, too."""

    def __init__(self, **metadata):
        self.metadata = SimpleNamespace(**METADATA | metadata)
        self.params = [SimpleNamespace(name=name, do_not_specialize=name == "count") for name in ("x", "num", "count", "scale")]
        self.fn, self.compiled, self.run_by_triton = lambda: None, [], []

    def warmup(self, *, grid, **values):
        self.compiled.append(values)
        signature = {name: "i32" if (name, value) == ("count", 1) else kind_of(value) for name, value in values.items()}
        signature |= {name: "constexpr" for name in values if name.isupper() or name.startswith(("num_", "enable", "launch"))}
        return SimpleNamespace(src=SimpleNamespace(signature=signature), metadata=self.metadata, name="kernel", kernel=b"")

    def __getitem__(self, grid):
        return lambda **values: self.run_by_triton.append((grid, values))


@pytest.fixture(autouse=True)
def _driver_of_triton(monkeypatch):
    if HAS_GPU:
        pytest.skip("a GPU has a driver of its own: the other tests launch with it")
    utils = SimpleNamespace(load_binary=lambda *_: (1, FUNCTION, 0, 0, 1024))
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 1234, utils=utils)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))


def launch_of(kernel, x, num=3, count=5, scale=0.5, grid=(2, 3), is_pdl=False):
    return Launch(kernel, grid, {"x": x, "num": num, "count": count, "scale": scale}, {"BLOCK": 64}, is_pdl=is_pdl)


def test_arguments_are_packed_as_the_kernel_takes_them():
    kernel, driver, x = Kernel(launch_pdl=True), Driver([8, 4, 4, 4, 8, 8]), torch.zeros(4)
    launcher = BoundLauncher(driver)
    launcher.run(launch_of(kernel, x))
    launcher.run(launch_of(kernel, x, num=7, count=-8, scale=0.25, grid=(9,)))
    packed = [struct.pack("@QiifQQ", x.data_ptr(), *numbers, 0, 0) for numbers in ((3, 5, 0.5), (7, -8, 0.25))]
    assert driver.launched == [((2, 3, 1), 128, 1024, 1234, True, packed[0]), ((9, 1, 1), 128, 1024, 1234, True, packed[1])]
    assert len(kernel.compiled) == 1
    assert kernel.run_by_triton == []


def test_wide_numbers_are_passed_to_other_code():
    kernel, driver, x = Kernel(), Driver([8, 4, 4, 4, 8, 8]), torch.zeros(4)
    launcher, numbers = BoundLauncher(driver), (7, 1 + (1 << 33), 9, 1 - (1 << 40))
    for num in numbers:
        driver.sizes[1] = 4 if num < 10 else 8  # asked when code is loaded
        launcher.run(launch_of(kernel, x, num=num))
    formats = ("@QiifQQ", "@QqifQQ", "@QiifQQ", "@QqifQQ")
    packed = [struct.pack(each, x.data_ptr(), num, 5, 0.5, 0, 0) for each, num in zip(formats, numbers, strict=True)]
    assert [launched[-1] for launched in driver.launched] == packed
    assert (len(kernel.compiled), kernel.run_by_triton) == (2, [])


def test_what_is_compiled_in_is_not_passed():
    kernel, driver = Kernel(), Driver([4, 4, 8, 8])
    BoundLauncher(driver).run(launch_of(kernel, None, num=1, count=1))
    assert [launched[-1] for launched in driver.launched] == [struct.pack("@ifQQ", 1, 0.5, 0, 0)]


def test_code_is_found_again_unless_it_depends_on_what_has_changed():
    kernel, x = Kernel(), torch.zeros(64)
    launcher = BoundLauncher(Driver())  # its driver is too old: all goes through Triton, once the code is known
    same = [{}, {"x": torch.ones(4)}, {"num": 5}, {"count": 1}, {"count": 16}, {"scale": 2.0}, {"grid": (7,)}]
    other = [{"x": x[1:]}, {"x": x.double()}, {"num": 1}, {"num": 32}, {"num": 1 << 33}, {"count": 1 << 33}, {"x": None}]
    for options in same:
        launcher.run(launch_of(kernel, **{"x": x, **options}))
    assert len(kernel.compiled) == 1
    for options in other:
        launcher.run(launch_of(kernel, **{"x": x, **options}))
    assert len(kernel.compiled) == 1 + len(other)
    for options in (*same, *other):
        launcher.run(launch_of(kernel, **{"x": x, **options}))
    assert len(kernel.compiled) == 1 + len(other)
    launcher.run(launch_of(kernel, x)._replace(constants={"BLOCK": 32}))
    launcher.run(launch_of(kernel, x, is_pdl=True))
    assert len(kernel.compiled) == 3 + len(other)


@pytest.mark.parametrize(
    ("kernel", "sizes", "statuses", "x"),
    [
        (Kernel(num_ctas=2), [8, 4, 4, 4, 8, 8], [], torch.zeros(4)),
        (Kernel(global_scratch_size=64), [8, 4, 4, 4, 8, 8], [], torch.zeros(4)),
        (Kernel(), [8, 4, 4, 4, 8], [], torch.zeros(4)),
        (Kernel(), None, [], torch.zeros(4)),
        (Kernel(), [8, 4, 4, 4, 8, 8], [INVALID_VALUE], torch.zeros(4)),
        (Kernel(), [8, 4, 4, 4, 8, 8], [], (torch.zeros(4), "boxes")),
    ],
    ids=["clusters", "working memory", "other conventions", "old driver", "refused", "other arguments"],
)
def test_other_launches_go_through_triton(kernel, sizes, statuses, x):
    driver = Driver(sizes, statuses)
    launcher = BoundLauncher(driver)
    for num in (3, 5):
        launcher.run(launch_of(kernel, x, num=num))
    assert [(grid, values["num"], values["BLOCK"]) for grid, values in kernel.run_by_triton] == [
        ((2, 3), 3, 64),
        ((2, 3), 5, 64),
    ]
    assert driver.launched == []


def test_why_launches_go_through_triton_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    launcher = BoundLauncher(Driver())  # too old for any kernel
    for kernel in (Kernel(), Kernel(), Kernel(num_ctas=2)):
        for num in (3, 16):
            launcher.run(launch_of(kernel, torch.zeros(4), num=num))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "an old driver",
        "it needs clusters or working memory: (2, False, 0, 0)",
    ]


def test_what_the_driver_says_is_raised():
    launcher = BoundLauncher(Driver([8, 4, 4, 4, 8, 8], [0, OUT_OF_MEMORY]))
    launcher.run(launch_of(kernel := Kernel(), torch.zeros(4)))
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        launcher.run(launch_of(kernel, torch.zeros(4)))
    assert is_out_of_memory(raised.value)


def test_what_is_compiled_elsewhere_is_waited_for_once():
    kernel, waited = Kernel(), []
    launcher = BoundLauncher(Driver([8, 4, 4, 4, 8, 8]))
    launcher.before_first.append(lambda launch: waited.append((launch.arguments["num"], len(kernel.compiled))))
    for num in (3, 5, 16):
        launcher.run(launch_of(kernel, torch.zeros(4), num=num))
    assert waited == [(3, 0), (16, 1)]


def test_a_thread_launches_no_kernel_whose_key_another_one_has_not_settled_yet(monkeypatch):
    monkeypatch.setattr(cache_keys, "INTERPRETED", SimpleNamespace(value=False))
    asked = []

    class Slow:
        """A kernel during whose hashing another thread launches it, too."""

        fn = lambda: None  # noqa: E731

        @property
        def cache_key(self):
            asked.append(self)
            if len(asked) == 1:
                other = Thread(target=cache_keys.hash_callees, args=(self,))
                other.start()
                other.join()

    cache_keys.hash_callees(kernel := Slow())
    assert asked == [kernel, kernel]
    cache_keys.hash_callees(kernel)
    assert asked == [kernel, kernel]


def test_descriptions_have_the_layout_of_the_driver():
    assert ctypes.sizeof(_Config) == 56
    assert [getattr(_Config, name).offset for name in ("block_x", "stream", "attributes", "num_attributes")] == [12, 32, 40, 48]
    assert (ctypes.sizeof(_Attribute), _Attribute.value.offset) == (72, 8)


@pytest.mark.slow
def test_compiled_kernels_take_the_arguments_that_are_packed(tmp_path):
    """The places of arguments are read from the machine code, and its key is that of Triton's own path."""
    found = run_without_interpreter(tmp_path, "bound")
    assert len(found) >= 4
    assert all(one["is_launched"] and one["has_key_of_triton"] and one["has_key_of_variant"] for one in found)
