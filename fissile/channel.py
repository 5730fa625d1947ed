"""Channel and server options. One place, because a misspelt gRPC option is ignored in silence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from fissile.errors import InvalidArgumentError
from fissile.tls import ClientTls

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
    # A client that vanished without a word is found out, and what it had open ends.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Calls that wait to be taken up. From 1,000 on gRPC would cancel some at random, and all beyond 3,000: the service
    # refuses what is too much itself, and says when to come again.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # Two processes on one port would share its connections at random instead of the second one failing.
    ("grpc.so_reuseport", 0),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_SIZE,
    # A channel has a connection of its own: a router lets each carry so many calls at a time, and equal channels of a
    # process would share one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    # For the answer to any ping, those that measure a stream that runs among them; it acts where the time-out of
    # keepalive alone does not. A process that is stopped answers none.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Reconnect soon after a restart: gRPC's own backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # How long an attempt may take: a server with much to do is not there at once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


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
