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
from pathlib import Path
from typing import Final

import psutil
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
#: The server closes connections that are idle for IDLE_SECONDS; members connect again by themselves. It holds at most
#: CLIENTS_MAX connections, or fewer if the system lets it open fewer files.
IDLE_SECONDS, CLIENTS_MAX = 60, 50_000
#: The share of this machine's memory that the server may take.
MEMORY_SHARE = 0.75
VALUE_BYTES_MAX = 16 << 20
#: An address that no machine has (RFC 5737). It only makes the system choose the address with which it would send.
_ELSEWHERE: Final = ("192.0.2.1", 9)


def tls_settings(folder: Path, host: str, port: int, password: str) -> dict[str, str]:
    """Write the certificates and the users of a server in its folder, and return the server's settings.

    Others reach it as `host`, at all addresses of this machine. The password is the administrator's.
    """
    own = socket.gethostname()
    hosts = (host, *([own] if _is_host(own) else []), LOOPBACK, "::1", "localhost")
    renew_certificates(folder / CERTIFICATES, hosts, datetime.datetime.now(datetime.UTC))
    _write_users(folder / USERS, password)
    return {
        "# password": password,  # The server itself has only a digest of it.
        "bind": "* -::*",
        "port": "0",
        "tls-port": str(port),
        "tls-cert-file": f"{CERTIFICATES}/{SERVER}",
        "tls-key-file": f"{CERTIFICATES}/{SERVER_KEY}",
        "tls-ca-cert-file": f"{CERTIFICATES}/{AUTHORITY}",
        "tls-auth-clients": "no",
        "aclfile": USERS,
        # Anyone may connect. Idle connections must neither lock newcomers out nor take the memory of this machine.
        "timeout": str(IDLE_SECONDS),
        "maxclients": str(CLIENTS_MAX),
        "maxmemory": str(int(MEMORY_SHARE * psutil.virtual_memory().total)),
        # Readers get whole values. Ours are small: payloads are stored in chunks of 1 MiB.
        "proto-max-bulk-len": str(VALUE_BYTES_MAX),
    }


def _write_users(file: Path, password: str) -> None:
    """Write the file of users: the administrator, a user `default` who cannot log in, and the members as they were.

    Redis 7.0 reads transactions and scripts of its append-only file with the rights of `default`, also while that user
    is off. What the user may not do would be lost at a restart.
    """
    ours = ("user default ", f"user {ADMINISTRATOR} ")
    kept = [line for line in file.read_text().splitlines() if not line.startswith(ours)] if file.exists() else []
    digest = hashlib.sha256(password.encode()).hexdigest()
    lines = [f"{ours[0]}off resetpass ~* &* +@all", f"{ours[1]}on #{digest} ~* &* +@all", *kept]
    write_atomically(file, "\n".join(lines) + "\n", mode=PRIVATE)


def public_host(host: str | None) -> str:
    """Return the name or address under which others reach this machine: the given one, or the one that it sends with.

    Raises ConfigError if `host` cannot be a name or an address.
    """
    if host is not None and not _is_host(host):
        raise ConfigError(
            f"--host cannot be {host!r:.80}", "Give a name or an address of this machine.", code="config.value"
        )
    return _own_address() if host is None else host


def _is_host(text: str) -> bool:
    """Return whether the text can be a name or an address in a URL and in a certificate."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        parts = text.split(".")
        return text.isascii() and len(text) < 254 and all(part.replace("-", "").isalnum() for part in parts)
    return "%" not in text


def _own_address() -> str:
    """Return the address with which this machine sends to others; the one of loopback if it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            address: str = probe.getsockname()[0]
        except OSError:
            return LOOPBACK
    return address


def renew_certificates(folder: Path, hosts: Sequence[str], now: datetime.datetime) -> None:
    """Make a server certificate for these hosts, and the authority if it is missing or ends soon. Raise ConfigError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    has_authority = (folder / AUTHORITY).exists() and (folder / AUTHORITY_KEY).exists()
    least = now + datetime.timedelta(days=SERVER_DAYS)
    if not has_authority or _authority(folder)[0].not_valid_after_utc < least:
        extensions = (x509.BasicConstraints(ca=True, path_length=0), _usage("key_cert_sign", "crl_sign"))
        _make(folder, AUTHORITY, AUTHORITY_KEY, now, AUTHORITY_DAYS, extensions)
    authority = _authority(folder)
    _make(folder, SERVER, SERVER_KEY, now, SERVER_DAYS, (
        x509.BasicConstraints(ca=False, path_length=None),
        _usage("digital_signature"),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_host(each) for each in dict.fromkeys(hosts)]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority[1].public_key()),
    ), authority)  # fmt: skip


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the certificate and the private key of the authority. Raises ConfigError if they cannot be used."""
    try:
        key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        if isinstance(key, ec.EllipticCurvePrivateKey) and certificate.public_key() == key.public_key():
            return certificate, key
        why = "key and certificate do not belong together"
    except (OSError, ValueError, TypeError) as error:
        why = str(error)
    raise ConfigError(
        f"the certificate authority in {folder} cannot be used ({why})",
        "Delete that folder. A new authority is then made, and all members need new invitations.",
        code="certificates.damaged",
    )


def _make(
    folder: Path,
    file: str,
    key_file: str,
    now: datetime.datetime,
    days: int,
    extensions: Sequence[x509.ExtensionType],
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None,
) -> None:
    """Write a certificate and its private key. The authority signs it, or it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"archipelago {file.removesuffix('.pem')}")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(authority[0].subject if authority else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for each in extensions:
        builder = builder.add_extension(each, critical=isinstance(each, x509.BasicConstraints | x509.KeyUsage))
    signed = builder.sign(authority[1] if authority else key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    write_atomically(folder / key_file, private, mode=PRIVATE)
    write_atomically(folder / file, signed.public_bytes(pem))


def _usage(*names: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{**_NO_USAGES, **dict.fromkeys(names, True)})


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
