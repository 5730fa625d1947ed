"""What a router can be told: flags, or `FISSILE_ROUTER_*` in the environment."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from common.config import CommaList, GrpcPort, ServiceSettings, is_sendable
from fissile.tls import ClientTls
from router.targets import Target, parse_target

_ORIGIN = re.compile(r"\*|https?://[^/\s]+")
"""As browsers send it: without a path, not even a slash."""
_SHARE = re.compile(r"(?P<model>.+)@(?P<version>[A-Za-z0-9._-]+)=(?P<share>0?\.[0-9]+|0|1(\.0*)?)")


PolicyName = Literal[
    "prefix", "prefix_history", "least_loaded", "round_robin", "random", "power_of_two", "consistent_hash"
]


class RouterSettings(ServiceSettings):
    """Serve fissile.v1.GenerationService: tokenise, balance over workers, stream text back."""

    model_config = SettingsConfigDict(env_prefix="FISSILE_ROUTER_")

    port: GrpcPort = 50051

    workers: CommaList = Field(
        ("127.0.0.1:50061",),
        description="Workers: host:port, dns:///name:port for every address of the name, file:///path for a file of "
        "addresses, or kubernetes:///service.namespace:port for the pods of a service.",
    )
    resolve_interval: float = Field(5.0, gt=0, description="Seconds between looks at DNS names and files.")
    connect_timeout: float = Field(10.0, gt=0, description="Seconds for each call that sets up a worker.")
    reconnect_backoff: float = Field(0.2, gt=0, description="Seconds before the first reconnect; doubles up to 1.")
    model_aliases: CommaList = Field(
        (),
        description="Other names for models, as NAME=MODEL; workers may have names of their own (--served-model-name).",
    )
    version_shares: CommaList = Field(
        (),
        description="Shares of a model's new requests, 0 to 1, as MODEL@VERSION=SHARE; a version is called by its "
        "workers' --model-version. Other versions share the rest. Unset: all by load.",
    )
    load_interval: float = Field(1.0, gt=0, description="Seconds between load reports of a quiet worker.")

    policy: PolicyName = Field(
        "prefix",
        description="How a worker is chosen. prefix: by load and by what workers tell of their caches; prefix_history: "
        "by what this router has sent them instead.",
    )
    prefix_index_mib: int = Field(
        128, gt=0, description="Bound of what policies by prefix know of workers' caches, in MiB."
    )
    worker_wait: float = Field(5.0, ge=0, description="Seconds a request waits for a healthy worker.")
    max_retries: int = Field(3, ge=0, description="Times a request may move to another worker between two tokens.")
    first_token_timeout: float = Field(
        300.0, gt=0, description="Seconds a worker has for the first token of a request before it moves elsewhere."
    )
    probe_timeout: float = Field(
        1.0,
        gt=0,
        description="Seconds for an answer of a worker that was quiet for --load-interval; after three without one it "
        "counts as lost.",
    )
    silence_timeout: float = Field(
        120.0, gt=0, description="Seconds without a step after which a busy worker counts as lost, though it answers."
    )

    max_message_rate: float = Field(
        3000.0,
        gt=0,
        description="Messages per second to all clients together. Above it, tokens of several steps share a message; "
        "the first and the last message of a stream do not wait. A busy event loop sends as little as a quarter.",
    )
    max_prompt_bytes: int = Field(4 * 1024 * 1024, gt=0, description="Longest prompt text, in bytes.")
    max_open_requests: int = Field(
        4096, gt=0, description="Open requests; more are refused. One client alone gets four fifths of them."
    )
    max_queued_requests: int = Field(
        2048,
        ge=0,
        description="Open requests that wait for room on a worker; when it is full, the longest line gives way.",
    )
    max_held_bytes: int = Field(
        1024 * 1024 * 1024,
        gt=0,
        description="Bytes of requests and of answers that are not read yet, of all clients, by estimate; a request "
        "that would take more is refused or ended. One client alone gets four fifths of them.",
    )
    max_unread_bytes: int = Field(
        64 * 1024 * 1024, gt=0, description="The same, of one answer that is not read yet; past it, it is ended."
    )
    receive_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds that a request has to come in: its message, or over HTTP its head, and again its body.",
    )
    write_timeout: float = Field(
        30.0, gt=0, description="Seconds after which a client that reads nothing of what was sent loses its request."
    )
    max_connections: int = Field(
        4096, gt=0, description="Connections to the gRPC port, and to the HTTP front. One host gets four fifths there."
    )
    max_connection_calls: int = Field(
        128,
        gt=0,
        description="Open calls of one gRPC connection. More wait in the client's own gRPC, where they are in nobody's "
        "way, until others end; a client that wants more at a time opens more connections.",
    )
    max_connection_age: float = Field(
        3600.0,
        gt=0,
        description="Seconds, more or less a tenth, after which a gRPC client is told to connect anew, so that clients "
        "spread over routers that have come. Open requests go on.",
    )
    max_connection_age_grace: float = Field(
        86400.0, gt=0, description="Seconds after which what is still open on such a connection is ended."
    )
    allow_chat_template: bool = Field(False, description="Let requests bring a chat template of their own.")
    chat_template: Path | None = Field(
        None, description="Jinja file in place of the chat templates of all models served here; unset: their own."
    )
    chat_format: Literal["auto", "none", "hermes", "qwen3", "deepseek", "harmony", "glm"] = Field(
        "auto",
        description="How reasoning and tool calls are found in answers of Chat; auto: the chat template tells; none: "
        "all is text.",
    )
    tokenizer_threads: int = Field(2, ge=1, description="Threads that tokenise; large requests leave one of them.")

    drain_timeout: float = Field(30.0, ge=0, description="Seconds that open requests have to finish at shutdown.")

    http_host: str = Field("127.0.0.1", description="Address of the OpenAI-compatible HTTP front.")
    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Its port; unset: no front. With tls-certificate it speaks HTTPS. Needs fissile[http].",
    )
    http_port_file: Path | None = Field(None, description="File to write its port to, once it is bound.")
    http_allowed_origins: CommaList = Field(
        (),
        description="Web pages whose scripts may use it (CORS), as https://host[:port], or * for all; unset: none.",
    )

    api_key: SecretStr = Field(
        SecretStr(""),
        description="What clients must show, as `authorization: Bearer KEY`, on the gRPC port and the HTTP front; "
        "empty: nothing. Better in the environment: flags can be seen by others.",
    )
    api_key_file: Path | None = Field(
        None,
        description="TOML file of more keys, each with a name, a tenant and a quota; read again when it changes.",
    )
    worker_tls: bool = Field(
        False,
        description="Connect to workers over TLS. A worker's certificate must name its host: the address in --workers, "
        "or for dns:/// the name.",
    )
    worker_tls_ca: Path | None = Field(None, description="PEM file: CA of the workers; unset: the system's.")
    worker_tls_certificate: Path | None = Field(None, description="PEM file: certificate to show to workers.")
    worker_tls_key: Path | None = Field(None, description="PEM file: its key.")

    worker_key: SecretStr = Field(
        SecretStr(""),
        description="What workers with a --router-key want to see. Better in the environment: flags can be seen by "
        "others.",
    )
    channelz: bool = Field(False, description="Tell callers with a key of connections and calls (gRPC).")

    @model_validator(mode="after")
    def _consistent(self) -> "RouterSettings":
        if not self.workers:
            raise ValueError("at least one worker is needed")
        self.targets()
        self.aliases()
        self.shares()
        for name, key in (("api-key", self.api_key), ("worker-key", self.worker_key)):
            if not is_sendable(key.get_secret_value()):
                raise ValueError(f"{name}: must be printable ASCII without blanks")
        for origin in self.http_allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"http-allowed-origins: {origin!r} must be http(s)://host[:port] or *")
        if (self.worker_tls_certificate is None) != (self.worker_tls_key is None):
            raise ValueError("worker-tls-certificate and worker-tls-key go together")
        if not self.worker_tls and (self.worker_tls_ca or self.worker_tls_certificate):
            raise ValueError("worker-tls-ca and worker-tls-certificate need worker-tls")
        return self

    def targets(self) -> list[Target]:
        """Where workers are. Raises ValueError."""
        try:
            return [parse_target(text) for text in self.workers]
        except ValueError as error:
            raise ValueError(f"workers: {error}") from None

    def aliases(self) -> dict[str, str]:
        """Ids of models by alias. Raises ValueError."""
        pairs = [word.partition("=")[::2] for word in self.model_aliases]
        for (name, model), word in zip(pairs, self.model_aliases, strict=True):
            if not name or not model:
                raise ValueError(f"model-aliases: {word!r} must be NAME=MODEL")
        return dict(pairs)

    def shares(self) -> dict[str, dict[str, float]]:
        """By model and version. Raises ValueError."""
        shares: dict[str, dict[str, float]] = {}
        for word in self.version_shares:
            match = _SHARE.fullmatch(word)
            if match is None:
                raise ValueError(f"version-shares: {word!r} must be MODEL@VERSION=SHARE, the share from 0 to 1")
            shares.setdefault(match["model"], {})[match["version"]] = float(match["share"])
        for model, by_version in shares.items():
            if sum(by_version.values()) > 1 + 1e-9:
                raise ValueError(f"version-shares: those of {model} are more than 1 together")
        return shares

    def client_tls(self) -> ClientTls | None:
        if not self.worker_tls:
            return None
        return ClientTls(self.worker_tls_ca, self.worker_tls_certificate, self.worker_tls_key)
