"""An endpoint that answers by a script, for the commands that talk to one."""

from collections.abc import Iterator

import pytest

from halfmoon_testing.scripted_endpoint import ScriptedEndpoint


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint() as running:
        yield running
