"""Requests of a plan, sent in time: what happens when one can't be sent."""

import time

import pytest

from halfmoon_cli.bench.bench_record import BenchRecord
from halfmoon_cli.bench.load_generator import LoadGenerator, RunProgress
from halfmoon_cli.bench.load_plan import PlannedRequest


async def test_a_request_that_can_not_be_made_ends_the_run_with_its_own_error() -> None:
    """The command prints an `OSError` or `ValueError` in a line; a group would be a traceback."""

    async def send(planned: PlannedRequest, record: BenchRecord) -> None:
        if planned.index:
            raise OSError("no descriptor is left")

    chains = [(PlannedRequest(index=index, at_s=0.0, parts=(), n_output=1),) for index in range(3)]
    generator = LoadGenerator(chains, send, time.monotonic, RunProgress(len(chains)))
    with pytest.raises(OSError, match="no descriptor is left"):
        await generator.run()
