"""Keep ranks of other processes in step with the hooks of a forward pass.

Each rank has a connection to the engine's process, which carries single bytes:

    GO    engine → rank   the next layer's KV has landed: attention may read it
    STOP  engine → rank   a hook failed: the pass ends
    DONE  rank → engine   the next layer's keys and values are in the pool's memory
    OVER  rank → engine   the pass has ended, well or not

The end of a connection is the end of its process, and known at once.
"""

import select
import socket
import struct
import tempfile
from pathlib import Path

from halfmoon_engine.errors import EngineLost
from halfmoon_engine.interface import LayerHook

GO, STOP, DONE, OVER = b"G", b"S", b"D", b"O"
#: Seconds until all ranks have connected.
_CONNECT_WITHIN_S = 60.0


class PassStopped(Exception):
    """A hook failed in the engine's process; the rank's pass ends."""


class StepServer:
    """The engine's side."""

    def __init__(self) -> None:
        """Listen in a folder of our own, which no other user can enter."""
        self._folder = tempfile.TemporaryDirectory(prefix="halfmoon-ranks-")
        self.path = str(Path(self._folder.name) / "steps")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._ranks: list[socket.socket] = []

    def accept(self, n_ranks: int) -> None:
        """Take the connections of all ranks.

        Raises:
            EngineLost: one did not connect.
        """
        self._listener.settimeout(_CONNECT_WITHIN_S)
        try:
            while len(self._ranks) < n_ranks:
                connection, _ = self._listener.accept()
                connection.settimeout(None)
                self._ranks.append(connection)
        except TimeoutError:
            raise EngineLost(f"{len(self._ranks)} of {n_ranks} ranks started") from None
        finally:
            self._listener.close()
            self._folder.cleanup()  # all are connected: a killed process leaves no folder

    def follow(
        self, n_layers: int, before_layer: LayerHook | None, after_layer: LayerHook | None
    ) -> None:
        """Call the hooks of one pass as its ranks reach them, until all ranks have ended it.

        Raises:
            EngineLost: a rank's process ended.
            Exception: of a hook, after the ranks have ended the pass.
        """
        watched = before_layer is not None or after_layer is not None
        try:
            for layer in range(n_layers if watched else 0):
                if before_layer is not None:
                    before_layer(layer)
                self._tell(GO)
                if any(answer == OVER for answer in self._hear()):
                    return  # the pass failed in a rank: its answer says why
                if after_layer is not None:
                    after_layer(layer)
        except EngineLost:
            raise
        except BaseException:
            self._tell(STOP)
            self._finish()
            raise
        self._finish()

    def close(self) -> None:
        """Close all connections."""
        for rank in self._ranks:
            rank.close()

    def check_alive(self) -> None:
        """Check that the processes of all ranks run; from any thread.

        Raises:
            EngineLost: one ended.
        """
        ended = select.poll()
        for rank in self._ranks:
            ended.register(rank, select.POLLRDHUP)
        if hung_up := {descriptor for descriptor, _ in ended.poll(0)}:
            raise _lost(next(rank for rank in self._ranks if rank.fileno() in hung_up))

    def _tell(self, what: bytes) -> None:
        for rank in self._ranks:
            try:
                rank.sendall(what)
            except OSError as error:
                raise _lost(rank) from error

    def _hear(self) -> list[bytes]:
        return [self._next(rank) for rank in self._ranks]

    def _finish(self) -> None:
        for rank in self._ranks:
            while self._next(rank) != OVER:
                pass

    def _next(self, rank: socket.socket) -> bytes:
        try:
            byte = rank.recv(1)
        except OSError as error:
            raise _lost(rank) from error
        if not byte:
            raise _lost(rank)
        return byte


class StepClient:
    """A rank's side."""

    def __init__(self, path: str) -> None:
        """Connect to the engine's process."""
        self._engine = socket.socket(socket.AF_UNIX)
        self._engine.connect(path)

    def before_layer(self, _layer: int) -> None:
        """Wait until the layer's KV has landed.

        Raises:
            PassStopped: a hook failed.
        """
        if self._engine.recv(1) != GO:
            raise PassStopped("a hook of the engine's process failed, or the process ended")

    def after_layer(self, _layer: int) -> None:
        """Tell that the layer's keys and values are written."""
        self._engine.sendall(DONE)

    def over(self) -> None:
        """Tell that the pass has ended."""
        self._engine.sendall(OVER)


def _lost(rank: socket.socket) -> EngineLost:
    (pid,) = struct.unpack_from("i", rank.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return EngineLost(f"the rank of process {pid} ended")
