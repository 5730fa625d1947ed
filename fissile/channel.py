"""Channel and server options, and TLS. One place, because a misspelt gRPC option is ignored in silence."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from fissile.errors import InvalidArgumentError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Both directions. gRPC's own limit of 4 MiB is below a long prompt with log probabilities."""

MAX_PENDING_CALLS = 32_768
"""Of a server."""

_MESSAGE_SIZE = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_SIZE,
    # A stream is silent while a long prompt is computed. Without these two, a client's pings in that time would count
    # as abuse and be answered with GOAWAY "too_many_pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Calls that wait to be taken up. From 1,000 on gRPC would cancel some at random, and all beyond 3,000: the service
    # refuses what is too much itself, and says when to come again.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # Two processes on one port would share its connections at random instead of the second one failing.
    ("grpc.so_reuseport", 0),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_SIZE,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Reconnect soon after a restart: gRPC's own backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files in PEM. With `client_ca` clients must show a certificate of it (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises InvalidArgumentError, naming the file, if one cannot be used."""
        _check(self.certificate, self.key, self.client_ca)
        roots = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=roots,
            require_client_auth=roots is not None,
        )


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files in PEM. `ca` unset: the system's roots. `certificate` and `key` are for servers that want one."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """What the server's certificate must name; empty: the host of the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgumentError, naming the file, if one cannot be used, or if only one of a pair is given."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgumentError("TLS: a certificate and its key go together")
        _check(self.certificate, self.key, self.ca)
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca.read_bytes() if self.ca else None,
            private_key=self.key.read_bytes() if self.key else None,
            certificate_chain=self.certificate.read_bytes() if self.certificate else None,
        )

    def options(self) -> list[tuple[str, int | str]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def _check(certificate: Path | None, key: Path | None, ca: Path | None) -> None:
    """gRPC would only say, on standard error or at the first call, that something is wrong, and not with which file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise InvalidArgumentError(f"TLS certificate {certificate} with key {key}: {error}") from error
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except OSError as error:
        raise InvalidArgumentError(f"TLS CA {ca}: {error}") from error


def call_metadata(api_key: str) -> list[tuple[str, str]]:
    """What every call of a client carries. Raises InvalidArgumentError for a key that no header can hold."""
    if not api_key:
        return []
    if not api_key.isascii() or not api_key.isprintable():
        raise InvalidArgumentError("api_key: must be printable ASCII")
    return [("authorization", f"Bearer {api_key}")]


def aio_channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel for asyncio; the caller closes it. Raises InvalidArgumentError for unusable TLS files."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.aio.secure_channel(address, tls.credentials(), options=[*CLIENT_OPTIONS, *tls.options()])


class KeyedChannel:
    """Stands for a channel where a stub wants one: each call shows the key. A client interceptor would do the same, and
    put a queue and a task between a stream and its writer."""

    def __init__(self, channel: grpc.aio.Channel, api_key: str) -> None:
        """Raises InvalidArgumentError for a key that no header can hold. The channel stays the caller's."""
        self._metadata = call_metadata(api_key)
        self.unary_unary = self._keyed(channel.unary_unary)
        self.unary_stream = self._keyed(channel.unary_stream)
        self.stream_unary = self._keyed(channel.stream_unary)
        self.stream_stream = self._keyed(channel.stream_stream)

    def _keyed(self, make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        return lambda *args, **kwargs: partial(make(*args, **kwargs), metadata=self._metadata)


def channel(address: str, tls: ClientTls | None = None) -> grpc.Channel:
    """A blocking channel; the caller closes it. Raises InvalidArgumentError for unusable TLS files."""
    if tls is None:
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.secure_channel(address, tls.credentials(), options=[*CLIENT_OPTIONS, *tls.options()])
