"""Models with known sizes, as the planner sees them."""

from quire.planner.model_shape import AttentionGroup, ExpertGroup, ModelShape, usual_weight_bytes


def make_shape(**changes) -> ModelShape:
    """Return a small dense model: 4 layers, 2 kv heads of 64, 1000 tokens."""
    num_layers, hidden, vocab = 4, 256, 1000
    figures = {
        "name": "small",
        "dtype": "bfloat16",
        "num_parameters": 4_000_000,
        "num_embed": 0,
        "num_head": vocab * hidden,
        "num_layers": num_layers,
        "hidden_size": hidden,
        "max_positions": 4096,
        "num_kv_heads": 2,
        "weight_bytes": usual_weight_bytes(4_000_000),
        "attention": (AttentionGroup(None, num_layers, num_layers * 2, num_layers * 2 * 2 * 64, num_layers * 4 * 64),),
    }
    return ModelShape(**{**figures, **changes})


def qwen3_06b() -> ModelShape:
    """Return Qwen3-0.6B: 28 layers, 16 heads of 128, 8 kv heads, tied."""
    group = AttentionGroup(None, 28, 28 * 8, 28 * 8 * 128 * 2, 28 * 16 * 128)
    return ModelShape(
        name="qwen3-0.6b",
        dtype="bfloat16",
        num_parameters=596_049_920,
        num_embed=0,
        num_head=151_936 * 1024,
        num_layers=28,
        hidden_size=1024,
        max_positions=40960,
        num_kv_heads=8,
        weight_bytes=usual_weight_bytes(596_049_920),
        attention=(group,),
    )


def make_mixture() -> ModelShape:
    """Return a model with 8 experts in all, of which a token takes 2, with half of the weights."""
    return make_shape(experts=(ExpertGroup(8, 2, 2_000_000),))
