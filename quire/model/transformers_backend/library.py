"""The transformers library: its version, its classes, and the attention function that quire registers there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError

LEAST_VERSION = (5, 12)
"""The extra `quire[transformers]` has the same lower bound."""

ATTENTION, PROBE = "quire", "quire_probe"
"""Names of attention implementations: the paged cache, and what records the calls of a model without weights."""

_HANDLER = "quire_attention"

AttentionHandler = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
"""(attention module, q [1, H, T, D], k [1, K, T, D], v, mask, keyword arguments of the interface) -> output [1, T, H, D]."""


def import_library() -> Any:
    """Return the module `transformers`. Raises ConfigError where it is missing or too old."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model_impl 'transformers' needs the transformers library ({error}): pip install 'quire[transformers]', or choose "
            "model_impl 'auto'"
        ) from error
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ConfigError(
            f"model_impl 'transformers' needs transformers {least} or later, got {transformers.__version__}: "
            "pip install --upgrade 'quire[transformers]'"
        )
    return transformers


def read_config(folder: Path) -> Any:
    """Return the configuration object of a checkpoint folder. No code of the checkpoint is executed.

    Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    library = import_library()
    if folder.is_file():
        raise UnsupportedError(
            f"{folder} is a GGUF file: model_impl 'transformers' needs the folder of a Hugging Face checkpoint"
        )
    if not (folder / "config.json").is_file():
        raise ModelFormatError(f"{folder} has no config.json; give a folder with a Hugging Face checkpoint")
    try:
        return library.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedError(
            f"{folder}: transformers {library.__version__} cannot read its config.json, or knows its model_type only by code "
            f"in the checkpoint, which quire does not execute: {first_line(error)}"
        ) from error


def causal_class(config: Any, folder: Path) -> Any:
    """Return the class that generates text with a configuration. Raises UnsupportedError where there is none that can run."""
    reason = _refusal(config)
    if reason is not None:
        raise UnsupportedError(f"{folder}: model_type {config.model_type!r} {reason}")
    return import_library().MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def library_refusal(model_type: str) -> str | None:
    """Return why model_impl "transformers" does not run a model type, as far as that shows without a checkpoint.

    None: it may run it, or the library is not installed.
    """
    try:
        library = import_library()
    except ConfigError:
        return None
    if model_type in _REFUSED_BY_PROBE:
        return _REFUSED_BY_PROBE[model_type]
    try:
        config = library.AutoConfig.for_model(model_type)
    except ValueError:
        return f"is not known to transformers {library.__version__}"
    return _refusal(config)


_REFUSED_BY_PROBE = {
    **dict.fromkeys(("axk2", "dots3_note_text", "hy_v4"), "attends to keys that an indexer chooses"),
    **dict.fromkeys(("dory", "hrm_text"), "runs its layers in loops"),
    "doge": "adds a bias to the scores of its attention",
}
"""What is refused only when a model is inspected (probe.py)."""


def _refusal(config: Any) -> str | None:
    """Return why the library does not run a model of a configuration; the sentence follows the model type."""
    library, kind = import_library(), type(config)
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder and a decoder; model_impl 'transformers' runs decoders"
    if kind in library.MODEL_FOR_MASKED_LM_MAPPING:
        return "is an encoder; model_impl 'transformers' runs decoders"
    if config.get_text_config() is not config:
        return "is a model of text and other inputs; model_impl 'transformers' runs text only"
    classes = library.MODEL_FOR_CAUSAL_LM_MAPPING
    if kind not in classes:
        return f"has no causal language model in transformers {library.__version__}"
    found = classes[kind]
    named = getattr(config, "architectures", None) or []
    if named and not any(name == found.__name__ or name.endswith(("ForCausalLM", "LMHeadModel")) for name in named):
        return f"with architectures {named} is no causal language model; quire runs {found.__name__}"
    if not getattr(found, "_supports_attention_backend", False):
        return (
            f"cannot use a paged KV cache: {found.__name__} of transformers {library.__version__} does not send its attention "
            "through the attention interface (_supports_attention_backend)"
        )
    if getattr(found, "_is_stateful", False):
        return f"cannot be paged: {found.__name__} keeps a recurrent state besides keys and values"
    return None


def register_attention() -> None:
    """Make ATTENTION known to the library; it makes no masks for it.

    Which handler is called is an attribute of the attention module.
    """
    import_library().AttentionInterface.register(ATTENTION, _call_handler)


def register_probe(recorder: MaskRecorder) -> None:
    """Make PROBE known to the library: its masks come from `recorder`."""
    library = import_library()
    library.AttentionInterface.register(PROBE, _call_handler)
    library.AttentionMaskInterface.register(PROBE, recorder.make_mask)


def set_handler(module: nn.Module, handler: AttentionHandler) -> None:
    """Let `handler` attend for a module."""
    module.__dict__[_HANDLER] = handler


def _call_handler(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    handler: AttentionHandler | None = module.__dict__.get(_HANDLER)
    if handler is None:
        raise UnsupportedError(f"{type(module).__name__} attends in a way that quire did not see when it inspected the model")
    return handler(module, query, key, value, attention_mask, options), None


class MaskRecorder:
    """Which mask each mask tensor of a model stands for, while the library computes a model without weights.

    windows  id of a mask tensor -> window of it; None: causal without a window
    """

    def __init__(self) -> None:
        self.windows: dict[int, int | None] = {}
        self._masks: list[Tensor] = []  # kept, so that ids stay unique

    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor | bool],
        local_size: int | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Tensor:
        """Return a new mask tensor [batch_size, 1, q_length, kv_length], and note its window. See the mask interface."""
        _check_mask(mask_function, local_size)
        mask = torch.zeros(batch_size, 1, q_length, kv_length, device=device)
        self.windows[id(mask)] = local_size
        self._masks.append(mask)
        return mask


def _check_mask(mask_function: Callable[..., Tensor | bool], window: int | None) -> None:
    """Raise UnsupportedError unless a mask is causal, with a window where it has a size."""
    span = 8 if window is None else window
    zero = torch.tensor(0)
    for query in (0, span // 2, span, 2 * span + 1, 3 * span - 1):
        for key in {0, query - span - 1, query - span, query - span + 1, query - 1, query, query + 1}:
            if key < 0:
                continue
            is_seen = key <= query and (window is None or key > query - window)
            if bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key))) != is_seen:
                kind = "causal" if window is None else f"causal with a sliding window of {window}"
                raise UnsupportedError(f"a mask of its attention is not {kind} (chunks, prefixes or other patterns)")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, cut where it is long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
