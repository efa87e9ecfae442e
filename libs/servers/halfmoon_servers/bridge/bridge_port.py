"""Hold the open port of one role of a bridged server, and what answers conductors there."""

from collections.abc import Callable
from dataclasses import dataclass, field

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.channels.network import Port
from halfmoon_runtime.worker.conductor_connections import ConductorConnections
from halfmoon_servers.bridge.answer_queue import AnswerQueue


@dataclass
class BridgePort:
    """The port of one role of a bridged server."""

    port: Port
    info: WorkerInfo
    conductors: ConductorConnections = field(init=False)
    answers: AnswerQueue = field(init=False)

    def open(self, drop_request: Callable[[RequestId], None]) -> None:
        """Make what answers; `drop_request` is called for requests of a connection that is gone."""
        self.conductors = ConductorConnections(self.port, drop_request)
        self.answers = AnswerQueue(self.conductors)
