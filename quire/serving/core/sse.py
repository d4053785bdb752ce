"""named_frame: a server-sent event that is named by its type."""

from __future__ import annotations

import msgspec


def named_frame(event: msgspec.Struct) -> bytes:
    """Return a Struct with a tag as a server-sent event of that name."""
    return b"event: %s\ndata: %s\n\n" % (str(event.__struct_config__.tag).encode(), msgspec.json.encode(event))
