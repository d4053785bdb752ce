"""Where the tensors of a step are, on a device without memory: nothing that a kernel or an operation gets is on the host, and
what is captured as a CUDA graph copies nothing from the host or to it, and waits for nothing.

In the interpreter host and device are the same, so that nothing else would find it without a GPU. Reading numbers of a device
without memory is an error.
"""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.base.ids import RequestId
from quire.contracts.expert_options import LossyRouting
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.kernels.triton.launching import Launch
from quire.kv.device_pool import DeviceKvPool
from quire.model.config_reader import read_model_spec
from quire.model.device_decoder import DeviceDecoder
from quire.model.lora.device_adapters import DeviceAdapters
from quire.model.parameters import parameter_shapes
from quire.sampling.processors import apply_token_masks, process_logits
from quire.sampling.row_state import SamplingRow
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import SAMPLINGS, full_step
from quire.worker.device.launched_step import Kept, StepSizes
from quire.worker.device.staging import Readback
from quire.worker.device.variants import NotCapturing, ServedModel, meta_decoder
from tests.unit.kernels.gpu.test_triton_decoder import MODELS, RMS

META = torch.device("meta")
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


class NothingFromHost(OneDevice):
    """Nothing is copied between host and device, and no random number is drawn."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {}, out)) if isinstance(leaf, torch.Tensor)]
        places = {leaf.device.type for leaf in tensors if leaf.ndim or func.name().startswith(COPIES)}
        assert len(places) <= 1, f"{func.name()} of tensors on {places}"
        assert torch.Tag.nondeterministic_seeded not in func.tags, f"{func.name()} draws numbers"
        return out


class NoNumbers(TorchFunctionMode):
    """No tensor on the device is made of numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_made = func in (torch.tensor, torch.as_tensor, torch.asarray)
        assert not is_made or torch.device(kwargs.get("device") or "cpu") != META, f"{func.__name__} copies {args}"
        return func(*args, **kwargs)


class StrictCapturer(NotCapturing):
    """Checks what is captured."""

    num_captured = 0

    def capture(self, step):
        with NoNumbers(), NothingFromHost():
            step()
        self.num_captured += 1
        return step


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
@pytest.mark.parametrize("name", ["qwen3", "olmo", "gpt", "experts"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("capturer", [None, StrictCapturer()], ids=["one-by-one", "captured"])
def test_every_tensor_of_a_step_is_on_the_device(name, kv_dtype, capturer, launches):
    scaled = {"embed_scale": 3.0, "is_embed_scale_cast": True, "final_softcap": 9.0}
    positions = 64 if name == "gpt" else 0
    spec = ModelSpec("test", "bfloat16", 61, 48, tuple(MODELS[name]), RMS, 64, num_learned_positions=positions, **scaled)
    parameters = {key: torch.ones(shape, dtype=torch.bfloat16) for key, shape in parameter_shapes(spec).items()}
    kv = KvSpec.of(spec, 16, kv_dtype)
    with OneDevice():
        decoder = DeviceDecoder(spec, parameters, 64, META)
        stepper = GpuStepExecutor(
            decoder, DeviceKvPool(kv, 1, META), StepSizes(4, 32, 64, has_processors=True), StepGraphs(capturer)
        )
        stepper.run_full(32, 4, 64)
        stepper.give_pool(DeviceKvPool(kv, 9, META))
        stepper.capture_largest()
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


def capture(spec, lossy=None, has_adapters=False, **options):
    """Capture a step with prompts and a decode step of a model."""
    parameters = {name: torch.empty(shape, dtype=torch.bfloat16, device=META) for name, shape in parameter_shapes(spec).items()}
    decoder = meta_decoder(ServedModel(spec, parameters, **options), 64)
    if lossy is not None:
        decoder.watch_experts(lossy)
    cached = decoder.spec if decoder.ranks is None else decoder.ranks.shard.cached_spec
    kv = KvSpec.on_device(cached, 64, "bfloat16", "shares" not in options)
    adapters = DeviceAdapters(spec, 2, 8, META, has_experts=True) if has_adapters else None
    capturer, sizes = StrictCapturer(), StepSizes(4, 64, 64, has_processors=True)
    stepper = GpuStepExecutor(decoder, DeviceKvPool(kv, 2, META, 1, 1), sizes, StepGraphs(capturer), None, adapters)
    keys = [key._replace(has_adapters=has_adapters) for key in (*stepper.prompts.keys[:1], *stepper.capture_sizes.keys[:1])]
    with torch.inference_mode():
        for key in keys:
            stepper.capture(key)
    assert capturer.num_captured == len(keys) > 0


TWO_RANKS, LOSSY = {"shares": (1.0, 1.0)}, LossyRouting(1.2, 1e-3, 0.1)
CAPTURED = [
    *((name, {}) for name in MODELS),
    *((name, {"has_adapters": True}) for name in ("experts", "latent")),
    *((name, TWO_RANKS | {"has_homes": has_homes}) for name in ("qwen3", "experts") for has_homes in (False, True)),
    ("qwen3", {"context_size": 2, **TWO_RANKS}),
    *((name, {"context_size": 2, "is_in_order": True, **TWO_RANKS}) for name in ("gpt-oss", "latent")),
    ("shared-experts", {"lossy": LOSSY}),
    ("shared-experts", {"lossy": LOSSY, "num_redundant": 0, **TWO_RANKS}),
    ("experts", {"lossy": LossyRouting(), "num_redundant": 0, "has_homes": True, **TWO_RANKS}),
]
QUICK = ("qwen3", "experts")


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("name", "options"), [each if each[0] in QUICK else pytest.param(*each, marks=pytest.mark.slow) for each in CAPTURED]
)
def test_captured_steps_copy_nothing_from_the_host_and_do_not_wait(name, options):
    spec = ModelSpec("test", "bfloat16", 61, 48, tuple(MODELS[name]), RMS, 64)
    capture(spec, **options)


ODD = ("gemma3n", "qwen3-next", "zamba2", "mamba", "lfm2", "minimax-m3", "mimo-v2-flash", "deepseek-v32", "bloom", "laguna")


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", ODD)
def test_captured_steps_of_odd_models_do_neither(case, tmp_path):
    make = pytest.importorskip("tests.golden.make_checkpoints").make_checkpoint
    capture(replace(read_model_spec(make(case, tmp_path / case)), dtype="bfloat16"))


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


@pytest.mark.parametrize(
    "step",
    [
        lambda: torch.zeros(3).to(META),
        lambda: torch.tensor(2.0).to(META),
        lambda: torch.tensor(2.0, device=META),
        lambda: torch.zeros(3, device=META).cpu(),
        lambda: torch.zeros(3, device=META).sum().item(),
        lambda: torch.zeros(3, device=META)[torch.tensor([1])],
        lambda: torch.nn.functional.embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(4, 5, device=META)),
        lambda: torch.rand(3, device=META),
    ],
)
def test_what_a_capture_may_not_do_is_found(step):
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
        StrictCapturer().capture(step)
