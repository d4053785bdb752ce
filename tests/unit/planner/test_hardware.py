"""The table says where each figure is from, and that none is measured."""

import pytest

from quire.base.errors import ConfigError
from quire.planner.hardware import HARDWARE, find_hardware, with_memory


@pytest.mark.parametrize("device", HARDWARE.values(), ids=HARDWARE.keys())
def test_every_figure_has_a_source_and_is_not_measured(device):
    for name in ("bytes_per_s", "flops_per_s", "memory_bytes", "watts"):
        assert getattr(device, name) > 0
        source = device.source[name]
        assert "https://" in source or "not checked" in source or (device.kind == "cpu" and name == "memory_bytes")
    assert not device.is_measured
    assert "not measured" in device.label
    assert 0 < device.efficiency.bandwidth <= 1
    assert 0 < device.efficiency.compute <= 1


def test_devices_of_the_field_are_there():
    assert {"h100", "h200", "b200", "a100", "l40s", "l4", "rtx4090", "mi300x"} <= set(HARDWARE)
    assert sum(device.kind == "cpu" for device in HARDWARE.values()) >= 3


def test_unknown_device_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"--hardware must be one of h100, .*mi300x.*, got 'h300'"):
        find_hardware("h300")


def test_fp8_has_its_own_rate_only_where_the_device_has_one():
    assert find_hardware("H100").flops_of("fp8") == pytest.approx(2 * find_hardware("h100").flops_of("int8"), rel=1e-3)
    assert find_hardware("a100").flops_of("fp8") == find_hardware("a100").flops_per_s


def test_memory_may_be_given():
    assert with_memory(find_hardware("xeon-8480"), 256).memory_bytes == 256 * 10**9
    with pytest.raises(ConfigError, match=r"--memory-gb must be a number above 0, got 0"):
        with_memory(find_hardware("l4"), 0)


def test_cpu_rates_are_computed_from_channels_and_cores():
    assert find_hardware("xeon-8480").bytes_per_s == pytest.approx(307.2e9)
    assert find_hardware("epyc-9654").bytes_per_s == pytest.approx(460.8e9)
