"""Latencies that a client asks for in headers: for clients whose library fixes the body."""

from typing import Annotated

import msgspec
from fastapi import Depends, Header

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.openai_requests import SharedFields

_Seconds = Header(gt=0, allow_inf_nan=False)


class LatencySlo(msgspec.Struct, frozen=True):
    """Latest acceptable predictions, seconds; None: those of the conductor's settings."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    def beside(self, body: SharedFields) -> "LatencySlo":
        """These and those in the body.

        Raises:
            InvalidRequest: they contradict each other.
        """
        return LatencySlo(
            _either(self.ttft_s, body.ttft_slo_s, "ttft_slo_s"),
            _either(self.tbt_s, body.tbt_slo_s, "tbt_slo_s"),
        )


def _either(header: float | None, field: float | None, name: str) -> float | None:
    if header is not None and field is not None and header != field:
        raise InvalidRequest(
            f"{name} is {field}, and the header X-{name.replace('_', '-')} says {header}; "
            "send one of them.",
            param=name,
        )
    return field if header is None else header


def _read(
    x_ttft_slo_s: Annotated[float | None, _Seconds] = None,
    x_tbt_slo_s: Annotated[float | None, _Seconds] = None,
) -> LatencySlo:
    return LatencySlo(x_ttft_slo_s, x_tbt_slo_s)


#: A route's argument of this type has what the headers say.
LatencyHeaders = Annotated[LatencySlo, Depends(_read)]
