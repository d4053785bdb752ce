"""HostCheck: which Host headers are answered, against pages of other sites that make their own name point here."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from quire.serving.errors import ApiError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    return host in LOOPBACK or host.startswith("127.")


def host_name(host: str) -> str:
    """Return the name in a Host header or a URL's authority, in lower case and without a port; "" for what is neither."""
    if not host.isascii() or not host.isprintable() or "@" in host:
        return ""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that are not around an IPv6 address
        return ""


class HostCheck:
    """names: those that are answered, without ports; None, or "*" among them: all."""

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = None if names is None or "*" in names else frozenset(name.lower() for name in names)

    def check(self, host: str | None) -> None:
        """Raise ApiError 403 for the header of a name that is not answered.

        host  None where there is no header: browsers always send one, probes of load balancers with HTTP/1.0 need not
        """
        if self._names is None or host is None:
            return
        name = host_name(host)
        if name not in self._names:
            raise ApiError(
                403,
                f"the Host header names {name[:100]!r}, which this server does not answer to; --allowed-hosts adds names",
                code="host_not_allowed",
            )
