"""What each replica of a host gets."""

import logging

import pytest

from quire import LLMEngine
from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.engine import replica_setup
from quire.engine.replica_setup import replica_setups, visible_gpus
from quire.worker.inspect import inspect_model

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of five cores and 12 GiB without GPUs."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(replica_setup, "num_usable_cores", lambda: 5)
    monkeypatch.setattr(replica_setup, "available_memory_bytes", lambda: 12 * GIB)
    monkeypatch.setattr(replica_setup, "visible_gpus", lambda: ())
    monkeypatch.setattr("quire.base.threads.num_usable_cores", lambda: 5)


def setups(**options):
    return replica_setups(EngineConfig(model="demo", **options))


def threads_of(**options):
    return [setup.config.num_threads for setup in setups(**options)]


def test_cores_and_memory_are_divided():
    found = setups(data_parallel_size=2)
    assert [setup.config.num_threads for setup in found] == [2, 3]
    assert [setup.config.host_memory_bytes for setup in found] == [6 * GIB, 6 * GIB]
    assert [setup.config.data_parallel_size for setup in found] == [1, 1]
    assert [setup.environment for setup in found] == [{}, {}]


def test_threads_are_those_given(monkeypatch):
    assert threads_of(data_parallel_size=2, num_threads=4) == [2, 2]
    assert threads_of(data_parallel_size=2, data_parallel_threads=[4, 1]) == [4, 1]
    assert threads_of(data_parallel_threads=(3,)) == [3]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_of(data_parallel_size=2) == [1, 1]
    assert threads_of(data_parallel_size=2, num_threads=4) == [2, 2]


def test_given_memory_is_that_of_all_replicas():
    assert [setup.config.host_memory_bytes for setup in setups(data_parallel_size=3, host_memory_bytes=3 * GIB)] == [GIB] * 3


def test_more_processes_than_threads_are_told_of(caplog):
    with caplog.at_level(logging.WARNING):
        assert threads_of(data_parallel_size=3, tensor_parallel_size=2) == [1, 2, 2]
    assert "3 replicas of 2 ranks" in caplog.text
    assert "5 threads" in caplog.text


def test_the_memory_plan_keeps_to_its_part():
    (first, _) = setups(data_parallel_size=2, host_memory_bytes=2 * GIB)
    whole = inspect_model(EngineConfig(model="demo", host_memory_bytes=2 * GIB)).memory
    part = inspect_model(first.config).memory
    assert part.available_bytes == GIB
    assert part.weight_bytes + part.activation_bytes + part.kv_bytes <= GIB
    assert part.num_kv_blocks <= whole.num_kv_blocks


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be an integer >= 1, got 0"),
        ({"data_parallel_size": 1.5}, "data_parallel_size must be an integer >= 1, got 1.5"),
        ({"data_parallel_size": 2, "data_parallel_threads": (1,)}, r"data_parallel_threads must be .* of 2 integers .* \(1,\)"),
        ({"data_parallel_size": 2, "data_parallel_threads": (9, 1)}, "data_parallel_threads must be from 1 to 5, .* got 9"),
        ({"data_parallel_size": 2, "data_parallel_threads": (1, 1), "num_threads": 2}, "give one of them"),
        ({"data_parallel_size": 2, "device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"host_memory_bytes": -1}, "host_memory_bytes must be None or an integer >= 1, got -1"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        EngineConfig(model="demo", **options)


def test_every_replica_sees_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(replica_setup, "visible_gpus", lambda: ("0", "3", "GPU-7"))
    found = setups(data_parallel_size=2, device="cuda")
    assert [setup.environment for setup in found] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    with pytest.raises(ConfigError, match=r"data_parallel_size is 4, .* visible GPUs are 3 \(0, 3, GPU-7\)"):
        setups(data_parallel_size=4, device="cuda")
    assert setups(data_parallel_size=4, device="cpu")[0].environment == {}
    monkeypatch.setattr(replica_setup, "visible_gpus", lambda: ())
    with pytest.raises(ConfigError, match="visible GPUs are none"):
        setups(data_parallel_size=2, device="cuda")


@pytest.mark.parametrize(
    ("num_devices", "variable", "expected"),
    [
        (0, "0,1", ()),
        (2, None, ("0", "1")),
        (4, "2, 0", ("2", "0")),
        (4, "1,9,0", ("1",)),
        (4, "-1", ()),
        (4, "", ()),
        (4, "GPU-1,GPU-2", ("GPU-1", "GPU-2")),
    ],
)
def test_visible_gpus_are_those_of_the_variable(tmp_path, monkeypatch, num_devices, variable, expected):
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(num_devices))):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus(tmp_path) == expected


def test_one_engine_refuses_to_be_several():
    with pytest.raises(ConfigError, match="data_parallel_size is 2, but this runs one engine"):
        LLMEngine("demo", data_parallel_size=2)
