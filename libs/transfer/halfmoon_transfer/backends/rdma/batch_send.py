"""Send one batch over the rails of one link.

    todo -> in flight on the rail that has the fewest bytes in flight -> applied
      ^                |
      +--- fenced <- held: its rail has failed, and flushes what else was on it

A slice is tried again only after the owner has fenced the failed rail. Otherwise a late packet
could overwrite the bytes of a later transfer.
"""

from collections import deque
from collections.abc import Sequence

from halfmoon_transfer.backends.backend_interface import CarryRequest, refusal_outcome
from halfmoon_transfer.backends.rdma.link import RdmaLink
from halfmoon_transfer.backends.rdma.rail import Rail
from halfmoon_transfer.backends.rdma.rail_health import RailFailed
from halfmoon_transfer.backends.rdma.rdma_handshake import RdmaRegionGrant
from halfmoon_transfer.backends.rdma.rdma_memory import RdmaMemoryTable, RegionRegistrations
from halfmoon_transfer.backends.rdma.verbs import CompletionStatus as Completed
from halfmoon_transfer.backends.rdma.verbs import RdmaOperation, completion_status_text
from halfmoon_transfer.planning.transfer_plan import APPLIED, OutcomeKind, SliceOutcome
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus

#: Tries of a slice that the owner's device refused, with the owner's latest grant.
_MAX_REFUSALS = 2


class BatchSend:
    """One batch in flight."""

    def __init__(
        self,
        link: RdmaLink,
        request: CarryRequest,
        memory: RdmaMemoryTable,
        outcomes: list[SliceOutcome | None],
    ) -> None:
        self._link = link
        self._request = request
        self._memory = memory
        #: Outcome of each slice; None while it is open.
        self.outcomes = outcomes
        #: Reason for the slices that end without an outcome.
        self.missing = "no rail of this peer works"
        self._todo: deque[int] = deque()
        #: By rail: slices that failed there and wait for the fence.
        self._held: dict[Rail, list[int]] = {}
        self._n_refusals: dict[int, int] = {}
        self._local: dict[bytes, RegionRegistrations] = {}
        self._grants: dict[bytes, RdmaRegionGrant] = {}
        #: Longest operation of the weakest device.
        self._max_bytes = min((each.device.max_message_bytes for each in link.rails), default=0)

    def run(self) -> None:
        """Move all slices that can be moved; afterwards no device accesses the local bytes.

        Raises:
            RdmaPeerGone: the side channel broke; slices without an outcome are lost.
            VerbsError: a device failed; slices without an outcome are lost.
        """
        try:
            self._look_up()
            regions = {each.local.key: each.local for each in self._request.batch.slices}
            with self._memory.borrow(regions.values()) as self._local:
                try:
                    self._move()
                finally:
                    for rail in self._link.rails:
                        rail.drain()
        except AccessRefused:
            gone = SliceOutcome(OutcomeKind.REJECTED, "the local region was unregistered meanwhile")
            self.outcomes[:] = [each or gone for each in self.outcomes]

    def _look_up(self) -> None:
        """Refuse the slices that the owner does not allow."""
        for index in range(len(self.outcomes)):
            outcome = self._refused(index)
            if outcome is None:
                self._todo.append(index)
            else:
                self.outcomes[index] = outcome

    def _refused(self, index: int) -> SliceOutcome | None:
        """Return the outcome of a slice that the owner does not allow; None if it does."""
        batch = self._request.batch
        each = batch.slices[index]
        if index in self._request.damage:
            # The device drops a damaged packet, so a damaged slice never lands.
            return refusal_outcome(batch, each, AccessStatus.CHECKSUM_MISMATCH, 0)
        try:
            granted = self._grant(each.remote.key)
        except AccessRefused as refused:
            return refusal_outcome(batch, each, refused.status, refused.detail)
        except RailFailed as failed:
            return SliceOutcome(OutcomeKind.UNUSABLE, f"the owner can't offer the region: {failed}")
        if each.remote_offset + each.length > granted.length:
            return refusal_outcome(batch, each, AccessStatus.OUT_OF_BOUNDS, granted.length)
        if batch.op == "write" and not granted.writable:
            return refusal_outcome(batch, each, AccessStatus.READ_ONLY, 0)
        if each.length > self._max_bytes:
            reason = f"a slice of {each.length} bytes; the devices take {self._max_bytes}"
            return SliceOutcome(OutcomeKind.UNUSABLE, reason)
        return None

    def _move(self) -> None:
        link, stop = self._link, self._request.stop
        while not stop.stopped:
            self._make_ready()
            self._post()
            if not any(rail.in_flight for rail in link.rails):
                if not self._held:
                    return
            elif not self._collect():
                link.wait()
                for rail in link.rails:
                    rail.nudge(usable=link.health.usable(rail.pair))
            for rail in [rail for rail in self._held if not rail.in_flight]:
                self._settle(rail, self._held.pop(rail))
        self.missing = "stopped"

    def _make_ready(self) -> None:
        """Connect the usable rails that are not connected (any more)."""
        for rail in self._link.rails:
            if rail.connected or rail.in_flight or rail in self._held:
                continue
            if self._todo and self._link.health.usable(rail.pair):
                try:
                    self._link.connect(rail)
                except RailFailed as failed:
                    self._give_up(rail, str(failed))

    def _post(self) -> None:
        """Post as many operations as the rails have room for, one run per rail."""
        usable = [rail for rail in self._link.rails if self._link.health.usable(rail.pair)]
        runs: dict[Rail, list[RdmaOperation]] = {rail: [] for rail in usable}
        n_bytes = dict.fromkeys(usable, 0)
        while self._todo:
            free = [rail for rail in usable if rail.has_room(len(runs[rail]), n_bytes[rail])]
            if not free:
                break
            rail = free[0]
            for other in free[1:]:
                if other.n_bytes + n_bytes[other] < rail.n_bytes + n_bytes[rail]:
                    rail = other
            operation = self._operation(self._todo.popleft(), rail)
            runs[rail].append(operation)
            n_bytes[rail] += operation.length
        write = self._request.batch.op == "write"
        for rail, run in runs.items():
            refused = run[rail.post(run, write=write) :] if run else ()
            if refused:
                self._held.setdefault(rail, []).extend(each.wr_id for each in refused)

    def _operation(self, index: int, rail: Rail) -> RdmaOperation:
        """Return one slice as an operation, with the addresses and keys of this rail's devices."""
        each = self._request.batch.slices[index]
        here = self._local[each.local.key]
        granted = self._grant(each.remote.key)
        return RdmaOperation(
            index,
            here.address + each.local_offset,
            each.length,
            here.by_device[rail.pair.local].lkey,
            granted.rkeys.get(rail.pair.remote, 0),
            granted.address + each.remote_offset,
        )

    def _grant(self, key: bytes) -> RdmaRegionGrant:
        """Return the owner's grant of a region; ask for it once."""
        known = self._grants.get(key)
        if known is None:
            known = self._grants[key] = self._link.grant(key)
        return known

    def _collect(self) -> bool:
        """Take completions; return whether there were any."""
        any_came = False
        for rail in self._link.rails:
            if not rail.in_flight:
                continue
            for completion in rail.collect():
                any_came = True
                if completion.status == Completed.SUCCESS:
                    self.outcomes[completion.wr_id] = APPLIED
                else:
                    self._held.setdefault(rail, []).append(completion.wr_id)
        return any_came

    def _settle(self, rail: Rail, held: Sequence[int]) -> None:
        """Retry the slices of a failed rail, of which nothing is in flight any more."""
        self._link.fence(rail)
        failure = rail.failure
        again = list(held)
        if failure is None:
            self._give_up(rail, "it took no operation, or completed none")
        elif failure.status not in Completed.OF_THE_REQUEST:
            self._give_up(rail, completion_status_text(failure.status))
        else:
            again.remove(failure.wr_id)
            self._on_refused(failure.wr_id, failure.status)
        self._todo.extend(again)

    def _on_refused(self, index: int, status: int) -> None:
        """Ask the owner about a region after its device refused a slice."""
        each = self._request.batch.slices[index]
        self._link.forget_grant(each.remote.key)
        self._grants.pop(each.remote.key, None)
        self._n_refusals[index] = self._n_refusals.get(index, 0) + 1
        outcome = self._refused(index)
        if outcome is None and self._n_refusals[index] >= _MAX_REFUSALS:
            outcome = SliceOutcome(OutcomeKind.LOST, completion_status_text(status))
        if outcome is None:
            self._todo.append(index)
        else:
            self.outcomes[index] = outcome

    def _give_up(self, rail: Rail, reason: str) -> None:
        self.missing = f"no rail of this peer works; {rail.pair} failed last: {reason}"
        self._link.health.on_failed(rail.pair, self._link.peer, reason)
