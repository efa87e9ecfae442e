"""The profile polyglot: workers in TypeScript have the places of ours, and do their work.

It begins where no container runs, and leaves none.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose.conftest import BUILT_WITHIN_S, Compose

pytestmark = pytest.mark.timeout(2400)

PROFILE = {"COMPOSE_PROFILES": "polyglot", "KVSTORE": "0", "DECODE": "0"}
N_NEW = 24
PROMPT = [37 + (7 * i) % 1009 for i in range(300)]


@pytest.fixture(scope="module")
def polyglot(images: Compose) -> Iterator[Compose]:
    """A cluster whose kvstore and decode workers are those in TypeScript."""
    images("down", "--volumes", "--remove-orphans")
    files = [Path(file) for file in images.environment["COMPOSE_FILE"].split(os.pathsep)]
    mixed = Compose(files, {**images.environment, **PROFILE})
    mixed("build", timeout_s=BUILT_WITHIN_S)
    try:
        mixed.up()
        yield mixed
    finally:
        mixed("down", "--volumes", "--remove-orphans")


def loads(cluster: Compose) -> dict[str, dict[str, Any]]:
    """Return what the conductor knows of each worker that it uses, by role."""
    workers = cluster.get("/debug/cluster")["workers"]
    return {w["role"]: w["load"] for w in workers if not w["refused"] and not w["draining"]}


def test_workers_in_typescript_answer_and_keep_the_prompt_for_the_next_request(
    polyglot: Compose,
) -> None:
    for ours in ("kvstore-0", "kvstore-1", "decode"):
        assert polyglot.containers(ours) == []
    polyglot.until(lambda: {"prefill", "decode", "kvstore"} <= loads(polyglot).keys())
    first = polyglot.complete(PROMPT, N_NEW)
    assert first["usage"]["completion_tokens"] == N_NEW
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    polyglot.until(lambda: loads(polyglot)["kvstore"]["n_indexed"] > 0)
    second = polyglot.complete(PROMPT, N_NEW)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
