"""Open HTTP clients of an endpoint, which trust the CAs that its user trusts."""

import ssl

import httpx

from halfmoon_cli.endpoint.endpoint_address import CONNECT_S, ApiEndpoint
from halfmoon_cli.endpoint.endpoint_errors import BadEndpointUrl
from halfmoon_metadata.tls_trust import trust_context


def open_client(endpoint: ApiEndpoint, silence_s: float) -> httpx.Client:
    """Open a client that ends a connection after so long without a byte.

    Raises:
        BadEndpointUrl: the endpoint's file of CAs can't be used.
    """
    return httpx.Client(
        headers=endpoint.headers,
        timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
        verify=endpoint_trust(endpoint) or True,
    )


def endpoint_trust(endpoint: ApiEndpoint) -> ssl.SSLContext | None:
    """Make the context of TLS connections to the endpoint; None if it speaks no TLS.

    Raises:
        BadEndpointUrl: the endpoint's file of CAs can't be used.
    """
    if not endpoint.api.startswith("https:"):
        return None
    try:
        return trust_context(endpoint.tls_ca)
    except ValueError as error:
        raise BadEndpointUrl(str(error)) from None
