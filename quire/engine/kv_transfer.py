"""What an engine's role needs: a page server for decode engines, the client of prefill engines, or both where it may change."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig, Role
from quire.contracts.memory import ModelReport
from quire.contracts.request import Request
from quire.contracts.tier_stats import TierStats
from quire.engine.prefill_service import PrefillService
from quire.engine.remote_prefill import RemotePrefill
from quire.engine.scheduling.scheduler import Scheduler
from quire.kv.tiers.host_slab import HostSlab
from quire.transfer.address import Address, parse_reachable
from quire.transfer.handshake import Identity
from quire.transfer.nixl_reads import NixlAgent, Region, check_nixl
from quire.worker.tiers import transfer_fingerprint

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """The addresses and the secret for the roles that an engine may have, checked."""

    listen: Address | None
    peers: tuple[Address, ...]
    secret: bytes


def read_transfer_options(config: EngineConfig) -> TransferOptions:
    """Return the KV transfer settings of a configuration, before the model is loaded. Raises ConfigError."""
    if config.kv_transfer_backend == "nixl":
        check_nixl()
    has_secret, text = config.transfer_secret_file is not None, config.prefill_listen
    listen = None if text is None else parse_reachable(text, "prefill_listen", has_secret=has_secret)
    peers = tuple(parse_reachable(url, "prefill_urls", has_secret=has_secret) for url in config.prefill_urls or ())
    secret = b"" if config.transfer_secret_file is None else _read_secret(Path(config.transfer_secret_file).expanduser())
    return TransferOptions(listen, peers, secret)


class KvTransfer:
    """The parts of an engine that send KV pages to others and get them from others, and its role, which says what is begun.

    prefill  serves decode engines while the role is "prefill"; None: the engine was started without prefill_listen
    remote   has prompts computed by prefill engines while the role is "decode"; None: the engine has never that role
    """

    def __init__(self, role: Role, prefill: PrefillService | None, remote: RemotePrefill | None) -> None:
        self.prefill, self.remote, self.role = prefill, remote, role
        self.set_role(role)

    def set_role(self, role: Role) -> None:
        """Change the role. What was begun in the role before goes on to its end. Raises ConfigError.

        With prefill_listen an engine may take every role, otherwise only the one that it was started with.
        """
        if self.prefill is None and role != self.role:
            raise ConfigError(
                f"role {role!r} is not possible here: start the engine with prefill_listen, so that it may change"
            )
        self.role = role
        if self.prefill is not None:
            self.prefill.is_open = role == "prefill"
        if self.remote is not None:
            self.remote.is_open = role == "decode"

    def tier_stats(self) -> list[TierStats]:
        """Return the tier "peer"; nothing where there is none."""
        found = [part.tier_stats() for part in (self.prefill, self.remote) if part is not None]
        return [_merged(*found)] if len(found) == 2 else found


def _merged(lent: TierStats, pulled: TierStats) -> TierStats:
    """Return the sums of what was lent and pulled; max_bytes is the host tier's, which both use."""
    found = dict[str, Any](tier=lent.tier, max_bytes=max(lent.max_bytes, pulled.max_bytes))
    for name in (one.name for one in fields(TierStats) if one.name not in found):
        first, second = getattr(lent, name), getattr(pulled, name)
        found[name] = first + second if not isinstance(first, dict) else {**first, **second}
    found["outcomes"] = dict(Counter(lent.outcomes) + Counter(pulled.outcomes))
    return TierStats(**found)


def open_transfer(
    config: EngineConfig,
    report: ModelReport,
    options: TransferOptions,
    slab: HostSlab | None,
    scheduler: Scheduler,
    check: Callable[[Request], None],
) -> KvTransfer:
    """Return the parts that the roles need which an engine may have. Raises ConfigError where it cannot listen."""
    if not config.has_kv_transfer or slab is None:
        return KvTransfer(config.role, None, None)
    backend = config.kv_transfer_backend
    identity = Identity(transfer_fingerprint(config, report), slab.page_bytes, options.secret, backend)
    nixl = None
    if backend == "nixl":
        nixl = NixlAgent(None if options.listen is None else Region(slab.address, slab.num_slots, slab.stride))
    prefill = None
    if options.listen is not None:
        try:
            prefill = PrefillService(options.listen, identity, slab, scheduler, check, nixl)
        except OSError as error:
            raise ConfigError(f"prefill_listen is {options.listen}, where this engine cannot listen: {error}") from None
    remote = RemotePrefill(list(options.peers), identity, slab, scheduler, config.prefill_min_tokens, nixl)
    return KvTransfer(config.role, prefill, remote)


def _read_secret(path: Path) -> bytes:
    """Return the secret in a file, which is made with mode 600 where there is none. Raises ConfigError."""
    try:
        if not path.exists():
            _make_secret(path)
        status, text = path.stat(), path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"transfer_secret_file {path}: {error.strerror or error}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"transfer_secret_file {path} belongs to user {status.st_uid}, this is user {os.geteuid()}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"transfer_secret_file {path} has mode {mode:o}, so others may read it: chmod it to 600")
    if len(text) < _SECRET_BYTES:
        raise ConfigError(f"transfer_secret_file {path} must have at least {_SECRET_BYTES} characters, it has {len(text)}")
    return text.encode()


def _make_secret(path: Path) -> None:
    """Write a new secret to a file that does not exist; an equal call that was faster wins."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 600
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_SECRET_BYTES) + "\n")
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
