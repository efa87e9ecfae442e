"""Define the errors of an endpoint, with what its user can do about them.

EndpointError
├── BadEndpointUrl       not the URL of an endpoint
├── EndpointUnreachable  no connection, or none that lasted until an answer began
├── EndpointRefused      an answer with a status other than 200
└── StreamBroken         an answer that began and did not end as it should

Every message has the endpoint's own words and the way out, on one line. The library that the errors
of connections come from is imported when there is one: commands name these classes at their start.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from halfmoon_metadata.tls_trust import certificate_problem

if TYPE_CHECKING:
    import httpx


class EndpointError(Exception):
    """Base of an endpoint's errors; the text is shown to the user."""


class BadEndpointUrl(EndpointError):
    """Not the URL of an endpoint."""


class EndpointUnreachable(EndpointError):
    """No connection, or none that lasted until an answer began."""


class StreamBroken(EndpointError):
    """An answer that began and did not end as it should."""


class EndpointRefused(EndpointError):
    """An answer with a status other than 200.

    Args:
        status: HTTP status.
        reason: the endpoint's own words.
        way_out: advice to the user, or empty.
        code: OpenAI's ``error.code``, or ``error.type`` without one, such as "overloaded".
        retry_after_s: seconds after which another try may succeed; None: never.
    """

    def __init__(
        self, status: int, reason: str, way_out: str, code: str, retry_after_s: float | None
    ) -> None:
        text = f"{reason.removesuffix('.')} ({status})"
        super().__init__(f"{text}: {way_out}" if way_out else text)
        self.status = status
        self.reason = reason
        self.code = code
        self.retry_after_s = retry_after_s


#: Seconds before the next try when the endpoint names none.
RETRY_AFTER_S = 1.0
#: Longer waits are cut to this.
_LONGEST_RETRY_S = 3600.0
#: Characters of an error text that are shown.
_SHOWN = 300


def refusal_error(status: int, headers: Mapping[str, str], body: bytes) -> EndpointRefused:
    """Make the error of an answer with a status other than 200."""
    reason, code = _parse_error(body)
    if not reason:
        reason = f"the endpoint answered {_phrase(status)}"
    return EndpointRefused(
        status, reason, _way_out(status, code), code, _retry_after_s(status, headers)
    )


def connection_error(url: str, error: "httpx.HTTPError") -> EndpointUnreachable:
    """Make the error of an httpx error before an answer has begun."""
    import httpx

    if problem := certificate_problem(error):
        return EndpointUnreachable(f"{url}: {problem}")
    match error:
        case httpx.ConnectError():
            return EndpointUnreachable(
                f"nothing answers at {url} ({error}): `halfmoon up` starts a cluster,"
                " --url or HALFMOON_URL names another endpoint"
            )
        case httpx.ConnectTimeout():
            return EndpointUnreachable(
                f"{url} can't be reached: no connection within its time; check the address"
                " and what lies between"
            )
        case httpx.ReadTimeout():
            return EndpointUnreachable(
                f"{url} took the request and said nothing: --timeout waits longer"
            )
        case _:
            return EndpointUnreachable(
                f"{url} broke off before it answered ({_error_name(error)}): try again"
            )


def stream_error(error: "httpx.HTTPError") -> StreamBroken:
    """Make the error of an httpx error in the middle of an answer."""
    import httpx

    if isinstance(error, httpx.ReadTimeout):
        return StreamBroken("the answer stopped coming: --timeout waits longer")
    return StreamBroken(f"the answer was cut off ({_error_name(error)}): try again")


def error_text(error: object) -> str:
    """Return the text of the ``error`` object of an answer or an event."""
    if isinstance(error, dict):
        return " ".join(str(error.get("message") or error).split())
    return " ".join(str(error).split())


def _error_name(error: "httpx.HTTPError") -> str:
    return str(error) or type(error).__name__


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "nothing"


def _parse_error(body: bytes) -> tuple[str, str]:
    """Return text and code of an error: OpenAI's form, other forms, or plain text."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return " ".join(body[:_SHOWN].decode(errors="replace").split()), ""
    if not isinstance(data, dict):
        return str(data)[:_SHOWN], ""
    error = data.get("error", data.get("detail", data))
    if isinstance(error, dict):
        return error_text(error)[:_SHOWN], str(error.get("code") or error.get("type") or "")
    return error_text(error)[:_SHOWN], ""


def _way_out(status: int, code: str) -> str:
    if code == "context_length_exceeded":
        return "send less"
    match status:
        case 401 | 403:
            return "give a key with --api-key or OPENAI_API_KEY"
        case 404 if code == "model_not_found":
            return "name another with --model"
        case 404:
            return "is this an OpenAI endpoint? --url or HALFMOON_URL names another"
        case 429 | 503:
            return "try again later, or have --retry do it"
        case _:
            return ""


def _retry_after_s(status: int, headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After; a date is not read."""
    if status not in (429, 503):
        return None
    try:
        seconds = float(headers.get("retry-after", RETRY_AFTER_S))
    except ValueError:
        return RETRY_AFTER_S
    return min(max(seconds, 0.0), _LONGEST_RETRY_S) if math.isfinite(seconds) else RETRY_AFTER_S
