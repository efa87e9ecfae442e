"""Parse the address of an OpenAI endpoint, and make its headers. No I/O."""

from urllib.parse import urlsplit

import msgspec

from halfmoon_cli.endpoint.endpoint_errors import BadEndpointUrl

DEFAULT_URL = "http://127.0.0.1:8000"
#: Environment variables that stand for --url, the first one first.
URL_VARIABLES = ["HALFMOON_URL", "OPENAI_BASE_URL"]
KEY_VARIABLE = "OPENAI_API_KEY"

#: Seconds for a connection to be opened.
CONNECT_S = 10.0


class ApiEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address and key of an endpoint."""

    #: The base URL of OpenAI's clients, such as http://127.0.0.1:8000/v1.
    api: str
    #: Sent as a bearer token; empty: none is sent.
    key: str = ""
    #: PEM file of CAs to trust besides the system's; empty: only those.
    tls_ca: str = ""

    @property
    def root(self) -> str:
        """Base URL of the routes that OpenAI does not have, such as /tokenize."""
        return self.api.removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def parse_endpoint(url: str, key: str = "", tls_ca: str = "") -> ApiEndpoint:
    """Return the endpoint of a URL; one without a path gets /v1.

    Raises:
        BadEndpointUrl: it is no http or https URL, or the key can't be sent in a header.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadEndpointUrl(
            f"{url!r} is no URL of an endpoint: write it as http://HOST:PORT,"
            " in --url or HALFMOON_URL"
        )
    if not key.isascii() or not key.isprintable():
        raise BadEndpointUrl("the API key has characters that no HTTP header can carry")
    path = parts.path.rstrip("/")
    api = f"{parts.scheme}://{parts.netloc}{path or '/v1'}"
    return ApiEndpoint(api=api, key=key, tls_ca=tls_ca)
