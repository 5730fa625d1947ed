"""Messages between hosts: frames over TCP, between peers that share a secret.

Each side proves that it knows the secret before anything else of it is read, and each frame after that has a proof of
its own (HMAC-SHA256 over its number and contents, a key a direction and connection), so that nothing is ever taken from
a peer that does not know the secret. Who listens in can read what is said: weights and tokens of ranks on the same
network are no less open.
"""

import hmac
import secrets
import socket
import struct
import sys
import time
from contextlib import suppress

MAX_FRAME_BYTES = 1 << 28
"""Far more than a step takes; a peer out of step does not make us reserve more."""
HANDSHAKE_SECONDS = 5.0
NONCE_BYTES = MAC_BYTES = 32
MIN_SECRET_LENGTH = 16
_MAGIC = b"fissile1"
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class HandshakeError(ConnectionError):
    """The peer is not ours, or does not share the secret."""


class TcpConnection:
    """A `Sender` and a `Receiver`. One thread at a time may send, one receive; any may `close`."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        """Made by `accept` and `connect`; takes over `sock`."""
        self._sock = sock
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        self.peer = str(sock.getpeername()[0])
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":  # a host that is gone, or cut off, is noticed within 4 s
            for option, value in (
                (socket.TCP_KEEPIDLE, 1),
                (socket.TCP_KEEPINTVL, 1),
                (socket.TCP_KEEPCNT, 3),
                (socket.TCP_USER_TIMEOUT, 4000),
            ):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send_bytes(self, buf: bytes, /) -> None:
        """Raises OSError when the peer is gone, ValueError for a message larger than a frame may be."""
        if len(buf) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(buf)} bytes is larger than {MAX_FRAME_BYTES}")
        self._sock.sendall(_LENGTH.pack(len(buf)) + _proof(self._send_key, _NUMBER.pack(self._num_sent), buf) + buf)
        self._num_sent += 1

    def recv_bytes(self) -> bytes:
        """Blocks. Raises EOFError when the peer has closed, OSError when it broke off or sent what is not its own."""
        head = _read(self._sock, _LENGTH.size + MAC_BYTES)
        (length,) = _LENGTH.unpack_from(head)
        if length > MAX_FRAME_BYTES:
            raise ConnectionError(f"{self.peer} sends a frame of {length} bytes")
        data = _read(self._sock, length)
        if not hmac.compare_digest(
            head[_LENGTH.size :], _proof(self._receive_key, _NUMBER.pack(self._num_received), data)
        ):
            raise ConnectionError(f"what came from {self.peer} is not what it sent")
        self._num_received += 1
        return data

    def close(self) -> None:
        """Whoever sends or receives has an error then. Idempotent."""
        _hang_up(self._sock)


def accept(sock: socket.socket, secret: bytes) -> TcpConnection:
    """The side that listened. Raises OSError or EOFError, HandshakeError among them; `sock` is closed then."""
    try:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        ours = secrets.token_bytes(NONCE_BYTES)
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.sendall(_MAGIC + ours)
        hello = _read(sock, len(_MAGIC) + NONCE_BYTES + MAC_BYTES, deadline)
        theirs = hello[len(_MAGIC) : -MAC_BYTES]
        if not hello.startswith(_MAGIC) or not hmac.compare_digest(
            hello[-MAC_BYTES:], _proof(secret, b"connects", ours, theirs)
        ):
            raise HandshakeError("it does not know the secret of this worker's ranks")
        sock.sendall(_proof(secret, b"listens", ours, theirs))
        return TcpConnection(sock, _proof(secret, b"down", ours, theirs), _proof(secret, b"up", ours, theirs))
    except BaseException:
        _hang_up(sock)
        raise


def connect(host: str, port: int, secret: bytes) -> TcpConnection:
    """Raises OSError or EOFError, HandshakeError among them."""
    sock = socket.create_connection((host, port), HANDSHAKE_SECONDS)
    try:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        ours = secrets.token_bytes(NONCE_BYTES)
        hello = _read(sock, len(_MAGIC) + NONCE_BYTES, deadline)
        theirs = hello[len(_MAGIC) :]
        if not hello.startswith(_MAGIC):
            raise HandshakeError(f"{host}:{port} is no worker that waits for ranks")
        sock.sendall(_MAGIC + ours + _proof(secret, b"connects", theirs, ours))
        try:
            proof = _read(sock, MAC_BYTES, deadline)
        except (EOFError, ConnectionError):
            raise HandshakeError(f"{host}:{port} refuses the secret") from None
        if not hmac.compare_digest(proof, _proof(secret, b"listens", theirs, ours)):
            raise HandshakeError(f"{host}:{port} does not know the secret")
        return TcpConnection(sock, _proof(secret, b"up", theirs, ours), _proof(secret, b"down", theirs, ours))
    except BaseException:
        _hang_up(sock)
        raise


def _proof(key: bytes, *parts: bytes) -> bytes:
    """All but the last of `parts` are of fixed lengths, so that no two lists of parts read the same."""
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(part)
    return mac.digest()


def _read(sock: socket.socket, length: int, deadline: float | None = None) -> bytes:
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = sock.recv_into(view[at:])
        if count == 0:
            raise EOFError
        at += count
    return bytes(data)


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes whoever reads
    sock.close()
