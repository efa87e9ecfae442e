"""Hold one prompt's lease and reservation at simulated kvstores."""

from collections.abc import Callable

from halfmoon_protocol.ids import Ticket, WorkerId
from halfmoon_protocol.messages import StartPrefill
from halfmoon_simulator.cluster.sim_disk import LeaseAnswer
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore


class SimHoldings:
    """Lease, reserve, commit and release for one prompt.

    Kvstores answer at once, but for leases of blocks that are on a disk.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        start: StartPrefill,
        kvstores: Callable[[WorkerId], SimKvstore | None],
    ) -> None:
        """Hold nothing yet.

        Args:
            worker_id: the worker that asks.
            start: its prompt.
            kvstores: returns a live kvstore by name.
        """
        self._worker_id = worker_id
        self._start = start
        self._kvstores = kvstores
        #: Where the cached prefix comes from, as long as it is leased, or is about to be.
        self.source: SimKvstore | None = None
        #: Where new blocks go, as long as room is reserved, and how many are to be written.
        self.home: SimKvstore | None = None
        self.n_put = 0

    def lease(self, n_blocks: int, leased: LeaseAnswer) -> None:
        """Pin the stored prefix of at most so many blocks; `leased` takes its length.

        It is called once all of it is in memory, and not at all after a release.
        """
        cached = self._start.cached
        kvstore = None if cached is None else self._kvstores(cached.kvstore.worker_id)
        hashes = self._start.block_hashes[:n_blocks]
        if kvstore is None or not hashes:
            leased(0)
            return

        def answered(n_found: int) -> None:
            if not n_found:
                self.source = None
            leased(n_found)

        self.source = kvstore
        kvstore.lease_tiers(self._worker_id, self._ticket, hashes, answered)

    def reserve(self, first_block: int) -> bool:
        """Reserve room at home for the blocks from the first on; return whether there is room."""
        start = self._start
        home = None if start.store_in is None else self._kvstores(start.store_in.worker_id)
        hashes = start.block_hashes[first_block:]
        if home is None or not hashes:
            return False
        parent = start.block_hashes[first_block - 1] if first_block else None
        n_put = home.reserve(self._put_owner, self._ticket, hashes, parent)
        if n_put is None:
            return False
        self.home, self.n_put = home, n_put
        return True

    def commit(self) -> None:
        """Serve the written blocks, if their kvstore is still there."""
        if self.home is not None:
            self.home.commit(self._put_owner, self._ticket, self.n_put)
            self.home = None

    def release_lease(self) -> None:
        """End the lease, if there is one."""
        if self.source is not None:
            self.source.release(self._worker_id, self._ticket)
            self.source = None

    def release(self) -> None:
        """End the lease and give the reservation back."""
        self.release_lease()
        if self.home is not None:
            self.home.revoke(self._put_owner, self._ticket)
            self.home = None

    @property
    def _ticket(self) -> Ticket:
        return Ticket(self._start.request_id)

    @property
    def _put_owner(self) -> str:
        """A ticket names a lease or a reservation; here a prompt may have both."""
        return f"{self._worker_id} put"
