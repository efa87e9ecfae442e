"""Show the roles of workers to operators, and change them: `/debug/roles`.

`GET /debug/roles` returns `role_outlook:RoleOutlook` as JSON. `POST /debug/roles/{worker_id}` takes
`{"role": "prefill" | "decode" | "auto"}` and returns the worker's row. The answer comes at once; a
worker that changes finishes its requests first.
"""

from typing import Any, cast, get_args

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halfmoon_conductor.errors import (
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    RoleChangeConflict,
    UnknownWorker,
)
from halfmoon_conductor.http_server.error_responses import error_response
from halfmoon_conductor.inputs.body_parsing import check_headers, parse_json
from halfmoon_conductor.workers.shell import Shell
from halfmoon_protocol.ids import WorkerId
from halfmoon_runtime.clock import Clock
from halfmoon_scheduling.cluster.role_refusals import RoleRefusal
from halfmoon_scheduling.events import RequestedRole, RoleChangeRequested

#: Bytes of a body at the most.
MAX_BODY_BYTES = 4096
_ROLES: tuple[str, ...] = get_args(RequestedRole)
_SHOWN = 60

_log = structlog.get_logger(__name__)


def role_routes(shell: Shell, clock: Clock) -> list[Route]:
    """Return the routes below ``/debug``.

    Args:
        shell: takes the operator's request to the core.
        clock: the shell's clock.
    """
    core = shell.core

    async def show_roles(request: Request) -> Response:
        now = clock.now()
        return _json({"now_s": now} | msgspec.to_builtins(core.role_outlook(now)))

    async def set_role(request: Request) -> Response:
        worker_id = WorkerId(request.path_params["worker_id"])
        try:
            role = await _read_role(request)
            # No event comes between this and the post: both are in one turn of the event loop.
            if (refusal := core.role_refusal(worker_id, role)) is not None:
                raise _to_error(refusal)
        except ApiError as error:
            return error_response(error, request.url.path)
        _log.info("role_requested", worker_id=worker_id, role=role)
        shell.post(RoleChangeRequested(worker_id, role))
        rows = core.role_outlook(clock.now()).workers
        return _json({"worker": next((row for row in rows if row.worker_id == worker_id), None)})

    return [
        Route("/roles", show_roles, methods=["GET"]),
        # A worker's name may have slashes.
        Route("/roles/{worker_id:path}", set_role, methods=["POST"]),
    ]


async def _read_role(request: Request) -> RequestedRole:
    """Return the role of the body.

    A page of another site can't send it: browsers ask before they send JSON elsewhere.

    Raises:
        InvalidRequest: the body is not as it should be; names the field.
        BodyTooLarge: it is over `MAX_BODY_BYTES`.
    """
    check_headers(request.headers)
    content = await request.body()
    if len(content) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"The body is over {MAX_BODY_BYTES} bytes, the most for a role.")
    body = parse_json(content)
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    for name in body:
        if name != "role":
            raise InvalidRequest(
                f"{name[:_SHOWN]} is not known here; leave it out.", param=name[:_SHOWN]
            )
    role: Any = body.get("role")
    if role is None:
        raise InvalidRequest(f"role is required: {', '.join(_ROLES)}.", param="role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"role is {str(role)[:_SHOWN]!r}, it is one of {', '.join(_ROLES)}.", param="role"
        )
    return cast(RequestedRole, role)


def _to_error(refusal: RoleRefusal) -> ApiError:
    kinds: dict[str, type[ApiError]] = {
        "unknown": UnknownWorker,
        "invalid": InvalidRequest,
        "conflict": RoleChangeConflict,
    }
    return kinds[refusal.kind](refusal.reason, param=refusal.field)


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
