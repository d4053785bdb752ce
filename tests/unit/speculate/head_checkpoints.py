"""Write random heads that draft, in every layout, for the tiny checkpoints."""

import json

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 48, 4, 2, 8, 301
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "torch_dtype": "float32",
}


def random_tensors(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 0.1) + (1 if "norm" in name else 0)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix, attended=HIDDEN, qk_norm=False):
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, attended),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, attended),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, attended),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def write(folder, config, tensors, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, str(folder / name), metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / name)
    return folder


def eagle1(folder, **changes):
    shapes = layer_shapes("layers.0.") | {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN)}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **CONFIG, **changes}
    return write(folder, config, random_tensors(shapes, 1), "pytorch_model.bin")


def eagle3(folder, draft_vocab=120, layers=(0, 1), prefix="midlayer.", **changes):
    shapes = layer_shapes(prefix, 2 * HIDDEN) | {
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, len(layers) * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab, HIDDEN),
    }
    tensors = random_tensors(shapes, 3)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:draft_vocab].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    tensors |= {"d2t": ids - torch.arange(draft_vocab), "t2d": mask}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **CONFIG,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
        **changes,
    }
    return write(folder, config, tensors)


def speculators(folder):
    """The same head as `eagle3`, as the speculators library stores it."""
    eagle3(folder, prefix="layers.0.")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
        "transformer_layer_config": {"model_type": "llama", **CONFIG},
        "draft_vocab_size": 120,
        "eagle_aux_hidden_state_layer_ids": [0, 1],
        "norm_before_residual": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mtp(folder, layout="qwen", qk_norm=True):
    prefix = "mtp.layers.0."
    shapes = layer_shapes(prefix, qk_norm=qk_norm) | {f"{prefix}input_layernorm.weight": (HIDDEN,)}
    shapes |= {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {f"mtp.{name}.weight": (HIDDEN,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    tensors = random_tensors(shapes, 7)
    if layout == "deepseek":
        names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
        renamed = {f"mtp.{old}.weight": f"model.layers.2.{new}.weight" for old, new in names.items()}
        tensors = {renamed.get(n, n.replace(prefix, "model.layers.2.")): tensor for n, tensor in tensors.items()}
    if layout == "mimo":
        names = {"fc": "input_proj", "pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm"}
        names |= {"norm": "final_layernorm"}
        renamed = {f"mtp.{old}.weight": f"model.mtp_layers.0.{new}.weight" for old, new in names.items()}
        tensors["mtp.fc.weight"] = torch.cat(tensors["mtp.fc.weight"].chunk(2, 1)[::-1], 1).contiguous()
        tensors = {renamed.get(n, n.replace(prefix, "model.mtp_layers.0.")): tensor for n, tensor in tensors.items()}
        for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"model.mtp_layers.0.self_attn.{name}_proj.bias"] = torch.zeros(size * HEAD_DIM)
        tensors |= {name: torch.zeros(VOCAB, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    config = {"architectures": ["Qwen3MTP"], "model_type": "qwen3", **CONFIG, "num_nextn_predict_layers": 1}
    return write(folder, config, tensors)


def medusa(folder, layout="medusa", count=3, bias=True):
    generator = torch.Generator().manual_seed(9)

    def make(*shape):
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {}
    for i in range(count):
        block, offset, head = make(HIDDEN, HIDDEN), make(HIDDEN), make(VOCAB, HIDDEN)
        if layout == "vllm":
            tensors[f"blocks.{i}.layers.0.weight"], tensors[f"lm_heads.{i}.weight"] = block, head
            tensors |= {f"blocks.{i}.layers.0.bias": offset} if bias else {}
        else:
            prefix = "medusa_head." if layout == "full" else ""
            tensors[f"{prefix}{i}.0.linear.weight"], tensors[f"{prefix}{i}.1.weight"] = block, head
            tensors |= {f"{prefix}{i}.0.linear.bias": offset} if bias else {}
    config = {"model_type": "medusa", "medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": HIDDEN}
    return write(folder, config, tensors, "medusa_lm_head.pt" if layout == "medusa" else "model.safetensors")
