"""PrefillServers: which prefill servers each decode server is to use, and where they are reached.

Prefill servers are backends like others, and known by their role in `GET /load`. Decode servers that were started without
prefill_urls report those that they use there, too: where these are not the prefill servers of their model that are ready, the
router sends the new list. So a server that was restarted, or was not there, has it a moment later.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from quire.base.logging import get_logger
from quire.router.config import BackendAddress
from quire.serving.hosts import is_loopback

if TYPE_CHECKING:
    from quire.router.backend import Backend, BackendTable

logger = get_logger(__name__)


def reachable_url(listen: str | None, address: BackendAddress) -> str | None:
    """Return where other machines connect to a prefill server that listens at tcp://HOST:PORT or unix:PATH: every address of
    a machine (0.0.0.0, ::) stands for the host that the router knows it by."""
    if listen is None or not listen.startswith("tcp://"):
        return listen
    parts = urlsplit(listen)
    with suppress(ValueError):
        if ipaddress.ip_address(parts.hostname or "").is_unspecified:
            host = f"[{address.host}]" if ":" in address.host else address.host
            return f"tcp://{host}:{parts.port}"
    return listen


def is_reachable(url: str, server: BackendAddress, other: BackendAddress) -> bool:
    """Return whether another server can connect to the URL of a prefill server: one of its machine only serves that one."""
    is_local = not url.startswith("tcp://") or is_loopback(urlsplit(url).hostname or "")
    is_same = server.host == other.host or (is_loopback(server.host) and is_loopback(other.host))
    return not is_local or is_same


class PrefillServers:
    """Compares what decode servers use with what there is."""

    def __init__(self, table: BackendTable) -> None:
        self._table = table
        self._refusals: dict[str, str] = {}

    def urls_for(self, backend: Backend) -> list[str]:
        """Return the prefill servers of a decode server: those of its model that are ready and not drained."""
        found = [one for one in self._table if one.is_prefill and one.is_in_service]
        found = [one for one in found if any(backend.serves(model) for model in one.models)]
        pairs = [(one.prefill_url, one.address) for one in found]
        return sorted({url for url, address in pairs if url and is_reachable(url, address, backend.address)})

    def news_for(self, backend: Backend) -> list[str] | None:
        """Return the prefill servers that a backend is to be told; None: it takes none, or uses these already.

        While a backend was not asked yet, as after the start of the router, no list is complete.
        """
        told = msgspec.UNSET if backend.load is None else backend.load.prefill_urls
        if told is msgspec.UNSET or any(one.state == "starting" for one in self._table):
            return None
        urls = self.urls_for(backend)
        return None if told is not None and sorted(told) == urls else urls

    def note_answer(self, backend: Backend, urls: list[str], refusal: str) -> None:
        """Log what came of telling a backend, each refusal once."""
        if not refusal:
            logger.info("backend %s uses the prefill servers %s", backend.name, ", ".join(urls) or "none")
        elif self._refusals.get(backend.name) != refusal:
            logger.warning("backend %s does not take the prefill servers %s: %s", backend.name, ", ".join(urls), refusal)
        self._refusals[backend.name] = refusal
