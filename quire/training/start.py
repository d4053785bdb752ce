"""StartingHead: the head of another run as initial weights of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import ConfigError
from quire.model.heads.stored import HeadFolder
from quire.model.resolve import resolve_model
from quire.training.mtp_layout import from_stored

_MAY_DIFFER = {"num_speculative_tokens", "architectures", "model_type", "qk_norm"}
"""Config fields that concern only the unrolling of a head and its layout, which the shapes of the tensors determine."""


class StartingHead:
    """A stored head in the layout that training writes. Raises ConfigError or ModelFormatError."""

    def __init__(self, name: str) -> None:
        self._name = name
        stored = HeadFolder.open(resolve_model(name))
        self._config: Mapping[str, object] = stored.config
        self._tensors: Mapping[str, Tensor] = from_stored(stored.tensors)

    @property
    def draft_ids(self) -> list[int] | None:
        """The tokens that it drafts, if they are a subset of the model's; None: all."""
        if "t2d" in self._tensors:
            return self._tensors["t2d"].nonzero().flatten().tolist()
        return self._tensors["token_map"].tolist() if "token_map" in self._tensors else None

    @torch.no_grad()
    def load_into(self, head: Any) -> None:
        """Copy these weights to a head in training, whose inputs and outputs must be the same."""
        for name, value in head.config().items():
            if name not in _MAY_DIFFER and self._config.get(name) != value:
                raise ConfigError(
                    f"start_from: {self._name} has {name} {self._config.get(name)}, with these options it is {value}: give the "
                    "model, the kind and the options that it was trained with"
                )
        fixed = {name: tensor for name, tensor in head.tensors().items() if not tensor.is_floating_point()}
        for name, tensor in {**dict(head.named_parameters()), **fixed}.items():
            stored = self._tensors.get(name)
            if stored is None or stored.shape != tensor.shape:
                found = "none of that name" if stored is None else list(stored.shape)
                raise ConfigError(
                    f"start_from: these options need a tensor {name} {list(tensor.shape)}, {self._name} has {found}: "
                    "give the kind and the options that it was trained with"
                )
            if tensor.is_floating_point():
                tensor.copy_(stored)
            elif not torch.equal(stored, tensor):
                raise ConfigError(f"start_from: {self._name} differs in {name} from the heads that quire trains")
