"""What tests of the simulator share."""

from functools import cache

import pytest

from halfmoon_simulator.workloads import workload_sources
from halfmoon_simulator.workloads.synthetic_workloads import conversation_surrogate


@pytest.fixture
def one_surrogate_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-in of the conversation trace once for a test: a second for each run."""
    make = cache(conversation_surrogate)
    monkeypatch.setattr(workload_sources, "conversation_surrogate", make)
