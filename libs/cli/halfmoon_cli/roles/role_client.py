"""Fetch the roles of workers from a conductor, and request another one."""

from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from halfmoon_cli.endpoint.endpoint_address import ApiEndpoint
from halfmoon_cli.endpoint.endpoint_errors import (
    EndpointError,
    EndpointRefused,
    connection_error,
    refusal_error,
)

_PATH = "/debug/roles"
Answer = TypeVar("Answer")


def fetch_roles(client: httpx.Client, endpoint: ApiEndpoint) -> Any:
    """Return the conductor's JSON of `GET /debug/roles`.

    Raises:
        EndpointError: the endpoint does not answer, or is no conductor that knows roles.
    """
    return _ask(client, endpoint, "GET", _PATH)


def request_role(client: httpx.Client, endpoint: ApiEndpoint, worker_id: str, role: str) -> Any:
    """Pin a worker to a role, or release it with "auto"; return the conductor's JSON.

    Raises:
        EndpointError: as `fetch_roles`; or the conductor refuses, with its own words.
    """
    path = f"{_PATH}/{quote(worker_id, safe='')}"
    return _ask(client, endpoint, "POST", path, {"role": role})


def parse_answer(data: Any, kind: type[Answer], endpoint: ApiEndpoint) -> Answer:
    """Check the JSON and return it as this kind of answer.

    Raises:
        EndpointError: it is not a conductor's.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise EndpointError(f"{_no_roles(endpoint)}: {error}") from None


def _ask(
    client: httpx.Client, endpoint: ApiEndpoint, method: str, path: str, body: Any = None
) -> Any:
    try:
        answer = client.request(method, f"{endpoint.root}{path}", json=body)
    except httpx.HTTPError as error:
        raise connection_error(endpoint.root, error) from error
    if answer.status_code != 200:
        refusal = refusal_error(answer.status_code, answer.headers, answer.content)
        if refusal.code == "worker_not_found":
            raise EndpointRefused(refusal.status, refusal.reason, "", refusal.code, None)
        raise _no_roles(endpoint) if refusal.status == 404 else refusal
    try:
        return msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        raise _no_roles(endpoint) from None


def _no_roles(endpoint: ApiEndpoint) -> EndpointError:
    return EndpointError(
        f"{endpoint.root} answers, but not as a conductor of Halfmoon that shows roles: there is"
        " no /debug/roles. It may be an older one, or a proxy keeps it to itself; --url names"
        " another"
    )
