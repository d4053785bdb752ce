"""ReplicaRouter: chooses the replica with the least predicted wait. Does not import torch.

A replica's predicted wait is counted in prompt tokens: those that its requests have still to compute, those of the new request
that its prefix cache is not known to hold, and the output tokens that its sequences still have to decode next to the new one,
as each of these sequences adds a token to every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.contracts.block_keys import block_keys
from quire.contracts.request import Request

MAX_KNOWN_BLOCKS = 1 << 16
"""The maximum number of block keys that are remembered for one replica: about 8 MB."""

_FIRST_OUTPUT_TOKENS = 128.0
"""Expected output tokens of a sequence, until some have ended."""

_LEARNING_RATE = 0.05
_FED_AHEAD_SHARE = 8
_FED_AHEAD_LEAST = 4


class SentPrefixes:
    """The keys of full prompt blocks that were sent to a replica, with LRU eviction."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_known(self, keys: Iterable[int]) -> int:
        """Return how many of a prompt's keys, from the first on, were sent."""
        num_known = 0
        for key in keys:
            if key not in self._keys:
                break
            num_known += 1
        return num_known

    def note(self, keys: Sequence[int]) -> None:
        """Record that a prompt was sent. Its last blocks count as the oldest, as in the engine, which reuses them first."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_blocks:
            self._keys.popitem(last=False)


@dataclass(slots=True)
class _RemainingWork:
    """The remaining work of one request.

    num_prompt_tokens  to be computed
    num_expected       expected output tokens of each sequence
    num_output_tokens  of all sequences, so far
    """

    num_prompt_tokens: int
    num_sequences: int
    num_expected: float
    is_background: bool
    is_pooling: bool
    num_output_tokens: int = 0

    def decode_tokens(self, num_at_most: float) -> float:
        """Return the output tokens that its sequences generate in `num_steps` steps."""
        left = max(self.num_expected - self.num_output_tokens / self.num_sequences, 1.0)
        return 0.0 if self.is_pooling else self.num_sequences * min(left, num_at_most)


class _Replica:
    """The state of one replica. speed: relative to the other replicas, by its threads."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.max_num_seqs = 0
        self.prefixes = SentPrefixes(0)
        self.requests: dict[str, _RemainingWork] = {}

    @property
    def num_sequences(self) -> int:
        return sum(work.num_sequences for work in self.requests.values())

    def has_room(self, num_sequences: int, is_background: bool) -> bool:
        """Return whether it can run this many more sequences, now or next; background sequences take no room from others."""
        held = [work for work in self.requests.values() if is_background or not work.is_background]
        most = self.max_num_seqs + max(_FED_AHEAD_LEAST, self.max_num_seqs // _FED_AHEAD_SHARE)
        return not held or sum(work.num_sequences for work in held) + num_sequences <= most

    def wait(self, num_new_tokens: int, num_decode_steps: float, is_background: bool) -> float:
        """Return the predicted wait of a request with this many uncached prompt tokens."""
        ahead = [work for work in self.requests.values() if is_background or not work.is_background]
        queued = sum(work.num_prompt_tokens for work in ahead)
        decoding = sum(work.decode_tokens(num_decode_steps) for work in ahead)
        return (queued + num_new_tokens + decoding) / self.speed


@dataclass(frozen=True, slots=True)
class Route:
    """The replica for a request. num_cached_tokens: known cached tokens of its prompt."""

    replica: int
    num_cached_tokens: int
    keys: list[int]


class ReplicaRouter:
    """Tracks the work of all replicas, as reported by their owner. Belongs to one thread."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self.replicas = [_Replica(speed) for speed in speeds]
        self._owners: dict[str, int] = {}
        self._block_size = 0
        self.mean_output_tokens = _FIRST_OUTPUT_TOKENS

    def open(self, replica: int, *, max_num_seqs: int, block_size: int, num_kv_blocks: int) -> None:
        """Record that a replica is ready; num_kv_blocks: 0 without prefix caching."""
        found = self.replicas[replica]
        found.max_num_seqs = max_num_seqs
        found.prefixes = SentPrefixes(min(num_kv_blocks, MAX_KNOWN_BLOCKS))
        self._block_size = block_size if num_kv_blocks else 0

    def close(self, replica: int) -> None:
        """Remove all state of a replica that has ended."""
        found = self.replicas[replica]
        for request_id in found.requests:
            self._owners.pop(request_id, None)
        found.requests.clear()
        found.prefixes = SentPrefixes(0)

    def num_requests(self, replica: int) -> int:
        """Return how many requests a replica has."""
        return len(self.replicas[replica].requests)

    def owner_of(self, request_id: str) -> int | None:
        """Return the replica that has a request; None for one that has ended."""
        return self._owners.get(request_id)

    def has_room(self, replica: int, request: Request) -> bool:
        """Return whether a replica can run a request at once, or as one of the next few."""
        return self.replicas[replica].has_room(request.params.num_sequences, request.is_background)

    def choose(self, request: Request, candidates: Sequence[int]) -> Route:
        """Return the candidate (of at least one) with the least wait; those without room only if none has room.

        Ties go to the one with fewer sequences, then with fewer known prefixes, so that caches fill evenly.
        """
        num_tokens, is_background = len(request.prompt_token_ids), request.is_background
        keys = self._keys_of(request)
        roomy = [index for index in candidates if self.has_room(index, request)]
        num_steps = 0.0 if request.pooling is not None else self._expected(request)

        def rank(index: int) -> tuple[float, int, int, int]:
            replica = self.replicas[index]
            wait = replica.wait(num_tokens - self._num_cached(index, request, keys), num_steps, is_background)
            return wait, replica.num_sequences, len(replica.prefixes), index

        best = min(roomy or candidates, key=rank)
        return Route(best, self._num_cached(best, request, keys), keys)

    def add(self, request: Request, route: Route) -> None:
        """Record that a request was sent to the result of `choose`."""
        replica = self.replicas[route.replica]
        replica.prefixes.note(route.keys)
        replica.requests[request.request_id] = _RemainingWork(
            num_prompt_tokens=len(request.prompt_token_ids) - route.num_cached_tokens,
            num_sequences=request.params.num_sequences,
            num_expected=self._expected(request),
            is_background=request.is_background,
            is_pooling=request.pooling is not None,
        )
        self._owners[request.request_id] = route.replica

    def note_prefill(self, request_id: str, num_tokens: int) -> None:
        """Record computed prompt tokens of a request."""
        work = self._work_of(request_id)
        if work is not None:
            work.num_prompt_tokens = max(work.num_prompt_tokens - num_tokens, 0)

    def note_output(self, request_id: str, num_tokens: int) -> None:
        """Record output tokens of a request, whose prompt is then computed."""
        work = self._work_of(request_id)
        if work is not None and num_tokens:
            work.num_prompt_tokens = 0
            work.num_output_tokens += num_tokens

    def end(self, request_id: str, *, is_complete: bool = True) -> None:
        """Remove a request; is_complete: its output was not aborted, so its length updates the expected length."""
        owner = self._owners.pop(request_id, None)
        work = None if owner is None else self.replicas[owner].requests.pop(request_id, None)
        if work is not None and is_complete and work.num_output_tokens:
            length = work.num_output_tokens / work.num_sequences
            self.mean_output_tokens += _LEARNING_RATE * (length - self.mean_output_tokens)

    def _work_of(self, request_id: str) -> _RemainingWork | None:
        owner = self._owners.get(request_id)
        return None if owner is None else self.replicas[owner].requests.get(request_id)

    def _expected(self, request: Request) -> float:
        most = request.params.max_tokens
        return self.mean_output_tokens if most is None else min(self.mean_output_tokens, float(most))

    def _keys_of(self, request: Request) -> list[int]:
        if not self._block_size:
            return []
        lora = request.lora
        # Like the engine, which knows the adapter's files: prefixes of different adapters are not shared.
        root = request.cache_salt if lora is None else f"{request.cache_salt}\0{lora.lora_path}\0{lora.lora_int_id}"
        return block_keys(root, request.prompt_token_ids, self._block_size)

    def _num_cached(self, index: int, request: Request, keys: list[int]) -> int:
        """Return the prompt tokens that a replica need not compute: never the last one, and none with prompt log
        probabilities."""
        needs_all = request.pooling is not None and request.pooling.needs_every_token
        if needs_all or request.params.prompt_logprobs is not None or not self._block_size:
            return 0
        most = (len(request.prompt_token_ids) - 1) // self._block_size
        return self.replicas[index].prefixes.num_known(keys[:most]) * self._block_size
