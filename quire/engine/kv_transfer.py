"""What an engine's role needs: a page server for decode engines, or the client of prefill engines."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.contracts.request import Request
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
    """The addresses and the secret of an engine's role, checked."""

    listen: Address | None
    peers: tuple[Address, ...]
    secret: bytes


def read_transfer_options(config: EngineConfig) -> TransferOptions:
    """Return what a configuration says of KV transfer, before the model is loaded. Raises ConfigError."""
    if config.kv_transfer_backend == "nixl":
        check_nixl()
    has_secret, text = config.transfer_secret_file is not None, config.prefill_listen
    listen = None if text is None else parse_reachable(text, "prefill_listen", has_secret=has_secret)
    peers = tuple(parse_reachable(url, "prefill_urls", has_secret=has_secret) for url in config.prefill_urls or ())
    secret = b"" if config.transfer_secret_file is None else _read_secret(Path(config.transfer_secret_file).expanduser())
    return TransferOptions(listen, peers, secret)


def open_transfer(
    config: EngineConfig,
    report: ModelReport,
    options: TransferOptions,
    slab: HostSlab | None,
    scheduler: Scheduler,
    check: Callable[[Request], None],
) -> tuple[PrefillService | None, RemotePrefill | None]:
    """Return the part that an engine's role needs. Raises ConfigError where it cannot listen."""
    if config.role == "both" or slab is None:
        return None, None
    backend = config.kv_transfer_backend
    identity = Identity(transfer_fingerprint(config, report), slab.page_bytes, options.secret, backend)
    nixl = None
    if backend == "nixl":
        nixl = NixlAgent(None if options.listen is None else Region(slab.address, slab.num_slots, slab.stride))
    if options.listen is None:
        return None, RemotePrefill(list(options.peers), identity, slab, scheduler, config.prefill_min_tokens, nixl)
    try:
        return PrefillService(options.listen, identity, slab, scheduler, check, nixl), None
    except OSError as error:
        raise ConfigError(f"prefill_listen is {options.listen}, where this engine cannot listen: {error}") from None


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
