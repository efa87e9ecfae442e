"""Inject faults: delay, drop and damage the slices that a backend carries.

It ships with the product: run a cluster through it and see that only time is lost. The fault of a
slice depends only on the seed, the numbers of transfer and slice, and the number of tries. So the
same program meets the same faults, however its threads are scheduled. (When several threads submit,
the order decides the transfers' numbers.)

A dropped slice is lost either on the way there, or with its acknowledgement on the way back (then
it was applied). A damaged slice has one byte inverted in flight, so the wrapper requests checksums
even where no wire is crossed; not with `FaultPlan.verify` off: then only transfers that ask for
checks notice.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from halfmoon_transfer.backends.backend_interface import (
    Backend,
    BackendGauges,
    CarryRequest,
    SupportsHangUp,
    SupportsSettling,
    same_outcome_for_all,
)
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import OutcomeKind, Slice, SliceOutcome
from halfmoon_transfer.threads.stop_signal import StopSignal

_POLL_S = 0.02


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a path. Rates are per slice and try, from 0 to 1."""

    seed: int = 0
    #: Added to every batch.
    delay_s: float = 0.0
    drop_rate: float = 0.0
    corrupt_rate: float = 0.0
    #: The path is dead after so many slices; None: never.
    fail_after_n: int | None = None
    #: Whether no slice gets through.
    partitioned: bool = False
    #: Whether all slices are compared, also those of transfers that ask for no checks in memory.
    verify: bool = True


class FaultInjection:
    """A backend's name and its faults; given to `TransferEngine.open` in place of the name.

    `plan` and `rails` may be changed at any time, also while transfers are going on.
    """

    def __init__(
        self, inner: str, plan: FaultPlan, rails: Mapping[str, FaultPlan] | None = None
    ) -> None:
        """Describe the faults.

        Args:
            inner: the backend's name.
            plan: faults of all rails.
            rails: further faults of single rails, by the dialled address.
        """
        self.inner = inner
        self.plan = plan
        self.rails = dict(rails or {})

    def partition(self, rail: str | None = None) -> None:
        """Let nothing through, or nothing over one rail."""
        self._set_partitioned(rail, True)

    def heal(self, rail: str | None = None) -> None:
        """End a partition."""
        self._set_partitioned(rail, False)

    def _set_partitioned(self, rail: str | None, partitioned: bool) -> None:
        if rail is None:
            self.plan = msgspec.structs.replace(self.plan, partitioned=partitioned)
        else:
            plan = self.rails.get(rail, FaultPlan())
            self.rails[rail] = msgspec.structs.replace(plan, partitioned=partitioned)

    def wrap(self, inner: Backend) -> Backend:
        """Return the backend with these faults around it."""
        return FaultyBackend(inner, self)


class FaultyBackend:
    """A backend that carries through another one, with faults."""

    def __init__(self, inner: Backend, faults: FaultInjection) -> None:
        self.name = f"faults({inner.name})"
        self.capabilities = inner.capabilities
        self.slice_bytes = inner.slice_bytes
        self._inner = inner
        self._faults = faults
        #: Number of slices so far, by rail; of all rails under "".
        self._n_slices: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Endpoints of the inner backend: peers don't know of the faults."""
        return self._inner.endpoints

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return whether the inner backend reaches the peer."""
        return self._inner.reaches(peer)

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Carry some slices of the batch, some of them damaged."""
        request = msgspec.structs.replace(request, rail_hook=self._hook_rail)
        return self._carry(request, "", self._faults.plan, self._inner.carry)

    def notify(self, request: CarryRequest) -> SliceOutcome:
        """Deliver a notification, or lose it; a damaged one counts as lost."""
        request = msgspec.structs.replace(request, rail_hook=self._hook_rail)
        return self._notify(request, "", self._faults.plan, self._inner.notify)

    def _hook_rail(
        self,
        rail: str,
        request: CarryRequest,
        carry: Callable[[CarryRequest], Sequence[SliceOutcome]],
    ) -> Sequence[SliceOutcome]:
        plan = self._faults.rails.get(rail)
        if plan is None:
            return carry(request)
        if request.batch.notification is not None:
            return [self._notify(request, rail, plan, lambda each: carry(each)[0])]
        return self._carry(request, rail, plan, carry)

    def _carry(
        self,
        request: CarryRequest,
        rail: str,
        plan: FaultPlan,
        carry: Callable[[CarryRequest], Sequence[SliceOutcome]],
    ) -> Sequence[SliceOutcome]:
        _wait(request, plan.delay_s)
        if plan.partitioned:
            return same_outcome_for_all(request.batch, OutcomeKind.LOST, "partitioned")
        kept: list[int] = []
        outcomes = same_outcome_for_all(request.batch, OutcomeKind.LOST, "dropped")
        unacknowledged: set[int] = set()
        damage: dict[int, int] = {}
        for index, each in enumerate(request.batch.slices):
            if self._is_dead(plan, rail):
                outcomes[index] = SliceOutcome(
                    OutcomeKind.LOST, f"dead after {plan.fail_after_n} slices"
                )
                continue
            dice = _dice(plan.seed, request.batch.transfer, each)
            if dice.random() < plan.drop_rate:
                if dice.random() < 0.5:
                    continue
                unacknowledged.add(index)
            elif dice.random() < plan.corrupt_rate:
                damage[len(kept)] = dice.randrange(each.length)
            elif index in request.damage:
                damage[len(kept)] = request.damage[index]
            kept.append(index)
        if kept:
            part = _part(request, kept, damage, verify=request.verify or plan.verify)
            carried = carry(part)
            for index, outcome in zip(kept, carried, strict=True):
                if index not in unacknowledged:
                    outcomes[index] = outcome
        return outcomes

    def _notify(
        self,
        request: CarryRequest,
        rail: str,
        plan: FaultPlan,
        notify: Callable[[CarryRequest], SliceOutcome],
    ) -> SliceOutcome:
        _wait(request, plan.delay_s)
        if plan.partitioned:
            return SliceOutcome(OutcomeKind.LOST, "partitioned")
        if self._is_dead(plan, rail):
            return SliceOutcome(OutcomeKind.LOST, f"dead after {plan.fail_after_n} slices")
        dice = _dice(plan.seed, request.batch.transfer, request.batch.slices[0])
        if dice.random() < plan.drop_rate + plan.corrupt_rate:
            if dice.random() < 0.5:
                notify(request)
            return SliceOutcome(OutcomeKind.LOST, "dropped")
        return notify(request)

    def _is_dead(self, plan: FaultPlan, rail: str) -> bool:
        with self._lock:
            self._n_slices[rail] += 1
            return plan.fail_after_n is not None and self._n_slices[rail] > plan.fail_after_n

    def is_unsettled(self, peer: SegmentDescriptor) -> bool:
        """See `SupportsSettling`; False for a path whose writes end with their transfer."""
        return isinstance(self._inner, SupportsSettling) and self._inner.is_unsettled(peer)

    def hang_up(self) -> None:
        """See `SupportsHangUp`."""
        if isinstance(self._inner, SupportsHangUp):
            self._inner.hang_up()

    def is_quiet(self) -> bool:
        """See `SupportsHangUp`."""
        return not isinstance(self._inner, SupportsHangUp) or self._inner.is_quiet()

    def settle(self, peer: SegmentDescriptor, stop: StopSignal) -> None:
        """See `SupportsSettling`."""
        if isinstance(self._inner, SupportsSettling):
            self._inner.settle(peer, stop)

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """Return the inner backend's view; None while partitioned."""
        return None if self._faults.plan.partitioned else self._inner.view(peer, key)

    def revoke(self, key: bytes) -> None:
        """Pass it on to the inner backend."""
        self._inner.revoke(key)

    def evict(self, key: bytes) -> None:
        """Pass it on to the inner backend."""
        self._inner.evict(key)

    def forget(self, segment: str) -> None:
        """Pass it on to the inner backend."""
        self._inner.forget(segment)

    def gauges(self) -> BackendGauges:
        """Return the numbers of the inner backend."""
        return self._inner.gauges()

    def close(self) -> None:
        """Close the inner backend."""
        self._inner.close()


def _dice(seed: int, transfer: int, each: Slice) -> random.Random:
    return random.Random(f"{seed}/{transfer}/{each.number}/{each.tries}")


def _part(
    request: CarryRequest, kept: Sequence[int], damage: dict[int, int], *, verify: bool
) -> CarryRequest:
    """Return the request with only these slices, some to be damaged."""
    slices = tuple(request.batch.slices[index] for index in kept)
    return msgspec.structs.replace(
        request,
        batch=msgspec.structs.replace(request.batch, slices=slices),
        local=tuple(request.local[index] for index in kept),
        verify=verify,
        damage=damage,
    )


def _wait(request: CarryRequest, seconds: float) -> None:
    """Sleep, but not beyond the transfer's end."""
    if not seconds:
        return
    until = time.monotonic() + seconds
    while not request.stop.stopped and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_S))
