"""What the native kernels do not cover runs with torch, with a line in the log that says why."""

from dataclasses import replace

import pytest
import torch

from quire.contracts.model_spec import GateClamp, LaurelSpec, MlpSpec, MoeSpec, QueryScaling, RopeSpec
from quire.kernels.native import load_native
from quire.model.build import build_model, whole_prompt_logits
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.decoder import Decoder
from quire.model.native_decoder import NativeDecoder
from quire.model.native_model import native_refusal


def test_a_clamped_gate_is_covered_in_experts_alone(tiny_model):
    spec = read_model_spec(tiny_model)
    assert native_refusal(spec, 16) is None
    clamped = replace(spec.layers[0], mlp=replace(spec.layers[0].mlp, clamp=GateClamp(7.0, 1.702)))
    assert "a clamped gate outside" in (native_refusal(replace(spec, layers=(spec.layers[0], clamped)), 16) or "")


def test_what_no_native_kernel_runs_is_refused_by_name(tiny_model):
    spec = read_model_spec(tiny_model)
    (layer, *_), attention = spec.layers, spec.layers[0].attention
    scaled = replace(attention, query_scaling=QueryScaling(0.1, 8), rope=RopeSpec(4, 1e4, "dynamic", original_max=8))
    mixture = MoeSpec(4, 2, MlpSpec(16, "xielu"))
    for changed, reason in (
        (replace(layer, mlp=mixture), "xielu in a mixture"),
        (replace(layer, attention=scaled), "scaled by position"),
        (replace(layer, laurel=LaurelSpec(4, spec.final_norm)), "a low-rank residual"),
    ):
        assert reason in (native_refusal(replace(spec, layers=(layer, changed)), 16) or "")
    assert "bias of a head" in (native_refusal(replace(spec, has_head_bias=True, is_tied=True), 16) or "")


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_a_refused_model_runs_with_torch_and_the_log_says_why(tiny_model, caplog):
    spec = read_model_spec(tiny_model)
    layers = tuple(replace(layer, mlp=replace(layer.mlp, clamp=GateClamp(0.5, 1.702))) for layer in spec.layers)
    clamped, token_ids = replace(spec, layers=layers), [5, 100, 7, 44]
    with caplog.at_level("WARNING", logger="quire"):
        model = build_model(clamped, open_parameters(tiny_model, spec), 64, block_size=16)
    assert isinstance(model, Decoder)
    assert [record.message for record in caplog.records if "clamped gate" in record.message]
    plain = build_model(spec, open_parameters(tiny_model, spec), 64, block_size=16)
    assert isinstance(plain, NativeDecoder)
    assert not torch.allclose(whole_prompt_logits(model, token_ids), whole_prompt_logits(plain, token_ids), atol=1e-2)
