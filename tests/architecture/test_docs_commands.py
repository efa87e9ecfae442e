"""Lines of README and docs that start `halfmoon up` are ones that it, and its services, take."""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.up import foreground
from halfmoon_cli.up.embedded_cluster import ClusterPlan, plan_processes
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_engine.checkpoints import model_folder
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_workers.roles.role_settings import read_decode_settings, read_prefill_settings

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^```[a-z]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_UP = re.compile(r"(?:^|[\s/])halfmoon up(?P<rest>[^\n]*)")


def command_lines() -> list[tuple[str, str]]:
    """Each page with the arguments of each `halfmoon up` in its blocks."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in _FENCED.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if match := _UP.search(line):
                    found.append((str(page.relative_to(ROOT)), match["rest"]))
    return found


def planned(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> ClusterPlan:
    """The plan that a command would run."""
    plans: list[ClusterPlan] = []

    def run(plan: ClusterPlan, *_: object, **__: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(foreground, "run_up", run)
    monkeypatch.setattr(model_folder, "check_model", lambda *_, **__: {})
    result = CliRunner().invoke(app, ["up", *words])
    assert result.exit_code == 0, result.output
    return plans[0]


READERS: dict[str, Callable[[Sequence[str], str], ServiceSettings]] = {
    "prefill": read_prefill_settings,
    "decode": read_decode_settings,
    "kvstore": KvstoreSettings.from_args,
    "conductor": ConductorSettings.from_args,
}
LINES = command_lines()


@pytest.mark.parametrize(("page", "line"), LINES, ids=[page for page, _ in LINES])
def test_a_command_line_of_a_page_starts_services_that_fit(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in shlex.split(line, comments=True) if word != "&"]
    specs = plan_processes(planned(words, monkeypatch))
    workers = [
        settings
        for spec in specs
        if isinstance(settings := READERS[spec.role](spec.arguments, spec.role), EngineSettings)
    ]
    # What "auto" is differs between engines, and workers of a cluster share one layout.
    assert len({each.engine for each in workers}) == 1 or (
        len({each.dtype for each in workers}) == 1 and workers[0].dtype != "auto"
    ), f"{page}: engines are mixed, and the precision is left to each"


def test_the_pages_have_such_lines_also_of_engines_mixed() -> None:
    assert len(LINES) > 5
    assert any("engine=torch" in line for _, line in LINES)
