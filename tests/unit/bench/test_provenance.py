"""Where a figure was made."""

import json
from dataclasses import asdict

import pytest
import torch

from quire.bench import machine, provenance
from quire.bench.provenance import find_provenance
from quire.kernels.native import load_native

CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1

processor\t: 1
cpu family\t: 26
"""


def test_processor_is_told_by_its_numbers_when_its_name_hides_them(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    monkeypatch.setattr(machine, "_CPU_LIST", path)
    found = find_provenance()
    assert found.machine.startswith("AMD EPYC, ")
    assert (found.cpu_family, found.cpu_model, found.cpu_stepping) == (25, 17, 1)


@pytest.mark.parametrize("content", [None, "", "processor\t: 0\nmodel name\t: RISC\n", "cpu family\t: x\n"])
def test_numbers_are_absent_when_the_system_does_not_say(tmp_path, monkeypatch, content):
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(machine, "_CPU_LIST", path)
    found = find_provenance()
    assert found.machine
    assert (found.cpu_family, found.cpu_model, found.cpu_stepping) == (None, None, None)


def test_instruction_set_is_that_of_the_kernels_which_run():
    native = load_native()
    found = find_provenance()
    assert found.isa == (None if native is None else native.isa())
    assert found.num_threads == torch.get_num_threads()
    assert json.loads(json.dumps(asdict(found)))["isa"] == found.isa


def test_instruction_set_is_none_when_torch_runs(monkeypatch):
    monkeypatch.setattr(provenance, "load_native", lambda: None)
    assert find_provenance().isa is None
