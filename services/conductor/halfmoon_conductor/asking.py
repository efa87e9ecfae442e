"""What a request says besides its body: who asks, and by headers how soon it wants an answer."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request
from pydantic import WithJsonSchema
from starlette.datastructures import Headers

from halfmoon_conductor.door import Caller, caller_of
from halfmoon_conductor.errors import InvalidRequest

_Seconds = Annotated[
    float | None,
    Header(gt=0, allow_inf_nan=False),
    # A header is there or not; it can't be null.
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]


@dataclass(frozen=True)
class Asker:
    """Who asks. Latencies are latest acceptable predictions, seconds; None: as settings say."""

    caller: Caller
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


# A coroutine, though it waits for nothing: a plain function would be called in a thread.
async def _read(
    request: Request,
    x_ttft_slo_s: _Seconds = None,
    x_tbt_slo_s: _Seconds = None,
) -> Asker:
    return Asker(caller_of(request.scope), x_ttft_slo_s, x_tbt_slo_s)


def says_latencies(headers: Headers) -> bool:
    """Whether there is more to `Asker` than who it is."""
    return "x-ttft-slo-s" in headers or "x-tbt-slo-s" in headers


#: A route's argument of this type is who asks.
Asking = Annotated[Asker, Depends(_read)]
