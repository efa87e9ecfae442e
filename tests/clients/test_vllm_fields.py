"""The names that docs/api.md answers for are the ones that vLLM's own request classes have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

LISTED = Path(__file__).parents[1] / "conductor" / "vllm_fields.json"


def test_the_list_of_vllms_fields_is_complete_and_of_the_version_that_is_installed(
    run_client: Callable[..., Any], vllm: Path, program: Callable[[str], Path]
) -> None:
    done = run_client(vllm / "python", program("vllm_fields.py"), within_s=600)
    live = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(LISTED.read_text()) == live
