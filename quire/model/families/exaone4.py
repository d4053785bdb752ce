"""EXAONE 4: norms on the outputs of the blocks and on heads; with windows, only the layers that have one are rotated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import gemma2
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "exaone4"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an EXAONE 4 model."""
    norm, mlp = read_rms_norm(config), read_mlp(config)
    has_window = config.nullable_integer("sliding_window") is not None
    is_sliding = read_is_sliding(config, _pattern(config) if has_window else lambda _: False)
    window = window_of(config, is_sliding)
    full = replace(read_attention(config), qk_norm=norm)
    near = replace(full, window=window or None)
    full = replace(full, rope=None) if has_window else full
    layers = [LayerSpec(near if slides else full, mlp, attn_out=norm, mlp_out=norm) for slides in is_sliding]
    return assemble(config, layers, norm)


def _pattern(config: ConfigView) -> Callable[[int], bool]:
    """Return which layers slide: every one but each N-th, or as a string such as "LLLG" says."""
    pattern = config.raw("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise UnsupportedError(f"sliding_window_pattern {pattern!r} is not supported; supported: L and G, as in 'LLLG'")
        return lambda index: pattern[index % len(pattern)] == "L"
    period = config.integer("sliding_window_pattern")
    return lambda index: (index + 1) % period != 0


PAGE = FamilyPage(("Exaone4ForCausalLM",), read_spec, gemma2.find_sources)
