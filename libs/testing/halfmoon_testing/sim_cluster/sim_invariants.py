"""State what must hold at the end of a run, whatever went wrong in it.

Those of requests look at what clients received; those of the cluster look at each process once
nothing is under way any more.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.sim_cluster.sim_clients import ClientRequest
from halfmoon_testing.sim_cluster.sim_cluster import SimCluster
from halfmoon_testing.sim_cluster.sim_shape import (
    BLOCK_SIZE,
    MODEL,
    QUARANTINE_S,
    RECOVERY_OF_RECORDS_S,
)
from halfmoon_testing.sim_cluster.violation import Violation

#: How a request may end.
NAMED_ENDS = frozenset(
    {"ok", "left", "ConnectionBroken", "ServiceUnavailable", "ServerOverloaded", "GenerationFailed"}
)
#: Faults one of which alone costs no request.
HARMLESS_ALONE = frozenset(
    {"kill a worker", "kill a rack", "pause", "cut", "isolate", "role change"}
    | {"metadata down", "metadata loss", "metadata is full"}
)
_NOTHING_LOST = frozenset({"ok", "left", "ServerOverloaded"})
#: Seconds within which the cluster holds nothing of requests that are over.
QUIET_S = 45.0
#: Seconds from the last fault to the first success, where no records were lost.
RECOVERY_S = 2.0


@lru_cache
def _oracle() -> FakeEngine:
    return FakeEngine(MODEL, block_size=BLOCK_SIZE)


@lru_cache(4096)
def expected_tokens(prompt: tuple[int, ...], n: int, sampling: Sampling) -> tuple[int, ...]:
    """Compute the tokens that must follow a prompt, without any pool or service."""
    return tuple(_oracle().expected(prompt, n, sampling=sampling))


def check_request(request: ClientRequest) -> None:
    """Check what one client received.

    Raises:
        Violation: a token is wrong, missing or repeated, or the end has no name.
    """
    right = expected_tokens(request.prompt, request.n_new, request.sampling)
    got = tuple(request.tokens)
    name = request.request_id
    if len(got) > len(right):
        raise Violation("each token once", f"{name} got {len(got)} of {len(right)} tokens")
    if got != right[: len(got)]:
        at = next(i for i, token in enumerate(got) if token != right[i])
        if got[at] in right[max(0, at - 1) : at + 2]:
            raise Violation("each token once", f"{name}: token {at} is another one's: {got}")
        raise Violation("no wrong token", f"{name}: token {at} is {got[at]}, not {right[at]}")
    if request.end == "ok" and len(got) < len(right):
        raise Violation("each token once", f"{name} ended with {len(got)} of {len(right)} tokens")
    if request.end not in NAMED_ENDS:
        raise Violation(
            "a named end", f"{name} ended in {request.end or 'nothing'}: {request.error}"
        )


def check_requests(cluster: SimCluster) -> None:
    """Check what all clients received.

    Raises:
        Violation: something is wrong with one of them.
    """
    for request in cluster.clients.requests:
        check_request(request)
    conductors = [each.conductor for each in cluster.starts if each.conductor is not None]
    if n_failures := sum(conductor.shell.n_failures for conductor in conductors):
        raise Violation("the core handles every event", f"{n_failures} ended in an exception")
    records = [each.record for each in cluster.starts]
    tried_again = {request_id for record in records for request_id in record.tried_again}
    _check_salts(cluster.clients.requests, tried_again)
    for record in records:
        if record.wasted:
            raise Violation("a refused request used no prefill", record.wasted[0])


def _check_salts(requests: list[ClientRequest], tried_again: set[str]) -> None:
    """Check that cached tokens are of earlier requests with the same salt."""
    for request in requests:
        if not request.n_cached:
            continue
        assert request.first_s is not None
        longest = 0
        for other in requests:
            if other is request or other.salt != request.salt or other.began_s is None:
                continue
            if other.began_s <= request.first_s:
                whole = other.prompt + expected_tokens(other.prompt, other.n_new, other.sampling)
                longest = max(longest, _common(whole, request.prompt))
        # A later try of the request itself may find what an earlier one has stored.
        if request.n_cached > longest and request.request_id not in tried_again:
            raise Violation(
                "no hit across salts",
                f"{request.request_id} of salt {request.salt!r} had {request.n_cached} cached"
                f" tokens, {longest} of which are known to that salt",
            )


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    n = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        n += 1
    return n


def check_nothing_lost(cluster: SimCluster, faults: Mapping[str, int]) -> None:
    """Check that one fault of a kind that costs no request has cost none.

    Raises:
        Violation: a request failed.
    """
    if sum(faults.values()) > 1 or not HARMLESS_ALONE.issuperset(faults):
        return
    for request in cluster.clients.requests:
        if request.end not in _NOTHING_LOST:
            raise Violation(
                "a loss costs no request", f"{request.request_id}: {request.end}, {request.error}"
            )


async def check_end(cluster: SimCluster) -> None:
    """Wait until the cluster is quiet, and check what it still holds.

    Raises:
        Violation: something is held, or views differ.
    """
    await cluster.until(cluster.is_whole, QUIET_S, "all services are in use again")
    limit_s = cluster.loop.time() + QUIET_S
    for invariant, held in (
        ("all is given back", _held_of_requests),
        ("all is given back", _held_by_kvstores),
        ("the index equals the stores", _index_difference),
        ("each span ends", _unended_spans),
    ):
        await _until_nothing(cluster, invariant, held, limit_s)
    await _check_tasks(cluster)
    _audit(cluster)


async def _until_nothing(
    cluster: SimCluster, invariant: str, held: Callable[[SimCluster], str], limit_s: float
) -> None:
    try:
        await cluster.until(
            lambda: not held(cluster), max(0.0, limit_s - cluster.loop.time()), invariant
        )
    except Violation as violation:
        if violation.invariant != "ends within its bound":
            raise
        raise Violation(invariant, held(cluster)) from None


def _held_of_requests(cluster: SimCluster) -> str:
    """Describe what is held for requests; all of them are over."""
    parts = cluster.conductor.conductor
    assert parts is not None
    if any(parts.core.n_requests.values()):
        return f"the conductor has {parts.core.n_requests}"
    for service in cluster.services.values():
        pages = getattr(service.worker, "pages", None)
        if pages is not None and pages.n_free != pages.n_pages:
            return f"{service.name} has {pages.n_free} of {pages.n_pages} pages free"
        if (jobs := getattr(service.worker, "jobs", None)) and len(jobs):
            return f"{service.name} has jobs {list(jobs)}"
    return ""


def _held_by_kvstores(cluster: SimCluster) -> str:
    for service in cluster.services.values():
        tiers = getattr(service.worker, "tiers", None)
        if tiers is not None and (tiers.memory.n_reserved or tiers.memory.n_leased):
            return (
                f"{service.name} has {tiers.memory.n_reserved} reserved and"
                f" {tiers.memory.n_leased} leased blocks"
            )
    return ""


def _index_difference(cluster: SimCluster) -> str:
    parts = cluster.conductor.conductor
    assert parts is not None
    for service in cluster.services.values():
        if service.role != "kvstore" or service.worker is None:
            continue
        tiers = service.worker.tiers
        stored = set() if tiers is None else set(tiers.hashes())
        known = WorkerId(service.name)
        n_known = parts.core.index.n_blocks(known)
        missing = [each for each in stored if known not in parts.core.index.holders(each)]
        if missing or n_known != len(stored):
            return (
                f"the index has {n_known} blocks of {service.name}, which has {len(stored)};"
                f" {len(missing)} of these are unknown"
            )
    return ""


def _unended_spans(cluster: SimCluster) -> str:
    for service in cluster.services.values():
        if service.tracer is not None and service.tracer.unended:
            return f"{service.name} has spans {sorted(service.tracer.unended.values())}"
    return ""


async def _check_tasks(cluster: SimCluster) -> None:
    """Check that no task of a request is left."""

    def left(cluster: SimCluster) -> str:
        for service in cluster.services.values():
            process = service.process
            n_links = cluster.shape.n_kvstore + cluster.shape.n_prefill + cluster.shape.n_decode
            # Main tasks of a service, and one reader of each link.
            if len(process.tasks) > 8 + n_links:
                return f"{service.name} has {sorted(t.get_name() for t in process.tasks)}"
        return ""

    await _until_nothing(cluster, "no task is left", left, cluster.loop.time() + 5.0)


def _audit(cluster: SimCluster) -> None:
    for service in cluster.services.values():
        parts = service.conductor
        audits = [
            getattr(service.worker, "check", None),
            None if parts is None else parts.core.check,
        ]
        for check in audits:
            if check is not None:
                try:
                    check()
                except AssertionError as error:
                    raise Violation("state audits itself", f"{service.name}: {error!r}") from error


def check_recovery(recovery_s: float, *, lost_records: bool, pages_rest: bool) -> None:
    """Check how soon a request succeeded after the last fault.

    Args:
        recovery_s: seconds until it did.
        lost_records: whether the metadata server has lost records.
        pages_rest: whether a decode worker had pages in quarantine at the last fault.

    Raises:
        Violation: it was too late.
    """
    limit_s = RECOVERY_OF_RECORDS_S if lost_records else RECOVERY_S
    if pages_rest:
        limit_s = max(limit_s, QUARANTINE_S + RECOVERY_S)
    if recovery_s > limit_s:
        raise Violation(
            "a success soon after the last fault",
            f"the first one came after {recovery_s:.2f} s, the limit is {limit_s} s",
        )
