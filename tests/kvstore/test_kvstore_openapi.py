"""A kvstore's HTTP for operators answers generated requests as its OpenAPI document says."""

from pathlib import Path
from typing import Any

import pytest

from halfmoon_testing.block_client import prompt_blocks
from tests.schemathesis_run import run_schemathesis


@pytest.mark.random_seeds(1)
async def test_generated_requests_are_answered_as_the_document_says(
    nodes: Any, tmp_path: Path, seed: int
) -> None:
    nodes.start("a", capacity_mib=1, metrics_port=0)
    blocks = prompt_blocks(1, 8)
    async with nodes.client("a") as client:
        await client.put(blocks)
    # An `until` that is over, and one beside `ttl_s`, fit the schema.
    config = f"""\
[parameters]
"path.hash" = "{blocks[3].hex()}"

[[operations]]
include-operation-id = "pin"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 404]

[[operations]]
include-operation-id = "start"
enabled = false
"""
    run_schemathesis(
        "kvstore.openapi.json", nodes.info("a").http, tmp_path, seed=seed, config=config
    )
