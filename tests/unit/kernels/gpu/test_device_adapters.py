"""LoRA adapters on the device give the tokens and log probabilities that the CPU gives."""

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, LoRARequest, SamplingParams
from quire.base.errors import InvariantError, UnsupportedError
from quire.model.config_reader import read_model_spec
from quire.model.lora.adapter import Adapter, AdapterReader
from quire.model.lora.device_adapters import DeviceAdapters
from quire.model.lora.experts import LowRankPair
from tests.lora_adapter import write_adapter
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.test_device_engine import DEVICE, OPTIONS, PROMPTS, tokens
from tests.unit.kernels.gpu.test_device_stepper import SPEC, make_stepper

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Return a checkpoint, and the folders of two adapters: of every linear layer, and of some of the first layer."""
    folder = tmp_path_factory.mktemp("adapted")
    model = write_checkpoint(folder / "model", "qwen3")
    weights = load_file(model / "model.safetensors")
    shapes = {name.removesuffix(".weight"): tuple(weights[name].shape) for name in weights if "_proj.weight" in name}
    some = {name: shape for name, shape in shapes.items() if "layers.0" in name and name.endswith(("v_proj", "up_proj"))}
    write_adapter(folder / "one", shapes, rank=4, seed=1)
    write_adapter(folder / "two", some, rank=8, seed=2)
    return model, [LoRARequest("one", 1, str(folder / "one")), None, LoRARequest("two", 2, str(folder / "two"))]


def outputs_of(model, loras, device):
    """Return what the requests give with their adapters."""
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 6, "max_loras": 2, "max_lora_rank": 8}
    llm = LLM(str(model), device=device, enable_lora=True, **OPTIONS, **options)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    try:
        return llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[0]], params, use_tqdm=False, lora_request=loras)
    finally:
        llm.close()


@pytest.mark.slow
def test_tokens_and_log_probabilities_are_the_cpus_with_several_adapters_in_a_batch(adapted):
    want, found = (outputs_of(*adapted, device) for device in ("cpu", DEVICE))
    assert tokens(found) == tokens(want)
    for ours, theirs in zip(found, want, strict=True):
        pairs = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
        assert all(abs(one[key].logprob - two[key].logprob) < 1e-3 for one, two in pairs for key in one)
    first, _, last = (next(iter(output.prompt_logprobs[1].values())).logprob for output in found)
    assert abs(first - last) > 1e-2


def read(model, lora):
    return AdapterReader(model, read_model_spec(model), 8).read(lora.lora_path)


def test_a_place_that_is_free_again_holds_the_next_adapter_only(adapted, device):
    model, (one, _, two) = adapted
    spec = read_model_spec(model)
    fresh, reused = (DeviceAdapters(spec, 1, 8, device) for _ in range(2))
    adapters = read(model, one), read(model, two)
    reused.load(adapters[0])
    reused.unload(adapters[0].key)
    for holder in (fresh, reused):
        holder.load(adapters[1])
    x = torch.randn(2, spec.hidden_size, generator=torch.Generator().manual_seed(1)).to(getattr(torch, spec.dtype)).to(device)
    numbers = torch.tensor([0, -1], dtype=torch.int32, device=device)
    width = sum(len(adapters[0].pairs[f"layers.0.{name}"].b) for name in "qkv")
    found = [holder.rows(numbers).add_to(x.new_zeros(2, width), x, "layers.0.qkv") for holder in (fresh, reused)]
    assert torch.equal(*found)
    assert found[0][0].any()
    assert not found[0][1].any()


def test_more_adapters_than_places_are_an_error(adapted, device):
    model, (one, _, two) = adapted
    holder = DeviceAdapters(read_model_spec(model), 1, 8, device)
    holder.load(read(model, one))
    with pytest.raises(InvariantError, match="there is room for 1 adapters only"):
        holder.load(read(model, two))


@pytest.mark.slow
def test_adapters_of_experts_are_refused(tmp_path):
    spec = read_model_spec(write_checkpoint(tmp_path / "moe", "qwen3_moe"))
    holder = DeviceAdapters(spec, 1, 8, torch.device("cpu"))
    for name in ("layers.0.experts.3.up", "layers.1.router"):
        adapter = Adapter("a", 4, {name: LowRankPair(torch.zeros(4, 32), torch.zeros(4, 4))})
        with pytest.raises(UnsupportedError, match=rf"experts or routers of a mixture \({name}\), .* on CPUs only"):
            holder.load(adapter)


def test_adapters_leave_the_device_while_the_engine_sleeps(adapted):
    model, (one, _, _) = adapted
    llm = LLM(str(model), device=DEVICE, enable_lora=True, **OPTIONS, max_num_seqs=1, max_loras=1, max_lora_rank=8)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    expected = tokens(llm.generate([PROMPTS[0]], params, use_tqdm=False, lora_request=[one]))
    matrices = llm.llm_engine.runner.executor._adapters.tensors()
    for level in (1, 2):
        llm.sleep(level)
        assert not any(matrix.untyped_storage().nbytes() for matrix in matrices)
        llm.wake_up()
        assert llm.llm_engine.list_loras() == ({1} if level == 1 else set())
        assert tokens(llm.generate([PROMPTS[0]], params, use_tqdm=False, lora_request=[one])) == expected
        matrices = []
    llm.close()


@pytest.mark.slow
def test_steps_with_adapters_are_among_those_that_the_memory_plan_records(device):
    stepper, graphs = make_stepper(device, 2, adapters=DeviceAdapters(SPEC, 1, 4, device))
    plain, _ = make_stepper(device, 2)
    assert len(stepper.keys) == 2 * len(plain.keys)
    stepper.record_samples()
    for kind in {type(key) for key in graphs.keys}:
        assert {key.has_adapters for key in graphs.keys if isinstance(key, kind)} == {False, True}
