"""LoRA adapters on the device give the tokens and log probabilities that the CPU gives."""

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, LoRARequest, SamplingParams
from quire.base.errors import InvariantError, UnsupportedError
from quire.contracts.model_spec import MoeSpec
from quire.kernels.triton.launching import Launch
from quire.model.config_reader import read_model_spec
from quire.model.lora.adapter import Adapter, AdapterReader
from quire.model.lora.device_adapters import DeviceAdapters
from quire.model.lora.experts import LowRankPair, expert_adapter_bytes
from quire.model.parameters import parameter_shapes
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.host_step import SAMPLINGS
from tests.lora_adapter import write_adapter, write_stacks
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import draw
from tests.unit.kernels.gpu.test_device_engine import DEVICE, OPTIONS, PROMPTS, greedy, tokens
from tests.unit.kernels.gpu.test_device_stepper import SPEC, make_stepper, prompt

pytestmark = pytest.mark.usefixtures("few_programs")
MIXTURES = ("deepseek-v3", "gemma4-moe", "qwen2-moe", "minimax-m2", "phimoe", "mixtral")


def adapted_mixture(folder, family):
    """Return a checkpoint of a mixture, and adapters: of all experts and routers, none, and of some experts and attention."""
    model = write_checkpoint(folder / "model", family)
    weights = load_file(model / "model.safetensors")
    is_single = any(".experts.0." in name for name in weights)
    experts = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in weights.items()
        if tensor.dim() == 2 and (".experts." in name or name.endswith("mlp.gate.weight"))
    }
    if is_single:
        write_adapter(folder / "one", experts, rank=4, seed=1)
    else:
        write_stacks(folder / "one", model)
        experts = {}
    some = {name: shape for name, shape in experts.items() if "experts.1." in name and not name.endswith("up_proj")}
    queries = {
        name.removesuffix(".weight"): tuple(tensor.shape) for name, tensor in weights.items() if name.endswith("q_proj.weight")
    }
    write_adapter(folder / "two", some | queries, rank=8, seed=2)
    return model, [LoRARequest("one", 1, str(folder / "one")), None, LoRARequest("two", 2, str(folder / "two"))]


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


def outputs_of(model, loras, device, **more):
    """Return what the requests give with their adapters."""
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 6, "max_loras": 2, "max_lora_rank": 8, **more}
    llm = LLM(str(model), device=device, enable_lora=True, **OPTIONS, **options)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    try:
        return llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[0]], params, use_tqdm=False, lora_request=loras)
    finally:
        llm.close()


def check_outputs(found, want):
    assert tokens(found) == tokens(want)
    for ours, theirs in zip(found, want, strict=True):
        pairs = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
        assert all(abs(one[key].logprob - two[key].logprob) < 1e-3 for one, two in pairs for key in one)
    first, _, last = (next(iter(output.prompt_logprobs[1].values())).logprob for output in found)
    assert abs(first - last) > 1e-2


@pytest.mark.slow
def test_tokens_and_log_probabilities_are_the_cpus_with_several_adapters_in_a_batch(adapted):
    check_outputs(*(outputs_of(*adapted, device) for device in (DEVICE, "cpu")))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_and_routers_are_adapted_as_on_the_cpu(tmp_path, family):
    model, loras = adapted_mixture(tmp_path, family)
    check_outputs(*(outputs_of(model, loras, device, enable_lora_experts=True) for device in (DEVICE, "cpu")))


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
    x = draw(2, spec.hidden_size, seed=1).to(getattr(torch, spec.dtype)).to(device)
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


def test_adapters_of_experts_are_refused_without_memory_for_them(tmp_path, device):
    spec = read_model_spec(write_checkpoint(tmp_path / "moe", "qwen3_moe"))
    adapter = Adapter("a", 4, {"layers.0.experts.3.up": LowRankPair(torch.zeros(4, 32), torch.zeros(24, 4))})
    with pytest.raises(UnsupportedError, match=r"experts of a mixture \(layers.0.experts.3.up\), .* set enable_lora_experts"):
        DeviceAdapters(spec, 1, 8, device).load(adapter)
    holder = DeviceAdapters(spec, 1, 8, device, has_experts=True)
    holder.load(adapter)
    stack, without = (
        sum(tensor.nbytes for tensor in adapters.tensors()) for adapters in (holder, DeviceAdapters(spec, 1, 8, device))
    )
    assert stack - without == expert_adapter_bytes(spec, parameter_shapes(spec), 8, 4, (1, 1))


def test_an_adapter_without_experts_leaves_those_of_the_one_before_unused(tmp_path, device):
    spec = read_model_spec(write_checkpoint(tmp_path / "moe", "qwen3_moe"))
    generator = torch.Generator().manual_seed(1)
    of_experts = LowRankPair(torch.randn(4, 32, generator=generator), torch.randn(24, 4, generator=generator))
    other = LowRankPair(torch.randn(4, 32, generator=generator), torch.randn(32, 4, generator=generator))
    x, experts = (
        torch.randn(2, 32, generator=generator).to(device),
        torch.tensor([3, 1, 3, 0], dtype=torch.int32, device=device),
    )
    numbers = torch.tensor([0, -1], dtype=torch.int32, device=device)
    holder = DeviceAdapters(spec, 1, 8, device, has_experts=True)
    holder.load(Adapter("a", 4, {"layers.0.experts.3.up": of_experts}))
    added = holder.rows(numbers).of_experts("layers.0.experts")(experts)("gate_up", x, 2)
    want = (x[0].cpu() @ of_experts.a.t()) @ of_experts.b.t()
    torch.testing.assert_close(added[0, 24:].cpu(), want, atol=1e-5, rtol=1e-5)
    assert not added[0, :24].any()
    assert not added[1:].any()
    holder.unload("a")
    holder.load(Adapter("b", 4, {"layers.0.q": other}))
    assert not holder.rows(numbers).of_experts("layers.0.experts")(experts)("gate_up", x, 2).any()


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
def test_steps_with_adapters_are_among_those_that_the_memory_plan_captures(device):
    stepper, graphs = make_stepper(device, 2, adapters=DeviceAdapters(SPEC, 1, 4, device))
    plain, _ = make_stepper(device, 2)
    assert len(stepper.keys) == 2 * len(plain.keys)
    stepper.capture_samples()
    for kind in {type(key) for key in graphs.keys}:
        assert {key.has_adapters for key in graphs.keys if isinstance(key, kind)} == {False, True}


def test_a_step_without_adapters_launches_what_it_launches_without_the_option(device, monkeypatch):
    run, launches = Launch.run, []

    def noting(launch):
        given = [name for name, value in launch.arguments.items() if value is not None]
        launches.append((launch.kernel, launch.grid, given, launch.constants))
        run(launch)

    monkeypatch.setattr(Launch, "run", noting)
    stepper, _ = make_stepper(device, 2, adapters=DeviceAdapters(SPEC, 1, 4, device))
    plain, _ = make_stepper(device, 2)
    found = []
    for each in (stepper, plain):
        each.launch(prompt(0, [3, 5, 7]), SAMPLINGS[0], BlockTableUpdates([]))
        found.append(list(launches))
        launches.clear()
    assert len(found[0]) > 5
    assert found[0] == found[1]


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["", "in-order"])
@pytest.mark.parametrize("case", [*MIXTURES, "qwen3-5", "lfm2", "falcon-h1", "jamba", "zamba2", "kimi-linear", "deepseek-v32"])
def test_layers_of_a_family_are_adapted_as_on_the_cpu(tmp_path, case, options):
    pytest.importorskip("transformers", reason="the golden checkpoints are made by transformers")
    from tests.golden.make_checkpoints import make_checkpoint
    from tests.golden.test_lora_experts import expert_shapes
    from tests.golden.test_lora_recurrent import linear_layers

    model = make_checkpoint(case, tmp_path / "model")
    has_experts = any(isinstance(layer.mlp, MoeSpec) for layer in read_model_spec(model).layers)
    write_adapter(tmp_path / "one", (expert_shapes if case in MIXTURES else linear_layers)(model), rank=3, seed=1)
    loras = [LoRARequest("one", 1, str(tmp_path / "one")), None, LoRARequest("one", 1, str(tmp_path / "one"))]
    prompts, params = [[5, 9, 31, 7], [120, 3], list(range(11, 29))], greedy(3, logprobs=1)
    found = []
    # Compiling and capturing further steps, which others here test, would take most of the time.
    for device, more in ((DEVICE, {"enforce_eager": True, **options}), ("cpu", {})):
        sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "max_loras": 2, "max_lora_rank": 9}
        llm = LLM(str(model), device=device, enable_lora=True, enable_lora_experts=has_experts, **OPTIONS, **sizes, **more)
        found.append(llm.generate(prompts, params, use_tqdm=False, lora_request=loras))
        llm.close()
    assert tokens(found[0]) == tokens(found[1])
    for ours, theirs in zip(*([output.outputs[0] for output in outputs] for outputs in found), strict=True):
        for token, one, two in zip(ours.token_ids, ours.logprobs, theirs.logprobs, strict=True):
            assert abs(one[token].logprob - two[token].logprob) < 1e-3
