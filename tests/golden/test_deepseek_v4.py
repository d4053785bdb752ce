"""DeepSeek-V4: the names of its published files, and what its compressed keys and values rule out."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.contracts.config import EngineConfig
from quire.kv.pool import KvPool
from quire.model.build import load_model, whole_prompt_logits
from quire.model.config_reader import read_model_spec
from quire.worker.inspect import inspect_model

pytestmark = pytest.mark.golden

PROMPT = torch.randint(3, 131, (30,), generator=torch.Generator().manual_seed(4)).tolist()


def changed(checkpoint, tmp_path, **values):
    """Return a copy of the checkpoint whose config.json has other values; None: it lacks the key."""
    folder = shutil.copytree(checkpoint("deepseek-v4", "v5"), tmp_path / "changed", dirs_exist_ok=True)
    config = {**json.loads((folder / "config.json").read_text()), **values}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def test_files_with_the_published_names_are_the_same_model(checkpoint):
    found = [whole_prompt_logits(load_model(checkpoint("deepseek-v4", style)), PROMPT) for style in ("v5", "v4")]
    assert torch.equal(*found)


def test_files_in_fp8_with_the_published_names_are_the_model_of_their_numbers(checkpoint, tmp_path):
    folders = [shutil.copytree(checkpoint("deepseek-v4", "v4"), tmp_path / kind) for kind in ("stored", "dense")]
    tensors, dense = load_file(folders[0] / "model.safetensors"), {}
    for name, tensor in [*tensors.items()]:
        dense[name] = tensor
        if re.search(r"(attn\.w(q_a|q_b|kv|o_a|o_b)|indexer\.wq_b|experts\.\w+\.w[123])\.weight", name):
            tensors[name], scale = tensor.to(torch.float8_e4m3fn), torch.rand(*(-(-size // 16) for size in tensor.shape))
            tensors[name.replace(".weight", ".scale")] = scale = scale.to(torch.float8_e8m0fnu)
            whole = scale.float().repeat_interleave(16, 0).repeat_interleave(16, 1)
            dense[name] = tensors[name].float() * whole[: tensor.shape[0], : tensor.shape[1]]
    save_file(tensors, folders[0] / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, folders[1] / "model.safetensors")
    config = json.loads((folders[0] / "config.json").read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    (folders[0] / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    assert torch.equal(*(whole_prompt_logits(load_model(folder), PROMPT) for folder in folders))


@pytest.mark.parametrize(
    ("values", "error", "reason"),
    [
        ({"norm_topk_prob": False}, UnsupportedError, "norm_topk_prob False is not supported"),
        ({"scoring_func": "tanh"}, UnsupportedError, "scoring_func 'tanh'"),
        ({"layer_types": ["full_attention"] * 4}, UnsupportedError, "layer_types .* are not supported"),
        ({"layer_types": None, "compress_ratios": [0, 4, 8, 4]}, UnsupportedError, "compress_ratios .* are not supported"),
        ({"layer_types": None, "compress_ratios": [0, 4]}, ModelFormatError, "num_hidden_layers"),
        ({"mlp_layer_types": ["moe", "dense", "moe", "moe"]}, ModelFormatError, "mlp_layer_types must be"),
        ({"o_groups": 3}, ModelFormatError, "a divisor of num_attention_heads"),
        ({"index_head_dim": 4}, ModelFormatError, "at least the rotated values"),
        ({"compress_rates": {"heavily_compressed_attention": 0}}, ModelFormatError, "an integer from 1"),
    ],
)
def test_configs_of_other_models_are_refused(checkpoint, tmp_path, values, error, reason):
    with pytest.raises(error, match=reason):
        read_model_spec(changed(checkpoint, tmp_path, **values))


@pytest.mark.parametrize("expert", [-1, 6])
def test_tables_that_name_an_expert_that_does_not_exist_are_refused(checkpoint, tmp_path, expert):
    folder = changed(checkpoint, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.ffn.gate.tid2eid"][7, 0] = expert
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFormatError, match=f"1.ffn.gate.tid2eid must name experts from 0 to 5, got {expert}"):
        load_model(folder)


def test_the_layers_of_the_published_models_are_the_default(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, layer_types=None, mlp_layer_types=None, compress_rates=None)
    spec = read_model_spec(folder)
    assert [layer.attention.compression.rate for layer in spec.layers] == [128, 128, 128, 4]
    assert [layer.mlp.has_token_table for layer in spec.layers] == [True, True, True, False]


@pytest.mark.parametrize(
    ("case", "value_sizes"),
    # Of each layer, and of its entries: gates of two halves of 16 and 12 values or of one, and 4 keys of 12 in a block of 16.
    [("deepseek-v4", (0, 56, 16, 56, 0, 3, 0, 3)), ("minimax-m3", (16, 16, 16, 0, 0, 0))],
)
def test_values_that_nothing_reads_take_no_memory(checkpoint, case, value_sizes):
    folder = str(checkpoint(case))
    memory = inspect_model(EngineConfig(model=folder, skip_tokenizer_init=True, num_kv_blocks=4, block_size=16)).memory
    pool = KvPool(memory.kv, 4, num_window_blocks=4)
    assert tuple(v.shape[-1] for v in pool.v) == value_sizes
    assert sum(array.nbytes for array in pool.arrays()) == 4 * 16 * memory.kv.bytes_per_token
    num_layers = len(value_sizes) // 2
    assert memory.kv.num_layers == num_layers
    assert f"blocks for 4 of {num_layers} layers" in memory.describe() or case == "minimax-m3"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 2}, "native kernels, which do not run compressed keys"),
        ({"enable_lora": True}, "takes no adapters"),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}, "has compressed keys and values"),
        ({"kv_cache_dtype": "int8"}, "needs the native kernels"),
    ],
)
def test_what_compressed_keys_rule_out_is_refused(checkpoint, options, reason):
    with pytest.raises(ConfigError, match=reason):
        LLM(str(checkpoint("deepseek-v4", "v5")), skip_tokenizer_init=True, num_kv_blocks=30, **options)


def test_choices_that_fork_within_a_block_and_an_entry_have_the_probabilities_of_their_own_tokens(checkpoint):
    folder = checkpoint("deepseek-v4", "v5")
    llm = LLM(str(folder), skip_tokenizer_init=True, num_kv_blocks=40, block_size=4)
    params = SamplingParams(n=3, max_tokens=20, min_tokens=20, seed=5, logprobs=0, detokenize=False)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    llm.close()
    model, first = load_model(folder), len(PROMPT) - 1
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
    for choice in output.outputs:
        tokens = list(choice.token_ids)
        logprobs = whole_prompt_logits(model, PROMPT + tokens)[first:-1].log_softmax(-1)
        want = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found = [entry[token].logprob for entry, token in zip(choice.logprobs, tokens, strict=True)]
        assert (torch.tensor(found) - want).abs().max() < 1e-4
