"""Carry bytes between the memories of simulated processes, late and with faults.

The bytes go by the memory backend. Around it: batches that get lost on the way or with their
acknowledgement, damaged bytes, and no way between two processes that are cut off.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from halfmoon_testing.sim_cluster.late_writes import LateWrites
from halfmoon_testing.sim_cluster.sim_network import SimNetwork
from halfmoon_testing.sim_cluster.virtual_loop import VirtualProcess
from halfmoon_transfer.backends.backend_interface import (
    Backend,
    CarryRequest,
    same_outcome_for_all,
)
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan, FaultyBackend
from halfmoon_transfer.interface import Lost
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import OutcomeKind, SliceOutcome
from halfmoon_transfer.threads.stop_signal import StopSignal


class SimPath:
    """The faults of all paths of one cluster."""

    name = "faults(memory)"

    def __init__(self, dice: random.Random, network: SimNetwork, late_dice: random.Random) -> None:
        """Have no faults; `late_dice` draws when late writes land."""
        self.dice = dice
        self.late_dice = late_dice
        self.network = network
        self.carry_range_s = (0.0001, 0.002)
        self.plan = FaultPlan()

    def carry_s(self) -> float:
        """Draw the seconds until a batch is carried."""
        return self.dice.uniform(*self.carry_range_s)

    def of(self, process: VirtualProcess) -> "ProcessPath":
        """Return the path as one process uses it."""
        return ProcessPath(self, process)


class ProcessPath(FaultInjection):
    """The memory backend of one process, with faults around it."""

    def __init__(self, path: SimPath, process: VirtualProcess) -> None:
        """Have the faults of the cluster."""
        super().__init__("memory", path.plan)
        self.path = path
        self.process = process
        self.late_writes = LateWrites(path.network.loop, path.late_dice)

    def wrap(self, inner: Backend) -> Backend:
        """Return the backend with these faults around it."""
        return _CutBackend(inner, self)


class _SumsOnRequest:
    """Carries as a wire does: bytes are compared only where the transfer asks for that."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        verify = request.batch.checksums
        return self._inner.carry(msgspec.structs.replace(request, verify=verify))


class _CutBackend(FaultyBackend):
    def __init__(self, inner: Backend, faults: ProcessPath) -> None:
        super().__init__(_SumsOnRequest(inner), faults)
        self._memory = inner
        self._of = faults

    def is_unsettled(self, peer: SegmentDescriptor) -> bool:
        """See `SupportsSettling`."""
        return self._of.late_writes.any_to(peer.name)

    def settle(self, peer: SegmentDescriptor, stop: StopSignal) -> None:
        """See `SupportsSettling`."""
        if self._of.path.network.is_cut(self._of.process.name, peer.name):
            raise Lost(f"{peer.name} is cut off")
        self._of.late_writes.end(peer.name)

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        path = self._of.path
        if path.network.is_cut(self._of.process.name, request.peer.name):
            self._of.late_writes.on_cut(request, self._memory)
            return same_outcome_for_all(request.batch, OutcomeKind.LOST, "cut off")
        self._of.late_writes.end(request.peer.name)
        self._of.plan = msgspec.structs.replace(path.plan, seed=path.dice.getrandbits(32))
        return super().carry(request)
