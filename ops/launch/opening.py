"""A server that other machines reach: its addresses, certificates and users.

It talks TLS only, and has a user for each member. An authority that is made on the spot signs its certificate. The
authority stays in the folder, so that those who trust it can connect after each start. The server's certificate is made
anew at each start, because the machine may have other addresses then.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import socket
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
from archipelago.broker.machine import LOOPBACK

#: The certificate of the authority, which members pin, that of the server, and their private keys.
AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY = "authority.pem", "authority.key", "server.pem", "server.key"
AUTHORITY_DAYS: Final = 3650
SERVER_DAYS: Final = 825
#: Clocks of members may be behind ours.
EARLIER: Final = datetime.timedelta(days=1)
_NO_USAGES: Final = dict.fromkeys(
    ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
     "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False,
)  # fmt: skip
CERTIFICATES: Final = "certificates"
USERS: Final = "users.acl"
#: The user that may do everything at a server that other machines reach. The user `default` is off there.
ADMINISTRATOR: Final = "archipelago"
#: An address that no machine has (RFC 5737). It only makes the system choose the address with which it would send.
_ELSEWHERE: Final = ("192.0.2.1", 9)


@dataclass(frozen=True)
class Opening:
    """How other machines reach a server.

    Attributes:
        host: The name or address that they use.
        listen: The addresses at which the server listens besides loopback; empty for all.
        names: Further names and addresses of this machine for the certificate.
    """

    host: str
    listen: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def describe(self, port: int) -> str:
        """Describe where the server listens, for people."""
        listen = " and ".join(self.listen) or "all addresses"
        return f"port {port} of {listen} with TLS, known to others as {self.host}"

    def settings(self, folder: Path, port: int, password: str) -> dict[str, str]:
        """Write the certificates and the users of the server in a folder, and return its settings."""
        hosts = (self.host, *self.listen, *self.names, LOOPBACK, "::1", "localhost")
        CertificateFolder(folder / CERTIFICATES).renew(hosts, datetime.datetime.now(datetime.UTC))
        _write_users(folder / USERS, password)
        return {
            "# password": password,  # The server itself has only a digest of it.
            "bind": " ".join(dict.fromkeys((LOOPBACK, *self.listen))) if self.listen else "* -::*",
            "port": "0",
            "tls-port": str(port),
            "tls-cert-file": f"{CERTIFICATES}/{SERVER}",
            "tls-key-file": f"{CERTIFICATES}/{SERVER_KEY}",
            "tls-ca-cert-file": f"{CERTIFICATES}/{AUTHORITY}",
            "tls-auth-clients": "no",
            "aclfile": USERS,
        }


def _write_users(file: Path, password: str) -> None:
    """Write the file of users: the administrator, no user `default`, and the invited members as they were."""
    ours = ("user default ", f"user {ADMINISTRATOR} ")
    kept = [line for line in file.read_text().splitlines() if not line.startswith(ours)] if file.exists() else []
    digest = hashlib.sha256(password.encode()).hexdigest()
    lines = [f"{ours[0]}off resetpass resetkeys resetchannels -@all", f"{ours[1]}on #{digest} ~* &* +@all", *kept]
    write_atomically(file, "\n".join(lines) + "\n", mode=PRIVATE)


def opening_of(host: str | None) -> Opening:
    """Return how other machines reach a server here.

    Args:
        host: An address of this machine, to listen there only; or another name or address under which others reach
            this machine, to listen everywhere; or None to find out the address.

    Raises:
        ConfigError: `host` cannot be a name or an address.
    """
    if host is not None and not _is_host(host):
        raise ConfigError(
            f"--host cannot be {host!r:.80}", "Give a name or an address of this machine.", code="config.host"
        )
    name = socket.gethostname()
    names = (name,) if _is_host(name) else ()
    if host is None:
        return Opening(_own_address(), (), names)
    return Opening(host, (host,) if _is_ours(host) else (), names)


def _is_host(text: str) -> bool:
    """Return whether the text can be a name or an address in a URL and in a certificate."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        parts = text.split(".")
        return text.isascii() and len(text) < 254 and all(part.replace("-", "").isalnum() for part in parts)
    return "%" not in text


def _is_ours(host: str) -> bool:
    """Return whether that is an address of this machine, other than loopback."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return not address.is_unspecified


def _own_address() -> str:
    """Return the address with which this machine sends to others; the one of loopback if it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            address: str = probe.getsockname()[0]
        except OSError:
            return LOOPBACK
    return address


@dataclass(frozen=True)
class CertificateFolder:
    """The folder at `path` with the certificates, as PEM, and their private keys."""

    path: Path

    def renew(self, hosts: Sequence[str], now: datetime.datetime) -> None:
        """Make a server certificate, and the authority if there is none or it ends soon.

        Args:
            hosts: The names and addresses of the server.
            now: The time, with its time zone.

        Raises:
            ConfigError: The files of the authority cannot be read.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (self.path / AUTHORITY).exists() or not (self.path / AUTHORITY_KEY).exists():
            self._make_authority(now)
        certificate, key = self._load()
        if certificate.not_valid_after_utc < now + datetime.timedelta(days=SERVER_DAYS):
            self._make_authority(now)
            certificate, key = self._load()
        self._make_server(certificate, key, hosts, now)

    def _load(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        try:
            key = serialization.load_pem_private_key((self.path / AUTHORITY_KEY).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((self.path / AUTHORITY).read_bytes())
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
        write_atomically(self.path / AUTHORITY_KEY, _private(key), mode=PRIVATE)
        write_atomically(self.path / AUTHORITY, certificate.public_bytes(serialization.Encoding.PEM))

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
        write_atomically(self.path / SERVER_KEY, _private(key), mode=PRIVATE)
        write_atomically(self.path / SERVER, certificate.public_bytes(serialization.Encoding.PEM))


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
