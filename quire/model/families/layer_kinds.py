"""Which layers of a model have attention and which have a recurrent mixer."""

from __future__ import annotations

from collections.abc import Callable

from quire.base.errors import UnsupportedError
from quire.model.families.config_view import ConfigView

_ATTENTION = ("full_attention", "attention")
_OLD_NAMES = {"mamba": "linear_attention"}


def read_layer_kinds(config: ConfigView, recurrent: str, default: Callable[[int], bool], other: str = "") -> list[bool]:
    """Return for each layer whether it is recurrent: by `layer_types`, or by the family's rule where that is absent.

    recurrent  the name of such a layer
    other      the key that the rule reads: where both are in the file, they must name the same layers
    """
    num_layers, types = config.integer("num_hidden_layers"), config.strings("layer_types")
    if types is None:
        return [default(index) for index in range(num_layers)]
    types = [recurrent if _OLD_NAMES.get(name) == recurrent else name for name in types]
    known = (recurrent, *_ATTENTION)
    unknown = sorted({name for name in types if name not in known})
    if unknown:
        raise UnsupportedError(
            f"layer_types {unknown} are not supported in a {config.model_type!r} model; supported: {', '.join(known)}"
        )
    if len(types) != num_layers:
        raise config.error("the length of layer_types", len(types), f"num_hidden_layers ({num_layers})")
    found = [name == recurrent for name in types]
    if other and config.has(other) and (differing := [i for i in range(num_layers) if found[i] != default(i)]):
        raise config.error("layer_types", types, f"of the same kinds as {other}, which differs in layers {differing}")
    return found
