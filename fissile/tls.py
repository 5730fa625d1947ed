"""TLS of servers and clients, from files that may be renewed while a service runs."""

import logging
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from fissile.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


class WatchedFiles:
    """Files that may be replaced. Any thread."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._stamps()
        self._lock = threading.Lock()

    def have_changed(self) -> bool:
        """Since the last look."""
        with self._lock:
            seen, self._seen = self._seen, self._stamps()
            return self._seen != seen

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """None: it cannot be read now."""
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files in PEM. With `client_ca` clients must show a certificate of it (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path]

    def check(self) -> None:
        """Raises InvalidArgumentError, naming the file, if one cannot be used."""
        _check(self.certificate, self.key, self.client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Files that are replaced count for the connections after that; while they cannot be used, the old ones do.
        Raises InvalidArgumentError, as `check` does."""
        watched = WatchedFiles(self.files)

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            return self._renewed() if watched.have_changed() else None

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), renewed, require_client_authentication=self.client_ca is not None
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            configuration = self._configuration()
        except InvalidArgumentError as error:
            logger.error("certificates are not read again: %s", error.message)
            return None
        logger.info("certificates have been read again: %s", self.certificate)
        return configuration

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self.check()
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=self.client_ca.read_bytes() if self.client_ca else None,
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
