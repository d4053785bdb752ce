"""Rotary embeddings of config.json, in both styles."""

import math

import pytest
import torch

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.contracts.model_spec import RopeSpec
from quire.kernels.reference.rope import inverse_frequencies
from quire.model.config_reader import read_model_spec


@pytest.fixture
def read_rope(write_config):
    """Return a function that reads the rope of layer `index` from a config with changes."""

    def read(model_type, index=0, **changes):
        return read_model_spec(write_config(model_type, **changes)).layers[index].attention.rope

    return read


def test_theta_in_both_styles_and_absent(read_rope):
    assert read_rope("llama") == RopeSpec(8, 1e4)
    assert read_rope("llama", rope_theta=5e5) == RopeSpec(8, 5e5)
    assert read_rope("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == RopeSpec(8, 5e5)
    assert read_rope("mixtral", num_key_value_heads=2) == RopeSpec(8, 1e6)
    linear = {"rope_type": "linear", "factor": 2.0}
    assert read_rope("ministral3", num_key_value_heads=2, rope_scaling=linear).theta == 1e4
    for changes in ({}, {"rope_theta": 7.0}):  # that of the class's own rope_parameters
        assert read_rope("ministral3", num_key_value_heads=2, **changes).theta == 1e6


def test_truncate_stands_next_to_the_layer_types(read_rope):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    for is_truncated in (True, False):
        ropes = {"full_attention": yarn, "truncate": is_truncated}
        assert read_rope("mimo_v2_flash", rope_parameters=ropes, num_key_value_heads=2).truncate == is_truncated


def test_latent_heads_are_rotated_whole(read_rope):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    with pytest.raises(ModelFormatError, match=r"partial_rotary_factor gives must be qk_rope_head_dim \(6\), got 12"):
        read_rope("mistral4", num_key_value_heads=4, qk_rope_head_dim=6, qk_nope_head_dim=10, rope_parameters=rope)


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt_neox_japanese"])
def test_theta_by_the_old_name(read_rope, model_type):
    assert read_rope(model_type, rotary_emb_base=5e3, rotary_pct=0.5) == RopeSpec(4, 5e3)


def test_rope_scaling_replaces_rope_parameters(read_rope):
    rope = read_rope(
        "llama",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 1e4)


@pytest.mark.parametrize(
    "extra, expected",
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 0.7}, 0.1 * math.log(40) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
    ids=["factor", "given", "one mscale", "both mscales"],
)
def test_yarn_attention_factor(read_rope, extra, expected):
    rope = read_rope("llama", rope_scaling={"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, **extra})
    assert rope.attention_factor == pytest.approx(expected, rel=1e-12)
    assert (rope.original_max, rope.beta_fast, rope.beta_slow, rope.truncate) == (4096, 32.0, 1.0, True)


def test_positions_after_scaling(write_config):
    def positions(model_type="llama", **scaling):
        config = write_config(model_type, max_position_embeddings=1000, rope_scaling=scaling or None)
        return read_model_spec(config).max_positions

    assert positions() == 1000
    assert positions(type="linear", factor=4.0) == 4000
    assert positions(type="yarn", factor=4.0, original_max_position_embeddings=500) == 2000
    assert positions(type="yarn", factor=2.0, original_max_position_embeddings=100) == 1000
    assert positions(type="dynamic", factor=4.0) == 1000
    assert positions("gemma3_text", rope_type="linear", factor=8.0) == 1000


def test_dynamic_counts_from_max_position_embeddings(read_rope):
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    assert read_rope("llama", max_position_embeddings=64, rope_scaling=scaling).original_max == 64


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_longrope_under_its_three_names(read_rope, kind):
    scaling = {"type": kind, "short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0]}
    rope = read_rope(
        "phi3",
        partial_rotary_factor=0.75,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling=scaling,
    )
    assert (rope.kind, rope.dim, rope.original_max) == ("longrope", 6, 4096)
    assert rope.attention_factor == pytest.approx(1.19024, abs=1e-5)
    assert (rope.short, rope.long) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


def test_longrope_with_a_list_of_the_wrong_length(read_rope):
    with pytest.raises(ModelFormatError, match=r"length of .*short_factor must be .*4.*, got 1"):
        read_rope("phi3", rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4})


def test_gemma3_scales_layers_of_full_attention_only(read_rope):
    scaling = {"rope_type": "linear", "factor": 8.0}
    v4 = {"rope_scaling": scaling, "rope_theta": 2e6, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2}
    v5 = {
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    for style in (v4, v5):
        assert read_rope("gemma3_text", 0, **style) == RopeSpec(256, 2e4)
        full = read_rope("gemma3_text", 1, **style)
        assert (full.kind, full.factor, full.theta) == ("linear", 8.0, 2e6)


def test_gemma4_rotates_a_share_of_the_pairs_in_layers_of_full_attention(read_rope):
    assert read_rope("gemma4_text", 0) == RopeSpec(256, 1e4)
    full = read_rope("gemma4_text", 3)
    assert full == RopeSpec(512, 1e6, "proportional", num_pairs=64)
    frequencies = inverse_frequencies(full, 100)
    assert torch.equal(frequencies[64:], torch.zeros(192))
    assert torch.allclose(frequencies[:64], 1e6 ** (-torch.arange(64) / 256))
    ropes = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.001}}
    with pytest.raises(ModelFormatError, match="partial_rotary_factor must be such that 1 to 256 pairs"):
        read_rope("gemma4_text", 3, rope_parameters=ropes)
    with pytest.raises(UnsupportedError, match="proportional"):
        read_rope("llama", rope_parameters={"rope_type": "proportional", "rope_theta": 1e6})


def test_rope_parameters_of_the_wrong_nesting(read_rope):
    with pytest.raises(ModelFormatError, match="one object for all layers"):
        read_rope("llama", rope_parameters={"full_attention": {"rope_type": "default"}})
    with pytest.raises(ModelFormatError, match="full_attention"):
        read_rope("gemma3_text", rope_parameters={"rope_type": "default"})


@pytest.mark.parametrize(
    ("model_type", "changes", "key"),
    [
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "rope_theta"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-320}}, "beta_fast"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e308}}, "beta_slow"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "factor"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 10**40}},
            "original",
        ),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "head_dim": 2}, "head_dim"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}}, "rope_type"),
        ("phi3", {"rope_scaling": {"type": {"a": 1}, "factor": 4.0}}, "rope_type"),
        (
            "llama",
            {
                "rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
                "max_position_embeddings": 1,
            },
            "max_position_embeddings",
        ),
    ],
)
def test_scaling_without_a_value_is_refused_with_its_key(read_rope, model_type, changes, key):
    with pytest.raises(ModelFormatError, match=key):
        read_rope(model_type, **changes)


def test_olmo2_rotates_in_f32(read_rope):
    assert read_rope("olmo2").is_f32
    assert not read_rope("llama").is_f32
