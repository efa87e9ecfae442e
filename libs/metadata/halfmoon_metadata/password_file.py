"""Take the password of a metadata server from the file that its URL names.

A URL stands in environments, command lines and manifests, a password should not. So Redis and etcd
may be given as ``redis://host:6379/0?password_file=/run/secrets/redis``, as PostgreSQL's URLs may
name a ``passfile``.
"""

from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from halfmoon_metadata.redacted_url import redact_url
from halfmoon_metadata.secret_file import read_secret_file

PARAMETER = "password_file"


def with_password_of_file(url: str) -> str:
    """Return the URL with the password in place of the file; without a file, the URL itself.

    Raises:
        ValueError: the URL has a password besides, or the file is empty or can't be used.
    """
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    paths = [value for name, value in query if name == PARAMETER]
    if not paths:
        return url
    what = f"metadata URL {redact_url(url)!r}: {PARAMETER} {paths[-1]!r}"
    if parts.password is not None or len(paths) > 1:
        raise ValueError(f"{what} is not the only password: leave the others out")
    password = read_secret_file(paths[0], what=what)
    if not password:
        raise ValueError(f"{what} is empty: put the password into it, or leave {PARAMETER} out")
    left = urlencode([each for each in query if each[0] != PARAMETER])
    address = parts.netloc.rpartition("@")[2]
    user = f"{parts.username or ''}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{user}@{address}", query=left).geturl()
