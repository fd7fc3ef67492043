"""A certificate of one's own."""

import shutil
import subprocess
from pathlib import Path

import pytest

SUBJECT = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")


def make_certificate(folder: Path) -> Path:
    """For 127.0.0.1, with its key in `key.pem` beside it; skips where there is no openssl."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not there to make a certificate with")
    key_path, certificate_path = folder / "key.pem", folder / "cert.pem"
    arguments = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *SUBJECT)
    subprocess.run(
        [program, *arguments, "-keyout", str(key_path), "-out", str(certificate_path)],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    return certificate_path
