"""Routing of mixtures on every instruction set of this machine, against the reference in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.contracts.model_spec import ExpertGroups, MlpSpec, MoeSpec
from quire.kernels.reference.moe import route
from tests.unit.kernels.cpu.test_elementwise import assert_ends_untouched, guarded, random

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")

EXPERT = MlpSpec(8, "silu")
ROUTINGS = {
    "sigmoid": MoeSpec(24, 5, EXPERT, scoring="sigmoid"),
    "sigmoid-corrected": MoeSpec(17, 4, EXPERT, scoring="sigmoid", has_correction=True, least_sum=1e-20, routed_scale=2.5),
    "sigmoid-groups": MoeSpec(
        32, 6, EXPERT, scoring="sigmoid", has_correction=True, groups=ExpertGroups(8, 3, 2), is_renormalized=False
    ),
    "softmax-groups": MoeSpec(20, 3, EXPERT, groups=ExpertGroups(5, 2), is_renormalized=False, routed_scale=16.0),
    "softmax-corrected": MoeSpec(19, 6, EXPERT, has_correction=True, least_sum=0.5),
    "sparse": MoeSpec(16, 2, EXPERT, scoring="sparse", sparse_margin=0.3, is_renormalized=False),
}


def native_routing(spec: MoeSpec, correction: Tensor | None) -> object:
    routing, groups = native.Routing(), spec.groups
    routing.set(
        {"softmax": 0, "sigmoid": 1, "sparse": 2}[spec.scoring],
        *((1, 1, 1) if groups is None else (groups.count, groups.num_chosen, groups.num_best)),
        least_sum=spec.least_sum,
        scale=spec.routed_scale,
        threshold=spec.sparse_margin,
        correction=[] if correction is None else correction.tolist(),
    )
    return routing


def route_natively(logits: Tensor, spec: MoeSpec, correction: Tensor | None, isa: str) -> tuple[Tensor, Tensor]:
    logits = logits.clone()
    chosen = torch.full((len(logits), spec.top_k), -7, dtype=torch.int32)
    weights, memory = guarded(torch.full((len(logits), spec.top_k), float("nan")))
    addresses = logits.data_ptr(), *logits.shape, spec.top_k, spec.is_renormalized, chosen.data_ptr(), weights.data_ptr()
    native.route(*addresses, 2, isa, native_routing(spec, correction))
    assert_ends_untouched(memory)
    return chosen.long(), weights


@pytest.mark.parametrize("spec", ROUTINGS.values(), ids=ROUTINGS)
def test_route_is_that_of_the_reference_when_experts_are_scored_otherwise(isa: str, spec: MoeSpec):
    logits = random(200, spec.num_experts, seed=18) * 2
    correction = random(1, spec.num_experts, seed=19)[0] * 0.3 if spec.has_correction else None
    want, order = route(logits.double(), spec, correction)
    chosen, weights = route_natively(logits, spec, correction, isa)
    assert torch.equal(chosen.sort(1).values, order.sort(1).values)
    torch.testing.assert_close(
        torch.zeros_like(logits).scatter(1, chosen, weights),
        torch.zeros_like(logits).scatter(1, order, want.float()),
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize("spec", ROUTINGS.values(), ids=ROUTINGS)
def test_route_gives_distinct_experts_and_no_number_when_a_logit_is_nan(isa: str, spec: MoeSpec):
    logits = random(3, spec.num_experts, seed=20)
    logits[1, 2], logits[2] = float("nan"), float("nan")
    chosen, weights = route_natively(logits, spec, None, isa)
    assert all(len(set(row.tolist())) == spec.top_k for row in chosen)
    assert ((chosen >= 0) & (chosen < spec.num_experts)).all()
    assert weights[0].isfinite().all()
    assert weights[1:].isnan().all()


def test_a_routing_that_no_layer_can_have_is_refused_when_it_is_set():
    logits = torch.zeros(1, 6)
    with pytest.raises(ValueError, match="scoring"):
        native.Routing().set(3)
    with pytest.raises(ValueError, match="groups of experts"):
        native.Routing().set(1, 65, 1, 1)
    for spec in (MoeSpec(6, 3, EXPERT, groups=ExpertGroups(4, 2, 1)), MoeSpec(6, 3, EXPERT, groups=ExpertGroups(3, 1, 1))):
        with pytest.raises(ValueError, match="must be equal"):
            route_natively(logits, spec, None, "")
    with pytest.raises(ValueError, match="a value for each expert"):
        route_natively(logits, MoeSpec(6, 3, EXPERT), torch.zeros(5), "")
