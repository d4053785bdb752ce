"""Parts of the GPU's benchmark that need Triton, where nothing is timed."""

import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from tests.unit.kernels.gpu.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the benchmark itself runs on a GPU")
BENCH = Path(__file__).resolve().parents[4] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """The modules of the benchmark, as its script finds them."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    import gpu
    import gpu_model
    import gpu_profile
    import gpu_profile_table

    yield SimpleNamespace(gpu=gpu, model=gpu_model, profile=gpu_profile, table=gpu_profile_table)
    for name in set(sys.modules) - before:
        if name.startswith("gpu"):
            del sys.modules[name]


def test_the_pool_of_one_kind_of_steps_is_gone_before_the_next_is_made(bench, tmp_path, monkeypatch):
    made = []

    class Pool(bench.model.DeviceKvPool):
        def __init__(self, *arguments):
            assert [pool() for pool in made] == [None] * len(made), "the pool of another kind is still there"
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(bench.model, "DeviceKvPool", Pool)
    for name in ("time_steps", "time_prompt"):
        monkeypatch.setattr(bench.model, name, lambda *_: 1.0)
    place = bench.model.Place("interpreter", torch.device("cpu"), 1.0, 1.0, tmp_path)
    rows = list(bench.model.decode_rows(place, bench.model.TINY, float("inf")))
    assert len(made) == 2
    assert [row["section"] for row in rows] == ["decode", "prompt", "prompt"]


def total(key, count, device_us, device=DeviceType.CUDA):
    return SimpleNamespace(
        key=key, count=count, device_type=device, self_device_time_total=device_us, self_cpu_time_total=10 * device_us
    )


def test_kernels_are_told_by_their_time_in_a_step(bench):
    totals = [total("norm", 40, 100.0), total("attend", 20, 300.0), total("none", 4, 0.0)]
    totals.append(total("aten::mm", 20, 400.0, DeviceType.CPU))  # has launched kernels that are told of themselves
    rows = bench.profile.kernel_rows("decode 8 x 960", totals, 10, DeviceType.CUDA)
    assert [row["kernel"] for row in rows] == ["attend", "norm"]
    assert rows[0] == {
        "section": "profile",
        "what": "decode 8 x 960",
        "kernel": "attend",
        "launches": 2.0,
        "us": 30.0,
        "share": 0.75,
    }
    (error,) = bench.profile.kernel_rows("decode", totals[2:], 10, DeviceType.CUDA)
    assert "saw nothing on CUDA" in error["error"]
    more = bench.profile.kernel_rows("prompt of 512", [total("k" * 99, 1, 7.0)], 1, DeviceType.CUDA)
    assert bench.table.profile_table([*rows, *more, error, {"seconds": 3.0}]).splitlines() == [
        "decode 8 x 960: 40.0 us a step",
        "        us   share  launches  kernel",
        "      30.0   75.0%       2.0  attend",
        "      10.0   25.0%       4.0  norm",
        "",
        "prompt of 512: 7.0 us a step",
        "        us   share  launches  kernel",
        f"       7.0  100.0%       1.0  {'k' * 60}",
    ]
    assert bench.table.profile_table([{"section": "decode"}]) == ""


def test_the_profiler_tells_what_a_run_launches(bench, tmp_path):
    place = bench.model.Place("interpreter", torch.device("cpu"), 1.0, 1.0, tmp_path)
    x = torch.ones(300, 300)
    rows = list(bench.profile.traced_rows("products", place, lambda: [x @ x for _ in range(4)], 2))
    (product,) = (row for row in rows if row["kernel"] == "aten::mm")
    assert product["launches"] == 2.0
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)


def test_whole_outputs_go_where_they_come_back_from(bench, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    assert bench.gpu.logs_folder(None, Path("a/gpu.json")) == Path("a/gpu.logs")
    monkeypatch.setenv("OUT", "/lent/out")
    assert bench.gpu.logs_folder(None, Path("gpu.json")) == Path("/lent/out")
    assert bench.gpu.logs_folder(Path("mine"), Path("gpu.json")) == Path("mine")
