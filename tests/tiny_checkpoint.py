"""Write small random checkpoints as Hugging Face folders, without transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 301
END_OF_TEXT = 300
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": END_OF_TEXT,
    "torch_dtype": "float32",
}
_CONFIGS = {
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"},
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "sliding_window": 11,
    },
    "gemma2": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 13,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "silu",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_act": "silu",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 11,
        "swiglu_limit": 2.0,
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
            **{"beta_fast": 32.0, "beta_slow": 1.0},
        },
    },
}
WIDE_EXPERTS = {
    **{"hidden_size": 64, "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    "torch_dtype": "bfloat16",
}
"""Changes of qwen3_moe that make a step mostly what eight experts make of each token."""


def write_checkpoint(folder: Path, family: str, seed: int = 0, **changes) -> Path:
    """Write config, weights and tokenizer of one family, with changes of its config; return the folder."""
    folder.mkdir(parents=True)
    config = {**_COMMON, **_CONFIGS[family], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        name: (torch.randn(shape, generator=generator) * scale + offset).to(dtype)
        for name, shape, scale, offset in _tensors(config)
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def _tensors(config):
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), 0.3, 0
    yield "model.norm.weight", (hidden,), 0.3, 1
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden), 0.5, 0
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        for norm in norms:
            yield f"{prefix}{norm}.weight", (hidden,), 0.3, 1
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", (size, hidden), 0.3, 0
            if config["model_type"] in ("qwen2", "gpt_oss"):
                yield f"{prefix}self_attn.{name}_proj.bias", (size,), 0.5, 0
        yield f"{prefix}self_attn.o_proj.weight", (hidden, q), 0.3, 0
        if config["model_type"].startswith("qwen3"):
            yield f"{prefix}self_attn.q_norm.weight", (head_dim,), 0.3, 1
            yield f"{prefix}self_attn.k_norm.weight", (head_dim,), 0.3, 1
        if config["model_type"] == "gpt_oss":
            yield f"{prefix}self_attn.o_proj.bias", (hidden,), 0.3, 0
            yield f"{prefix}self_attn.sinks", (config["num_attention_heads"],), 1.0, 0
            yield from _fused_experts(f"{prefix}mlp.", config)
        elif config["model_type"] == "qwen3_moe":
            yield f"{prefix}mlp.gate.weight", (config["num_experts"], hidden), 0.5, 0
            for expert in range(config["num_experts"]):
                yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
        else:
            yield from _mlp(f"{prefix}mlp.", hidden, config["intermediate_size"])


def _fused_experts(prefix, config):
    count, hidden, inner = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    yield f"{prefix}router.weight", (count, hidden), 0.5, 0
    yield f"{prefix}router.bias", (count,), 0.5, 0
    yield f"{prefix}experts.gate_up_proj", (count, hidden, 2 * inner), 0.3, 0
    yield f"{prefix}experts.gate_up_proj_bias", (count, 2 * inner), 0.5, 0
    yield f"{prefix}experts.down_proj", (count, inner, hidden), 0.3, 0
    yield f"{prefix}experts.down_proj_bias", (count, hidden), 0.5, 0


def _mlp(prefix, hidden, inner):
    yield f"{prefix}gate_proj.weight", (inner, hidden), 0.3, 0
    yield f"{prefix}up_proj.weight", (inner, hidden), 0.3, 0
    yield f"{prefix}down_proj.weight", (hidden, inner), 0.3, 0


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: 256 bytes, a few merges, and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and then the other " * 4], trainer)
    tokenizer.add_tokens([f"<extra_{n}>" for n in range(300 - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
