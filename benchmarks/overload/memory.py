"""Sample the resident memory of a cluster's processes while a load runs."""

import asyncio
import statistics
from collections.abc import Mapping
from pathlib import Path

#: Growth from the second to the last quarter of the samples up to which memory counts as flat.
FLAT_WITHIN = 0.05


class MemorySamples:
    """Resident MiB of each process with its children, once a second."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Take no sample yet.

        Args:
            pids: of processes that began a session each, by name.
        """
        self._pids = dict(pids)
        self.samples: dict[str, list[float]] = {name: [] for name in pids}

    async def sample_forever(self, every_s: float = 1.0) -> None:
        """Sample until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(every_s)

    def sample(self) -> None:
        """Add one sample of each process."""
        by_session = _resident_mib()
        for name, pid in self._pids.items():
            self.samples[name].append(by_session.get(pid, 0.0))

    def quarters(self, name: str) -> list[float]:
        """Return the medians of the four quarters of a process's samples, in MiB."""
        values = self.samples[name]
        n = max(1, len(values) // 4)
        parts = [values[i * n : (i + 1) * n] or values[-1:] for i in range(4)]
        return [statistics.median(part) if part else 0.0 for part in parts]

    def is_flat(self, name: str) -> bool:
        """Return whether memory hardly grew after the first quarter."""
        _, second, _, last = self.quarters(name)
        return last <= second * (1 + FLAT_WITHIN)


def _resident_mib() -> dict[int, float]:
    """Return the resident MiB of all processes of this machine, summed by session."""
    found: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            status = (folder / "status").read_text()
        except OSError:
            continue  # it has ended
        for line in status.splitlines():
            if line.startswith("VmRSS:"):
                found[session] = found.get(session, 0.0) + int(line.split()[1]) / 1024
    return found
