"""Certificates for servers and clients of tests."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from archipelago.broker.machine import LOOPBACK


@dataclass(frozen=True)
class Identity:
    """A certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """An authority, two identities that it signed, and a self-signed one.

    The server's certificate is issued to 127.0.0.1 and to no other name.
    """

    authority: Identity
    server: Identity
    island: Identity
    stranger: Identity


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)  # noqa: S607


def signed(folder: Path, name: str, by: str = "", extension: str = "") -> Identity:
    """Make a certificate, signed by the authority `by` in the same folder, or self-signed."""
    openssl(
        folder,
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
        *("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN=archipelago {name}"),
        *(("-addext", extension) if extension else ()),
        *(("-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-addext", "basicConstraints=CA:FALSE") if by else ()),
    )
    return Identity(folder / f"{name}.pem", folder / f"{name}.key")


def make_certificates(folder: Path) -> Certificates:
    """Make the certificates with the openssl program; skip the test if there is none."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program is not installed")
    authority = signed(folder, "authority", extension="keyUsage=critical,keyCertSign")
    try:
        server = signed(folder, "server", "authority", f"subjectAltName=IP:{LOOPBACK}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this openssl cannot sign a new certificate: {error.stderr.decode()[:200]}")
    island = signed(folder, "island", "authority")
    stranger = signed(folder, "stranger", extension=f"subjectAltName=IP:{LOOPBACK}")
    return Certificates(authority, server, island, stranger)
