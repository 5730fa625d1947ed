"""Certificate authorities made on the spot, and files signed by them."""

from dataclasses import dataclass
from pathlib import Path

import trustme

from fissile.tls import ClientTls, ServerTls


@dataclass
class Authority:
    """A CA with its files in `folder`."""

    folder: Path

    def __post_init__(self):
        self._ca = trustme.CA()
        self.folder.mkdir()
        self.certificate = self.folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.certificate)

    def issue(self, name: str = "127.0.0.1") -> tuple[Path, Path]:
        """Certificate and key, in files, for a host name or address."""
        signed = self._ca.issue_cert(name)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        signed.cert_chain_pems[0].write_to_path(certificate)
        signed.private_key_pem.write_to_path(key)
        return certificate, key

    def server(self, name: str = "127.0.0.1", *, mutual: bool = False) -> ServerTls:
        return ServerTls(*self.issue(name), self.certificate if mutual else None)

    def client(self, *, with_certificate: bool = False, name: str = "client") -> ClientTls:
        return ClientTls(self.certificate, *(self.issue(name) if with_certificate else ()))
