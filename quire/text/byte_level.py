"""GPT-2's alphabet: the printable character that stands for each byte in a byte-level vocabulary."""

from __future__ import annotations


def _byte_by_character() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_BY_CHARACTER = _byte_by_character()


def bytes_of_byte_level(token: str) -> bytes:
    """Return the bytes of a token; one that is not spelt in the alphabet (an added token) stands for its UTF-8."""
    try:
        return bytes([BYTE_BY_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def byte_of_fallback(token: str) -> int | None:
    """Return the byte of a token spelt <0x0A>, None for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
