"""The compose file's profile `group` starts members that form one complete group."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.prefill_groups import complete_groups, group_faults
from halfmoon_testing.scheduling_inputs import a_worker
from halfmoon_workers.prefill.prefill_settings import PrefillSettings

FILE = Path(__file__).parents[2] / "docker-compose.yml"
PREFIX = "HALFMOON_"


def settings_of(service: dict[str, Any], **chosen: str) -> PrefillSettings:
    """The settings of a service's container, with these variables for the compose file."""

    def value(match: re.Match[str]) -> str:
        return chosen.get(match[1], match[2])

    fields = {
        name.removeprefix(PREFIX).lower(): re.sub(r"\$\{([A-Z_]+):-([^}]*)\}", value, str(text))
        for name, text in service["environment"].items()
        # Networks and files that only containers have.
        if "SUBNET" not in str(text) and not name.startswith("HALFMOON_CLUSTER_KEY")
    }
    return PrefillSettings.model_validate(fields)


@pytest.mark.parametrize("only", ["False", "True"])
def test_the_profile_group_has_each_stage_of_one_group_once(only: str) -> None:
    services = yaml.safe_load(FILE.read_text())["services"]
    members = {name: each for name, each in services.items() if each.get("profiles") == ["group"]}
    found = {name: settings_of(each, STAGE_LAYERS_ONLY=only) for name, each in members.items()}
    workers = [a_worker(name, stage=each.stage_record) for name, each in found.items()]
    (group,) = complete_groups(workers)
    assert group.members == tuple(map(WorkerId, sorted(members)))
    assert group_faults(workers) == {}
    assert {each.stage_layers_only for each in found.values()} == {only == "True"}
    for each in members.values():
        assert each["image"] == services["prefill"]["image"]
        assert each["networks"] == services["prefill"]["networks"]
