"""Call a metadata server over HTTP, and retry where that does no harm.

A call that may be applied twice without harm is retried when its connection failed or broke.
Other calls (compare-and-swap, increment, delete with its answer) are retried only if the
connection was never made.
"""

import httpx
import tenacity

from halfmoon_metadata.store_interface import MetadataRefused, MetadataUnreachable
from halfmoon_metadata.tls_trust import certificate_problem

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
    """Send a request and return the server's response, whatever its status.

    Args:
        client: HTTP client, with the timeout of one attempt.
        method: "GET", "POST", …
        url: URL of the call.
        server: name of the server in error texts.
        repeatable: whether the call may be applied twice.
        params: parameters of the URL.
        headers: headers besides the client's own.
        body: the whole body.

    Raises:
        MetadataUnreachable: there was no answer.
        MetadataRefused: the server's certificate is not accepted.
    """
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(
            httpx.TransportError if repeatable else httpx.ConnectError
        )
        & tenacity.retry_if_not_exception_type(httpx.TimeoutException)
        & tenacity.retry_if_exception(lambda error: certificate_problem(error) is None),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=_WAIT_S,
        reraise=True,
    )
    try:
        return again(client.request, method, url, params=params, headers=headers, content=body)
    except httpx.HTTPError as error:
        if problem := certificate_problem(error):
            raise MetadataRefused(f"metadata server {server}: {problem}") from error
        reason = str(error) or type(error).__name__
        raise MetadataUnreachable(f"metadata server {server}: {reason}") from error
