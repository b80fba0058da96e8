"""Certificates of a server of our own: an authority made on the spot, and a server certificate that it signs.

The authority stays in the folder, so that those who trust it can connect after each start. The server certificate is
made anew at each start, because the machine may have other addresses then.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from archipelago.broker.errors import ConfigError
from archipelago.broker.files import PRIVATE, write_atomically

AUTHORITY_DAYS: Final = 3650
SERVER_DAYS: Final = 825
#: Clocks of members may be behind ours.
EARLIER: Final = datetime.timedelta(days=1)
_NO_USAGES: Final = dict.fromkeys(
    ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
     "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False,
)  # fmt: skip


@dataclass(frozen=True)
class CertificateFolder:
    """The folder at `path` with the certificates, as PEM, and their private keys."""

    path: Path

    @property
    def authority(self) -> Path:
        """The certificate of the authority, which members pin."""
        return self.path / "authority.pem"

    @property
    def authority_key(self) -> Path:
        """The private key of the authority."""
        return self.path / "authority.key"

    @property
    def server(self) -> Path:
        """The certificate of the server."""
        return self.path / "server.pem"

    @property
    def server_key(self) -> Path:
        """The private key of the server."""
        return self.path / "server.key"

    def renew(self, hosts: Sequence[str], now: datetime.datetime) -> None:
        """Make a server certificate, and the authority if there is none or it ends soon.

        Args:
            hosts: The names and addresses of the server.
            now: The time, with its time zone.

        Raises:
            ConfigError: The files of the authority cannot be read.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.authority.exists() or not self.authority_key.exists():
            self._make_authority(now)
        certificate, key = self._load()
        if certificate.not_valid_after_utc < now + datetime.timedelta(days=SERVER_DAYS):
            self._make_authority(now)
            certificate, key = self._load()
        self._make_server(certificate, key, hosts, now)

    def _load(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        try:
            key = serialization.load_pem_private_key(self.authority_key.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(self.authority.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(str(error)) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
            raise self._damaged("key and certificate do not belong together")
        return certificate, key

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(
            f"the certificate authority in {self.path} cannot be used ({why})",
            "Delete that folder. A new authority is then made, and all members need new invitations.",
            code="certificates.damaged",
        )

    def _make_authority(self, now: datetime.datetime) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "archipelago authority")])
        usage = x509.KeyUsage(**{**_NO_USAGES, "key_cert_sign": True, "crl_sign": True})
        certificate = (
            _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        write_atomically(self.authority_key, _private(key), mode=PRIVATE)
        write_atomically(self.authority, certificate.public_bytes(serialization.Encoding.PEM))

    def _make_server(
        self,
        authority: x509.Certificate,
        authority_key: ec.EllipticCurvePrivateKey,
        hosts: Sequence[str],
        now: datetime.datetime,
    ) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "archipelago server")])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        certificate = (
            _builder(name, authority.subject, key.public_key(), now, SERVER_DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**{**_NO_USAGES, "digital_signature": True}), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_host(each) for each in dict.fromkeys(hosts)]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        write_atomically(self.server_key, _private(key), mode=PRIVATE)
        write_atomically(self.server, certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
