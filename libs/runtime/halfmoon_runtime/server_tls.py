"""Load the certificate and the key that a service's HTTP ports serve TLS with.

The files are read at the start, before the service takes work. What is wrong with them is said by
name then, and not by the first client's handshake.
"""

import ssl
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

#: OpenSSL's codes of a certificate that is not valid yet, or no more.
_TOO_EARLY, _TOO_LATE = 9, 10


class BadTlsFiles(ValueError):
    """A certificate or key that can't be served with; the text names setting, file and reason."""


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Make the context of a server that has this certificate. TLS 1.2 is the oldest version.

    Args:
        cert: PEM file of the certificate, followed by those of its issuers below the root.
        key: PEM file of its key, without a passphrase.

    Raises:
        BadTlsFiles: a file is missing or unreadable, holds something else, or they don't match.
    """
    for setting, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise BadTlsFiles(f"{setting} {path!r} can't be read: {error.strerror}") from None
        if b"-----BEGIN " not in content:
            raise BadTlsFiles(f"{setting} {path!r} is no PEM file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        raise BadTlsFiles(_explain(error, cert, key)) from None
    return context


def date_problem(cert: str, context: ssl.SSLContext) -> str | None:
    """Return what is wrong with the dates of a server's certificate; None if nothing is.

    Args:
        cert: the certificate's file.
        context: as `server_context` has made it.
    """
    try:
        _greet(cert, context)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _TOO_LATE:
            return "it has expired: clients refuse it"
        if error.verify_code == _TOO_EARLY:
            return "it is not valid yet: clients refuse it"
    except ssl.SSLError:
        return None
    return None


def certificate_names(cert: str, context: ssl.SSLContext) -> tuple[str, ...]:
    """Return the names of hosts in a server's certificate; none if its dates are wrong.

    Args:
        cert: the certificate's file.
        context: as `server_context` has made it.
    """
    try:
        shown = _greet(cert, context).getpeercert() or {}
    except ssl.SSLError:
        return ()
    names: Iterable[Any] = shown.get("subjectAltName", ())
    return tuple(str(name).lower() for kind, name in names if kind == "DNS")


def _greet(cert: str, context: ssl.SSLContext) -> ssl.SSLObject:
    """Return the end of a client that has shaken hands with a server, in memory.

    Raises:
        SSLError: the client, which trusts this very certificate, does not accept it.
    """
    # Such a client checks the dates, and little else.
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return client


def _refuse_passphrase() -> NoReturn:
    raise BadTlsFiles(
        "tls_key has a passphrase, which a service can't type: write the key without one, "
        "in a file that only its user can read"
    )


def _explain(error: ssl.SSLError, cert: str, key: str) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"tls_key {key!r} is not the key of the certificate tls_cert {cert!r}"
    return f"tls_cert {cert!r} and tls_key {key!r} can't be used: {error.reason or error}"
