"""A self-signed certificate for localhost, made with the `openssl` command."""

import shutil
import subprocess
from pathlib import Path

import pytest

from common.channel import ServerTls


def self_signed(folder: Path) -> tuple[ServerTls, Path]:
    """Server TLS and the certificate that clients should trust. Skips the test where `openssl` is missing."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return ServerTls(certificate=certificate, key=key), certificate
