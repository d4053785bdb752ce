"""The handshake of two engines: they prove that they know the shared secret, then compare fingerprints.

D -> P  hello      version, nonce
P -> D  challenge  version, nonce, incarnation, proof of P
D -> P  identify   proof of D, fingerprint, page_bytes
P -> D  welcome, or refusal with a reason; on a Unix socket with P's slots, which D then maps
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from quire.contracts.shared_slots import SharedSlots
from quire.transfer.channel import PROTOCOL_VERSION, Channel, Fields, TransferError, int_of, text_of, texts_of

_NONCE_BYTES = 16
_MAX_SHOWN = 20
"""Differing fields that are named, as their names come from the peer."""
REFUSAL_REASONS = ("version", "auth", "mismatch", "busy", "refused")


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine says of itself.

    fingerprint  all on which the bytes of a page depend, besides its tokens
    page_bytes   of one page
    secret       shared with the peers; empty: none, for peers of the same machine
    backend      how pages travel: "sockets" or "nixl"
    """

    fingerprint: Mapping[str, str]
    page_bytes: int
    secret: bytes = b""
    backend: str = "sockets"


class RefusedError(Exception):
    """The peer does not take the request, for one of REFUSAL_REASONS."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def greet(channel: Channel, identity: Identity) -> tuple[str, SharedSlots | Fields | None]:
    """Do the decode engine's part of the handshake, and return the peer's incarnation, and its slots if pages are read from
    there: fields for NixlAgent.open, or slots whose file descriptor the caller has to close.

    Raises TransferError and RefusedError.
    """
    mine = secrets.token_hex(_NONCE_BYTES)
    channel.send({"type": "hello", "version": PROTOCOL_VERSION, "nonce": mine})
    fields, _ = channel.receive("challenge", "refusal")
    raise_refusal(fields)
    nonce, incarnation = text_of(fields, "nonce"), text_of(fields, "incarnation")
    if not hmac.compare_digest(text_of(fields, "proof"), _proof(identity.secret, "prefill", mine, nonce, incarnation)):
        raise RefusedError("auth", "the peer does not know the secret of transfer_secret_file")
    channel.send(
        {
            "type": "identify",
            "proof": _proof(identity.secret, "decode", mine, nonce, incarnation),
            "fingerprint": dict(identity.fingerprint),
            "page_bytes": identity.page_bytes,
            "backend": identity.backend,
        }
    )
    fields, _ = channel.receive("welcome", "refusal")
    raise_refusal(fields)
    if identity.backend == "nixl":
        return incarnation, fields
    if "num_slots" not in fields:
        return incarnation, None
    num_slots = int_of(fields, "num_slots", 1, 1 << 40)
    stride = int_of(fields, "stride", identity.page_bytes, 1 << 40)
    return incarnation, SharedSlots(channel.receive_fd(), num_slots, stride)


def receive_greeting(
    channel: Channel, identity: Identity, incarnation: str, shared: SharedSlots | Fields | None = None
) -> None:
    """Do the prefill engine's part. Raises TransferError, and RefusedError after it was sent.

    shared  the slots that the peer is to map, or what NIXL needs to read them; None: pages are sent
    """
    fields, _ = channel.receive("hello")
    theirs, mine = text_of(fields, "nonce"), secrets.token_hex(_NONCE_BYTES)
    if fields.get("version") != PROTOCOL_VERSION:
        refuse(channel, "version", f"this engine speaks version {PROTOCOL_VERSION} of KV transfer")
    proof = _proof(identity.secret, "prefill", theirs, mine, incarnation)
    channel.send({"type": "challenge", "version": PROTOCOL_VERSION, "nonce": mine, "incarnation": incarnation, "proof": proof})
    fields, _ = channel.receive("identify")
    if not hmac.compare_digest(text_of(fields, "proof"), _proof(identity.secret, "decode", theirs, mine, incarnation)):
        refuse(channel, "auth", "the secret of transfer_secret_file is another one")
    different = find_differences(texts_of(fields, "fingerprint"), identity.fingerprint)
    if different:
        refuse(channel, "mismatch", f"the engines differ in {'; '.join(different)}")
    backend = fields.get("backend", "sockets")
    if backend != identity.backend:
        refuse(channel, "mismatch", f"the engines differ in {_difference('kv_transfer_backend', backend, identity.backend)}")
    if int_of(fields, "page_bytes", 1, 1 << 40) != identity.page_bytes:
        refuse(
            channel, "mismatch", f"the engines differ in {_difference('page_bytes', fields['page_bytes'], identity.page_bytes)}"
        )
    if shared is None:
        channel.send({"type": "welcome"})
    elif isinstance(shared, dict):
        channel.send({"type": "welcome", **shared})
    else:
        channel.send({"type": "welcome", "num_slots": shared.num_slots, "stride": shared.stride})
        channel.send_fd(shared.fd)


def find_differences(decode: Mapping[str, str], prefill: Mapping[str, str]) -> list[str]:
    """Return the fields in which the fingerprints of a decode and a prefill engine differ, with both values."""
    names = [*prefill, *(name for name in decode if name not in prefill)]
    found = [name for name in names if decode.get(name) != prefill.get(name)]
    return [_difference(name[:40], decode.get(name, "nothing"), prefill.get(name, "nothing")) for name in found[:_MAX_SHOWN]]


def _difference(name: str, decode: object, prefill: object) -> str:
    return f"{name}: {decode!s:.200} on the decode engine, {prefill!s:.200} on the prefill engine"


def refuse(channel: Channel, reason: str, text: str) -> None:
    """Send a refusal, and raise it as RefusedError."""
    channel.send({"type": "refusal", "reason": reason, "text": text})
    raise RefusedError(reason, text)


def raise_refusal(fields: dict[str, object]) -> None:
    """Raise RefusedError if a message is a refusal. Raises TransferError."""
    if fields["type"] == "refusal":
        reason = text_of(fields, "reason")
        if reason not in REFUSAL_REASONS:
            raise TransferError(f"the peer refuses for the reason {reason!r:.40}, which is none of {REFUSAL_REASONS}")
        raise RefusedError(reason, text_of(fields, "text"))


def _proof(secret: bytes, role: str, decode_nonce: str, prefill_nonce: str, incarnation: str) -> str:
    message = "\0".join((role, decode_nonce, prefill_nonce, incarnation)).encode()
    return hmac.new(secret or b"none", message, hashlib.sha256).hexdigest()
