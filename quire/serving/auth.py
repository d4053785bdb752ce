"""Authentication: API keys, or, without keys, checks of the Host and Origin headers."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.serving.config import ApiKey, ServerConfig
from quire.serving.errors import ApiError
from quire.serving.hosts import HostCheck, is_loopback
from quire.serving.interfaces import Tenant

logger = get_logger(__name__)

SECRET_BYTES = 32
SECRET_NAME = "cache_secret"
"""The file of the cache secret in the folder of a disk tier."""
ANONYMOUS = Tenant(name="anonymous", cache_salt="", is_admin=True, may_use_interactive=True)


def hash_key(key: str) -> bytes:
    """Return the hash that is stored instead of an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Authenticator:
    """Turns the headers of a request into its Tenant.

    With keys every tenant has a cache salt of its own, so that the time a prompt takes does not tell what others have sent.

    secret  that the salts are made with; None: a new one, so that nothing is found of what earlier servers have cached
    """

    def __init__(self, config: ServerConfig, secret: bytes | None = None) -> None:
        self._config = config
        secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._owners = [
            (
                key.sha256,
                Tenant(
                    name=key.name,
                    cache_salt=hmac.new(secret, key.name.encode(), "sha256").hexdigest(),
                    is_admin=key.is_admin,
                    may_use_interactive=key.may_use_interactive,
                ),
            )
            for key in config.api_keys
        ]
        self._by_name = {owner.name: owner for _, owner in self._owners}
        self._hosts = HostCheck((*config.allowed_hosts, config.host) if is_loopback(config.host) else None)

    def identify(self, headers: Mapping[str, str]) -> Tenant:
        """Return who sends a request. Raises ApiError 401 without a valid key, 403 for a foreign page or host name."""
        if not self._owners:
            self._check_origin(headers)
            return ANONYMOUS
        key = _presented_key(headers)
        if key is None:
            raise ApiError(401, "an API key is needed: send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
        digest = hash_key(key)
        found = None
        for known, owner in self._owners:  # compare with all keys, so that the time reveals nothing
            if hmac.compare_digest(known, digest):
                found = owner
        if found is None:
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")
        return found

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether the caller of an open route has full access."""
        try:
            self.identify(headers)
        except ApiError:
            return False
        return True

    def owner_named(self, name: str) -> Tenant:
        """Return the owner of stored work; an owner whose key was removed gets its own cache salt."""
        if not self._owners and name == ANONYMOUS.name:
            return ANONYMOUS
        return self._by_name.get(name) or Tenant(name=name, cache_salt=secrets.token_hex(32))

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse browser requests from pages of other origins, and DNS rebinding."""
        host = headers.get("host")
        self._hosts.check(host)
        origin = headers.get("origin")
        if origin is None or origin in self._config.allowed_origins or "*" in self._config.allowed_origins:
            return
        if not host or origin.partition("://")[2] != host:
            raise ApiError(
                403, f"requests from the origin {origin[:100]!r} are not allowed; --allowed-origins adds them", code="origin"
            )


def _presented_key(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or headers.get("api-key") or None  # of Anthropic's clients, and of Azure's


def cache_secret(config: ServerConfig, kv_disk_dir: str | None) -> bytes | None:
    """Return the secret that outlives the server: of --cache-secret-file, or where there is a disk tier, of a file in it.

    None where there is no such file. Raises ConfigError for a file that was named and cannot be used.
    """
    if config.cache_secret_file is not None:
        return read_cache_secret(config.cache_secret_file.expanduser())
    if kv_disk_dir is None or not config.api_keys:
        return None
    folder = Path(kv_disk_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return read_cache_secret(folder / SECRET_NAME)
    except (ConfigError, OSError) as error:
        logger.warning("prompts that are cached now will not be found after a restart: %s", error)
        return None


def read_cache_secret(path: Path) -> bytes:
    """Return the secret in a file, which is made with mode 600 where there is none. Raises ConfigError, never with the secret.

    Of several servers that start at the same time one makes the file, and all read the same.
    """
    try:
        if not path.exists():
            _make_secret(path)
        status, text = path.stat(), path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--cache-secret-file {path}: {error.strerror or error}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"--cache-secret-file {path} belongs to user {status.st_uid}, this is user {os.geteuid()}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"--cache-secret-file {path} has mode {mode:o}, so others may read it: chmod it to 600")
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"--cache-secret-file {path} must have {2 * SECRET_BYTES} hexadecimal digits only; delete it, and a new one is made"
        )
    return secret


def _make_secret(path: Path) -> None:
    """Write a new secret to a file that does not exist; an equal call that was faster wins."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 600
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of a key file; either the key or its SHA-256 in hexadecimal."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    key: str | None = None
    sha256: str | None = None
    max_concurrent: Annotated[int, msgspec.Meta(ge=1)] | None = None
    requests_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    max_stored_files: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_stored_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_stored_batches: Annotated[int, msgspec.Meta(ge=0)] | None = None
    admin: bool = False
    priority: bool = False


def read_key_file(path: Path) -> list[ApiKey]:
    """Return the keys in a JSON file, a list of objects with a name and a key (or its sha256), and perhaps limits.

    Raises ConfigError that names the problem but never contains a key.
    """
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_KeyEntry])
        return [_as_key(entry) for entry in entries]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None


def _as_key(entry: _KeyEntry) -> ApiKey:
    if (entry.key is None) == (entry.sha256 is None):
        raise ValueError(f"the entry {entry.name!r} must have either key or sha256")
    digest = bytes.fromhex(entry.sha256) if entry.sha256 is not None else hash_key(entry.key or "")
    if len(digest) != hashlib.sha256().digest_size or entry.key == "":
        raise ValueError(f"the entry {entry.name!r} must have a key, or a sha256 of 64 hexadecimal digits")
    return ApiKey(
        entry.name,
        digest,
        max_concurrent=entry.max_concurrent,
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        weight=entry.weight,
        max_stored_files=entry.max_stored_files,
        max_stored_bytes=entry.max_stored_bytes,
        max_stored_batches=entry.max_stored_batches,
        is_admin=entry.admin,
        may_use_interactive=entry.priority,
    )
