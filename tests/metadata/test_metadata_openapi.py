"""The metadata server answers generated requests as its OpenAPI document says."""

from pathlib import Path

import pytest

from tests.schemathesis_run import run_schemathesis

#: GET wants one of two parameters, which no OpenAPI document can say; a condition that does not
#: hold is 412; and what is put under a key need not be a counter.
CONFIG = """\
[[operations]]
include-operation-id = ["getRecord", "incrementCounter"]
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 404]

[[operations]]
include-operation-id = ["putRecord", "deleteRecord"]
checks.positive_data_acceptance.expected-statuses = ["2xx", 404, 412]
# Here schemathesis takes an empty If-Match for one that fits its pattern.
phases.coverage.checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 404, 412]
"""


@pytest.mark.random_seeds(1)
def test_generated_requests_are_answered_as_the_document_says(
    metadata_url: str, tmp_path: Path, seed: int
) -> None:
    run_schemathesis(
        "metadata.openapi.json", metadata_url.rstrip("/"), tmp_path, seed=seed, config=CONFIG
    )
