"""What a member of a group is told wrongly at its start is refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_engine.load import open_engine
from halfmoon_models.errors import ModelError
from halfmoon_protocol.messages import Stage
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.stage_engine import open_stage


def settings(**fields: Any) -> PrefillSettings:
    return PrefillSettings(model="fake://tiny", **fields)


def test_the_stage_is_the_one_of_the_flags() -> None:
    stage = settings(group="long", stage="1/4", group_chunk_tokens=256).stage_record
    assert stage == Stage("long", 1, 4, chunk_tokens=256)
    assert settings().stage_record is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"group": "long"}, "--group is 'long' without --stage: a member of a group has both"),
        ({"stage": "0/2"}, "--stage is '0/2' without --group"),
        ({"group": "long", "stage": "half"}, "--stage is 'half': it is INDEX/N, such as 0/2"),
        ({"group": "long", "stage": "2/2"}, "--stage is '2/2': the stages of 2 are 0/2 to 1/2"),
        ({"group": "long", "stage": "0/1"}, "--stage is '0/1': a group has 2 to 256 stages"),
        ({"group": "long", "stage": "0/257"}, "'0/257': a group has 2 to 256 stages"),
        ({"group": "long", "stage": "0/2", "roles": "prefill,decode"}, "keeps its role"),
        ({"stage_layers_only": True}, "--stage-layers-only is set without --stage"),
    ],
)
def test_a_stage_that_can_not_be_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        settings(**fields)
    assert said in str(refused.value)


async def test_more_stages_than_layers_are_refused_by_name() -> None:
    whole = FakeEngine(FakeModelSpec(name="tiny", layers=6))
    with pytest.raises(CannotStart) as refused:
        await open_stage(whole, Stage("long", 0, 7))
    assert str(refused.value) == (
        "stage is 0/7: tiny has 6 layers, and each stage has a layer of its own; choose at most 6 "
        "stages"
    )
    with pytest.raises(ModelError, match="n_stages is 7: the model has 6 layers"):
        open_engine("fake://tiny?layers=6", block_size=16, stage_index=0, n_stages=7)
