"""TransformersDecoder: runs a model of the transformers library over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.base.errors import InvariantError, ModelFormatError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.kernels.reference.attention import AttentionMetadata, attend, store_kv
from quire.kv.pool import KvPool
from quire.model.step_decoder import StepDecoder
from quire.model.token_runs import TokenRuns
from quire.model.transformers_backend.library import (
    ATTENTION,
    causal_class,
    import_library,
    read_config,
    register_attention,
    set_handler,
)
from quire.model.transformers_backend.probe import AttentionCall, TransformersModelInfo

logger = get_logger(__name__)

_MAX_LISTED = 8
_SELF_CHECK_TOKENS, _SELF_CHECK_CHUNK = 12, 7
_SELF_CHECK_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
"""How far the logits may be from those of the library's own attention, relative to their size."""


def load_transformers_model(
    folder: Path, info: TransformersModelInfo, device: torch.device | None = None
) -> TransformersDecoder:
    """Load the weights of a checkpoint folder, and check that the model gives with the paged cache what it gives by itself.

    device  a GPU; None: the CPU

    Raises ModelFormatError where tensors are missing, unexpected or of the wrong shape, or UnsupportedError.
    """
    library = import_library()
    register_attention()
    logger.warning(
        "transformers %s runs this model (model_impl 'transformers'): slower than quire's own implementations",
        library.__version__,
    )
    config = read_config(folder)
    kind = causal_class(config, folder)
    try:
        model, loading = kind.from_pretrained(
            str(folder),
            config=config,
            dtype=getattr(torch, info.spec.dtype),
            attn_implementation=ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelFormatError(f"{folder}: transformers cannot load the weights: {error}") from error
    _check_loading(loading, folder)
    model = model.eval() if device is None else model.eval().to(device)
    decoder = TransformersDecoder(model, info, device)
    _check_itself(decoder, folder)
    return decoder


def _check_loading(loading: dict[str, Any], folder: Path) -> None:
    found = {
        "missing": loading["missing_keys"],
        "unexpected": loading["unexpected_keys"],
        "of the wrong shape": loading["mismatched_keys"],
    }
    faults = [
        f"{len(names)} {what} ({', '.join(map(str, list(names)[:_MAX_LISTED]))})" for what, names in found.items() if names
    ]
    if faults:
        raise ModelFormatError(f"{folder}: the weights do not fit config.json: tensors {', '.join(faults)}")


@dataclass(slots=True)
class _Step:
    """The step that runs: every attention module reads it.

    number  counts the passes through the model
    """

    number: int = 0
    attention: AttentionMetadata | None = None
    kv: KvPool | None = None


class _PagedAttention:
    """Attends for one module; `calls` are its (index of the cache's layer, call) in a pass, in order."""

    def __init__(self, step: _Step, calls: list[tuple[int, AttentionCall]]) -> None:
        self._step, self._calls = step, calls
        self._number, self._next = -1, 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """See AttentionHandler."""
        step, kv = self._step.attention, self._step.kv
        if step is None or kv is None:
            raise InvariantError("a model of transformers attends outside of a step")
        if mask is not None:
            raise UnsupportedError(f"{type(module).__name__} makes a mask of its own")
        if self._number != self._step.number:
            self._number, self._next = self._step.number, 0
        if self._next >= len(self._calls):
            raise InvariantError(f"{type(module).__name__} attends more than {len(self._calls)} times in a step")
        layer, call = self._calls[self._next]
        self._next += 1
        q, k, v = (_rows(part, kv.k[layer], call.attention.head_dim) for part in (query, key, value))
        store_kv(k, v, kv.k[layer], kv.v[layer], step.slots)
        out = attend(q, kv.k[layer], kv.v[layer], step, call.attention, options.get("s_aux"))
        return out[None, :, :, : call.value_dim].to(query.dtype)


def _rows(heads: Tensor, cache: Tensor, head_dim: int) -> Tensor:
    """Return heads [1, H, T, D] as [T, H, head_dim] in the dtype of the cache, filled up with zeros."""
    return F.pad(heads[0].transpose(0, 1).to(cache.dtype), (0, head_dim - heads.shape[3])).contiguous()


class TransformersDecoder(StepDecoder):
    """A model of the transformers library.

    A step is one sequence [1, T] for the library: the tokens of all sequences with their positions. Only attention tells the
    sequences apart. The head is computed for the rows that are asked for.

    device  a GPU, which has the weights and the cache; None: the CPU. What goes in and comes out is on the CPU
    """

    def __init__(self, model: Any, info: TransformersModelInfo, device: torch.device | None = None) -> None:
        super().__init__()
        self.spec = info.spec
        self.device = device
        self.model = model
        self._body: nn.Module = model.base_model
        if self._body is model:
            raise UnsupportedError(f"{type(model).__name__} has no body apart from its head")
        self._step = _Step()
        self._output_type: Any = None
        calls: dict[str, list[tuple[int, AttentionCall]]] = {}
        for layer, call in enumerate(info.calls):
            calls.setdefault(call.module, []).append((layer, call))
        for name, of_module in calls.items():
            set_handler(model.get_submodule(name), _PagedAttention(self._step, of_module).attend)
        # The head's forward runs the body first: it is given what was computed before.
        self._compute_body, self._replayed = self._body.forward, None
        self._body.forward = self._forward_body

    def _forward_body(self, *args: Any, **options: Any) -> Any:
        return self._compute_body(*args, **options) if self._replayed is None else self._replayed

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, step: AttentionMetadata, kv: KvPool, layers: Sequence[int] | None = None
    ) -> Tensor:
        """See StepDecoder. Raises UnsupportedError where only some layers are to run."""
        if layers is not None:
            raise UnsupportedError("a model of transformers always runs all of its layers")
        if self.device is not None:
            token_ids, positions = token_ids.to(self.device), positions.to(self.device)
            step = replace(step, slots=step.slots.to(self.device), block_tables=step.block_tables.to(self.device))
        self._step.number += 1
        self._step.attention, self._step.kv = step, kv
        try:
            out = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._step.attention = self._step.kv = None
        self._output_type = type(out)
        return out.last_hidden_state[0]

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """Raise UnsupportedError where inputs of layers are wanted: they cannot be had from the library's models."""
        if layers:
            raise UnsupportedError("a model of transformers gives no inputs of its layers to draft with")

    def layer_inputs(self, rows: Sequence[int]) -> Tensor:
        """Return what keep_inputs keeps, which is nothing: [R, 0]."""
        return torch.empty(len(rows), 0)

    def parameter(self, name: str) -> Tensor | None:
        """Return the embedding or the head by its canonical name; None for others."""
        module = {"embed.weight": self.model.get_input_embeddings(), "lm_head.weight": self.model.get_output_embeddings()}
        found = module.get(name)
        return None if found is None else found.weight

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size], on the CPU, of rows of `forward`'s result."""
        if hidden.shape[0] == 0:
            return torch.empty(0, self.spec.vocab_size, dtype=hidden.dtype)
        self._replayed = self._output_type(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self.device)
            return self.model(input_ids=ids, use_cache=False).logits[0].cpu()
        finally:
            self._replayed = None


@torch.inference_mode()
def _check_itself(decoder: TransformersDecoder, folder: Path) -> None:
    """Raise UnsupportedError unless a text in chunks beside another gives the logits that the library's own attention gives."""
    spec, model = decoder.spec, decoder.model
    num_tokens, chunk = min(_SELF_CHECK_TOKENS, spec.max_positions), min(_SELF_CHECK_CHUNK, spec.max_positions - 1)
    ids = [(place * 7919 + 1) % spec.vocab_size for place in range(num_tokens)]
    model.set_attn_implementation("eager")
    want = model(input_ids=torch.tensor([ids], device=decoder.device), use_cache=False).logits[0, chunk:].float().cpu()
    model.set_attn_implementation(ATTENTION)
    kv = KvPool(KvSpec.of(spec, 16, spec.dtype), 2, decoder.device)
    tables = [np.array([0]), np.array([1])]
    decoder.run(TokenRuns(ids[:chunk], [0, chunk], [chunk], tables[1:], []), kv, [])
    rest = num_tokens - chunk
    both = TokenRuns([*ids[1:4], *ids[chunk:]], [0, 3, 3 + rest], [3, num_tokens], tables, [])
    found = decoder.run(both, kv, list(range(3, 3 + rest)))[0].float()
    error = float((found - want).norm() / want.norm().clamp(min=1e-6))
    allowed = _SELF_CHECK_ERROR[getattr(torch, spec.dtype)]
    if not error <= allowed:
        raise UnsupportedError(
            f"{folder}: model_impl 'transformers' cannot run model_type {spec.model_type!r}: over the paged KV cache its "
            f"logits differ by {error:.2g} of their size from those of transformers ({allowed:g} is allowed): it may keep "
            "another state, or attend in a way that the attention interface does not show"
        )
