"""OffloadPlan: which layers of a model on a GPU have their weights in host memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.contracts.memory import format_bytes
from quire.contracts.model_spec import ModelSpec

_MODULES = "q|k|v|o|gate|up|down|q_a|kv_a|latent_in|latent_out"
_MOVED = re.compile(rf"layers\.\d+\.(?:(?:shared\.)?(?:{_MODULES})|experts\.\w+)\.weight")
NUM_BUFFERS = 2
"""While a layer runs from one staging buffer, the next offloaded layer is copied to the other."""


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """Which layers have their weights in host memory; the sizes are estimates.

    layers          ascending, spread evenly, so that copies overlap with the layers between them
    num_bytes       of weights in host memory
    staging_bytes   of the buffers on the device
    """

    layers: tuple[int, ...]
    num_bytes: int
    staging_bytes: int


def plan_offload(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], num_weight_bytes: int, most_bytes: int) -> OffloadPlan:
    """Return the plan with as many layers in host memory as most_bytes suffice for.

    num_weight_bytes  of all weights, as they are run

    Only weights of attention, of MLPs and of experts are moved, see DeviceWeights: those of recurrent mixers, routers and gates
    stay, and layers with nothing else are left out. Raises ConfigError if most_bytes are less than one layer, or none has any.
    """
    sizes = [0] * len(spec.layers)
    for name, shape in shapes.items():
        if _MOVED.fullmatch(name):
            sizes[int(name.split(".")[1])] += math.prod(shape)
    per_element = num_weight_bytes / max(1, sum(map(math.prod, shapes.values())))
    movable = [layer for layer, size in enumerate(sizes) if size > 0]
    for count in range(len(movable), 0, -1):
        layers = tuple(movable[(2 * place + 1) * len(movable) // (2 * count)] for place in range(count))
        num_bytes = round(sum(sizes[layer] for layer in layers) * per_element)
        if num_bytes <= most_bytes:
            largest = round(max(sizes[layer] for layer in layers) * per_element)
            return OffloadPlan(layers, num_bytes, min(NUM_BUFFERS, count) * largest)
    if not movable:
        raise ConfigError("cpu_offload_gb: no layer has weights that can be in host memory: leave it out")
    raise ConfigError(
        f"cpu_offload_gb is {most_bytes / (1 << 30):g}, but whole layers are offloaded, and one layer has about "
        f"{format_bytes(max(sizes, default=0) * per_element)}: raise it, or leave it out"
    )
