"""Find the tested conductor by its URL: it has no record in the metadata server."""

import asyncio
import socket
from typing import Any

from halfmoon_conform.subject.subject import (
    START_S,
    CannotStartSubject,
    Subject,
    SubjectProcess,
)
from halfmoon_metadata.store_interface import MetadataStore

_POLL_S = 0.05


def free_port() -> int:
    """Return a TCP port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class ConductorSubject(Subject):
    """The tested conductor."""

    def __init__(
        self,
        url: str,
        store: MetadataStore,
        cluster_key: str = "",
        process: SubjectProcess | None = None,
    ) -> None:
        super().__init__("conductor", store, cluster_key, process)
        #: Of its REST API.
        self.url = url.rstrip("/")

    async def start(self) -> None:
        """Start the process if it does not run, and wait until its port answers.

        Raises:
            CannotStartSubject: it ended, or opens no port in time.
        """
        if self.process is not None and not self.process.running:
            self.process.start()
        try:
            await asyncio.wait_for(self._wait_for_port(), START_S)
        except TimeoutError:
            raise CannotStartSubject(
                f"nothing answers at {self.url}: does the conductor use {{port}}? {self._tail()}"
            ) from None

    async def read_record(self) -> dict[str, Any] | None:
        """Return nothing: a conductor has no record."""
        return None

    async def _wait_for_port(self) -> None:
        host, _, port = self.url.removeprefix("http://").partition(":")
        while True:
            if self.process is not None and not self.process.running:
                raise CannotStartSubject(
                    f"the command ended with status {self.process.exit_status}. {self._tail()}"
                )
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(_POLL_S)
                continue
            writer.close()
            return
