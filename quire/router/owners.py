"""ObjectOwners: which backend holds a stored response, conversation, file or batch. Backends do not share them."""

from __future__ import annotations

import re
from collections import OrderedDict

from quire.base.logging import get_logger
from quire.router.backend import Backend, BackendTable
from quire.router.incoming import KEY_HEADERS, Incoming
from quire.router.upstream import UpstreamError
from quire.serving.errors import ApiError

logger = get_logger(__name__)

COLLECTIONS = ("responses", "conversations", "files", "batches", "messages/batches")
_PATH = re.compile(rf"/v1/({'|'.join(COLLECTIONS)})/([A-Za-z0-9_-]+)(?:/.*)?")
_ID = re.compile(rb'"id"\s*:\s*"((?:resp|conv|file|batch|msgbatch)[_-][A-Za-z0-9_-]+)"')
_ID_PREFIX = re.compile("^(?:resp|conv|file|batch|msgbatch)[_-]")
_OBJECT_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")
"""An id in a body may be any text. Other characters would change the path that a backend is asked for, or add a request."""
_ACTIONS = frozenset({"input_tokens", "compact"})
"""Names below /v1/responses that are no ids."""
_MAX_KNOWN = 1 << 16
_MAX_SCANNED_BYTES = 8 << 10
_ASK_TIMEOUT_S = 10.0


def collection_of(path: str) -> str | None:
    """Return the collection that a path is about: /v1/files and what is below it; None for others."""
    return next((name for name in COLLECTIONS if f"{path}/".startswith(f"/v1/{name}/")), None)


def object_id_of(path: str) -> str | None:
    """Return the id of the object that a path names; None where it names none."""
    found = _PATH.fullmatch(path)
    return None if found is None or found[2] in _ACTIONS else found[2]


class ObjectOwners:
    """Remembers owners as objects are made. Where one is not known, as after a restart, all backends are asked."""

    def __init__(self, table: BackendTable) -> None:
        self._table = table
        self._names: OrderedDict[str, str] = OrderedDict()

    def learn(self, data: bytes, backend: Backend) -> bool:
        """Look for the id of an object in the first bytes of an answer; return whether there was one."""
        found = _ID.search(data[:_MAX_SCANNED_BYTES])
        if found is None:
            return False
        self._note(found[1].decode(), backend)
        return True

    async def find(self, collection: str, object_id: str, incoming: Incoming) -> Backend:
        """Return the backend that has an object. Raises ApiError: 404, or 503 where one that may have it cannot be asked."""
        if not _OBJECT_ID.fullmatch(object_id):
            raise ApiError(404, f"no backend has {object_id[:100]!r}", code="not_found")
        name = self._names.get(object_id)
        owner = None if name is None else self._table.get(name)
        if owner is not None:
            if owner.state == "ready":
                return owner
            raise _unavailable(object_id, [owner.name])
        unasked: list[str] = []
        for backend in sorted(self._table, key=lambda one: not _is_made_by(one, object_id)):  # its maker first
            if backend.state != "ready":
                unasked.append(backend.name)
                continue
            try:
                if await self._has(backend, collection, object_id, incoming):
                    self._note(object_id, backend)
                    return backend
            except UpstreamError as error:
                logger.warning("backend %s could not be asked for %s: %s", backend.name, object_id, error)
                unasked.append(backend.name)
        if unasked:
            raise _unavailable(object_id, unasked)
        raise ApiError(404, f"no backend has {object_id!r}", code="not_found")

    def _note(self, object_id: str, backend: Backend) -> None:
        self._names[object_id] = backend.name
        self._names.move_to_end(object_id)
        while len(self._names) > _MAX_KNOWN:
            self._names.popitem(last=False)

    @staticmethod
    async def _has(backend: Backend, collection: str, object_id: str, incoming: Incoming) -> bool:
        """Ask a backend with the client's own key, so that it learns of nobody else's objects."""
        headers = [(name, value) for name, value in incoming.headers_to_send() if name in KEY_HEADERS]
        target = f"/v1/{collection}/{object_id}".encode()
        answer = await backend.upstream.send("GET", target, headers, idle_timeout_s=_ASK_TIMEOUT_S)
        async with answer:
            return answer.status == 200


def _is_made_by(backend: Backend, object_id: str) -> bool:
    """Return whether an id begins with that of a server (`quire serve --replica-id`)."""
    return bool(backend.replica_id) and _ID_PREFIX.sub("", object_id).startswith(backend.replica_id)


def _unavailable(object_id: str, names: list[str]) -> ApiError:
    """Return a 503; the log names the backends, which are no client's business."""
    logger.warning("%s is not found while backends are not ready: %s", object_id, ", ".join(names))
    return ApiError(
        503,
        f"the backend that holds {object_id!r} is not available now",
        code="backend_unavailable",
        retry_after_s=2.0,
    )
