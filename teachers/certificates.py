"""Certificates by which the nodes of a Ray cluster encrypt what they send each other, and know each other.

Ray asks for them by four environment variables (:func:`variables`). A node that is connected to must show a certificate
for the very address that was dialled, and a node, driver or job that connects must show one too: both are accepted only
if the cluster's *authority* signed them. An authority is a key that stays with the operator of the cluster, and a
certificate of its own, which every node has. Addresses are mostly known on a node alone, so that each node signs for
itself when it starts, with the authority's key; who has this key, or a node's, can take part in the cluster, as far as
Ray's token allows.

Keys are on the curve P-256 and are written for their owner alone.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fairpate.files import make_folder, write_atomically
from fairpate.types import UsageError, UserError

AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
NODE, NODE_KEY = "node.crt", "node.key"
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # processes of a node also connect to each other
_CLOCKS_DIFFER = timedelta(hours=1)


class CertificateError(UserError):
    """An authority that cannot sign."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written: the certificate's file, the addresses that it is for, and when it ends."""

    certificate: Path
    addresses: tuple[str, ...]
    ends: datetime


def variables(folder: Path) -> dict[str, str]:
    """The environment of every process of a node whose certificate is in ``folder``."""
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / NODE),
        "RAY_TLS_SERVER_KEY": str(folder / NODE_KEY),
        "RAY_TLS_CA_CERT": str(folder / AUTHORITY),
    }


def make_authority(folder: Path, *, days: int) -> Written:
    """Write the key and the certificate of a new authority into ``folder``, which only its owner can access if it is
    new. UsageError if there is one: nodes trust it."""
    if found := [name for name in (AUTHORITY, AUTHORITY_KEY) if os.path.lexists(folder / name)]:
        raise UsageError(
            f"DIR: {folder} has the authority of a cluster already ({', '.join(found)}), and it is not replaced, as "
            "nodes trust it; give another folder."
        )
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("FairPATE cluster authority")
    signed = _certificate(name, key.public_key(), name, key, days=days, is_authority=True)
    make_folder(folder, private=True)
    _write(folder / AUTHORITY_KEY, _key_text(key), private=True)
    _write(folder / AUTHORITY, signed.public_bytes(serialization.Encoding.PEM))
    return Written(certificate=folder / AUTHORITY, addresses=(), ends=signed.not_valid_after_utc)


def make_node_certificate(authority: Path, folder: Path, addresses: Iterable[str], *, days: int) -> Written:
    """Write a new key and its certificate for ``addresses`` and the loopback's, signed by the authority in the folder
    ``authority``, into ``folder``, with the authority's certificate: all that a node needs, which thus never has to
    show the authority's key to what runs there. A node's earlier certificate is replaced, as it may have started with
    another address. It ends no later than the authority.

    UsageError for an address that is neither an IP address nor a host name. CertificateError if the authority is
    incomplete, unreadable, or at its end.
    """
    issuer, key = _authority(authority)
    if issuer.not_valid_after_utc <= datetime.now(UTC):
        raise CertificateError(
            f"DIR: the authority in {authority} ended on {issuer.not_valid_after_utc:%Y-%m-%d}; make one in another "
            "folder, and give it to every node."
        )
    names = tuple(dict.fromkeys([*addresses, *LOOPBACK]))
    own = ec.generate_private_key(ec.SECP256R1())
    signed = _certificate(
        _name("FairPATE cluster node"),
        own.public_key(),
        issuer.subject,
        key,
        days=days,
        addresses=[_address(name) for name in names],
        latest=issuer.not_valid_after_utc,
    )
    make_folder(folder, private=True)
    _write(folder / NODE_KEY, _key_text(own), private=True)
    _write(folder / NODE, signed.public_bytes(serialization.Encoding.PEM))
    _write(folder / AUTHORITY, issuer.public_bytes(serialization.Encoding.PEM))
    return Written(certificate=folder / NODE, addresses=names, ends=signed.not_valid_after_utc)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        issuer = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
    except FileNotFoundError as error:
        raise CertificateError(
            f"DIR: {folder} has no authority: no {Path(error.filename).name} in it. Make one by `fairpate cluster "
            "certificates DIR` on one machine, and copy the folder to every node."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a file of it is damaged"
        raise CertificateError(f"DIR: the authority in {folder} cannot be read: {reason}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != issuer.public_key():
        raise CertificateError(
            f"DIR: {AUTHORITY} and {AUTHORITY_KEY} in {folder} are not of one authority; copy both again."
        )
    return issuer, key


def _certificate(
    subject: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    days: int,
    is_authority: bool = False,
    addresses: Iterable[x509.GeneralName] = (),
    latest: datetime | None = None,
) -> x509.Certificate:
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    usage |= {"crl_sign": is_authority, "key_cert_sign": is_authority}
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(min(ends, latest) if latest else ends)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=not is_authority, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    if not is_authority:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
    return builder.sign(key, hashes.SHA256())


def _address(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if len(text) > 253 or not re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*", text):
            raise UsageError(f"--address: expected an IP address or a host name, got {text!r}.") from None
        if re.fullmatch(r"[\d.]+", text):  # a slip in an IP address would be a host that nobody dials
            raise UsageError(f"--address: {text} is not an IP address.") from None
        return x509.DNSName(text)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, *, private: bool = False) -> None:
    write: Callable[[Path], object] = lambda temporary: temporary.write_bytes(content)  # noqa: E731
    write_atomically(path, write, private=private)
