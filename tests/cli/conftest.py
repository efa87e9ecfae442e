"""An endpoint that answers by a script, for the commands that talk to one."""

from collections.abc import Iterator

import pytest

from halfmoon_cli.testing import ScriptedEndpoint


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint() as running:
        yield running
