"""One call over HTTP to a metadata server, tried again where that does no harm.

A connection that could not be made, or broke, is tried again for calls that may be applied
twice without harm; the others (compare-and-swap, increment, delete's answer) are tried again
only if the connection was never made.
"""

import httpx
import tenacity

from halfmoon_metadata.store_interface import MetadataUnreachable

_ATTEMPTS = 3
_WAIT_S = tenacity.wait_random_exponential(multiplier=0.05, max=0.5)


def call_with_retry(
    client: httpx.Client,
    method: str,
    url: str,
    *,
    server: str,
    repeatable: bool,
    params: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> httpx.Response:
    """What the server answers, whatever its status.

    Args:
        client: with the time that one attempt may take.
        method: "GET", "POST", …
        url: of the call.
        server: what errors call it.
        repeatable: applied twice, it does what it does once.
        params: of the URL.
        headers: beside the client's own.
        body: all of it.

    Raises:
        MetadataUnreachable: there was no answer.
    """
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(
            httpx.TransportError if repeatable else httpx.ConnectError
        )
        & tenacity.retry_if_not_exception_type(httpx.TimeoutException),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=_WAIT_S,
        reraise=True,
    )
    try:
        return again(client.request, method, url, params=params, headers=headers, content=body)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise MetadataUnreachable(f"metadata server {server}: {reason}") from error
