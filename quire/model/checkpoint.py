"""Load the parameters of a model from a checkpoint folder, under their canonical names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from quire.base.errors import ModelFormatError
from quire.base.logging import get_logger
from quire.contracts.model_spec import ModelSpec
from quire.model.families import FAMILIES, FamilyPage
from quire.model.families.sources import Piece, Source, Sources
from quire.model.parameters import Shape, parameter_shapes
from quire.model.stored_tensors import listing, open_tensors

logger = get_logger(__name__)

_EMBED, _HEAD = "embed.weight", "lm_head.weight"
_PROGRESS_DELAY_S = 3.0


def load_parameters(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Return canonical name -> tensor in the spec's dtype, as `parameter_shapes` lists them.

    A parameter that is stored as it is needed stays a view of the memory-mapped file. The head follows what is stored, as
    in transformers: an lm_head.weight that differs from the embedding is returned even where the config says tied (the
    decoder uses it where it is there), and one that is missing is the embedding.
    Raises ModelFormatError with the names of tensors that are missing, unexpected or of the wrong shape.
    """
    page = FAMILIES.get(spec.model_type)
    stored = _strip_names(open_tensors(folder), page, folder)
    shapes = parameter_shapes(spec)
    sources = page.find_sources(spec, stored)
    _settle_head(sources, shapes, stored, folder)
    expected = _stored_shapes(sources, shapes)
    _check_names(stored, expected, page, folder)
    _check_tensors(stored, expected, folder)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    parameters: dict[str, Tensor] = {}
    for name, source in tqdm(sources.items(), "loading weights", delay=_PROGRESS_DELAY_S, disable=None, leave=False):
        parameters[name] = _build(source, shapes[name], stored, dtype)
    return _share_head(parameters, spec)


def _strip_names(tensors: dict[str, Tensor], page: FamilyPage, folder: Path) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = page.strip(name)
        if short in stored:
            raise ModelFormatError(f"{folder}: the weights hold {short!r} twice, under different prefixes")
        stored[short] = tensor
    return stored


def _settle_head(sources: Sources, shapes: dict[str, Shape], stored: dict[str, Tensor], folder: Path) -> None:
    """Make `sources` and `shapes` ask for the heads that are stored.

    A tied model may store either, or both. An untied one may lack lm_head.weight, as in transformers, with a warning (real
    checkpoints do); a missing embedding is an error.
    """
    embed = sources[_EMBED].groups[0][0].name
    is_tied = _HEAD not in sources
    if is_tied and _HEAD in stored and embed not in stored:
        sources[_EMBED] = Source.of(_HEAD)
    elif _HEAD in stored:
        sources[_HEAD] = Source.of(_HEAD)
        shapes[_HEAD] = shapes[_EMBED]
    elif sources.pop(_HEAD, None) is not None:
        logger.warning("%s: no lm_head.weight is stored although the embedding is not tied; the embedding is used", folder)


def _share_head(parameters: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    embed, head = parameters[_EMBED], parameters.get(_HEAD)
    if not spec.is_tied:
        return parameters if head is not None else {**parameters, _HEAD: embed}
    if head is not None and torch.equal(head, embed):
        del parameters[_HEAD]
    elif head is not None:
        logger.warning("config.json says tied, but lm_head.weight differs from the embedding; lm_head.weight is used")
    return parameters


def _stored_shapes(sources: Sources, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Return stored name -> shape that the checkpoint must have, from what is made of it."""
    expected: dict[str, Shape] = {}
    for name, source in sources.items():
        shape = shapes[name][1:] if source.is_stacked else shapes[name]
        for group in source.groups:
            for piece in group:
                rows = shape[0] // len(group)
                if piece.rows is not None:
                    rows = max(piece.rows[1], expected.get(piece.name, (0,))[-1 if piece.is_transposed else 0])
                whole = (rows, *shape[1:])
                expected[piece.name] = whole[::-1] if piece.is_transposed else whole
    return expected


def _check_names(stored: dict[str, Tensor], expected: dict[str, Shape], page: FamilyPage, folder: Path) -> None:
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected and not page.ignored.fullmatch(name)]
    if missing or unexpected:
        parts = [
            f"{len(names)} {noun} ({listing(names)})"
            for noun, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise ModelFormatError(f"{folder}: the weights do not fit config.json: {', '.join(parts)}")


def _check_tensors(stored: dict[str, Tensor], expected: dict[str, Shape], folder: Path) -> None:
    wrong = [
        f"{name} has {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if tuple(stored[name].shape) != shape
    ]
    if wrong:
        raise ModelFormatError(f"{folder}: {len(wrong)} tensors have the wrong shape for config.json: {listing(wrong)}")
    wrong = [f"{name} is {stored[name].dtype}" for name in expected if not _is_plain_float(stored[name])]
    if wrong:
        raise ModelFormatError(f"{folder}: weights must be float32, bfloat16, float16 or float64: {listing(wrong)}")


def _is_plain_float(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64) and tensor.layout == torch.strided


def _build(source: Source, shape: Shape, stored: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return one parameter, contiguous and of `dtype`; a view of the file where nothing has to change."""
    if not source.is_stacked and len(source.groups[0]) == 1:
        return _cut(source.groups[0][0], stored).to(dtype).contiguous()
    # Copied piece by piece into its place, so that the peak is one copy of the parameter.
    out = torch.empty(shape, dtype=dtype)
    for index, group in enumerate(source.groups):
        row = 0
        target = out[index] if source.is_stacked else out
        for piece in group:
            part = _cut(piece, stored)
            target[row : row + len(part)] = part
            row += len(part)
    return out


def _cut(piece: Piece, stored: dict[str, Tensor]) -> Tensor:
    tensor = stored[piece.name].t() if piece.is_transposed else stored[piece.name]
    return tensor if piece.rows is None else tensor[piece.rows[0] : piece.rows[1]]
