"""Mixers with a recurrent state: layers that mix tokens by a state of fixed size, in place of attention or next to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


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
    gate_rank  Kimi delta attention (https://arxiv.org/abs/2510.26692): a decays each row of S by itself, a and z are made by
               two matrices each, of this rank between them, and the output is gated by the sigmoid of z, normalised in f32.
               None: as above
    write_scale  multiplies beta (OLMo Hybrid: 2, so that eigenvalues may be negative)
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_size: int
    norm_eps: float
    gate_rank: int | None = None
    write_scale: float = 1.0

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


@dataclass(frozen=True, slots=True)
class GatedNormSpec:
    """The norm of the output of Mamba 2 in equal groups of channels, and its gate, SiLU of z.

    order  "gate_first": y * silu(z) is normalised; "norm_first": the normalised y is multiplied by silu(z)
    """

    num_groups: int
    eps: float
    order: Literal["gate_first", "norm_first"] = "gate_first"


@dataclass(frozen=True, slots=True)
class Mamba2Scales:
    """Factors on the input of a Mamba 2 mixer, and on what it projects that to (Falcon-H1)."""

    input: float = 1.0
    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    step: float = 1.0


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba 2 (Dao and Gu, 2024: https://arxiv.org/abs/2405.21060).

    One matrix projects the input to z, x, B, C and a step per head; x, B and C pass a causal convolution and SiLU. The state
    S [heads, state_size, head_dim] becomes exp(-exp(log) * step) * S + B (step * x)^T, and the output is S^T C + D * x.
    Heads are in num_groups equal groups, which share B and C.

    conv_size  taps of the convolution, that of the token itself included
    min_step, max_step  steps are clipped to these, after softplus
    norm       None: the output is multiplied by SiLU of z, and not normalised
    has_in_bias, has_out_bias  of the projections; has_conv_bias: of the convolution
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_size: int
    norm: GatedNormSpec | None
    min_step: float = 0.0
    max_step: float = math.inf
    has_in_bias: bool = False
    has_out_bias: bool = False
    has_conv_bias: bool = True
    scales: Mamba2Scales = Mamba2Scales()

    @property
    def channels(self) -> int:
        """Values of x, z and the output."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Rows of x, B and C together, which the convolution is over."""
        return self.channels + 2 * self.num_groups * self.state_size

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the state consists of: the last inputs of the convolution, and S."""
        return (
            StateShape((self.conv_channels, self.conv_size - 1)),
            StateShape((self.num_heads, self.state_size, self.head_dim), is_f32=True),
        )


@dataclass(frozen=True, slots=True)
class Mamba1Spec:
    """Mamba (Gu and Dao, 2023: https://arxiv.org/abs/2312.00752).

    The input is projected to x and z; x passes a causal convolution and SiLU, and is projected to a step, B and C. The state
    S [state_size, channels] becomes exp(-exp(log) * step) * S + B (step * x)^T, with a step per channel, and the output is
    (S^T C + D * x) * silu(z).

    step_rank        size of what steps are made of
    conv_size        taps of the convolution, that of the token itself included
    norm_eps         of RMS norms of steps, B and C; None: there are none
    has_norm_weight  these norms have a weight (Jamba)
    has_bias         on the projections in and out; has_conv_bias: on the convolution
    """

    channels: int
    state_size: int
    step_rank: int
    conv_size: int
    norm_eps: float | None = None
    has_norm_weight: bool = False
    has_bias: bool = False
    has_conv_bias: bool = True

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the state consists of: the last inputs of the convolution, and S."""
        return (
            StateShape((self.channels, self.conv_size - 1)),
            StateShape((self.state_size, self.channels), is_f32=True),
        )


@dataclass(frozen=True, slots=True)
class LightningSpec:
    """Lightning attention (https://arxiv.org/abs/2401.04658), as MiniMax-Text-01 has it.

    One matrix projects the input to q, k and v of each head in turn, which pass SiLU. The state S [heads, head_dim, head_dim]
    becomes decay * S + k v^T, and the output is S^T q, normalised over all heads and gated by the sigmoid of z.

    decays    of each head
    norm_eps  of the norm of the output
    """

    head_dim: int
    decays: tuple[float, ...]
    norm_eps: float

    @property
    def channels(self) -> int:
        """Values of the output."""
        return len(self.decays) * self.head_dim

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the state consists of: S."""
        return (StateShape((len(self.decays), self.head_dim, self.head_dim), is_f32=True),)


MixerSpec = GatedDeltaSpec | ShortConvSpec | Mamba2Spec | Mamba1Spec | LightningSpec
