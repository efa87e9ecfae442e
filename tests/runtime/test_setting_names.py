"""Misspelt flags and variables, and the settings that they meant."""

from itertools import permutations

import pytest

from halfmoon_conductor.settings import ConductorSettings
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.setting_names import misspelt_variables, unknown_flags
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_workers.roles.role_settings import FlexibleDecodeSettings, FlexiblePrefillSettings

SERVICES = [ConductorSettings, KvstoreSettings, FlexiblePrefillSettings, FlexibleDecodeSettings]
#: Variables that are no service's setting.
OTHERS = ["URL", "STATE", "STATUS_FILE", "SERVICE", "ENGINE_NATIVE", "TRACES", "OPERATOR_TOKEN"]


def variables(settings: type[ServiceSettings]) -> list[str]:
    return [f"HALFMOON_{name.upper()}" for name in settings.model_fields]


@pytest.mark.parametrize(
    ("one", "other"), [*permutations(SERVICES, 2)], ids=lambda settings: settings.__name__
)
def test_no_service_takes_a_setting_of_another_for_a_misspelt_one_of_its_own(
    one: type[ServiceSettings], other: type[ServiceSettings]
) -> None:
    around = [*variables(other), *(f"HALFMOON_{name}" for name in OTHERS)]
    assert misspelt_variables(around, one.model_fields, "HALFMOON_") == {}


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("HALFMOON_CHUNK_TOKEN", "HALFMOON_CHUNK_TOKENS"),
        ("HALFMOON_METADTA", "HALFMOON_METADATA"),
        ("HALFMOON_ALLOW_OPEN_NETWORKS", "HALFMOON_ALLOW_OPEN_NETWORK"),
        ("HALFMOON_CLUSTER_KEYFILE", "HALFMOON_CLUSTER_KEY_FILE"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_it_meant(
    variable: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert FlexiblePrefillSettings.misspelt_variables() == {variable: meant}


def test_variables_of_other_programs_are_left_alone() -> None:
    assert misspelt_variables(["CHUNK_TOKEN", "HALFMOONS_METADTA"], {"chunk_tokens"}, "M_") == {}


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--chunk-token=5", "--chunk-token is no flag: did you mean --chunk-tokens?"),
        ("--no-mesure", "--no-mesure is no flag: did you mean --no-measure?"),
        ("--zzz", "--zzz is no flag\n"),
    ],
)
def test_a_misspelt_flag_is_named_with_the_one_it_meant(
    argument: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        FlexiblePrefillSettings.from_args(["--worker-id", "x", argument], "prefill")
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_value_is_no_flag() -> None:
    assert unknown_flags(["--a", "-5", "b", "--", "--a=--c"], {"--a"}) == {}
