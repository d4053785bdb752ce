"""Models with the weights of some layers in host memory: the same tokens as without, and a plan that counts them."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.model.device_offload import OffloadedWeights
from quire.model.offload_plan import OffloadPlan
from tests.tiny_checkpoint import write_checkpoint
from tests.unit.kernels.gpu.conftest import HAS_GPU

pytestmark = pytest.mark.usefixtures("few_programs")
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
OPTIONS = {
    "device": "cuda" if HAS_GPU else "interpreter",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 16,
    "num_kv_blocks": 40,
    "max_model_len": 96,
    "max_num_seqs": 2,
}
PROMPTS = [[5, 9, 31, 7]]


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_layers_find_their_weights_in_the_staging_buffers_in_every_step(num_layers):
    plan = OffloadPlan(tuple(range(1, num_layers + 1)), 0, 0)
    offload = OffloadedWeights(DEVICE, plan)
    dense = {layer: torch.rand(6, 32, device=DEVICE) for layer in range(num_layers + 2)}
    quantized = {
        layer: DeviceQuantizedWeight(
            torch.randint(-9, 9, (4, 32), dtype=torch.int8, device=DEVICE),
            torch.rand(4, 1, device=DEVICE),
            None,
            32,
            1,
            32,
            None,
        )
        for layer in plan.layers
    }
    expected = {layer: weight.clone() for layer, weight in dense.items()}
    codes = {layer: weight.codes.clone() for layer, weight in quantized.items()}
    parts = {layer: (weight[:2], weight[2:]) if layer % 2 else (weight,) for layer, weight in dense.items()}
    for layer, weights in parts.items():
        offload.take(f"layers.{layer}.qkv.weight", weights)
    for layer, weight in quantized.items():
        offload.take(f"layers.{layer}.o.weight", (weight,))
    offload.take("embed.weight", (torch.rand(3, 3, device=DEVICE),))
    offload.finish()
    assert offload.num_bytes == num_layers * (6 * 32 * 4 + 4 * 32 + 4 * 4)
    for _ in range(2):
        offload.begin()
        for layer in range(num_layers + 2):
            offload.before(layer)
            assert torch.equal(torch.cat(parts[layer]), expected[layer])
            if layer in codes:
                assert torch.equal(quantized[layer].codes, codes[layer])
            offload.after(layer)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("qwen3", {}), ("qwen3", {"quantization": "int8"}), ("qwen3_moe", {})])
def test_tokens_are_the_same_when_layers_are_in_host_memory(tmp_path, kind, options):
    folder = write_checkpoint(tmp_path / kind, kind, num_hidden_layers=3)
    found, plans, size = [], [], 0
    for _ in range(3):
        llm = LLM(str(folder), **OPTIONS, **options, cpu_offload_gb=size)
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)])
        plans.append(llm.llm_engine.report.memory)
        llm.close()
        size = 0.7 * plans[-1].offloaded_bytes / (1 << 30) if plans[1:] else 0.5  # all layers, and then some
    assert found[0] == found[1] == found[2]
    whole, everything, some = plans
    assert whole.offloaded_bytes == 0 < some.offloaded_bytes < everything.offloaded_bytes
    assert everything.weight_bytes < whole.weight_bytes
    assert "of weights in host memory" in everything.describe()
