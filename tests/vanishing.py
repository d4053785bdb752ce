"""Peers that vanish: what comes for them is dropped and nothing is answered, as behind a cable that was cut."""

import ctypes
import socket
import struct
import sys

import pytest

_SO_ATTACH_FILTER = 26
_RETURN = 0x06


def vanish(sock):
    """Have the kernel drop every packet for a socket, acknowledgements and all; skips the test where that cannot be done.

    The socket must not be closed before the peer has noticed: the closing would be sent.
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("packets can be dropped by a filter on Linux only")
    take_nothing = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(take_nothing))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        pytest.skip(f"this system lets no filter be attached to a socket: {error}")
