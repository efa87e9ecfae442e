"""Where an OpenAI endpoint is and what it wants to see; nothing here opens a connection."""

from urllib.parse import urlsplit

import httpx
import msgspec

from halfmoon_cli.endpoint.endpoint_errors import BadEndpointUrl

DEFAULT_URL = "http://127.0.0.1:8000"
#: Looked at in this order when no --url is given.
URL_VARIABLES = ["HALFMOON_URL", "OPENAI_BASE_URL"]
KEY_VARIABLE = "OPENAI_API_KEY"

#: Seconds for a connection to be opened.
CONNECT_S = 10.0


class ApiEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint."""

    #: What OpenAI's clients call the base URL, such as http://127.0.0.1:8000/v1.
    api: str
    #: Sent as a bearer token; empty: none is sent.
    key: str = ""

    @property
    def root(self) -> str:
        """Where routes lie that OpenAI does not have, such as /tokenize."""
        return self.api.removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def parse_endpoint(url: str, key: str = "") -> ApiEndpoint:
    """The endpoint that a user means: a URL without a path gets /v1.

    Raises:
        BadAddress: it is no http or https URL, or the key can't be sent in a header.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadEndpointUrl(
            f"{url!r} is no URL of an endpoint: write it as http://HOST:PORT, with --url"
        )
    if not key.isascii() or not key.isprintable():
        raise BadEndpointUrl("the API key has characters that no HTTP header can carry")
    path = parts.path.rstrip("/")
    return ApiEndpoint(api=f"{parts.scheme}://{parts.netloc}{path or '/v1'}", key=key)


def http_timeouts(silence_s: float) -> httpx.Timeout:
    """Limits of a connection: so long without a byte ends it."""
    return httpx.Timeout(silence_s, connect=CONNECT_S)
