"""AdapterRegistry: which LoRA adapters are loaded, who uses them, and the requests that wait for room."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from quire.base.errors import ModelFormatError, RequestError, UnsupportedError
from quire.base.ids import RequestId
from quire.base.logging import get_logger
from quire.contracts.lora import AdapterReport, LoRARequest
from quire.contracts.memory import format_bytes
from quire.contracts.request import Request
from quire.worker.lora import AdapterStore

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    lora: LoRARequest
    report: AdapterReport


class AdapterRegistry:
    """The adapters of an engine, the one that was used last at the end. Owned by the engine's thread.

    An adapter that is replaced or removed stays in memory until the last request that uses it has ended.

    store      loads them; None: enable_lora is off
    max_loras  adapters that are in memory at the same time
    """

    def __init__(self, store: AdapterStore | None, max_loras: int) -> None:
        self._store, self._max_loras = store, max_loras
        self._by_number: dict[int, _Loaded] = {}
        self._users: dict[str, set[RequestId]] = {}  # of every adapter in memory, by its key
        self._waiting: deque[Request] = deque()

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait until an adapter that is in memory is not used any more."""
        return bool(self._waiting)

    @property
    def loaded(self) -> list[LoRARequest]:
        """The adapters in memory that requests can name, least recently used first."""
        return [known.lora for known in self._by_number.values()]

    def add(self, lora: LoRARequest) -> bool:
        """Load an adapter; return False if it is loaded already.

        Raises RequestError if it cannot be loaded, or if all others are in use.
        """
        if self._find(lora) is not None:
            return False
        if not self._make_room():
            raise RequestError(
                f"the LoRA adapter {lora.lora_name!r} cannot be loaded now: max_loras is {self._max_loras}, and requests use "
                "all that are in memory; try again later, or raise max_loras (--max-loras)",
                "lora_name",
            )
        self._load(lora)
        return True

    def remove(self, lora_int_id: int) -> bool:
        """Remove the adapter of a number; return whether there was one. Requests that use it go on."""
        known = self._by_number.pop(lora_int_id, None)
        if known is None:
            return False
        self._release_unused(known.report.key)
        return True

    def admit(self, request: Request) -> Request | None:
        """Return a request with the key of its adapter, which is loaded if necessary; None: it waits, see `take_ready`.

        Raises RequestError if the adapter cannot be loaded.
        """
        if self._waiting:  # in order of arrival, so that none waits for ever
            self._waiting.append(request)
            return None
        ready = self._try(request)
        if ready is None:
            self._waiting.append(request)
        return ready

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Remove and return the waiting requests that can go on, with the error of those whose adapter cannot be loaded."""
        found: list[tuple[Request, RequestError | None]] = []
        while self._waiting:
            request, error = self._waiting[0], None
            try:
                ready = self._try(request)
            except RequestError as raised:
                ready, error = request, raised
            if ready is None:
                break
            self._waiting.popleft()
            found.append((ready, error))
        return found

    def remove_waiting(self, request_id: str) -> bool:
        """Remove a request that waits; return whether it did."""
        found = next((request for request in self._waiting if request.request_id == request_id), None)
        if found is not None:
            self._waiting.remove(found)
        return found is not None

    def release(self, request: Request) -> None:
        """Note that a request has ended."""
        if request.lora is None:
            return
        for key, users in list(self._users.items()):
            if request.request_id in users:
                users.remove(request.request_id)
                self._release_unused(key)

    def _try(self, request: Request) -> Request | None:
        lora = request.lora
        assert lora is not None
        known = self._find(lora)
        if known is None:
            if not self._make_room():
                return None
            known = self._load(lora)
        self._by_number[lora.lora_int_id] = self._by_number.pop(lora.lora_int_id)
        self._users[known.report.key].add(request.request_id)
        return replace(request, adapter_key=known.report.key)

    def _find(self, lora: LoRARequest) -> _Loaded | None:
        """Return a loaded adapter; None: it is not loaded. Raises RequestError if its number is that of another."""
        known = self._by_number.get(lora.lora_int_id)
        if known is None or known.lora == lora:
            return known
        if known.lora.lora_name != lora.lora_name:
            raise RequestError(
                f"lora_int_id {lora.lora_int_id} is that of the LoRA adapter {known.lora.lora_name!r}: give "
                f"{lora.lora_name!r} another number",
                "lora_int_id",
            )
        raise RequestError(
            f"the LoRA adapter {lora.lora_name!r} is loaded with number {lora.lora_int_id} from {known.lora.lora_path!r}, not "
            f"from {lora.lora_path!r}: remove it first, or choose another number",
            "lora_int_id",
        )

    def _make_room(self) -> bool:
        """Unload adapters that no request uses until there is room for one more; return whether there is."""
        for number, known in list(self._by_number.items()):
            if len(self._users) < self._max_loras:
                break
            if not self._users[known.report.key]:
                logger.info("LoRA adapter %s is unloaded to make room", known.lora.lora_name)
                self.remove(number)
        return len(self._users) < self._max_loras

    def _load(self, lora: LoRARequest) -> _Loaded:
        if self._store is None:
            raise RequestError(
                "this engine takes no LoRA adapters: start it with enable_lora=True (--enable-lora)", "lora_request"
            )
        try:
            report = self._store.load(lora.lora_path)
        except (ModelFormatError, UnsupportedError) as error:
            raise RequestError(f"the LoRA adapter {lora.lora_name!r} cannot be loaded: {error}", "lora_path") from error
        logger.info(
            "LoRA adapter %s: rank %d, %d layers, %s",
            lora.lora_name,
            report.rank,
            report.num_modules,
            format_bytes(report.num_bytes),
        )
        self._users.setdefault(report.key, set())
        known = self._by_number[lora.lora_int_id] = _Loaded(lora, report)
        return known

    def _release_unused(self, key: str) -> None:
        """Unload the adapter of a key if no request uses it and no number stands for it."""
        is_named = any(known.report.key == key for known in self._by_number.values())
        if self._store is not None and not is_named and key in self._users and not self._users[key]:
            del self._users[key]
            self._store.unload(key)
