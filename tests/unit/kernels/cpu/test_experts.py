"""Mixtures of experts in the native step on every instruction set of this machine, against f64."""

import pytest

from tests.unit.kernels.cpu.packed_layers import run_apart

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")


ISAS = native.supported_isas()


@pytest.mark.parametrize("isa", [*(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[:-1]), ISAS[-1]])
def test_logits_behind_experts_are_within_the_roundings_of_f64(isa):
    # A process has one instruction set for its steps.
    run_apart("from tests.unit.kernels.cpu.expert_oracle import check\ncheck()", QUIRE_CPU_ISA=isa)
