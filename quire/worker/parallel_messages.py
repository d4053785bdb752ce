"""Messages of a leader to its workers, of CPUs, GPUs or stages: the calls of its executor, over a MessageRing.

A message is sixteen numbers and some arrays, so nothing is pickled. Every call reaches all workers in the leader's order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.base.errors import InvariantError
from quire.model.lora.adapter import Adapter, LowRankPair
from quire.model.lora.numbers import AdapterHolder
from quire.model.native_steps import OneTokenCall
from quire.model.token_runs import BoundsRequest, TreePlaces
from quire.parallel.expert_balance import Move
from quire.parallel.ring import RingMessage
from quire.worker.expert_moves import ExpertChange, ExpertMover
from quire.worker.step_executor import StateChange, StepTokens, TableEntry

_Arrays = list[NDArray[np.generic]]


class Call(IntEnum):
    """Which call a message is. The leader's executor and decoder are what makes them.

    HIDDEN_STATES                  to stages only
    STAGED to COUNT_EXPERTS        to ranks on GPUs only, in place of STEP, CHANGES and MOVE_TOKENS: see staged_call.py
    """

    STEP = 1
    CHANGES = 2
    MOVE_TOKENS = 3
    LOGITS = 4
    ONE_TOKEN = 5
    MOVE_PAGES = 6
    SLEEP = 7
    WAKE_UP = 8
    LOAD_EXPERTS = 9
    SWITCH_EXPERTS = 10
    LOAD_ADAPTER = 11
    UNLOAD_ADAPTER = 12
    WAIT = 13
    HIDDEN_STATES = 14
    STAGED = 15
    USE_BLOCKS = 16
    SETTLE_PAGES = 17
    COUNT_EXPERTS = 18


class Changes(NamedTuple):
    """What begin_step of an executor is given."""

    entries: list[TableEntry]
    block_copies: list[tuple[int, int]]


class StepCall(NamedTuple):
    """One step: what start_step of an executor is given, as far as it changes what is computed.

    changes  what begin_step was given just before: it goes with the step, in one message
    """

    tokens: StepTokens
    hidden_rows: list[int]
    wants_best: bool
    needs_logits: bool
    keeps_all: bool
    changes: Changes | None = None


Encoded = tuple[list[int], _Arrays]
_BOUNDS_TYPES = np.int64, np.int32, np.float32, np.int64


def encode_changes(changes: Changes) -> Encoded:
    """Return the message of changes before a step."""
    return [Call.CHANGES], _change_arrays(changes)


def _change_arrays(changes: Changes) -> _Arrays:
    words: list[int] = []
    for batch_slot, index, block_ids in changes.entries:
        words += [batch_slot, index, len(block_ids), *block_ids]
    copies = [block for pair in changes.block_copies for block in pair]
    return [_int32(words), _int32(copies)]


def decode_changes(message: RingMessage) -> Changes:
    """Return what encode_changes was given."""
    return _changes_of(message.arrays)


def _changes_of(arrays: Sequence[NDArray[np.generic]]) -> Changes:
    words, copies = (array.tolist() for array in arrays)
    entries: list[TableEntry] = []
    at = 0
    while at < len(words):
        batch_slot, index, count = words[at : at + 3]
        entries.append((batch_slot, index, words[at + 3 : at + 3 + count]))
        at += 3 + count
    return Changes(entries, list(zip(copies[::2], copies[1::2], strict=True)))


def encode_step(call: StepCall) -> Encoded:
    """Return the message of a step."""
    tokens = call.tokens
    flags = call.wants_best | call.needs_logits << 1 | call.keeps_all << 2
    flags |= (tokens.trees is not None) << 3 | (tokens.short_ropes is not None) << 4 | (call.changes is not None) << 5
    has_adapters = tokens.adapters is not None and any(tokens.adapters)
    flags |= has_adapters << 6 | (tokens.states is not None) << 7 | (tokens.bounds is not None) << 8
    lists = tokens.token_ids, tokens.starts, tokens.ends, tokens.batch_slots, tokens.logit_rows, call.hidden_rows
    arrays: _Arrays = [_int32(values) for values in lists]
    if tokens.trees is not None:
        arrays += [tokens.trees.positions, tokens.trees.num_drafts, tokens.trees.ancestors]
    if tokens.short_ropes is not None:
        arrays.append(_int32(tokens.short_ropes))
    if tokens.states is not None:
        arrays += _state_arrays(tokens.states)
    if tokens.adapters is not None and has_adapters:
        keys = list(dict.fromkeys(tokens.adapters))
        arrays += [_int32([keys.index(key) for key in tokens.adapters]), _text("\n".join(keys))]
    if tokens.bounds is not None:
        arrays += [np.array(values, dtype) for values, dtype in zip(tokens.bounds, _BOUNDS_TYPES, strict=True)]
    if call.changes is not None:
        arrays += _change_arrays(call.changes)
    return [Call.STEP, flags, tokens.num_ready], arrays


def decode_step(message: RingMessage) -> StepCall:
    """Return what encode_step was given."""
    _, flags, num_ready = message.header[:3].tolist()
    token_ids, starts, ends, batch_slots, logit_rows, hidden_rows = (array.tolist() for array in message.arrays[:6])
    rest = list(message.arrays[6:])
    trees = None
    if flags & 8:
        positions, num_drafts, ancestors = (array.copy() for array in rest[:3])
        trees, rest = TreePlaces(positions, num_drafts, ancestors), rest[3:]
    short_ropes, adapters, states = None, None, None
    if flags & 16:
        short_ropes, rest = [bool(value) for value in rest[0]], rest[1:]
    if flags & 128:
        states, rest = _states_of(rest[:3]), rest[3:]
    if flags & 64:
        keys = _text_of(rest[1]).split("\n")
        adapters, rest = [keys[index] for index in rest[0].tolist()], rest[2:]
    bounds = BoundsRequest(*(array.tolist() for array in rest[:4])) if flags & 256 else None
    tokens = StepTokens(token_ids, starts, ends, batch_slots, logit_rows, num_ready, trees, short_ropes, states, adapters)
    tokens = tokens._replace(bounds=bounds)
    changes = _changes_of(rest[-2:]) if flags & 32 else None
    return StepCall(tokens, hidden_rows, bool(flags & 1), bool(flags & 2), bool(flags & 4), changes)


def _state_arrays(states: StateChange) -> _Arrays:
    starts = [number for slot, position, checkpoint in states.starts for number in (slot, position, _or_none(checkpoint))]
    saves = [number for index, pairs in states.saves.items() for tokens, slot in pairs for number in (index, tokens, slot)]
    return [_int32(starts), _int32(saves), _int32(states.num_drafts)]


def _or_none(checkpoint: int | None) -> int:
    return -1 if checkpoint is None else checkpoint


def _states_of(arrays: Sequence[NDArray[np.generic]]) -> StateChange:
    starts, saves = (array.reshape(-1, 3).tolist() for array in arrays[:2])
    by_index: dict[int, list[tuple[int, int]]] = {}
    for index, tokens, slot in saves:
        by_index.setdefault(index, []).append((tokens, slot))
    found = [(slot, position, None if checkpoint < 0 else checkpoint) for slot, position, checkpoint in starts]
    return StateChange(found, by_index, arrays[2].tolist())


def encode_rows(call: Call, *rows: Sequence[int]) -> Encoded:
    """Return the message of a call whose arguments are lists of numbers of 64 bits."""
    return [call], [np.array(values, dtype=np.int64) for values in rows]


def encode_page_moves(saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> Encoded:
    """Return the message of pages to copy, see PageMover."""
    return [Call.MOVE_PAGES], [_int32([number for pair in pairs for number in pair]) for pairs in (saves, loads)]


def decode_page_moves(message: RingMessage) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return what encode_page_moves was given."""
    saves, loads = (array.reshape(-1, 2).tolist() for array in message.arrays)
    return [(block_id, slot) for block_id, slot in saves], [(slot, block_id) for slot, block_id in loads]


def encode_expert_change(change: ExpertChange | None) -> Encoded:
    """Return the message of experts to load; None: to switch to those that were loaded, see ExpertMover."""
    if change is None:
        return [Call.SWITCH_EXPERTS], []
    moves = [number for move in change.moves for number in (move.rank, move.old, move.new)]
    return [Call.LOAD_EXPERTS, change.layer], [_int32(moves)]


def decode_expert_change(message: RingMessage) -> ExpertChange:
    """Return the experts that encode_expert_change was given."""
    moves = message.arrays[0].reshape(-1, 3).tolist()
    return ExpertChange(int(message.header[1]), tuple(Move(*move) for move in moves))


def encode_adapter(adapter: Adapter) -> Encoded:
    """Return the message of a LoRA adapter to load, with its matrices."""
    pairs = adapter.pairs.items()
    about = {
        "key": adapter.key,
        "rank": adapter.rank,
        "dtype": str(next(iter(adapter.pairs.values())).a.dtype).removeprefix("torch."),
        "pairs": [[name, *pair.b.shape, pair.a.shape[1]] for name, pair in pairs],
    }
    matrices = [matrix.contiguous().view(-1).view(torch.uint8).numpy() for _, pair in pairs for matrix in pair]
    return [Call.LOAD_ADAPTER], [_text(json.dumps(about)), np.concatenate(matrices)]


def decode_adapter(message: RingMessage) -> Adapter:
    """Return the adapter that encode_adapter was given."""
    about = json.loads(_text_of(message.arrays[0]))
    values = torch.from_numpy(message.arrays[1].copy()).view(getattr(torch, about["dtype"]))
    pairs: dict[str, LowRankPair] = {}
    at = 0
    for name, num_outputs, rank, num_inputs in about["pairs"]:
        a, b = values[at : at + rank * num_inputs], values[at + rank * num_inputs :][: num_outputs * rank]
        pairs[name] = LowRankPair(a.view(rank, num_inputs), b.view(num_outputs, rank))
        at += rank * (num_inputs + num_outputs)
    return Adapter(about["key"], about["rank"], pairs)


def encode_adapter_key(key: str) -> Encoded:
    """Return the message of an adapter to unload."""
    return [Call.UNLOAD_ADAPTER], [_text(key)]


def decode_adapter_key(message: RingMessage) -> str:
    """Return what encode_adapter_key was given."""
    return _text_of(message.arrays[0])


def change_model(
    message: RingMessage,
    adapters: AdapterHolder | None,
    mover: ExpertMover | None = None,
    own_part: Callable[[Adapter], Adapter] | None = None,
) -> None:
    """Load or unload an adapter, or load experts or switch to them, as the leader of any kind of worker says.

    own_part: what a stage loads of an adapter. Raises InvariantError if the message is another call, or one that the worker
    cannot make, as it has no adapters or no mover.
    """
    call = Call(int(message.header[0]))
    if adapters is not None and call is Call.LOAD_ADAPTER:
        adapter = decode_adapter(message)
        adapters.load(adapter if own_part is None else own_part(adapter))
    elif adapters is not None and call is Call.UNLOAD_ADAPTER:
        adapters.unload(decode_adapter_key(message))
    elif mover is not None and call is Call.LOAD_EXPERTS:
        mover.prepare(decode_expert_change(message))
    elif mover is not None and call is Call.SWITCH_EXPERTS:
        mover.switch()
    else:
        raise InvariantError(f"the leader has sent call {call!r}, which this worker cannot make")


def encode_one_token(call: OneTokenCall) -> Encoded:
    """Return the message of a pass of drafts by layer skipping."""
    arrays: _Arrays = [call.token_ids, call.positions, call.slots, call.lengths, call.block_tables]
    if call.layers is not None:
        arrays.append(call.layers)
    return [Call.ONE_TOKEN, call.block_tables.shape[1]], [np.ascontiguousarray(array) for array in arrays]


def decode_one_token(message: RingMessage) -> OneTokenCall:
    """Return what encode_one_token was given."""
    width = int(message.header[1])
    token_ids, positions, slots, lengths, tables = (array.copy() for array in message.arrays[:5])
    layers = message.arrays[5].copy() if len(message.arrays) > 5 else None
    return OneTokenCall(token_ids, positions, slots, lengths, tables.reshape(-1, width), layers)


def _text(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _text_of(array: NDArray[np.generic]) -> str:
    return array.tobytes().decode()


def _int32(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
