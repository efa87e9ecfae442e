"""Show a metadata server's URL without the password in it."""

import re

#: All between "//" and the last "@" of the authority; a password may have an "@" of its own.
_USER_AND_PASSWORD = re.compile(r"(?<=//)[^/?#]*@")


def redact_url(url: str) -> str:
    """Return the URL with its user and password as an ellipsis; any text may be given."""
    return _USER_AND_PASSWORD.sub("…@", url)
