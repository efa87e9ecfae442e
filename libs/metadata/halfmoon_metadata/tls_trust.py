"""Choose which certificates our clients trust, and explain why one was not accepted.

Clients trust the CAs of the system and those of one file. There is no way to turn verification
off: a server's certificate is from one of these CAs and names the host of the URL.
"""

import os
import ssl
from pathlib import Path

#: Environment variable of the file with further CAs, the same for all clients of ours.
TLS_CA_VARIABLE = "HALFMOON_TLS_CA"
#: OpenSSL's codes of a certificate that is too old or too new, or names other hosts.
_OUT_OF_DATE = (9, 10)
_WRONG_NAME = (62, 64)


def tls_ca_from_environment() -> str:
    """Return the file of CAs of a process that has no settings of its own; empty if unset."""
    return os.environ.get(TLS_CA_VARIABLE, "")


def trust_context(ca_file: str = "") -> ssl.SSLContext:
    """Make the context of a client's TLS connections.

    Args:
        ca_file: PEM file of CAs to trust besides the system's; empty: only those.

    Raises:
        ValueError: the file is missing, unreadable, or holds no certificate.
    """
    context = ssl.create_default_context()
    if ca_file:
        try:
            context.load_verify_locations(cadata=Path(ca_file).read_text("ascii"))
        except (ssl.SSLError, ValueError):  # before OSError, which SSLError is
            raise _bad_file(ca_file, "it holds no certificate in PEM") from None
        except OSError as error:
            raise _bad_file(ca_file, f"it can't be read ({error.strerror})") from None
    return context


def certificate_problem(failure: BaseException) -> str | None:
    """Return why a server's certificate was not accepted, and the way out.

    None if the failure, and what caused it, is something else.
    """
    error: BaseException | None = failure
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        # Libraries raise errors of this class, too, around the one that has the code.
        if isinstance(error, ssl.SSLCertVerificationError) and hasattr(error, "verify_code"):
            return f"its certificate is not accepted ({error.verify_message}): {_way_out(error)}"
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _way_out(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _WRONG_NAME:
        return "the URL must have a name or address that the certificate has"
    if error.verify_code in _OUT_OF_DATE:
        return "the server needs a new one, or the clock of this machine is wrong"
    return f"{TLS_CA_VARIABLE} (--tls-ca) must name a file with the CA that signed it"


def _bad_file(ca_file: str, reason: str) -> ValueError:
    return ValueError(f"{TLS_CA_VARIABLE} (--tls-ca) is {ca_file!r}: {reason}")
