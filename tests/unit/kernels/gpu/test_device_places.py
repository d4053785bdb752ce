"""Where the tensors of a step are, on a device without memory: nothing that a kernel or an operation gets is on the host.

In the interpreter host and device are the same, so that nothing else would find it without a GPU.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.base.ids import RequestId
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.kernels.triton.launching import Launch
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.parameters import parameter_shapes
from quire.sampling.processors import apply_token_masks, process_logits
from quire.sampling.row_state import SamplingRow
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import SAMPLINGS, full_step
from quire.worker.device.launched_step import Kept, StepSizes
from quire.worker.device.staging import Readback
from quire.worker.device.variants import NotRecording

META = torch.device("meta")
RMS = NormSpec("rms", 1e-6)
LAYERNORM = NormSpec("layer", 1e-5, has_bias=True)


def attention(**options):
    return AttentionSpec(4, 2, 16, 0.25, **({"rope": RopeSpec(16, 1e4)} | options))


LAYERS = {
    "qwen3": LayerSpec(attention(qk_norm=RMS, has_qkv_bias=True), MlpSpec(40, "silu"), attn_in=RMS, mlp_in=RMS),
    "olmo": LayerSpec(attention(qk_norm=RMS, qk_norm_over="all", window=6), MlpSpec(40, "silu"), attn_out=RMS, mlp_out=RMS),
    "gpt": LayerSpec(
        attention(rope=None), MlpSpec(40, "gelu", is_gated=False, has_bias=True), attn_in=LAYERNORM, mlp_in=LAYERNORM
    ),
    "experts": LayerSpec(attention(), MoeSpec(4, 2, MlpSpec(40, "silu")), attn_in=RMS, mlp_in=RMS),
    "xielu": LayerSpec(attention(), MlpSpec(40, "xielu", is_gated=False), attn_in=RMS, mlp_in=RMS),
}
COPIES = ("aten::copy_", "aten::_to_copy")  # the way to the device, and back
INDEXED = ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")  # indices may be on the host


class OneDevice(TorchDispatchMode):
    """Every operation with a tensor on the device has all of them there, but for single numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        if name.startswith(INDEXED):
            tensors = [leaf for leaf in (args[0], *args[2:3]) if isinstance(leaf, torch.Tensor)]
        places = {leaf.device.type for leaf in tensors if leaf.ndim}
        assert len(places) <= 1 or name.startswith(COPIES), f"{name} of tensors on {places}"
        return func(*args, **(kwargs or {}))


def on_the_host(*values, device=None, make=torch.tensor, **options):
    """Return torch.tensor's, which copies numbers to a GPU: no recording may do that."""
    assert device is None or torch.device(device).type == "cpu"
    return make(*values, **options)


@pytest.fixture
def launches(monkeypatch):
    found = []

    def run(launch):
        for name, value in launch.arguments.items():
            assert not isinstance(value, torch.Tensor) or value.device == META, f"{launch.kernel} gets {name} on the host"
        found.append(launch)

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(Readback, "start", lambda *_: None)
    return found


@pytest.mark.covering
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("recorder", [None, NotRecording()], ids=["one-by-one", "recorded"])
def test_every_tensor_of_a_step_is_on_the_device(name, kv_dtype, recorder, launches, monkeypatch):
    spec = ModelSpec(
        "test", "bfloat16", 61, 64, (LAYERS[name],) * 2, RMS, 64, embed_scale=3.0, is_embed_scale_cast=True, final_softcap=9.0,
        num_learned_positions=64 if name == "gpt" else 0,
    )  # fmt: skip
    parameters = {key: torch.ones(shape, dtype=torch.bfloat16) for key, shape in parameter_shapes(spec).items()}
    kv = KvSpec.of(spec, 16, kv_dtype)
    with OneDevice():
        decoder = DeviceDecoder(spec, parameters, 64, META)
        monkeypatch.setattr(torch, "tensor", on_the_host)
        stepper = GpuStepExecutor(
            decoder, DeviceKvPool(kv, 1, META), StepSizes(4, 32, 64, has_processors=True), StepGraphs(recorder)
        )
        stepper.run_full(32, 4, 64)
        stepper.give_pool(DeviceKvPool(kv, 9, META))
        stepper.record_largest()
        changes = BlockTableUpdates([(0, 0, (1, 2))], ((0, 1),))
        for sampling in SAMPLINGS[:-1]:
            for num_tokens, kept in ((3, Kept()), (3, Kept(True, True)), (3, Kept(True)), (9, Kept(True))):
                launched = stepper.launch(full_step(num_tokens, 3, 20, 4), sampling, changes, kept)
                assert (launched.logits is not None, launched.hidden is not None) == kept
                assert launched.logits is None or launched.logits.device == META
        for num_tokens in (3, 9):
            deferred = stepper.launch(full_step(num_tokens, 3, 20, 4), "deferred", changes)
            words = -(-spec.vocab_size // 32)
            assert stepper.sample_deferred(deferred, {1: torch.zeros(words, dtype=torch.int32)}).logits is None
    assert len(launches) > 100


def test_logits_are_changed_on_the_device_when_a_request_changes_them():
    params = SamplingParams(
        logit_bias={3: 1.0}, repetition_penalty=1.2, presence_penalty=0.3, min_tokens=3, allowed_token_ids=[1, 2, 3],
        stop_token_ids=[5],
    )  # fmt: skip
    request = Request(request_id=RequestId("a"), prompt_token_ids=(1, 2), params=params, seed=7)
    row = SamplingRow(request, 0, (1, 2, 9), 61)
    row.token_mask = torch.full((2,), -1, dtype=torch.int32)
    logits = torch.zeros(1, 61, device=META)
    with OneDevice():
        apply_token_masks(logits, [row])
        process_logits(logits, [row])


def test_a_tensor_on_the_host_is_found_when_an_operation_gets_one():
    with pytest.raises(AssertionError, match=r"aten::embedding of tensors on"), OneDevice():
        torch.nn.functional.embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(4, 5, device=META))
