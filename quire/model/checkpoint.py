"""Load the parameters of a model from a checkpoint folder, under their canonical names."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.model_spec import ModelSpec, MoeSpec
from quire.model.config_reader import is_base_model, is_multimodal, read_quantization_config
from quire.model.families import FAMILIES, FamilyPage
from quire.model.families.sources import Piece, Source, Sources
from quire.model.families.wrappers import NOT_TEXT
from quire.model.mapped_files import MappedFiles
from quire.model.parameters import Shape, float32_parameters, integer_parameters, parameter_shapes
from quire.model.stored_parameters import CheckpointParameter, StoredTensors
from quire.model.stored_tensors import has_weights, listing, open_tensors
from quire.quant.parameters import Parameter, StoredParameter, load_all
from quire.quant.readers import gather_weights
from quire.quant.weight import StoredWeight

logger = get_logger(__name__)

_EMBED, _HEAD = "embed.weight", "lm_head.weight"
_LOOKED_UP = ("pos.weight",)
_OTHER_HEAD = re.compile(r"score\.weight")
"""Modules in place of an LM head; `worker/pooling_head.py` reads them."""
_DRAFTING = re.compile(r"(.*layers\.\d+\.)eh_proj\.\w+")

_GO_ON = (
    "give the option allow_missing_head (--allow-missing-head; it is not for draft models) to use the embedding as the head: "
    "embeddings of texts (`embed`) do not depend on it, generated tokens do"
)

Stored = dict[str, Tensor | StoredWeight]


def load_parameters(folder: Path, spec: ModelSpec) -> dict[str, Parameter]:
    """Return all parameters of `open_parameters`, loaded: tensors in the spec's dtype, or quantised.

    A parameter that is stored in the needed form stays a view of the memory-mapped file. A weight that is stored as integers
    stays quantised (a stack of experts as a QuantizedStack), unless its pieces cannot be joined or it is a position
    embedding: these become tensors, like weights in formats without integers.
    """
    return load_all(open_parameters(folder, spec))


def open_parameters(folder: Path, spec: ModelSpec) -> dict[str, Parameter | StoredParameter]:
    """Return canonical name -> parameter, still in the checkpoint, as `parameter_shapes` lists them.

    Names, shapes, dtypes and tables of experts are checked here, other values when a parameter is opened. As in transformers,
    an lm_head.weight that differs from the embedding is returned even if the config says tied; the decoder uses it if it
    exists.
    Raises ModelFormatError with the names of tensors that are missing, unexpected or of the wrong shape.
    """
    page = FAMILIES.get(spec.model_type)
    files = MappedFiles()
    stored = _strip_names(_open(folder, page, files=files), page, folder)
    shapes = parameter_shapes(spec)
    sources = page.find_sources(spec, stored)
    _settle_head(sources, shapes, stored, spec, folder)
    expected = _stored_shapes(sources, shapes, stored)
    if read_quantization_config(folder) is None:
        wanted = {name: tensor for name, tensor in stored.items() if not page.ignored.fullmatch(name)}
        refuse_undeclared(wanted, expected, folder)
    _check_names(stored, expected, page, folder)
    integers = integer_parameters(spec)
    tables = {name: sources[name].groups[0][0].name for name in integers}
    _check_tensors(stored, expected, folder, {*tables.values()})
    _check_tables(stored, tables, spec, folder)
    dtypes = dict.fromkeys(sources, getattr(torch, spec.dtype)) | dict.fromkeys(float32_parameters(spec), torch.float32)
    dtypes |= dict.fromkeys(integers, torch.int64)
    tensors = StoredTensors(stored, files)
    opened: dict[tuple[Source, Shape, torch.dtype, bool], CheckpointParameter] = {}  # layers that share weights share these
    parameters: dict[str, CheckpointParameter] = {}
    for name, source in sources.items():
        kind = source, shapes[name], dtypes[name], name in _LOOKED_UP
        parameters[name] = opened.setdefault(kind, CheckpointParameter(tensors, *kind[:3], is_dense=kind[3]))
    return _share_head(parameters, spec)


def find_stored_sources(folder: Path, spec: ModelSpec) -> Sources:
    """Return where the checkpoint folder stores each parameter, by names without prefix; no values are read.

    Raises ModelFormatError.
    """
    page = FAMILIES.get(spec.model_type)
    stored = _strip_names(_open(folder, page, is_logged=False), page, folder)
    sources = page.find_sources(spec, stored)
    _settle_head(sources, parameter_shapes(spec), stored, spec, folder)
    return sources


def distinct_shapes(folder: Path, spec: ModelSpec, shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """Return the shapes of parameters by name, those of weights that several layers share once.

    All of them where no weights are stored yet. Raises ModelFormatError.
    """
    if not has_weights(folder):
        return shapes
    sources = find_stored_sources(folder, spec)
    firsts: dict[tuple[Source | str, Shape], str] = {}
    return {name: shape for name, shape in shapes.items() if firsts.setdefault((sources.get(name, name), shape), name) == name}


def tie_missing_head(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec of a tied model, with a warning, if an untied checkpoint stores no head; otherwise the same spec.

    Raises ModelFormatError if the weights cannot be opened.
    """
    page = FAMILIES.get(spec.model_type)
    stored = _strip_names(_open(folder, page, is_logged=False), page, folder)
    if spec.is_tied or page.find_sources(spec, stored)[_HEAD].groups[0][0].name in stored:
        return spec
    logger.warning(
        "%s: no lm_head.weight is stored although the embedding is not tied; allow_missing_head is set: the embedding is used",
        folder,
    )
    return replace(spec, is_tied=True)


def quantized_weights(folder: Path, spec: ModelSpec) -> list[StoredWeight]:
    """Return the weights that a checkpoint folder stores quantised; nothing is unpacked or logged.

    Raises ModelFormatError.
    """
    stored = _open(folder, FAMILIES.get(spec.model_type), is_logged=False)
    return [weight for weight in stored.values() if isinstance(weight, StoredWeight)]


def _open(folder: Path, page: FamilyPage, is_logged: bool = True, files: MappedFiles | None = None) -> Stored:
    tensors, quantization = open_tensors(folder, files), read_quantization_config(folder)
    drafting = _drafting_layers(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(drafting)}
    if is_multimodal(folder):
        num_tensors = len(kept)
        kept = {name: tensor for name, tensor in kept.items() if not NOT_TEXT.fullmatch(name)}
        if is_logged:
            logger.info("%s: %d tensors of images are skipped: its language model is served", folder, num_tensors - len(kept))
    if quantization is None:
        refuse_modelopt(folder)
        return kept
    wanted = {n: t for n, t in kept.items() if not page.ignored.fullmatch(page.strip(n))}
    return gather_weights(wanted, quantization, is_logged)


def _drafting_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the name prefixes of layers that are only for drafting, in DeepSeek's layout; model/heads/mtp.py reads them."""
    return tuple({match[1] for name in names if (match := _DRAFTING.fullmatch(name)) is not None})


def _strip_names(tensors: Stored, page: FamilyPage, folder: Path) -> Stored:
    stored: Stored = {}
    for name, tensor in tensors.items():
        short = page.strip(name)
        if short in stored:
            raise ModelFormatError(f"{folder}: the weights hold {short!r} twice, under different prefixes")
        stored[short] = tensor
    return stored


def _settle_head(sources: Sources, shapes: dict[str, Shape], stored: Stored, spec: ModelSpec, folder: Path) -> None:
    """Adapt `sources` and `shapes` to the heads that are stored.

    A tied model may store either, or both. An untied one must store both: transformers would fill a missing lm_head.weight
    with random numbers. A base model class without a head is an exception: it is used for its hidden states.
    """
    embed = sources[_EMBED].groups[0][0].name
    is_tied = _HEAD not in sources
    if is_tied and _HEAD in stored and embed not in stored:
        sources[_EMBED] = Source.of(_HEAD)
    elif _HEAD in stored:
        sources.setdefault(_HEAD, Source.of(_HEAD))
        shapes[_HEAD] = shapes[_EMBED]
    elif not is_tied and sources[_HEAD].groups[0][0].name in stored:
        return
    elif not is_tied and is_base_model(folder):
        logger.info("%s holds a model without an LM head: it is there for embeddings or scores, and generates no text", folder)
        del sources[_HEAD]
    elif not is_tied:
        if folder.is_file():  # GGUF: only architectures whose head llama.cpp requires are untied without one
            raise ModelFormatError(
                f"{folder}: the weights have no output.weight, which files of a {spec.model_type!r} model must have; get the "
                f"file again, or {_GO_ON}"
            )
        raise ModelFormatError(
            f"{folder}: the weights have no lm_head.weight, but tie_word_embeddings of config.json is false (also where it is "
            "absent and false is the default of the model type); get all files of the checkpoint, or set tie_word_embeddings "
            f"to true where the head is the embedding, or {_GO_ON}"
        )


def _share_head(parameters: dict[str, CheckpointParameter], spec: ModelSpec) -> dict[str, Parameter | StoredParameter]:
    embed, head = parameters[_EMBED], parameters.get(_HEAD)
    if not spec.is_tied:
        return {**parameters} if head is not None else {**parameters, _HEAD: embed}
    if head is None:
        return {**parameters}
    if head.is_equal(embed):
        del parameters[_HEAD]
    else:
        logger.warning("config.json says tied, but lm_head.weight differs from the embedding; lm_head.weight is used")
    return {**parameters}


def _stored_shapes(sources: Sources, shapes: dict[str, Shape], stored: Stored) -> dict[str, Shape]:
    """Return stored name -> required shape in the checkpoint, derived from the parameters. Quantised weights are [out, in]."""
    expected: dict[str, Shape] = {}
    for name, source in sources.items():
        shape = shapes[name][1:] if source.is_stacked else shapes[name]
        for group in source.groups:
            for piece in group:
                is_plain = not isinstance(stored.get(piece.name), StoredWeight)
                is_transposed = piece.is_transposed and is_plain
                # A parameter that is not a stack of experts has one entry.
                count = shapes[name][0] if source.is_stacked else 1
                stack = (count,) if piece.entry is not None and is_plain else ()
                rows = shape[0] // len(group)
                if piece.rows is not None:
                    before = expected.get(piece.name, (*stack, 0))[len(stack) :]
                    rows = max(piece.rows[1], before[-1 if is_transposed else 0])
                whole = (rows, *shape[1:])
                if source.factor is not None:
                    whole = (rows, _add_factor(expected, source.factor, stored, shape[1]))
                whole = (*stack, *(whole[::-1] if is_transposed else whole))
                expected[piece.name] = whole if piece.num_entries is None else (whole[0] * whole[1], *whole[2:])
    return expected


def _add_factor(expected: dict[str, Shape], factor: Piece, stored: Stored, columns: int) -> int:
    """Add the shape of the factor of a source to `expected` and return the columns of what it multiplies."""
    shape = tuple(stored[factor.name].shape) if factor.name in stored else (columns, columns)
    num_rows = shape[-1 if factor.is_transposed else 0]
    expected[factor.name] = (columns, num_rows) if factor.is_transposed else (num_rows, columns)
    return num_rows


def _check_names(stored: Stored, expected: dict[str, Shape], page: FamilyPage, folder: Path) -> None:
    missing = [name for name in expected if name not in stored]
    is_headless = is_base_model(folder)
    unexpected = [
        name
        for name in stored
        if name not in expected
        and not page.ignored.fullmatch(name)
        and not (page.spare is not None and page.spare.fullmatch(name))
        and not _is_needless_bias(name, stored)
        and not (is_headless and _OTHER_HEAD.fullmatch(name))
    ]
    if missing or unexpected:
        parts = [
            f"{len(names)} {noun} ({listing(names)})"
            for noun, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise ModelFormatError(f"{folder}: the weights do not fit config.json: {', '.join(parts)}")


def _is_needless_bias(name: str, stored: Stored) -> bool:
    """Return whether a tensor is the zero bias that some GPTQ writers add to every linear layer."""
    module, _, kind = name.rpartition(".")
    bias = stored[name]
    if kind != "bias" or not isinstance(bias, Tensor) or not isinstance(stored.get(f"{module}.weight"), StoredWeight):
        return False
    return not bool(bias.any())


def _check_tables(stored: Stored, tables: Mapping[str, str], spec: ModelSpec, folder: Path) -> None:
    """Refuse a table that names an expert which does not exist. tables: canonical name -> stored name."""
    for name, stored_name in tables.items():
        table, mlp = stored[stored_name], spec.layers[int(name.split(".")[1])].mlp
        if not isinstance(table, Tensor) or not isinstance(mlp, MoeSpec):
            continue
        wrong = table[(table < 0) | (table >= mlp.num_experts)]
        if len(wrong) > 0:
            raise ModelFormatError(
                f"{folder}: {stored_name} must name experts from 0 to {mlp.num_experts - 1}, got {int(wrong[0])}"
            )


def _check_tensors(stored: Stored, expected: dict[str, Shape], folder: Path, integers: Container[str]) -> None:
    wrong = [
        f"{name} has {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if tuple(stored[name].shape) != shape
    ]
    if wrong:
        raise ModelFormatError(f"{folder}: {len(wrong)} tensors have the wrong shape for config.json: {listing(wrong)}")
    plain = {name: tensor for name in expected if isinstance(tensor := stored[name], Tensor)}
    wrong = [f"{name} is {tensor.dtype}" for name, tensor in plain.items() if name in integers and not _is_index(tensor)]
    if wrong:
        raise ModelFormatError(f"{folder}: tables of experts must be int64 or int32: {listing(wrong)}")
    floats = {name: tensor for name, tensor in plain.items() if name not in integers}
    wrong = [f"{name} is {tensor.dtype}" for name, tensor in floats.items() if not _is_plain_float(tensor)]
    if wrong:
        raise ModelFormatError(f"{folder}: weights must be float32, bfloat16, float16 or float64: {listing(wrong)}")


def _is_index(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _is_plain_float(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64) and tensor.layout == torch.strided


_MODELOPT = "hf_quant_config.json"
_FORMATS = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8",
    ".weight_scale": "fp8, compressed-tensors or ModelOpt",
    ".SCB": "bitsandbytes",
    ".absmax": "bitsandbytes",
    "_blocks": "mxfp4",
}
_DTYPES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


def refuse_modelopt(folder: Path) -> None:
    """Raise UnsupportedError where ModelOpt's own file stands for the quantisation config of a folder that has none."""
    if (folder / _MODELOPT).is_file():
        raise UnsupportedError(
            f"{folder} is quantised by ModelOpt, as its {_MODELOPT} says, which is not supported without a "
            "quantization_config in config.json; take a version in compressed-tensors, fp8, GPTQ or AWQ, or the one that is "
            "not quantised"
        )


def refuse_undeclared(stored: Mapping[str, Tensor | StoredWeight], expected: Container[str], folder: Path) -> None:
    """Raise ModelFormatError where a weight is stored quantised although no config says how.

    expected  names that a model of floats has
    """
    for name, tensor in stored.items():
        if isinstance(tensor, StoredWeight):
            continue
        ending = next((ending for ending in _FORMATS if name not in expected and name.endswith(ending)), None)
        if ending is None and not (name in expected and tensor.dtype in _DTYPES):
            continue
        what = _FORMATS[ending] if ending is not None else _DTYPES[tensor.dtype]
        raise ModelFormatError(
            f"{folder} stores {name} in the form of {what}, but config.json has no quantization_config for it; get "
            "the checkpoint again with all of its files (some have a quantize_config.json), or the one that is not quantised"
        )
