"""Steps with tokens of prompts, as arrays: of their own size, or of a larger one, so that they can be captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec
from quire.kernels.triton.step import AttentionLibrary, DeviceAttentionMetadata, DeviceStateRows, TileLists, Tiles
from quire.worker.device.graphs import PromptKey, ShortRuns
from quire.worker.device.host_step import STATE_ARRAYS, HostStep
from quire.worker.device.staging import Part

_HIDING_OPERATIONS = 2e11
"""Operations of a layer's products that take a GPU as long as the host takes to launch the layer one by one: about a third of a
millisecond, at 6e14 a second. Larger steps hide their launches, and are not padded."""

_WHOLE_TOKENS = 64
TileKind = tuple[int, int]
"""Queries of a tile, and up to how many queries a sequence is short; see DeviceAttentionMetadata.tiles."""


class MixedSizes(NamedTuple):
    """How large the arrays of a step are.

    tiles      for each kind, how many short and how many long ones
    has_trees  whether there are arrays for drafts that are trees
    has_states whether there are arrays for recurrent states
    has_adapters  whether there is an array for the numbers of LoRA adapters
    has_windows  whether there is an array for slots of the window group
    """

    num_tokens: int
    num_sequences: int
    tiles: tuple[tuple[int, int], ...]
    has_trees: bool = False
    has_states: bool = False
    has_adapters: bool = False
    has_windows: bool = False

    @property
    def parts(self) -> list[Part]:
        """The arrays: of `host_step.fill`, and those of `fill_tiles`."""
        # Each list on its own, so that all begin at multiples of 16 bytes: kernels are compiled for that.
        lists = [
            Part(f"{run}_{name}{index}", torch.int32, count)
            for index, counts in enumerate(self.tiles)
            for run, count in zip(("short", "long"), counts, strict=True)
            for name in ("sequences", "offsets")
        ]
        trees = _tree_parts(self.num_tokens, self.num_sequences) if self.has_trees else []
        flags = self.has_states, self.has_adapters, self.has_windows
        return [*token_parts(self.num_tokens, self.num_sequences, *flags), *trees, *lists]


def token_parts(
    num_tokens: int, num_sequences: int, has_states: bool = False, has_adapters: bool = False, has_windows: bool = False
) -> list[Part]:
    """Return the arrays of a step's tokens and sequences, as host_step.py fills them."""
    counts = (num_sequences, num_tokens, num_tokens)
    states = [Part(name, torch.int32, count) for name, count in zip(STATE_ARRAYS, counts, strict=True)] if has_states else []
    adapters = [Part("adapters", torch.int32, num_tokens)] if has_adapters else []
    return [
        Part("given_ids", torch.int64, num_tokens),
        Part("token_rows", torch.int32, num_tokens),
        Part("positions", torch.int64, num_tokens),
        Part("slots", torch.int64, num_tokens),
        Part("rows", torch.int32, num_sequences),
        Part("context_lens", torch.int32, num_sequences),
        Part("query_starts", torch.int32, num_sequences + 1),
        *states,
        *adapters,
        *([Part("window_slots", torch.int64, num_tokens)] if has_windows else []),
    ]


def _tree_parts(num_tokens: int, num_sequences: int) -> list[Part]:
    return [
        Part("num_drafts", torch.int32, num_sequences),
        Part("ancestors", torch.int64, num_tokens),
        Part("tree_positions", torch.int32, num_tokens),
    ]


class StepShape(NamedTuple):
    """What the launches of a step depend on that is launched one by one.

    counts        tokens of each sequence
    context_lens  of each sequence, with them
    has_trees     whether drafts are trees
    has_adapters  whether some tokens have LoRA adapters
    home_sequences  of each home, in this order, see homes.py; empty: sequences have no homes
    """

    counts: tuple[int, ...]
    context_lens: tuple[int, ...]
    has_trees: bool = False
    has_adapters: bool = False
    home_sequences: tuple[int, ...] = ()

    @classmethod
    def of(cls, step: HostStep, home_sequences: tuple[int, ...] = ()) -> StepShape:
        """Return that of a step."""
        flags = step.trees is not None, step.adapters is not None
        return cls(step.counts, tuple(step.context_lens.tolist()), *flags, home_sequences)

    @property
    def parts(self) -> list[Part]:
        """The arrays of a step whose sequences have homes, in addition to those of exact_sizes."""
        if not self.home_sequences:
            return []
        # Sequences of padding have no context.
        num_tokens = sum(count for count, length in zip(self.counts, self.context_lens, strict=True) if length > 0)
        return [Part("home_places", torch.int64, num_tokens)]


def exact_sizes(
    shape: StepShape, lists: Sequence[TileLists], has_states: bool = False, has_windows: bool = False
) -> MixedSizes:
    """Return the sizes of a step without padding."""
    tiles = tuple((len(own.short), len(own.long)) for own in lists)
    flags = shape.has_trees, has_states, shape.has_adapters, has_windows
    return MixedSizes(sum(shape.counts), len(shape.counts), tiles, *flags)


def padded_sizes(
    key: PromptKey, max_num_seqs: int, kinds: Sequence[TileKind], has_states: bool = False, has_windows: bool = False
) -> MixedSizes:
    """Return sizes that hold every step of a key, with one sequence of padding after those of the step."""
    most = min(max_num_seqs, key.num_tokens)
    num_short = 0 if key.short_runs == "none" else most
    tiles = [
        # One more for the last tile of each long sequence, and of the padding.
        (num_short, key.num_tokens // num_queries + min(most, key.num_tokens // (longest_short + 1)) + 1)
        for num_queries, longest_short in kinds
    ]
    flags = key.has_trees, has_states, key.has_adapters, has_windows
    return MixedSizes(key.num_tokens, most + 1, tuple(tiles), *flags)


def fill_tiles(
    host: Mapping[str, NDArray[np.generic]], step: HostStep, lists: Sequence[TileLists], kinds: Sequence[TileKind]
) -> None:
    """Write the work lists of a step; where arrays are longer, with tiles for the tokens of padding, and empty ones."""
    num_tokens, num_sequences = len(host["given_ids"]), len(host["rows"])
    padding, num_further = num_sequences - 1, num_tokens - len(step.given_ids)
    for index, (found, (num_queries, _)) in enumerate(zip(lists, kinds, strict=True)):
        further = [(padding, offset) for offset in range(0, num_further, num_queries)]
        for run, pairs in (("short", found.short), ("long", [*found.long, *further])):
            sequences, offsets = host[f"{run}_sequences{index}"], host[f"{run}_offsets{index}"]
            both = np.array(pairs, np.int32).reshape(-1, 2)
            sequences[: len(pairs)], offsets[: len(pairs)] = both[:, 0], both[:, 1]
            # An empty tile begins after the end of its sequence.
            sequences[len(pairs) :], offsets[len(pairs) :] = padding, num_tokens


def short_runs(lists: Sequence[TileLists]) -> ShortRuns:
    """Return which short runs of queries a step has."""
    if any(own.longest_short > 1 for own in lists):
        return "any"
    return "single" if any(own.short for own in lists) else "none"


def exact_step(
    shape: StepShape,
    arrays: Mapping[str, Tensor],
    tables: Tensor,
    lists: Sequence[TileLists],
    kinds: Sequence[TileKind],
    library: AttentionLibrary | None,
) -> DeviceAttentionMetadata:
    """Return a step of exact_sizes, whose arrays are on the device; tables [S, max_blocks] i32."""
    places = *_places(arrays), tables, *_trees(arrays)
    lengths, states = shape.context_lens, states_of(arrays)
    found = DeviceAttentionMetadata(*places, shape.counts, max(lengths), False, lengths, library, states)
    _place_tiles(found, arrays, kinds, [own.longest_short for own in lists])
    return found


def padded_step(
    key: PromptKey, arrays: Mapping[str, Tensor], tables: Tensor, kinds: Sequence[TileKind]
) -> DeviceAttentionMetadata:
    """Return the step of a key, of padded_sizes: the same launches for every step of that key."""
    places = *_places(arrays), tables, *_trees(arrays)
    found = DeviceAttentionMetadata(*places, None, key.max_context_len, states=states_of(arrays))
    _place_tiles(found, arrays, kinds, [most if key.short_runs == "any" else 1 for _, most in kinds])
    return found


def _places(arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return arrays["slots"], arrays["query_starts"], arrays["context_lens"]


def _trees(arrays: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return arrays.get("num_drafts"), arrays.get("ancestors"), arrays.get("tree_positions")


def states_of(arrays: Mapping[str, Tensor]) -> DeviceStateRows | None:
    """Return the rows of recurrent states of a step, if its arrays have any."""
    return DeviceStateRows(*(arrays[name] for name in STATE_ARRAYS)) if STATE_ARRAYS[0] in arrays else None


def _place_tiles(
    step: DeviceAttentionMetadata, arrays: Mapping[str, Tensor], kinds: Sequence[TileKind], longest_short: Sequence[int]
) -> None:
    for index, (kind, longest) in enumerate(zip(kinds, longest_short, strict=True)):
        short, long = ((arrays[f"{run}_sequences{index}"], arrays[f"{run}_offsets{index}"]) for run in ("short", "long"))
        step.place_tiles(*kind, Tiles(*short, len(short[0]), longest), Tiles(*long, len(long[0]), kind[0]))


def most_captured_tokens(spec: ModelSpec, max_num_batched_tokens: int) -> int:
    """Return up to how many tokens launching a step one by one may take longer than the GPU does."""
    most = max((_HIDING_OPERATIONS / (2 * _active_weights(spec, layer)) for layer in spec.layers), default=0)
    return min(max_num_batched_tokens, max(1, int(most) // _WHOLE_TOKENS) * _WHOLE_TOKENS)


def _active_weights(spec: ModelSpec, layer: LayerSpec) -> int:
    """Return how many weights of a layer a token is multiplied with."""
    attention, mlp = layer.attention, layer.mlp
    expert, count = (mlp, 1) if isinstance(mlp, MlpSpec) else (mlp.expert, mlp.top_k)
    heads = 2 * (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    inner = count * (3 if expert.is_gated else 2) * expert.intermediate_size
    return spec.hidden_size * max(spec.hidden_size, heads + inner)  # a mixer has no fewer
