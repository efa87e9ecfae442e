"""A client that insists on a model's name of its own is served under that name."""

import pytest
from pydantic import ValidationError

from halfmoon_conductor.settings import ConductorSettings
from tests.conductor.fronts import CHAT, MESSAGES, RESPONSES, Front


@pytest.fixture
def model_aliases() -> tuple[str, ...]:
    return "gpt-4o", "claude-*"


@pytest.mark.parametrize("name", ["gpt-4o", "claude-", "claude-sonnet-4-5", "lab/moon"])
async def test_an_alias_is_answered_under_the_name_that_was_asked_for(
    front: Front, name: str
) -> None:
    for path in (CHAT, MESSAGES, RESPONSES):
        assert (await front.ask(path, model=name))["model"] == name
    assert (await front.get(f"/v1/models/{name}")).json()["id"] == "lab/moon"


async def test_other_names_are_not_found(front: Front) -> None:
    for name in ("gpt-4o-mini", "gpt", "my-claude-1", "claude", "claude*"):
        await front.error(CHAT, 404, model=name)


def test_aliases_are_separated_by_commas_and_a_star_is_at_the_end() -> None:
    settings = ConductorSettings(model="fake://tiny", model_aliases=" gpt-4o, claude-* ,")
    assert settings.other_model_names == ("gpt-4o", "claude-*")
    with pytest.raises(ValidationError, match="'a\\*b' has a \\* before its end"):
        ConductorSettings(model="fake://tiny", model_aliases="a*b")
