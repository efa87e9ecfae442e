"""Check API keys, and limit each tenant's rate and concurrency.

The middleware guards all routes that cost something. A request without a valid key is refused
before its body is read. A slot is taken once the body has arrived, and released when the client is
gone, whatever work is left.

`/debug` shows the requests of all tenants, and changes roles. With a tenants file it needs an
operator's key, with a cluster key the operators' token, and with both one of the two. It is neither
counted nor limited. `/health`, `/ready`, `/metrics` and the schema stay
open: they are for the cluster's own network. The page at `/` is open too: it has no data
but what it reads from other routes.
"""

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halfmoon_conductor.errors import (
    ApiError,
    InvalidKey,
    NotPermitted,
    RateLimited,
    ServerOverloaded,
)
from halfmoon_conductor.http_server import error_responses
from halfmoon_conductor.http_server.body_receiver import BodyReceiver, ReceivedBody, replay_body
from halfmoon_conductor.http_server.disconnect import connection_of, unless_client_gone
from halfmoon_conductor.http_server.headers import header_of
from halfmoon_conductor.http_server.token_bucket import TokenBucket
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics, RejectionReason
from halfmoon_conductor.tenants import Tenant, Tenants
from halfmoon_protocol.salts import salt_of
from halfmoon_runtime.observability.operator_tokens import is_operator_token
from halfmoon_scheduling.fair_queueing import FairRoom

#: Paths that need a key, with all below them.
_GUARDED = ("/v1", "/tokenize", "/detokenize")
#: Paths that need an operator's key, with all below them.
_FOR_OPERATORS = ("/debug",)
#: When one of many requests will end is unknown; soon is likely.
_RETRY_WHEN_FULL_S = 1.0
#: Seconds by which the event loop may be behind all the time, and then until clients come back.
_MAX_BEHIND_S = 1.0
_RETRY_WHEN_BEHIND_S = 5.0
#: Statuses of answers to requests that nothing was computed for.
_COME_BACK = (429, 503)
_SCOPE_KEY = "halfmoon.caller"
#: Apps are coroutine functions, though their type says no more than awaitable.
_Work = Coroutine[Any, Any, None]


class Principal:
    """The sender of requests: a tenant with its usage, or any client if there are no tenants."""

    def __init__(self, tenant: Tenant | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.n_running = 0
        self._clock = clock
        self._requests = _bucket(tenant.requests_per_minute if tenant else None)
        self._tokens = _bucket(tenant.tokens_per_minute if tenant else None)

    @property
    def name(self) -> str:
        """The tenant's name; empty without tenants."""
        return self.tenant.name if self.tenant else ""

    def salt(self, cache_salt: str | None) -> str:
        """Return the salt of the block hashes of this principal's requests."""
        return salt_of(self.name, cache_salt or "")

    def acquire(self) -> None:
        """Take a slot for a request; `release` it once the request is answered.

        Raises:
            RateLimited: over the tenant's requests per minute or concurrency.
        """
        limit = self.tenant.max_concurrent if self.tenant else None
        if limit is not None and self.n_running >= limit:
            raise RateLimited(
                f"{self.name} has {self.n_running} requests here, and may have {limit} at once.",
                _RETRY_WHEN_FULL_S,
            )
        self._take(self._requests, 1, "requests")
        self.n_running += 1

    def release(self) -> None:
        """Give back a slot."""
        self.n_running -= 1

    @property
    def counts_requests(self) -> bool:
        """True if its requests per minute are limited."""
        return self._requests is not None

    def give_back_request(self) -> None:
        """Count a request no more that was refused so that others keep their latency."""
        if self._requests is not None:
            self._requests.give_back(1)

    def give_back_prompt(self, n_tokens: int) -> None:
        """Give back what `charge_prompt` took for a prompt that was not computed."""
        if self._tokens is not None:
            self._tokens.give_back(n_tokens)

    def charge_prompt(self, n_tokens: int) -> None:
        """Charge a prompt before it is computed.

        Raises:
            RateLimited: this minute's tokens are used up.
        """
        self._take(self._tokens, n_tokens, "tokens")

    def charge_generated(self, n_tokens: int) -> None:
        """Charge generated tokens, whose number is not known in advance."""
        if self._tokens is not None:
            self._tokens.take(n_tokens, self._clock())

    def _take(self, bucket: TokenBucket | None, n: int, unit: str) -> None:
        if bucket is None:
            return
        now_s = self._clock()
        if (wait_s := bucket.wait_s(n, now_s)) > 0:
            raise RateLimited(
                f"{self.name} has used up its {unit} per minute; {n} more may be had in "
                f"{wait_s:.1f} s.",
                wait_s,
            )
        bucket.take(n, now_s)


class ConcurrencyLimit:
    """Limit the guarded requests that are answered at once, of all principals together.

    A principal with less than its share is let in even when others have taken all. While the
    process's event loop is behind, which delays every stream, none is let in.
    """

    def __init__(self, limit: int, behind_s: Callable[[], float] = lambda: 0.0) -> None:
        self.n_running = 0
        self._limit = limit
        self._behind_s = behind_s
        self._room = FairRoom()

    def acquire(self, principal: str) -> None:
        """Take a slot for a request; `release` it once the request is answered.

        Args:
            principal: name of the tenant; empty without tenants.

        Raises:
            ServerOverloaded: the limit is reached, and the principal has its share; or the event
                loop is behind.
        """
        if (behind_s := self._behind_s()) > _MAX_BEHIND_S:
            raise ServerOverloaded(
                f"this conductor is behind by {behind_s:.1f} s with what it has to send.",
                _RETRY_WHEN_BEHIND_S,
            )
        self._room.enter(principal)
        is_full = self.n_running >= self._limit
        if is_full and not self._room.is_within_share(principal, self._limit):
            self._room.leave(principal)
            raise ServerOverloaded(
                f"{self.n_running} requests are being answered, the most that are taken at once.",
                _RETRY_WHEN_FULL_S,
            )
        self.n_running += 1

    def release(self, principal: str) -> None:
        """Give back a slot of this principal."""
        self._room.leave(principal)
        self.n_running -= 1


class AuthMiddleware:
    """Let only valid, permitted requests through to an app.

    Args:
        app: the app to wrap.
        tenants: None accepts requests without a key.
        operator_tokens: each opens the routes for operators, see `halfmoon_runtime`'s function of
            this name; none: without tenants they are open.
        concurrency: counts the requests that are being answered.
        bodies: receives request bodies.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tenants: Tenants | None,
        concurrency: ConcurrencyLimit,
        metrics: HttpMetrics,
        bodies: BodyReceiver,
        operator_tokens: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._operator_tokens = operator_tokens
        self._bodies = bodies
        self._metrics = metrics
        self._tenants = tenants
        self._concurrency = concurrency
        #: The principal without tenants, and principals by tenant name.
        self._anyone = Principal(None)
        self._principals: dict[str, Principal] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif is_guarded(scope["path"]):
            await self._serve_guarded(scope, receive, send)
        elif _is_below(_FOR_OPERATORS, scope["path"]):
            await self._serve_operator(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve_guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, body = connection_of(scope), self._bodies.open()
        is_here = connection is not None and not connection.is_receiving
        tenant = ""
        try:
            try:
                principal = self._identify(scope)
                tenant = principal.name
                await body.read(receive, is_here=is_here)
                self._acquire(principal)
            except ApiError as error:
                self._metrics.on_rejected(_rejection_reason(error, body), tenant)
                response = error_responses.error_response(error, scope["path"])
                if not body.is_read and not isinstance(error, InvalidKey):
                    response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
            scope[_SCOPE_KEY] = principal
            if principal.name:
                structlog.contextvars.bind_contextvars(tenant=principal.name)
            try:
                if principal.counts_requests:
                    send = _giving_back(principal, send)
                work = self._app(scope, replay_body(scope, body, receive), send)
                await unless_client_gone(receive, cast(_Work, work), connection)
            finally:
                self._concurrency.release(principal.name)
                principal.release()
        finally:
            body.release()

    def _acquire(self, principal: Principal) -> None:
        """Take the principal's slot and one of all principals'."""
        principal.acquire()
        try:
            self._concurrency.acquire(principal.name)
        except ApiError:
            principal.release()
            principal.give_back_request()
            raise

    async def _serve_operator(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_operator(scope)
        except ApiError as error:
            response = error_responses.error_response(error, scope["path"])
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_operator(self, scope: Scope) -> None:
        """Return if a request may see all tenants' requests.

        Raises:
            InvalidKey: it shows neither the token nor a valid key.
            NotPermitted: its key is valid, but of no operator.
        """
        if self._operator_tokens:
            if any(is_operator_token(key, self._operator_tokens) for key in _shown_keys(scope)):
                return
            if self._tenants is None:
                raise InvalidKey(
                    "This cluster has a key: show its operators' token, which `halfmoon "
                    "operator-token` prints, in the header 'Authorization: Bearer <token>'."
                )
        tenant = self._identify(scope).tenant
        if tenant is not None and not tenant.operator:
            raise NotPermitted(
                f"This is for operators, and {tenant.name} is none: see 'operator' in the "
                "file of tenants."
            )

    def _identify(self, scope: Scope) -> Principal:
        if self._tenants is None:
            return self._anyone
        keys = _shown_keys(scope)
        if not keys:
            raise InvalidKey(
                "An API key is needed here: send the header 'Authorization: Bearer <key>'."
            )
        # Clients send what their environment has, too: a stale key beside a valid one is no fault.
        tenants = [tenant for key in keys if (tenant := self._tenants.of(key)) is not None]
        if not tenants:
            raise InvalidKey("This API key is none that is valid here.")
        tenant = tenants[0]
        if tenants[-1].name != tenant.name:
            raise InvalidKey(
                f"Authorization has a key of {tenant.name}, and x-api-key one of "
                f"{tenants[-1].name}: send one of them."
            )
        return self._principals.setdefault(tenant.name, Principal(tenant))


def principal_of(scope: Scope) -> Principal:
    """Return the principal of a request that `AuthMiddleware` let in."""
    principal = scope[_SCOPE_KEY]
    assert isinstance(principal, Principal)
    return principal


def _shown_keys(scope: Scope) -> list[str]:
    """Return the keys in a request's headers: a bearer, and the one of Anthropic's clients."""
    scheme, _, bearer = header_of(scope, b"authorization").partition(" ")
    shown = bearer if scheme.lower() == "bearer" else "", header_of(scope, b"x-api-key")
    return [key for each in shown if (key := each.strip())]


def is_guarded(path: str) -> bool:
    """Return whether a path needs a key, unlike those for probes and operators."""
    return _is_below(_GUARDED, path)


def _is_below(tops: tuple[str, ...], path: str) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in tops)


def _rejection_reason(error: ApiError, body: ReceivedBody) -> RejectionReason:
    """Return the reason by which a refusal is counted."""
    if isinstance(error, InvalidKey):
        return "invalid_key"
    if not body.is_read:
        return "body"
    return "tenant_limit" if isinstance(error, RateLimited) else "concurrency"


def _giving_back(principal: Principal, send: Send) -> Send:
    """Return a `send` that counts a request no more whose answer says to come back later."""

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in _COME_BACK:
            principal.give_back_request()
        await send(message)

    return watched


def _bucket(per_minute: float | None) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute)
