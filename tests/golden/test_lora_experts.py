"""LoRA adapters of experts and routers give the logits of a model of the transformers library into which they are merged."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LoRARequest
from quire.base.errors import ConfigError, RequestError
from quire.model.config_reader import read_model_spec
from quire.model.lora.adapter import AdapterReader
from quire.model.parameters import parameter_shapes
from tests.golden.make_checkpoints import reference_model
from tests.golden.test_lora import F32_TOLERANCE, KINDS, PROMPTS, adapted_decoder, engine, generate, is_equal, logits_of_batch
from tests.lora_adapter import write_adapter, write_merged, write_pairs, write_stacks

pytestmark = pytest.mark.golden

ADAPTED = re.compile(
    r"(.*\.(?:experts\.\d+\.\w+|(?:mlp|block_sparse_moe)\.gate|shared_expert_gate|kv_b_proj|indexer\.\w+|router(?:\.proj)?"
    r"|gate\.wg))\.weight"
)
MORE = ("mixtral", "glm4-moe", "ernie4-5-moe", "hunyuan-moe", "phimoe", "deepseek-v32", "olmoe", "minimax-m2", "gemma4-moe")
STACKED = ("qwen3-vl-moe", "gemma4-moe")
RANK = 3


def expert_shapes(folder):
    """Return module -> [out, in] of the experts and routers of a checkpoint that stores each expert."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        match = ADAPTED.fullmatch(name)
        if match is not None and tensor.dim() == 2:
            found[match[1]] = tuple(tensor.shape)
    return found


def check(folder, merged, adapter, kind, tolerance=F32_TOLERANCE):
    """Compare the logits of a batch of which some prompts have an adapter with those of two models of transformers."""
    decoder = adapted_decoder(folder, adapter, kind)
    found = logits_of_batch(decoder, PROMPTS, [adapter.key, "", adapter.key])
    for model, index in ((merged, 0), (reference_model(folder), 1), (merged, 2)):
        with torch.inference_mode():
            want = model(torch.tensor([PROMPTS[index]])).logits[0]
        assert (found[index] - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["qwen2-moe", *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)])
def test_single_experts_and_routers_are_adapted(checkpoint, tmp_path, case, kind):
    folder = checkpoint(case, "v5")
    merged = write_merged(folder, tmp_path / "merged", write_adapter(tmp_path / "a", expert_shapes(folder), rank=RANK))
    adapter = AdapterReader(folder, read_model_spec(folder), 16).read(str(tmp_path / "a"))
    check(folder, reference_model(merged), adapter, kind)


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["gpt-oss", *(pytest.param(case, marks=pytest.mark.slow) for case in STACKED)])
def test_stacks_of_experts_are_adapted(checkpoint, tmp_path, case, kind):
    folder = checkpoint(case, "v5")
    deltas = write_stacks(tmp_path / "a", folder, RANK)
    merged = write_merged(folder, tmp_path / "merged", {})
    tensors = load_file(folder / "model.safetensors")
    changed = {name: (tensors[name] + delta).contiguous() for name, delta in deltas.items()}
    save_file(tensors | changed, merged / "model.safetensors", metadata={"format": "pt"})
    adapter = AdapterReader(folder, read_model_spec(folder), 16).read(str(tmp_path / "a"))
    check(folder, reference_model(merged), adapter, kind)


def test_stacks_of_granite_may_have_their_older_names(checkpoint, tmp_path):
    folder = checkpoint("granitemoe", "v5")
    spec, block = read_model_spec(folder), "model.layers.0.block_sparse_moe"
    shapes = parameter_shapes(spec)
    stacks = [shapes[f"layers.0.experts.{name}.weight"] for name in ("gate_up", "down")]
    pairs = [(torch.randn(count * RANK, columns), torch.randn(rows, RANK * count)) for count, rows, columns in stacks]
    found = []
    for number, names in enumerate((("experts.base_layer", "experts"), ("input_linear", "output_linear"))):
        named = {f"{block}.{name}": pair for name, pair in zip(names, pairs, strict=True)}
        write_pairs(tmp_path / str(number), named, alpha=RANK, rank=RANK)
        found.append(AdapterReader(folder, spec, 16).read(str(tmp_path / str(number))).pairs)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(*matrices) for name in found[0] for matrices in zip(found[0][name], found[1][name], strict=True))


def test_chunk_with_an_adapter_changes_nothing_of_a_decoding_request_without(checkpoint, tmp_path):
    """In the last layer only the rows of which tokens are sampled are left, none of them with an adapter."""
    folder = checkpoint("qwen3-moe", "v5")
    write_adapter(tmp_path / "one", expert_shapes(folder), seed=1)
    llm = engine(folder, max_num_batched_tokens=16)
    prompts, loras = [PROMPTS[0][:5], PROMPTS[0] * 5], [None, LoRARequest("one", 1, str(tmp_path / "one"))]
    together = generate(llm, prompts, loras)
    assert is_equal(together[:1], generate(llm, prompts[:1], loras[:1]))
    llm.close()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_requests_with_adapters_of_experts_share_a_batch(checkpoint, tmp_path, quantization):
    """Chunks of prompts, decoding steps and cached prefixes give the tokens of each request alone, and of a merged model."""
    folder = checkpoint("qwen3-moe", "v5")
    shapes = expert_shapes(folder)
    some = {name: shape for name, shape in shapes.items() if ".layers.1." in name and "down" in name}
    deltas = write_adapter(tmp_path / "one", shapes, seed=1), write_adapter(tmp_path / "two", some, seed=2)
    one, two = (LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate(("one", "two"), start=1))
    loras = [one, None, two]
    llm = engine(folder, quantization=quantization, max_num_batched_tokens=16)
    found, again = generate(llm, PROMPTS, loras), generate(llm, PROMPTS, loras)
    alone = [generate(llm, [prompt], [lora])[0] for prompt, lora in zip(PROMPTS, loras, strict=True)]
    llm.close()
    assert is_equal(found, again)
    assert is_equal(found, alone)
    if quantization is None:
        for index, delta in ((0, deltas[0]), (2, deltas[1])):
            plain = engine(write_merged(folder, tmp_path / f"merged-{index}", delta), enable_lora=False)
            assert is_equal(generate(plain, [PROMPTS[index]], None), [found[index]])
            plain.close()


def test_adapters_of_experts_that_exceed_the_memory_plan_are_refused(checkpoint, tmp_path):
    folder = checkpoint("qwen3-moe", "v5")
    shapes = expert_shapes(folder)
    for name, seed in (("one", 1), ("two", 2), ("three", 3)):
        write_adapter(tmp_path / name, shapes, rank=4, seed=seed)
    llm = engine(folder, max_loras=3, max_lora_rank=8)
    loras = [LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate(("one", "two", "three"), start=1)]
    assert llm.llm_engine.add_lora(loras[0])
    with pytest.raises(
        RequestError,
        match=r"for experts, takes .* are taken: set enable_lora_experts .* or raise max_loras, which is 3 \(--max-loras\)",
    ):
        _ = [llm.llm_engine.add_lora(lora) for lora in loras[1:]]
    assert llm.llm_engine.remove_lora(1)
    assert llm.llm_engine.add_lora(loras[2])
    llm.close()
    llm = engine(folder, max_loras=3, max_lora_rank=8, enable_lora_experts=True)
    assert all(llm.llm_engine.add_lora(lora) for lora in loras)
    llm.close()


def test_memory_for_experts_is_refused_where_there_are_none(checkpoint):
    with pytest.raises(ConfigError, match=r"enable_lora_experts is True, but the model \('qwen3'\) has no experts"):
        engine(checkpoint("qwen3", "v5"), enable_lora_experts=True)
