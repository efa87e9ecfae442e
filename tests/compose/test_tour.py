"""docs/tour.md, its part with Docker: each command is run, and shows what the page says.

It begins where no container runs, and images are built. The page's own commands start and stop the
cluster.
"""

import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_testing.page_steps import read_steps

pytestmark = pytest.mark.timeout(1800)

PAGE = (Path(__file__).parents[2] / "docs/tour.md").read_text().partition("## With Docker")[2]


def test_the_commands_of_the_tour_show_what_it_says(images: Any, tmp_path: Path) -> None:
    images("down", "--volumes", "--remove-orphans")
    port = free_port()
    words = {"127.0.0.1:8000": f"127.0.0.1:{port}"}
    environment = {**os.environ, **images.environment, "HTTP_PORT": str(port)}
    *steps, down = read_steps(PAGE)
    shown = [step.run(tmp_path, words, timeout_s=600, environment=environment) for step in steps]
    (token,) = re.findall(r"#token=([0-9a-f]{64})$", "".join(shown), re.M)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as browser:
        assert "<title>Halfmoon</title>" in browser.get("/").text
        browser.headers["authorization"] = f"Bearer {token}"
        workers = browser.get("/debug/cluster").raise_for_status().json()["workers"]
        roles = [each["worker_id"].split("-")[0] for each in workers]
        assert sorted(roles) == ["decode"] * 2 + ["kvstore"] * 2 + ["prefill"] * 2
        # The worker that was killed had the answer.
        activity = browser.get("/debug/activity").raise_for_status().json()
        assert sum(second["placed_again"] for second in activity["seconds"]) >= 1
    down.run(tmp_path, words, environment=environment)
    assert images.containers("conductor") == []
