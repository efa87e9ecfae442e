"""Read a request's principal and, from its headers, its latency targets."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header
from pydantic import Field, TypeAdapter, ValidationError, WithJsonSchema
from starlette.datastructures import Headers
from starlette.types import Scope

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.http_server.auth_middleware import Principal, principal_of
from halfmoon_conductor.http_server.resumption_headers import (
    EVENT_ID_PATTERN,
    KEY_PATTERN,
    Resumption,
)
from halfmoon_conductor.http_server.validation_errors import describe_validation_error

_Seconds = Annotated[
    float | None,
    Header(gt=0, allow_inf_nan=False),
    # A header can be absent but not null.
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]
# Patterns are for the schema: `resumption_headers` checks them.
_Key = Annotated[str | None, Header(), WithJsonSchema({"type": "string", "pattern": KEY_PATTERN})]
_LastEventId = Annotated[
    str | None, Header(), WithJsonSchema({"type": "string", "pattern": EVENT_ID_PATTERN})
]


@dataclass(frozen=True)
class RequestContext:
    """A request's principal, its latency targets in seconds, and the stream that it names.

    None for a target: that of the settings.
    """

    principal: Principal
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    #: None: the client does not come back to the answer, or it is no stream.
    resumption: Resumption | None = None

    def slos(
        self, ttft_slo_s: float | None, tbt_slo_s: float | None
    ) -> tuple[float | None, float | None]:
        """Return the targets for TTFT and TBT, those in the body included.

        Raises:
            InvalidRequest: header and body differ.
        """
        return (
            _agreed_slo(self.ttft_slo_s, ttft_slo_s, "ttft_slo_s"),
            _agreed_slo(self.tbt_slo_s, tbt_slo_s, "tbt_slo_s"),
        )


def _agreed_slo(header: float | None, field: float | None, name: str) -> float | None:
    if header is not None and field is not None and header != field:
        raise InvalidRequest(
            f"{name} is {field}, and the header X-{name.replace('_', '-')} says {header}; "
            "send one of them.",
            param=name,
        )
    return field if header is None else header


# FastAPI reads the headers for its schema here and never calls it: `generation_route` makes
# contexts.
async def _declared_headers(
    x_ttft_slo_s: _Seconds = None,
    x_tbt_slo_s: _Seconds = None,
    idempotency_key: _Key = None,
    last_event_id: _LastEventId = None,
) -> RequestContext:
    raise NotImplementedError


def request_context_of(headers: Headers, scope: Scope) -> RequestContext:
    """Return the context of a request that `AuthMiddleware` let in.

    Raises:
        InvalidRequest: a latency target in a header is not a positive number.
    """
    principal = principal_of(scope)
    if "x-ttft-slo-s" not in headers and "x-tbt-slo-s" not in headers:
        return RequestContext(principal)
    return RequestContext(
        principal, _latency(headers, "x-ttft-slo-s"), _latency(headers, "x-tbt-slo-s")
    )


def _latency(headers: Headers, name: str) -> float | None:
    try:
        return _seconds.validate_python(headers.get(name))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise describe_validation_error([{**first, "loc": ("header", name)}], None)


_seconds: TypeAdapter[float | None] = TypeAdapter(
    Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
)

#: Type of a route's argument that receives the request's context.
RequestContextDependency = Annotated[RequestContext, Depends(_declared_headers)]
