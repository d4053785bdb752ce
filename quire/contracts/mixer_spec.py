"""Mixers with a recurrent state: layers that mix tokens by a state of fixed size, in place of attention or next to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of the state of one sequence in one layer; is_f32: it is float32 whatever the model's dtype is."""

    shape: tuple[int, ...]
    is_f32: bool = False


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """A gated delta net (Yang et al., 2024: https://arxiv.org/abs/2412.06464), as Qwen3-Next has it.

    q, k and v pass a causal convolution and SiLU; q and k are normalised. The state S [v heads, k_dim, v_dim] becomes
    a * S + k (beta * (v - a * S^T k))^T, and the output is S^T q, normalised and gated by SiLU of z. num_v_heads is a multiple
    of num_k_heads.

    conv_size  taps of the convolution, that of the token itself included
    norm_eps   of the norm of each head of the output
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_size: int
    norm_eps: float

    @property
    def conv_channels(self) -> int:
        """Rows of q, k and v together, which the convolution is over."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the state consists of: the last inputs of the convolution, and S."""
        return (
            StateShape((self.conv_channels, self.conv_size - 1)),
            StateShape((self.num_v_heads, self.k_dim, self.v_dim), is_f32=True),
        )


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution (LFM2): out(c * conv(b * x)), where b, c and x are projections of the input.

    conv_size  taps of the convolution, that of the token itself included
    has_bias   of both projections and of the convolution
    """

    channels: int
    conv_size: int
    has_bias: bool = False

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the state consists of: the last inputs of the convolution."""
        return (StateShape((self.channels, self.conv_size - 1)),)


MixerSpec = GatedDeltaSpec | ShortConvSpec
