"""Wires between hosts: transfers share what their sender sends and their receiver receives.

A transfer between two hosts runs at the lesser of its equal share of the sender's outgoing and
of the receiver's incoming bandwidth; within one host it has its share of the way between
memory and accelerators. What one transfer leaves unused, because its other end is the
narrower one, is not given to the others: shares are equal, not max-min fair.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from halfmoon_simulator.cluster.event_queue import EventQueue


@dataclass(eq=False, slots=True)
class _Port:
    """One end of a wire, in one direction."""

    bytes_per_s: float
    #: In order of their start.
    transfers: "dict[SimTransfer, None]" = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class SimTransfer:
    """Bytes on their way."""

    ports: tuple[_Port, ...]
    left_bytes: float
    done: Callable[[], None]
    bytes_per_s: float = 0.0
    #: When `left_bytes` was true.
    since_s: float = 0.0
    #: Counts changes of speed; an end that was foreseen at an earlier speed is void.
    version: int = 0
    over: bool = False


class NetworkModel:
    """All transfers under way."""

    def __init__(
        self, event_queue: EventQueue, *, network_bytes_per_s: float, local_bytes_per_s: float
    ) -> None:
        self._event_queue = event_queue
        self._network_bytes_per_s = network_bytes_per_s
        self._local_bytes_per_s = local_bytes_per_s
        self._ports: dict[tuple[str, str], _Port] = {}

    def start(
        self, source: str, target: str, n_bytes: int, done: Callable[[], None]
    ) -> SimTransfer:
        """Move bytes from a host to another or within one; `done` is called at the end."""
        if source == target:
            ports: tuple[_Port, ...] = (self._port("local", source, self._local_bytes_per_s),)
        else:
            ports = (
                self._port("out", source, self._network_bytes_per_s),
                self._port("in", target, self._network_bytes_per_s),
            )
        transfer = SimTransfer(ports, float(n_bytes), done, since_s=self._event_queue.now)
        for port in ports:
            port.transfers[transfer] = None
        self._share(ports)
        return transfer

    def cancel(self, transfer: SimTransfer) -> None:
        """Stop a transfer; `done` is not called any more."""
        if not transfer.over:
            self._end(transfer)

    def _port(self, kind: str, host: str, bytes_per_s: float) -> _Port:
        if (port := self._ports.get((kind, host))) is None:
            port = self._ports[kind, host] = _Port(bytes_per_s)
        return port

    def _share(self, ports: tuple[_Port, ...]) -> None:
        """Give the transfers at these ports their speeds, which a change has altered."""
        now = self._event_queue.now
        for transfer in dict.fromkeys(t for port in ports for t in port.transfers):
            speed = min(port.bytes_per_s / len(port.transfers) for port in transfer.ports)
            if speed == transfer.bytes_per_s:
                continue
            transfer.left_bytes -= transfer.bytes_per_s * (now - transfer.since_s)
            transfer.since_s = now
            transfer.bytes_per_s = speed
            transfer.version += 1
            left_s = max(0.0, transfer.left_bytes) / speed
            self._event_queue.after(left_s, self._on_end, transfer, transfer.version)

    def _on_end(self, transfer: SimTransfer, version: int) -> None:
        if transfer.version == version and not transfer.over:
            self._end(transfer)
            transfer.done()

    def _end(self, transfer: SimTransfer) -> None:
        transfer.over = True
        for port in transfer.ports:
            del port.transfers[transfer]
        self._share(transfer.ports)

    def check(self) -> None:
        """Audit: no port is used beyond its bandwidth, and what is over is gone."""
        for port in self._ports.values():
            used = sum(transfer.bytes_per_s for transfer in port.transfers)
            assert used <= port.bytes_per_s * (1 + 1e-9), "a port is over its bandwidth"
            assert not any(transfer.over for transfer in port.transfers)
