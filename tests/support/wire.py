"""Length-prefixed messages between the test process, the zygote and the ranks.

Both ends are our own processes, connected by a socketpair that nobody else can open, so the payload is a pickle. File
descriptors travel with a message (SCM_RIGHTS). A reader keeps partial data, so that a selector can drive it without
ever blocking on half a message.
"""

from __future__ import annotations

import array
import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<Q")
_MAX_FDS = 64


def send(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    payload = pickle.dumps(message)
    header = _HEADER.pack(len(payload))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([header], ancillary)
    sock.sendall(payload)


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            raise EOFError("the other end closed")
        parts += part
    return bytes(parts)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Returns one message and its descriptors. Raises EOFError if the other end is gone."""
    fds = array.array("i")
    header, ancillary, _, _ = sock.recvmsg(_HEADER.size, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize))
    if not header:
        raise EOFError("the other end closed")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    header += _read_exactly(sock, _HEADER.size - len(header)) if len(header) < _HEADER.size else b""
    return pickle.loads(_read_exactly(sock, _HEADER.unpack(header)[0])), list(fds)


class Reader:
    """Reads messages from a socket when a selector says that data is available."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self.closed = False

    def drain(self) -> list[Any]:
        """Returns every complete message that has arrived. Sets `closed` at the end of the stream."""
        while not self.closed:
            try:
                part = self._sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                self.closed = True
            self._data += part
        messages = []
        while len(self._data) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._data)
            if len(self._data) < _HEADER.size + size:
                break
            messages.append(pickle.loads(bytes(self._data[_HEADER.size : _HEADER.size + size])))
            del self._data[: _HEADER.size + size]
        return messages
