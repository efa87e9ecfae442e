"""Make a certificate authority and certificates for tests, with keys that are quick to make."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class IssuedCertificate:
    """Files of a server's certificate and its key, in PEM."""

    cert: Path
    key: Path


class TlsAuthority:
    """Issue certificates, as files in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        """Make the authority, and write its own certificate.

        Args:
            folder: where files are written; it exists.
            name: of the authority, and of its file.
        """
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Test CA {name}")])
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        own = self._builder(self._name, self._key.public_key(), _DAY)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        own = own.add_extension(usage, critical=True)
        #: File of the authority's certificate, for clients.
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(
            own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )

    def issue(
        self, *hosts: str, name: str = "server", valid_for: timedelta = _DAY
    ) -> IssuedCertificate:
        """Issue a certificate for names and addresses; by default for this machine's own.

        Args:
            hosts: DNS names and IP addresses.
            name: of the files.
            valid_for: time until it expires; a negative one makes an expired certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternatives = [_general_name(host) for host in hosts or ("127.0.0.1", "localhost")]
        request = self._builder(subject, key.public_key(), valid_for)
        request = request.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        request = request.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        issued = IssuedCertificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        issued.cert.write_bytes(
            request.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        issued.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return issued

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, valid_for: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _DAY)
            .not_valid_after(now + valid_for)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(issuer_key, critical=False)
        )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
