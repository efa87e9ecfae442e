"""Fetch and check the state of a cluster from its conductor."""

from typing import Any

import httpx
import msgspec

from halfmoon_cli.endpoint.endpoint_address import ApiEndpoint
from halfmoon_cli.endpoint.endpoint_errors import EndpointError, connection_error, refusal_error
from halfmoon_cli.status.debug_responses import ClusterStatus

#: Routes below `/debug`, by their names in `ClusterStatus`.
_PATHS = {
    "cluster": "/debug/cluster",
    "decisions": "/debug/decisions",
    "latencies": "/debug/latencies",
}


def fetch_status(client: httpx.Client, endpoint: ApiEndpoint) -> dict[str, Any]:
    """Fetch the state of a cluster as the conductor's JSON.

    Raises:
        EndpointError: the endpoint does not answer, or is no conductor.
    """
    data: dict[str, Any] = {}
    for name, path in _PATHS.items():
        try:
            answer = client.get(f"{endpoint.root}{path}")
        except httpx.HTTPError as error:
            raise connection_error(endpoint.root, error) from error
        if answer.status_code == 404 and data:
            # A conductor of another version: routes that it lacks are not shown.
            continue
        if answer.status_code == 404:
            raise _no_conductor(endpoint)
        if answer.status_code != 200:
            raise refusal_error(answer.status_code, answer.headers, answer.content)
        try:
            data[name] = msgspec.json.decode(answer.content)
        except msgspec.DecodeError:
            raise _no_conductor(endpoint) from None
    return data


def parse_status(data: dict[str, Any], endpoint: ApiEndpoint) -> ClusterStatus:
    """Check the JSON and return it as a status.

    Raises:
        EndpointError: it is not a conductor's.
    """
    try:
        return msgspec.convert(data, ClusterStatus)
    except msgspec.ValidationError as error:
        raise EndpointError(f"{_no_conductor(endpoint)}: {error}") from None


def _no_conductor(endpoint: ApiEndpoint) -> EndpointError:
    return EndpointError(
        f"{endpoint.root} answers, but not as a conductor of Halfmoon: there is no /debug/cluster."
        " A proxy may keep it to itself; --url or HALFMOON_URL names another"
    )
