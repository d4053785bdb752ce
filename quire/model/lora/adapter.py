"""Adapter: the weights of a LoRA adapter by the canonical names of a model's linear layers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.model_spec import ModelSpec
from quire.model.checkpoint import find_stored_sources
from quire.model.families import FAMILIES
from quire.model.families.sources import Source, Sources
from quire.model.families.wrappers import NOT_TEXT
from quire.model.lora.adapter_config import CONFIG_FILE, AdapterConfig, read_adapter_config
from quire.model.lora.experts import LowRankPair, expert_sources, is_stack, split_gate_up, split_stack
from quire.model.lora.latent import is_absorbed
from quire.model.parameters import Shape, shapes_with_head
from quire.model.stored_tensors import listing, open_file

logger = get_logger(__name__)

_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_LAYER_MODULE = re.compile(
    r"layers\.\d+\.(?:q|k|v|o|attn_gate|q_a|kv_a|kv_b|gate|up|down|router|shared_scale|shared\.(?:gate|up|down)"
    r"|delta\.(?:qkv|z|z_in|b|a|a_in|o)|conv\.(?:in|out)|mamba\.(?:in|x|step|out)|latent_in|latent_out"
    r"|index_(?:q|k|weights)|block_out|adapters\.\w+_(?:in|out))|lm_head"
)
"""Canonical names of the linear layers that can be adapted."""
_ALIASES = (
    (re.compile(r"\.mlp\.router\b"), ".block_sparse_moe.gate"),
    (re.compile(r"\.mlp\."), ".block_sparse_moe."),
    (re.compile(r"\.self_attn\.forget_gate\."), ".self_attn."),
)
"""Modules of transformers that checkpoints store under other names, and these."""
_HASHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter for one model.

    key    hash of its files
    rank   the largest of its pairs
    pairs  canonical name of a linear layer, without ".weight" -> what is added to its output
    """

    key: str
    rank: int
    pairs: Mapping[str, LowRankPair] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pairs."""
        return sum(pair.num_bytes for pair in self.pairs.values())


class AdapterReader:
    """Reads adapters of one base model.

    folder    the base model's
    max_rank  the largest rank that is allowed
    """

    def __init__(self, folder: Path, spec: ModelSpec, max_rank: int) -> None:
        self._page = FAMILIES.get(spec.model_type)
        self._spec, self._folder, self._max_rank = spec, folder, max_rank
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._shapes = shapes_with_head(spec)
        sources = find_stored_sources(folder, spec)
        experts, expert_shapes = expert_sources(sources, self._shapes)
        self._shapes |= expert_shapes
        self._sources = _linear_sources(sources, self._shapes) | experts
        self._stored_shapes = _stored_shapes(self._sources, self._shapes)

    def read(self, path: str) -> Adapter:
        """Return the adapter of a folder. Raises ModelFormatError or UnsupportedError with what is wrong with it."""
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ModelFormatError(f"lora_path {path!r} is no folder of this machine; download the adapter first")
        config = read_adapter_config(folder, self._max_rank)
        file = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
        if file is None:
            raise ModelFormatError(f"{folder} has no weights of an adapter: {' or '.join(_WEIGHT_FILES)}")
        matrices = self._matrices(open_file(file), file)
        pairs, rank = self._expert_pairs(matrices, config, file)
        modules = self._modules(matrices, config, file)
        used: set[str] = set()
        for name, source in self._sources.items():
            names = dict.fromkeys(piece.name for piece in source.groups[0])
            found = {stored: modules[stored] for stored in names if stored in modules}
            if found:
                used |= found.keys()
                pairs[name.removesuffix(".weight")] = _join(source, found, self._shapes[name], self._dtype)
        self._refuse_unknown([name for name in modules if name not in used], config, file)
        rank = max([rank, *(len(pair.a) for pair in modules.values())])
        return Adapter(_hash(folder / CONFIG_FILE, file), rank, split_gate_up(pairs, self._spec))

    def _matrices(self, tensors: Mapping[str, Tensor], file: Path) -> dict[str, dict[str, Tensor]]:
        """Return module -> its matrices A and B, checked but for their sizes."""
        parts: dict[str, dict[str, Tensor]] = {}
        num_left_out = 0
        for name, tensor in tensors.items():
            match = _MATRIX.fullmatch(name)
            if match is not None and NOT_TEXT.fullmatch(f"{match[1]}.weight"):
                num_left_out += 1
                continue
            if match is None:
                raise UnsupportedError(
                    f"{file} holds {name!r}, which is no lora_A.weight or lora_B.weight of a linear layer; adapters of "
                    "embeddings, whole weights (modules_to_save) and DoRA are not supported"
                )
            matrices = parts.setdefault(match[1], {})
            if match[2] in matrices:
                raise ModelFormatError(f"{file} holds lora_{match[2]} of {match[1]} twice, under different prefixes")
            _check_matrix(name, tensor, file)
            matrices[match[2]] = tensor
        if num_left_out:
            logger.warning(
                "%s: %d matrices of layers for images or sounds are left out, as only text is computed", file, num_left_out
            )
        if not parts:
            raise ModelFormatError(f"{file} holds no matrices" + (" of the language model" if num_left_out else ""))
        for module, matrices in parts.items():
            missing = [letter for letter in "AB" if letter not in matrices]
            if missing:
                raise ModelFormatError(f"{file}: {module}.lora_{missing[0]}.weight is missing; get the file again")
        return parts

    def _expert_pairs(
        self, matrices: dict[str, dict[str, Tensor]], config: AdapterConfig, file: Path
    ) -> tuple[dict[str, LowRankPair], int]:
        """Take the matrices of stacks of experts out of `matrices`; return the pairs of their experts, and the largest rank."""
        found: dict[str, LowRankPair] = {}
        for module in [module for module in matrices if is_stack(self._stored(module), self._spec)]:
            stack = matrices.pop(module)
            pairs = split_stack(self._stored(module), stack["A"], stack["B"], self._spec, self._shapes, config, file)
            if not found.keys().isdisjoint(pairs):
                raise ModelFormatError(f"{file} holds the matrices of the experts of {module} twice")
            found |= {name: LowRankPair(pair.a.to(self._dtype), pair.b.to(self._dtype)) for name, pair in pairs.items()}
        return found, max((len(pair.a) for pair in found.values()), default=0)

    def _stored(self, module: str) -> str:
        return _module(self._page.strip(f"{module}.weight"))

    def _modules(self, parts: Mapping[str, Mapping[str, Tensor]], config: AdapterConfig, file: Path) -> dict[str, LowRankPair]:
        """Return stored name of a base weight -> its matrices in f32, b with the scale."""
        modules: dict[str, LowRankPair] = {}
        for module, matrices in parts.items():
            stored = self._known(self._page.strip(f"{module}.weight"))
            if stored in modules:
                raise ModelFormatError(f"{file} holds the matrices of {module} twice, under different prefixes")
            modules[stored] = pair = self._pair(module, matrices, config, file)
            self._check_shape(module, self._stored_shapes.get(stored), pair, config, file)
        return modules

    def _known(self, stored: str) -> str:
        """Return the name under which the checkpoint has a weight, given that or the one of transformers."""
        if stored in self._stored_shapes:
            return stored
        found = (pattern.sub(name, stored) for pattern, name in _ALIASES)
        return next((name for name in found if name in self._stored_shapes), stored)

    def _pair(self, module: str, matrices: Mapping[str, Tensor], config: AdapterConfig, file: Path) -> LowRankPair:
        a, b, rank = matrices["A"], matrices["B"], config.rank_of(module)
        if a.shape[0] != rank or b.shape[1] != rank:
            raise ModelFormatError(
                f"{file}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, but {CONFIG_FILE} gives it rank "
                f"{rank}: lora_A must be [{rank}, in] and lora_B [out, {rank}]"
            )
        return LowRankPair(a.float(), b.float() * config.scale_of(module))

    def _check_shape(
        self, module: str, shape: tuple[int, int] | None, pair: LowRankPair, config: AdapterConfig, file: Path
    ) -> None:
        """Compare a pair with the shape [out, in] of the weight; None: there is none, which _refuse_unknown reports."""
        given = (pair.b.shape[0], pair.a.shape[1])
        if shape is not None and given != shape:
            made_for = f" (it was made for {config.base_model!r})" if config.base_model else ""
            raise ModelFormatError(
                f"{file}: the adapter of {module} is for a layer of {given[1]} inputs and {given[0]} outputs, but the base "
                f"model {self._folder} has {shape[1]} and {shape[0]}: the adapter is for another base model{made_for}"
            )

    def _refuse_unknown(self, names: list[str], config: AdapterConfig, file: Path) -> None:
        if not names:
            return
        made_for = f", which was made for {config.base_model!r}," if config.base_model else ""
        raise ModelFormatError(
            f"{file}{made_for} adapts {len(names)} modules that are no linear layers of {self._folder} or cannot be adapted "
            f"({listing([_module(name) for name in names])}); supported: the linear layers of attention, of recurrent mixers "
            "and of MLPs, routers, lm_head, and experts by the names of the checkpoint's matrices or as target_parameters of "
            "PEFT (experts.gate_up_proj, experts.down_proj)"
        )


def _check_matrix(name: str, matrix: Tensor, file: Path) -> None:
    if not matrix.is_floating_point() or matrix.dim() != 2:
        raise ModelFormatError(f"{file}: {name} must be a matrix of floats, got {matrix.dtype} {list(matrix.shape)}")
    if not bool(torch.isfinite(matrix).all()):
        raise ModelFormatError(f"{file}: {name} holds values that are not finite")


def adapter_bytes(shapes: Mapping[str, Shape], rank: int, width: int, num_ranks: int = 1) -> int:
    """Return the bytes of an adapter of this rank of every linear layer that can be adapted, but for experts.

    width      bytes of a value
    num_ranks  tensor-parallel ranks on CPUs, each of which has the whole first matrices
    """
    # Both products of absorbed latent attention read the first matrix of kv_b, each in its own layout.
    values = 0
    for name, (rows, columns) in adaptable_shapes(shapes).items():
        values += rows + num_ranks * (1 + is_absorbed(name)) * columns
    return rank * width * values


def adaptable_shapes(shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
    """Return canonical name, without ".weight" -> [out, in] of the linear layers that can be adapted, but for experts."""
    found = {name: shape for name, shape in shapes.items() if _is_adaptable(name, shape)}
    return {name.removesuffix(".weight"): (rows, columns) for name, (rows, columns) in found.items()}


def _is_adaptable(name: str, shape: Shape) -> bool:
    module, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and _LAYER_MODULE.fullmatch(module) is not None


def _linear_sources(sources: Sources, shapes: Mapping[str, Shape]) -> Sources:
    """Return the sources of the weights that can be adapted."""
    return {
        name: source
        for name, source in sources.items()
        if name in shapes and _is_adaptable(name, shapes[name]) and not source.is_stacked and not source.is_computed
    }


def _stored_shapes(sources: Sources, shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
    """Return stored name -> [out, in] of the linear layer, whichever way it is stored."""
    found: dict[str, tuple[int, int]] = {}
    for name, source in sources.items():
        (group,) = source.groups
        rows, columns = shapes[name]
        for piece in group:
            end = rows // len(group) if piece.rows is None else piece.rows[1]
            found[piece.name] = (max(end, found.get(piece.name, (0, 0))[0]), columns)
    return found


def _module(stored: str) -> str:
    return stored.removesuffix(".weight")


def _join(source: Source, modules: Mapping[str, LowRankPair], shape: Shape, dtype: torch.dtype) -> LowRankPair:
    """Return the pair of a parameter whose pieces are rows of adapted weights; rows of others get nothing."""
    first_column: dict[str, int] = {}
    rank = 0
    for name, pair in modules.items():
        first_column[name] = rank
        rank += len(pair.a)
    b = torch.zeros(shape[0], rank)
    row, (group,) = 0, source.groups
    for piece in group:
        pair = modules.get(piece.name)
        start, stop = (0, shape[0] // len(group)) if piece.rows is None else piece.rows
        count = len(range(start, stop, piece.step))
        if pair is not None:
            column = first_column[piece.name]
            b[row : row + count, column : column + len(pair.a)] = pair.b[start : stop : piece.step]
        row += count
    return LowRankPair(torch.cat([pair.a for pair in modules.values()]).to(dtype), b.to(dtype))


def _hash(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while part := stream.read(_HASHED_BYTES):
                digest.update(part)
    return digest.hexdigest()
