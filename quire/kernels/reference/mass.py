"""Definition of the mass of a token, e^depth for depth = logit - best logit, as an integer number of units of 2**-44.

Sums of integers do not depend on their order, so a cut at a share of the mass (top_p) keeps the same tokens however the sum is
split, vectorised or sorted. Every port must give the same units. In the algorithm every operation is one IEEE f32 operation
rounded to nearest even, in the order of the brackets, and a multiply and an add are never fused:

  x = max(depth, -32)                                    depth <= 0; below -32 the mass is 0
  n = round(x * 1.44269504)                              to nearest, ties to even
  r = (x - (n * 0.693359375)) + (n * 2.12194440e-4)
  y = C0;  y = (y * r) + Ci for C1 ... C5, in order;  y = (y * (r * r)) + (r + 1)      the polynomial of Cephes expf
  units = round(y * 2**(n + 44))                         to nearest, ties to even; fewer than 2**45

All constants are rounded to f32 first. The relative error is below 1e-6 where the mass is above 2**-24.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**-44

_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# Elements per pass, as in noise.py.
_CHUNK_ELEMENTS = 1 << 15


def fixed_point_exp(depth: Tensor) -> Tensor:
    """Return the masses of tokens; depth f32, <= 0 or -inf, any shape, not changed. Returns int64."""
    flat = depth.reshape(-1)
    units = torch.empty(flat.shape, dtype=torch.int64, device=depth.device)
    for first in range(0, len(flat), _CHUNK_ELEMENTS):
        part = slice(first, first + _CHUNK_ELEMENTS)
        units[part] = _chunk_units(flat[part])
    return units.view(depth.shape)


def _chunk_units(depth: Tensor) -> Tensor:
    r = depth.clamp(min=-32.0)
    n = (r * 1.44269504).round_()
    r.sub_(n * 0.693359375).add_(n * 2.12194440e-4)
    y = torch.full_like(r, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        y.mul_(r).add_(coefficient)
    y.mul_(r * r).add_(r.add_(1.0))
    power = n.to(torch.int32).add_(127 + 44).bitwise_left_shift_(23).view(torch.float32)
    return y.mul_(power).round_().to(torch.int64)
