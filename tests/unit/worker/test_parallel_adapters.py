"""Ranks and pipeline stages with LoRA adapters give the tokens and log probabilities of one process, bit for bit."""

from __future__ import annotations

from contextlib import closing

import pytest
from safetensors.torch import load_file

from quire import LLM, LoRARequest, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.base.threads import num_usable_cores
from quire.contracts.config import EngineConfig
from quire.kernels.native import load_native
from quire.worker import parallel_launch, pipeline_build
from quire.worker.inspect import inspect_model
from quire.worker.lora import check_lora
from quire.worker.parallel_build import rank_memories
from quire.worker.pipeline_plan import stage_memories
from tests.lora_adapter import write_adapter
from tests.ranks import wait_until
from tests.thread_workers import ThreadWorkers
from tests.tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

PROMPTS = [{"prompt_token_ids": ids} for ids in (list(range(5, 30)), [7], [31, 9] * 5, [11, 12, 13])]
ADAPTERS = ("one", None, "two", "one")


@pytest.fixture(autouse=True)
def thread_workers(monkeypatch):
    for module in (parallel_launch, pipeline_build):
        monkeypatch.setattr(module, "spawn_workers", lambda *args: ThreadWorkers(*args))


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def adapted(request, tmp_path_factory):
    """Return a model, and the folder of its adapters: of all layers with experts and routers, of attention, of one layer."""
    folder, shapes = tmp_path_factory.mktemp("adapters"), {}
    model = write_checkpoint(folder / "model", request.param)
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("proj.weight", "mlp.gate.weight")) or name == "lm_head.weight":
            shapes[name.removesuffix(".weight")] = tuple(weight.shape)
    write_adapter(folder / "one", shapes, rank=5, seed=1)
    write_adapter(folder / "two", {name: shape for name, shape in shapes.items() if "attn" in name}, rank=20, seed=2)
    write_adapter(folder / "three", {name: shape for name, shape in shapes.items() if ".0." in name}, seed=3)
    write_adapter(folder / "wide", shapes, rank=40)
    return str(model), folder


def engine(model, size=1, **options):
    threads = {"num_threads": min(size, num_usable_cores())}
    limits = {"max_num_seqs": 4, "num_kv_blocks": 96, "max_num_batched_tokens": 16, "max_loras": 2, "max_lora_rank": 20}
    options = {"enable_lora": True, "skip_tokenizer_init": True, **threads, **limits, **options}
    return closing(LLM(model=model, device="cpu", tensor_parallel_size=size, **options))


def adapter(folder, name):
    return None if name is None else LoRARequest(name, 1 + ("one", "two", "three", "wide").index(name), str(folder / name))


def outputs(llm, folder, names=ADAPTERS):
    # On stages the logits of prompts are computed after later steps have begun.
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=prompt)
        for prompt in (1, 1, None, None)
    ]
    loras = [adapter(folder, name) for name in names]
    found = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=loras)
    assert [output.error for output in found] == [None] * len(PROMPTS)
    return [
        ([list(one.outputs[0].token_ids)] + [repr(each) for each in (one.outputs[0].logprobs, one.prompt_logprobs)])
        for one in found
    ]


def after_changes(llm, folder):
    """Return outputs, before and after adapters are unloaded and loaded while the engine runs."""
    found = [outputs(llm, folder)]
    assert llm.llm_engine.remove_lora(1)
    assert llm.llm_engine.add_lora(adapter(folder, "three"))
    found.append(outputs(llm, folder, ("three", "two", None, "three")))
    with pytest.raises(RequestError, match="max_lora_rank"):
        llm.llm_engine.add_lora(adapter(folder, "wide"))
    return [*found, outputs(llm, folder)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"size": 2, "tensor_parallel_shares": (2, 1)}, id="unequal"),
        pytest.param({"size": 2}, id="equal", marks=pytest.mark.slow),
        pytest.param({"size": 4}, id="four", marks=pytest.mark.slow),
        pytest.param({"size": 3, "quantization": "int8"}, id="int8", marks=pytest.mark.slow),
        pytest.param({"size": 2, "decode_context_parallel_size": 2}, id="context", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, id="stages"),
        pytest.param({"size": 2, "pipeline_parallel_size": 2}, id="ranks-of-stages", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "quantization": "int8"}, id="int8-stages", marks=pytest.mark.slow),
    ],
)
def test_outputs_are_those_of_one_process(adapted, options):
    model, folder = adapted
    with engine(model, **{name: options[name] for name in options if name == "quantization"}) as one:
        expected = after_changes(one, folder)
    assert expected[0][0] != expected[1][0] != expected[0][3]
    with engine(model, **options) as ranks:
        assert after_changes(ranks, folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("adapted", ["qwen3_moe"], indirect=True)
def test_experts_may_be_divided_by_ranks(adapted, tmp_path):
    model, folder = adapted
    with engine(model, save_expert_load=str(tmp_path / "load.json")) as one:
        expected = after_changes(one, folder)
    assert (tmp_path / "load.json").stat().st_size > 0
    for num_stages in (1, 2):
        with engine(model, 2, enable_expert_parallel=True, pipeline_parallel_size=num_stages) as ranks:
            assert after_changes(ranks, folder) == expected


@pytest.mark.parametrize("adapted", ["qwen3_moe"], indirect=True)
def test_adapters_of_experts_stay_with_experts_that_move(adapted):
    model, folder = adapted
    with engine(model) as one:
        expected = after_changes(one, folder)
    with engine(model, 2, enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=1) as ranks:
        assert outputs(ranks, folder) == expected[0]
        assert ranks.llm_engine.rebalance_experts()

        def has_moved():
            ranks.llm_engine.check_health()
            return any(layer.num_moved for layer in ranks.llm_engine.stats.experts)

        assert wait_until(has_moved)
        assert after_changes(ranks, folder) == expected


def test_first_matrices_are_counted_on_every_rank():
    def num_bytes(size, num_stages=1, **options):
        options |= {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
        config = EngineConfig(model="demo", device="cpu", num_kv_blocks=96, **options)
        memories = rank_memories if num_stages == 1 else stage_memories
        return sum(each.weight_bytes for each in memories(config, inspect_model(config)))

    one, two, stages, ranks = (
        num_bytes(*sizes, enable_lora=True) - num_bytes(*sizes) for sizes in ((1,), (2,), (1, 2), (2, 2))
    )
    assert 1.2 * one < two < 2 * one
    assert (stages, ranks) == pytest.approx((one, two), rel=0.01)


def test_adapters_of_experts_that_move_between_gpus_are_refused():
    options = {"enable_lora": True, "enable_lora_experts": True, "enable_expert_parallel": True, "enable_eplb": True}
    config = EngineConfig(model="demo", tensor_parallel_size=2, **options)
    with pytest.raises(ConfigError, match=r"enable_eplb is True, but adapters of experts .* do not move between GPUs"):
        check_lora(config, None, "cuda:0")
