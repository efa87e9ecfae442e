"""Decide about the continuous batch of a decode worker, and about landings that wait for KV.

    reserve ──▶ landing ──start──▶ running ──on_token──▶ finished
                   │  └─cancel in      │
                   │    doubt─▶ aside  │
                expire,            preempted,
                cancel             cancel

Pages belong to a request from `reserve` until it leaves, by any arrow. Another holder, such as a
transfer that reads them, may share them and release them later.

A landing may begin with pages that are held or kept already, since their blocks are those of its
prompt: it shares them, and only the rest is to land. They are complete blocks before the last one
of the prompt, so neither prefill nor a step writes to them. With `start` all complete blocks of the
prompt are kept for others. Until then prefill may write to them.

Only numbers live here; the engine runs the forward passes. The worker calls this between steps,
never during one, since a freed page may be another request's a moment later. For the same reason
the pages of a landing whose writer could not be stopped stay aside for as long as the caller says.
They are free at the landing's deadline at the latest: from then on the writer may not write.

Room to grow: a request is admitted only if its own pages leave one free page for each request here,
itself included, that may still need one. So every request can cross its next block border. Beyond
that the pool is overcommitted. When it has no free page, the request that started last loses its
pages, since the least work is lost with it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NewType

from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import BlockHash, RequestId
from halfmoon_protocol.sampling import Finish, Stopping
from halfmoon_scheduling.decode.page_allocator import OutOfPages, PageAllocator

#: Names the pages of one landing that was set aside.
AsideNumber = NewType("AsideNumber", int)


class ReservationRefused(Exception):
    """A reservation that got no pages."""

    def __init__(
        self, reason: str, *, retryable: bool, code: str, lacks_pages: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        #: Of `halfmoon_protocol.error_codes`.
        self.code = code
        #: True when more free pages would have been enough.
        self.lacks_pages = lacks_pages
        #: True when it would fit at another time, False when it never does.
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's part of a step."""

    request_id: RequestId
    #: The newest token; its KV is to be computed, then the next token is chosen.
    token: int
    #: Index of `token` in prompt and output; the KV of all before it is in `pages`.
    position: int
    #: Block i of the request is in page ``pages[i]``; they cover `position`.
    pages: tuple[int, ...]
    #: Stop tokens, while it is too early for them: none of them is the next token.
    masked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchStep:
    """One forward pass over all running requests, the one that started first in front."""

    rows: tuple[BatchRow, ...]
    #: Requests that lost their pages; they are gone from the batch.
    preempted: tuple[RequestId, ...]


@dataclass(slots=True)
class _Held:
    """The pages and limits of a request of either kind."""

    pages: list[int]
    #: Pages that it needs at its longest.
    max_pages: int
    #: Tokens that landed: the position of the first new one.
    n_landed: int
    stopping: Stopping

    @property
    def may_grow(self) -> bool:
        return len(self.pages) < self.max_pages


@dataclass(slots=True)
class _Landing(_Held):
    deadline_s: float
    #: Blocks at its beginning that were there when it was reserved.
    n_held_blocks: int
    #: Complete blocks of the prompt, to be kept; empty: none is.
    block_hashes: Sequence[BlockHash]


@dataclass(slots=True)
class _Running(_Held):
    token: int
    #: New tokens so far, including the first one, from prefill.
    n_new: int
    #: Whether its next token is late: it is left out of steps until `on_token`.
    held: bool = False

    @property
    def position(self) -> int:
        return self.n_landed + self.n_new - 1


def _pages_of(landings: Sequence[_Landing]) -> set[int]:
    return {page for landing in landings for page in landing.pages}


def finish_reason(stopping: Stopping, n_new: int, token: int) -> Finish:
    """Return the reason for which a request is finished by its newest token; "" if it is not.

    Args:
        stopping: the request's rules.
        n_new: new tokens, this one included; the first one of a request is 1.
        token: the newest token.

    Returns:
        "stop" for a stop token, which comes early only where nothing else may come; "length" when
        no more may come; else "".
    """
    if token in stopping.stop_token_ids:
        return "stop"
    return "length" if n_new >= stopping.max_new_tokens else ""


class DecodeBatch:
    """Batch requests continuously: they join and leave between steps, and grow page by page."""

    def __init__(
        self,
        pages: PageAllocator,
        *,
        block_size: int,
        max_running: int,
        max_context: int,
        landing_ttl_s: float,
    ) -> None:
        """Start with an empty batch.

        Args:
            pages: the pool; pages that others hold are not free.
            block_size: tokens per page.
            max_running: most requests, including landings (each becomes a row).
            max_context: most tokens of prompt and output.
            landing_ttl_s: seconds from its reservation after which a landing is discarded.
        """
        if min(block_size, max_running, max_context) < 1:
            raise ValueError(
                f"block_size {block_size}, max_running {max_running} and max_context "
                f"{max_context} must be at least 1"
            )
        self._pages = pages
        self._block_size = block_size
        self._max_running = max_running
        self._max_context = max_context
        self._landing_ttl_s = landing_ttl_s
        #: In order of reservation. Disjoint from `_running`.
        self._landings: dict[RequestId, _Landing] = {}
        #: In order of start.
        self._running: dict[RequestId, _Running] = {}
        #: Landings cancelled in doubt: their requests are gone, their pages not yet free.
        self._aside: dict[AsideNumber, _Landing] = {}
        self._aside_numbers = count(1)

    @property
    def n_running(self) -> int:
        """Requests in the next step, if none is preempted."""
        return len(self._running)

    @property
    def n_reserved(self) -> int:
        """Landings that wait for their start."""
        return len(self._landings)

    @property
    def pages_landing(self) -> int:
        """Pages of landings that wait for their start."""
        return len(_pages_of(list(self._landings.values())))

    @property
    def pages_quarantined(self) -> int:
        """Pages of landings cancelled in doubt; not yet free, and of no other landing."""
        return len(_pages_of(list(self._aside.values())) - _pages_of(list(self._landings.values())))

    @property
    def context_tokens(self) -> int:
        """Tokens that the next step attends to, over all running requests."""
        return sum(row.position + 1 for row in [*self._running.values()])

    @property
    def free_pages(self) -> int:
        """Pages without holders."""
        return self._pages.n_free

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._running or request_id in self._landings

    def request_ids(self) -> list[RequestId]:
        """Return all requests here, landings and running ones."""
        return [*self._landings, *self._running]

    def is_running(self, request_id: RequestId) -> bool:
        """Return whether a request is in the next step, unless it is preempted."""
        return request_id in self._running

    def n_landed(self, request_id: RequestId) -> int | None:
        """Return the tokens of a landing that waits for its start; None without one."""
        landing = self._landings.get(request_id)
        return None if landing is None else landing.n_landed

    def landing_pages(self, request_id: RequestId) -> tuple[int, ...]:
        """Return the pages of a landing that waits for its start; empty without one."""
        landing = self._landings.get(request_id)
        return () if landing is None else tuple(landing.pages)

    def held_blocks(self, request_id: RequestId) -> int:
        """Return the blocks of a landing that were there when it was reserved."""
        landing = self._landings.get(request_id)
        return 0 if landing is None else landing.n_held_blocks

    def reserve(
        self,
        request_id: RequestId,
        n_tokens: int,
        stopping: Stopping,
        now: float,
        block_hashes: Sequence[BlockHash] = (),
    ) -> list[int]:
        """Reserve pages for the KV of `n_tokens` tokens, for `landing_ttl_s`.

        Args:
            request_id: not here yet.
            n_tokens: of the prompt.
            stopping: the request's rules.
            now: seconds.
            block_hashes: complete blocks of the prompt, from its first one on. Those that are here
                are shared, and the others are kept once they have landed.

        Raises:
            ReservationRefused: it can never fit (not retryable), or not now (retryable).
            ValueError: the request is here already, or has no tokens.
        """
        if request_id in self:
            raise ValueError(f"request {request_id!r} is here already")
        if n_tokens < 1:
            raise ValueError(f"request {request_id!r} has {n_tokens} tokens; the least is 1")
        max_pages = self._max_pages(n_tokens, stopping)
        n_pages = self._pages_for(n_tokens)
        n_held = len(self._running) + len(self._landings)
        if n_held >= self._max_running:
            raise ReservationRefused(
                f"{n_held} requests are running or landing, {self._max_running} is the limit",
                retryable=True,
                code=error_codes.NO_ROOM,
            )
        growing = sum(held.may_grow for held in (*self._running.values(), *self._landings.values()))
        headroom = growing + (n_pages < max_pages)
        held = self._pages.kept.longest_prefix(block_hashes[: (n_tokens - 1) // self._block_size])
        # Kept pages without holders are free ones.
        n_wanted = n_pages - sum(self._pages.n_holders(page) > 0 for page in held)
        if n_wanted + headroom > self._pages.n_free:
            raise ReservationRefused(
                f"{n_wanted} pages wanted and {headroom} to be left for growing, "
                f"{self._pages.n_free} of {self._pages.n_pages} are free",
                retryable=True,
                code=error_codes.NO_ROOM,
                lacks_pages=True,
            )
        self._pages.hold(held)
        pages = [*held, *self._pages.allocate(n_pages - len(held))]
        deadline_s = now + self._landing_ttl_s
        self._landings[request_id] = _Landing(
            pages, max_pages, n_tokens, stopping, deadline_s, len(held), block_hashes
        )
        return list(pages)

    def start(self, request_id: RequestId, first_token: int, now: float) -> None:
        """Move a request whose KV has landed into the batch.

        Raises:
            KeyError: there is no such landing, or its deadline has passed and it is freed.
            ValueError: its first token was its last one too; the landing stays.
        """
        landing = self._landings.get(request_id)
        if landing is None:
            raise KeyError(f"no landing is held for request {request_id!r}")
        if landing.stopping.max_new_tokens < 2:
            raise ValueError(f"request {request_id!r} has max_new_tokens 1: nothing to decode")
        del self._landings[request_id]
        if landing.deadline_s <= now:
            self._pages.release(landing.pages)
            raise KeyError(f"the landing of request {request_id!r} ran out before its start")
        n_full = landing.n_landed // self._block_size
        for page, block in zip(landing.pages[:n_full], landing.block_hashes, strict=False):
            self._pages.keep(page, block)
        self._running[request_id] = _Running(
            landing.pages,
            landing.max_pages,
            landing.n_landed,
            landing.stopping,
            token=first_token,
            n_new=1,
        )

    def next_step(self) -> BatchStep:
        """Allocate the page that each row's newest token needs, and return the step to compute.

        The oldest rows come first. When no page is free, the youngest running request is preempted,
        perhaps the very row that needs one. The oldest is never preempted: if landings hold all
        other pages, it is left out of this step until they start or expire.
        """
        rows: list[BatchRow] = []
        preempted: list[RequestId] = []
        for request_id in list(self._running):
            if request_id not in self._running:
                break  # preempted for an older row, as are all rows after it
            if self._running[request_id].held:
                continue
            if self._grow(request_id, preempted):
                running = self._running[request_id]
                rows.append(
                    BatchRow(
                        request_id,
                        running.token,
                        running.position,
                        tuple(running.pages),
                        running.stopping.masked_after(running.n_new),
                    )
                )
        return BatchStep(tuple(rows), tuple(preempted))

    def hold(self, request_id: RequestId) -> None:
        """Leave a request whose next token is late out of steps, until `on_token`.

        Raises:
            KeyError: the request is not running.
        """
        self._running[request_id].held = True

    def on_token(self, request_id: RequestId, token: int) -> Finish:
        """Record a request's next token. A finished request leaves the batch and frees its pages.

        Returns:
            "" while it continues, else "stop" or "length".

        Raises:
            KeyError: the request is not running.
        """
        running = self._running[request_id]
        running.token = token
        running.n_new += 1
        running.held = False
        finish = finish_reason(running.stopping, running.n_new, token)
        if finish:
            self._pages.release(self._running.pop(request_id).pages)
        return finish

    def page_of(self, request_id: RequestId, block: int) -> int:
        """Return the page of a running request's block.

        Raises:
            KeyError: the request is not running.
        """
        return self._running[request_id].pages[block]

    @property
    def held_pages(self) -> list[int]:
        """Pages of all requests, and those aside; each page has one request."""
        held = [*self._running.values(), *self._landings.values(), *self._aside.values()]
        return [page for one in held for page in one.pages]

    @property
    def lacks_pages(self) -> bool:
        """Return whether the next step would want more pages than are free."""
        size = self._block_size
        n_wanted = sum(r.position >= len(r.pages) * size for r in self._running.values())
        return n_wanted > self._pages.n_free

    @property
    def quiet_steps(self) -> int:
        """Steps in a row in which no request needs a page or reaches its length.

        A driver that knows the tokens beforehand, such as a simulator, may `skip` so many steps.
        """
        size = self._block_size
        return min(
            (
                min(
                    len(r.pages) * size - r.position,
                    r.stopping.max_new_tokens - r.n_new - 1,
                )
                for r in self._running.values()
            ),
            default=0,
        )

    def skip(self, n_steps: int) -> None:
        """Record `n_steps` tokens of each running request, none of which finishes it.

        Raises:
            ValueError: more than `quiet_steps`.
        """
        if n_steps > self.quiet_steps:
            raise ValueError(f"{n_steps} steps to skip, {self.quiet_steps} are quiet")
        for running in self._running.values():
            running.n_new += n_steps

    def cancel(self, request_id: RequestId, *, aside_until_s: float | None = None) -> bool:
        """Remove a request, landing or running, and return whether it was here.

        Args:
            request_id: the request.
            aside_until_s: a landing may still be written to: keep its pages aside until then.
                A running request has landed, so its pages are free at once.
        """
        if (running := self._running.pop(request_id, None)) is not None:
            self._pages.release(running.pages)
        elif request_id not in self._landings:
            return False
        elif aside_until_s is not None:
            self.set_aside(request_id, aside_until_s)
        else:
            self._pages.release(self._landings.pop(request_id).pages)
        return True

    def set_aside(self, request_id: RequestId, until_s: float) -> AsideNumber:
        """Remove a landing that may still be written to, and keep its pages aside until then.

        Returns:
            Names its pages, for `free_early`.

        Raises:
            KeyError: there is no such landing.
        """
        landing = self._landings.pop(request_id)
        landing.deadline_s = until_s
        number = AsideNumber(next(self._aside_numbers))
        self._aside[number] = landing
        return number

    def is_aside(self, number: AsideNumber) -> bool:
        """Return whether pages are still aside."""
        return number in self._aside

    def free_early(self, number: AsideNumber) -> None:
        """Free pages that are aside, if they still are: nothing writes to them any more."""
        if (landing := self._aside.pop(number, None)) is not None:
            self._pages.release(landing.pages)

    def is_landing(self, request_id: RequestId) -> bool:
        """Return whether the KV of a request may still be written to its pages."""
        return request_id in self._landings

    def late_landings(self, now: float) -> list[RequestId]:
        """Return landings past their deadline: they are to be cancelled."""
        return [rid for rid, landing in self._landings.items() if landing.deadline_s <= now]

    def free_aside(self, now: float) -> None:
        """Free pages that were aside for long enough."""
        for number in [n for n, landing in self._aside.items() if landing.deadline_s <= now]:
            self.free_early(number)

    def expire(self, now: float) -> list[RequestId]:
        """Free what was aside for long enough; cancel late landings, and return them."""
        self.free_aside(now)
        late = self.late_landings(now)
        for request_id in late:
            self.cancel(request_id)
        return late

    def check(self) -> None:
        """Check that pages cover every row's context, and that those written have one request.

        A page may have further holders, which read it.
        """
        self._pages.check()
        assert not self._running.keys() & self._landings.keys()
        assert len(self._running) + len(self._landings) <= self._max_running
        held = [*self._running.values(), *self._landings.values(), *self._aside.values()]
        n_requests = Counter(self.held_pages)
        for page, n in n_requests.items():
            assert n == 1 or page in self._pages.kept, "a page belongs to two requests"
            assert self._pages.n_holders(page) >= n, "a page here is free"
        assert len(n_requests) + self._pages.n_free <= self._pages.n_pages
        for landing in (*self._landings.values(), *self._aside.values()):
            self._check_unshared(landing.pages[landing.n_held_blocks :])
        for running in self._running.values():
            self._check_unshared(running.pages[running.position // self._block_size :])
        for one in held:
            assert self._pages_for(one.n_landed) <= len(one.pages) <= one.max_pages
        for running in self._running.values():
            assert running.n_new < running.stopping.max_new_tokens
            assert running.position <= len(running.pages) * self._block_size

    def _check_unshared(self, written: Sequence[int]) -> None:
        assert not any(page in self._pages.kept for page in written), "a kept page is written"

    def _grow(self, request_id: RequestId, preempted: list[RequestId]) -> bool:
        """Allocate pages up to a row's position; return False if there are none."""
        running = self._running[request_id]
        while running.position >= len(running.pages) * self._block_size:
            try:
                running.pages += self._pages.allocate(1)
            except OutOfPages:
                oldest, youngest = next(iter(self._running)), next(reversed(self._running))
                if youngest == oldest:
                    return False
                self._pages.release(self._running.pop(youngest).pages)
                preempted.append(youngest)
                if youngest == request_id:
                    return False
        return True

    def _max_pages(self, n_tokens: int, stopping: Stopping) -> int:
        """Return the pages of a request at its longest: the last token's KV is never needed.

        Raises:
            ReservationRefused: not retryable, over the model's context or the whole pool.
        """
        longest = n_tokens + stopping.max_new_tokens
        if longest > self._max_context:
            raise ReservationRefused(
                f"{n_tokens} tokens and {stopping.max_new_tokens} new ones are {longest}, "
                f"max_context is {self._max_context}",
                retryable=False,
                code=error_codes.TOO_LONG,
            )
        max_pages = self._pages_for(longest - 1)
        if max_pages > self._pages.n_pages:
            raise ReservationRefused(
                f"{n_tokens} tokens and {stopping.max_new_tokens} new ones need {max_pages} "
                f"pages of {self._block_size} tokens, the pool has {self._pages.n_pages}",
                retryable=False,
                code=error_codes.TOO_LONG,
            )
        return max_pages

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._block_size)
