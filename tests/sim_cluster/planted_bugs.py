"""Bugs to plant into the services, at least one for each promise: each swaps one function.

They show that the simulation finds what it looks for. `seed` of each is the first one that found
it; `python -m tests.sim_cluster.planted_bugs` looks for them anew.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from halfmoon_conductor.generation import core_gateway
from halfmoon_conductor.generation.core_gateway import CoreGateway
from halfmoon_conductor.workers import worker_links
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_protocol.blocks import block_hashes
from halfmoon_runtime import membership
from halfmoon_scheduling.cache.block_cache import BlockCache
from halfmoon_scheduling.conductor.decode_handover import DecodeHandover
from halfmoon_scheduling.conductor.request_admission import RequestAdmission
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.directory.kv_event_follower import KvEventFollower
from halfmoon_scheduling.tiers.tiered_cache import TieredCache
from halfmoon_testing.sim_cluster.sim_run import run_seed
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.regions.grant_revocation import OVER
from halfmoon_workers.decode.decode_spans import DecodeSpans
from halfmoon_workers.prefill import prefill_shell
from halfmoon_workers.prefill.prefix_cache_client import PrefixCacheClient


@dataclass(frozen=True)
class PlantedBug:
    """One bug: what it replaces, and what finds it."""

    #: The invariant that it breaks.
    breaks: str
    owner: Any
    attribute: str
    #: Makes the wrong one from the right one.
    make: Callable[[Any], Any]
    #: The first seed that finds it.
    seed: int

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the bug for the length of a block."""
        right = getattr(self.owner, self.attribute)
        setattr(self.owner, self.attribute, self.make(right))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, right)


def _nothing(right: object) -> Callable[..., None]:
    return lambda *args, **more: None


def _async_nothing(right: object) -> Callable[..., Any]:
    async def nothing(*args: object) -> None:
        pass

    return nothing


def _impatient(right: object) -> Callable[..., None]:
    def on_worker_lost(admission: RequestAdmission, lost: object, now: float) -> None:
        admission.on_workers_changed()

    return on_worker_lost


def _forgetful_request(right: Callable[..., Any]) -> Callable[..., Any]:
    """Begin each try from the client's prompt: tokens that were delivered come again."""

    def request_of(stream: Any, layout: Any) -> Any:
        tokens, stream.tokens = stream.tokens, []
        try:
            return right(stream, layout)
        finally:
            stream.tokens = tokens

    return request_of


def _silent_loss(right: object) -> Callable[..., None]:
    """Note that a worker is lost, and do not tell the core."""

    def lose(self: WorkerLinks, member: Any, reason: str) -> None:
        member.link, member.joined = None, False

    return lose


def _gap_is_fine(right: Callable[..., bool]) -> Callable[..., bool]:
    """Apply events without a look at their numbers."""

    def on_events(self: KvEventFollower, worker: Any, batch: Any, now: float) -> bool:
        stream = self._streams.get(worker)
        if stream is not None and not stream.awaits_snapshot:
            stream.applied = max(stream.applied, batch.sequence - 1)
        return right(self, worker, batch, now)

    return on_events


def _decide_late(right: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse long prompts when their prefill is done."""

    def on_prefill_done(self: DecodeHandover, state: Any, done: Any, now: float) -> Any:
        if len(state.request.token_ids) > 100:
            verdict = self._table.late_admission.verdict(state, now)
            return self._refuse(state, verdict, now)
        return right(self, state, done, now)

    return on_prefill_done


def _leaky(right: Callable[..., None]) -> Callable[..., None]:
    """Forget the last page of long prompts."""

    def release(self: PageAllocator, pages: Any) -> None:
        pages = list(pages)
        right(self, pages[:-1] if len(pages) > 8 else pages)

    return release


def _not_applied(right: object) -> Callable[..., list[Any]]:
    """Answer a commit, and store nothing."""
    return lambda *args: []


def _without_salt(right: object) -> Callable[..., Any]:
    def hashes(token_ids: Any, *, model: str, salt: str, block_size: int) -> Any:
        return block_hashes(token_ids, model=model, salt="", block_size=block_size)

    return hashes


def _never_cancelled(right: object) -> Callable[..., Any]:
    """Renew leases of requests that are over."""

    async def renew(self: PrefixCacheClient, job: Any) -> None:
        while True:
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                continue

    return renew


def _mistaken(right: Callable[..., Any]) -> Callable[..., Any]:
    """Raise for long prompts what no client is told of by a name."""

    def request_of(stream: Any, layout: Any) -> Any:
        if stream.attempt == 1 and len(stream.request.prompt_token_ids) > 180:
            return {}[stream.request.request_id]
        return right(stream, layout)

    return request_of


def _once(right: object) -> Callable[..., Any]:
    """Ask the metadata server once: what asks ends while the server is away."""

    async def until_done(what: str, attempt: Callable[[], Any], **more: object) -> Any:
        return await attempt()

    return until_done


def _at_once(right: object) -> Callable[..., Any]:
    """Say that nothing lands any more without asking the landing's owner."""

    async def settle(*args: object) -> bool:
        return True

    return settle


def _kept_open(right: object) -> Callable[..., Any]:
    """Say that a key opens nothing any more, and leave it as it is."""

    def begin_take_back(self: GrantLender[Any], holder: Any) -> Any:
        return None if self._lent.pop(holder, None) is None else OVER

    return begin_take_back


#: By what they are.
BUGS = {
    "keys of landings stay open": PlantedBug(
        "no wrong token", GrantLender, "begin_take_back", _kept_open, seed=522
    ),
    "decode leaves spans of its requests open": PlantedBug(
        "each span ends", DecodeSpans, "on_ended", _nothing, seed=0
    ),
    "a prefill has stopped while its writes are on their way": PlantedBug(
        "no wrong token", prefill_shell, "settle_writes", _at_once, seed=517
    ),
    "fetched blocks are not verified": PlantedBug(
        "no wrong token", PrefixCacheClient, "verify", _async_nothing, seed=15
    ),
    "a try begins without the delivered tokens": PlantedBug(
        "each token once", core_gateway, "_request_of", _forgetful_request, seed=56
    ),
    "an error in the gateway has no name": PlantedBug(
        "a named end", core_gateway, "_request_of", _mistaken, seed=2
    ),
    "a worker ends while the metadata server is away": PlantedBug(
        "services go on", membership, "until_done", _once, seed=0
    ),
    "the core is not told of a lost worker": PlantedBug(
        "ends within its bound", WorkerLinks, "_lose", _silent_loss, seed=1
    ),
    "no request waits for a worker that comes back": PlantedBug(
        "a loss costs no request", RequestAdmission, "on_worker_lost", _impatient, seed=216
    ),
    "a rejected request gets no answer": PlantedBug(
        "ends within its bound", CoreGateway, "reject", _nothing, seed=4
    ),
    "the last page of a long prompt is not given back": PlantedBug(
        "all is given back", PageAllocator, "release", _leaky, seed=2
    ),
    "a commit is answered and not applied": PlantedBug(
        "acknowledged puts live", TieredCache, "commit", _not_applied, seed=0
    ),
    "leases of dead readers do not expire": PlantedBug(
        "all is given back", BlockCache, "expire", _nothing, seed=18
    ),
    "gaps in KV events are not noticed": PlantedBug(
        "the index equals the stores", KvEventFollower, "on_events", _gap_is_fine, seed=118
    ),
    "long prompts are refused after their prefill": PlantedBug(
        "a refused request used no prefill", DecodeHandover, "on_prefill_done", _decide_late, seed=1
    ),
    "block hashes are without the salt": PlantedBug(
        "no hit across salts", core_gateway, "block_hashes", _without_salt, seed=0
    ),
    "a lost worker is dialled again after half a minute": PlantedBug(
        "a success soon after the last fault",
        worker_links,
        "_REDIAL_S",
        lambda right: 30.0,
        seed=1,
    ),
    "renewals go on after their request": PlantedBug(
        "no task is left", PrefixCacheClient, "renew_until_cancelled", _never_cancelled, seed=1
    ),
}


def first_seed(bug: PlantedBug, seeds: range) -> int | None:
    """Return the first of these seeds that finds a bug; None: none does."""
    with bug.planted():
        for seed in seeds:
            violation = run_seed(seed).violation
            if violation is not None and violation.invariant == bug.breaks:
                return seed
    return None


if __name__ == "__main__":
    for name, each in BUGS.items():
        print(first_seed(each, range(2000)), name, flush=True)
