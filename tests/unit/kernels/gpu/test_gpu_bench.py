"""Parts of the GPU's benchmark that need Triton, where nothing is timed."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from quire.base.errors import ConfigError
from quire.kernels.triton.attention import KvCache, attend
from tests.unit.kernels.gpu.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the benchmark itself runs on a GPU")
BENCH = Path(__file__).resolve().parents[4] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """The modules of the benchmark, as its script finds them."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    import gpu
    import gpu_libraries
    import gpu_model
    import gpu_profile
    import gpu_profile_table

    yield SimpleNamespace(gpu=gpu, libraries=gpu_libraries, model=gpu_model, profile=gpu_profile, table=gpu_profile_table)
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


def test_a_record_goes_on_with_that_of_an_earlier_call_at_the_same_commit(bench, tmp_path):
    from gpu_sections import record_text

    first = bench.gpu.begin_record(None, "abc", ["--budget", "500"])
    assert first == {"commit": "abc", "command": "python bench/gpu.py --budget 500"}
    (tmp_path / "a.json").write_text(record_text({**first, "few": [{"us": 1.0}]}))
    second = bench.gpu.begin_record(tmp_path / "a.json", "abc", ["--after", "a.json"])
    assert second["few"] == [{"us": 1.0}]
    assert second["command"] == "python bench/gpu.py --budget 500; python bench/gpu.py --after a.json"
    with pytest.raises(SystemExit, match="a record is of one commit"):
        bench.gpu.begin_record(tmp_path / "a.json", "abd", [])


def test_attention_of_a_library_is_compared_with_ours_and_one_that_is_missing_says_why(bench, device):
    class Doubled:
        def attend(self, q, k, v, step, spec):
            return 2 * attend(q, KvCache(k, v), step, spec)

    def load(name, *_):
        if name == "flashinfer":
            raise ConfigError("flashinfer is not installed")
        return Doubled()

    missing, own, found = bench.libraries.library_rows(torch.device(device), True, float("inf"), load)
    assert missing == {"section": "libraries", "library": "flashinfer", "skipped": "flashinfer is not installed"}
    assert (own["library"], own["difference"]) == ("own", 0.0)
    assert (found["library"], found["difference"]) == ("flash_attn", pytest.approx(1.0, rel=0.01))


@pytest.mark.slow
def test_sections_of_whole_models_run_at_their_real_sizes_without_memory():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.kernels.gpu.bench_on_meta"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCH.parent, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == []
    assert found["counts"]["decode"] == 1 + 8 + 4 + 5 + 1 + 4  # kernels, kinds of steps, and prompts where layers are fused
    assert found["counts"]["adapters"] == 1 + 2 + 3 + 3 + 2 * 2
    assert found["counts"]["profile"] > 4
    # The kernel for Hopper, with up to as many empty tiles as others.
    chosen = {"512 of 1", "2048 of 1", "512 of 7", "2048 of 7", "2048 of 31"}
    assert len(found["kernels"]) == 2 * 2 * 4
    for name, kernels in found["kernels"].items():
        assert kernels == ["attend_prompts" if name in chosen else "attend_runs"]
    assert {label: kernels[0] for label, kernels in found["products"].items()} == {
        "dequantised in the kernel": "multiply_packed",
        "dequantised, cuBLAS": "dequantize_rows",
        **{f"dequantised in registers, {tokens}": "multiply_dequantised" for tokens in (64, 128, 256)},
    }
