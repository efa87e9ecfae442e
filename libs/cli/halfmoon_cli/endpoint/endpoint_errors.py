"""What can go wrong with an endpoint, and what its user can do about it.

EndpointError
├── BadAddress    not a URL that could be asked
├── Unreachable   nobody answers there
├── Refused       an answer with a status other than 200; `status` and `retry_after_s`
└── StreamBroken  an answer that began and did not end as it should

Every message names the endpoint's own words and the way out, on one line.
"""

import math
from collections.abc import Mapping

import httpx
import msgspec


class EndpointError(Exception):
    """The base of all of these: its text is for the user's eyes."""


class BadEndpointUrl(EndpointError):
    """Not a URL that could be asked."""


class EndpointUnreachable(EndpointError):
    """No connection, or none that lasted until an answer began."""


class StreamBroken(EndpointError):
    """An answer that began and did not end as it should."""


class EndpointRefused(EndpointError):
    """An answer with a status other than 200.

    Args:
        status: HTTP's.
        reason: the endpoint's own words.
        way_out: what to do; empty when there is nothing to say.
        code: OpenAI's ``error.code``, or ``error.type`` without one, such as "overloaded".
        retry_after_s: seconds after which trying again may help; None when it won't.
    """

    def __init__(
        self, status: int, reason: str, way_out: str, code: str, retry_after_s: float | None
    ) -> None:
        told = f"{reason.removesuffix('.')} ({status})"
        super().__init__(f"{told}: {way_out}" if way_out else told)
        self.status = status
        self.reason = reason
        self.code = code
        self.retry_after_s = retry_after_s


#: Waited before the next try when the endpoint does not say how long.
RETRY_AFTER_S = 1.0
#: More than this is not believed.
_LONGEST_RETRY_S = 3600.0
#: Of an answer's text that is no JSON, so much is shown.
_SHOWN = 300


def refusal_error(status: int, headers: Mapping[str, str], body: bytes) -> EndpointRefused:
    """The error that an answer with a status other than 200 stands for."""
    reason, code = _told(body)
    if not reason:
        reason = f"the endpoint answered {httpx.codes.get_reason_phrase(status) or 'nothing'}"
    return EndpointRefused(
        status, reason, _way_out(status, code), code, _retry_after_s(status, headers)
    )


def connection_error(url: str, error: httpx.HTTPError) -> EndpointUnreachable:
    """The error that httpx's stands for, before an answer has begun."""
    match error:
        case httpx.ConnectError():
            return EndpointUnreachable(
                f"nothing answers at {url} ({error}): `halfmoon up` starts a cluster,"
                " --url names another endpoint"
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
                f"{url} broke off before it answered ({_named(error)}): try again"
            )


def stream_error(error: httpx.HTTPError) -> StreamBroken:
    """The error that httpx's stands for, in the middle of an answer."""
    if isinstance(error, httpx.ReadTimeout):
        return StreamBroken("the answer stopped coming: --timeout waits longer")
    return StreamBroken(f"the answer was cut off ({_named(error)}): try again")


def error_text(error: object) -> str:
    """The text of an ``error`` object as it stands in an answer or a stream's event."""
    if isinstance(error, dict):
        return " ".join(str(error.get("message") or error).split())
    return " ".join(str(error).split())


def _named(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _told(body: bytes) -> tuple[str, str]:
    """The endpoint's words and its code; OpenAI's shape, others' shapes, or plain text."""
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
            return "is this an OpenAI endpoint? --url names another"
        case 429 | 503:
            return "try again later, or have --retry do it"
        case _:
            return ""


def _retry_after_s(status: int, headers: Mapping[str, str]) -> float | None:
    """Seconds, as Retry-After says; a date is not read."""
    if status not in (429, 503):
        return None
    try:
        seconds = float(headers.get("retry-after", RETRY_AFTER_S))
    except ValueError:
        return RETRY_AFTER_S
    return min(max(seconds, 0.0), _LONGEST_RETRY_S) if math.isfinite(seconds) else RETRY_AFTER_S
