"""What a request says besides its body: who asks, and by headers how soon it wants an answer."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header
from pydantic import Field, TypeAdapter, ValidationError, WithJsonSchema
from starlette.datastructures import Headers
from starlette.types import Scope

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.http_server.auth_middleware import Principal, principal_of
from halfmoon_conductor.http_server.validation_errors import describe_validation_error

_Seconds = Annotated[
    float | None,
    Header(gt=0, allow_inf_nan=False),
    # A header is there or not; it can't be null.
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]


@dataclass(frozen=True)
class RequestContext:
    """Who asks. Latencies are latest acceptable predictions, seconds; None: as settings say."""

    caller: Principal
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None

    def slos(
        self, ttft_slo_s: float | None, tbt_slo_s: float | None
    ) -> tuple[float | None, float | None]:
        """Time to first token and between tokens, with those that the body has.

        Raises:
            InvalidRequest: header and body contradict each other.
        """
        return (
            _either(self.ttft_slo_s, ttft_slo_s, "ttft_slo_s"),
            _either(self.tbt_slo_s, tbt_slo_s, "tbt_slo_s"),
        )


def _either(header: float | None, field: float | None, name: str) -> float | None:
    if header is not None and field is not None and header != field:
        raise InvalidRequest(
            f"{name} is {field}, and the header X-{name.replace('_', '-')} says {header}; "
            "send one of them.",
            param=name,
        )
    return field if header is None else header


# For the schema, and never called: `generation_route` knows who asks.
async def _read(x_ttft_slo_s: _Seconds = None, x_tbt_slo_s: _Seconds = None) -> RequestContext:
    raise NotImplementedError


def request_context_of(headers: Headers, scope: Scope) -> RequestContext:
    """Who asks, of a request that came through the door.

    Raises:
        InvalidRequest: a latency in a header is no positive number.
    """
    caller = principal_of(scope)
    if "x-ttft-slo-s" not in headers and "x-tbt-slo-s" not in headers:
        return RequestContext(caller)
    return RequestContext(
        caller, _latency(headers, "x-ttft-slo-s"), _latency(headers, "x-tbt-slo-s")
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

#: A route's argument of this type is who asks.
RequestContextDependency = Annotated[RequestContext, Depends(_read)]
