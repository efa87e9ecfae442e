"""Misspelt flags and variables, and values that are names in a registry."""

from itertools import permutations

import pytest

from halfmoon_conductor.settings import ConductorSettings
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.setting_names import misspelt_variables
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.cache.eviction_policies import EVICTION_POLICIES
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS
from halfmoon_transfer.backends import BACKENDS
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
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


CHOICES = [
    (ConductorSettings, "placement", PLACEMENT_MODES, ["--model=fake://tiny"]),
    (ConductorSettings, "admission", ADMISSION_MODES, ["--model=fake://tiny"]),
    (KvstoreSettings, "eviction", EVICTION_POLICIES, []),
    (PrefillSettings, "queue_order", QUEUE_ORDERS, ["--model=fake://tiny"]),
]


def flag(field: str) -> str:
    """The command line's name of a setting."""
    return field.replace("_", "-")


@pytest.mark.parametrize(("settings", "field", "names", "flags"), CHOICES)
def test_each_registered_name_can_be_set_and_another_is_refused_with_those_that_there_are(
    settings: type[ServiceSettings],
    field: str,
    names: list[str],
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in names:
        assert getattr(settings.from_args([*flags, f"--{flag(field)}={name}"]), field) == name
    with pytest.raises(SystemExit):
        settings.from_args([*flags, f"--{flag(field)}=psychic"])
    said = capsys.readouterr().err
    assert f"--{flag(field)} (HALFMOON_{field.upper()}) is 'psychic'" in said
    assert f"there are: {', '.join(names)}" in said
    assert ", ".join(names) in (settings.model_fields[field].description or "")


MODEL = "--model=fake://tiny"
MOVERS = [(PrefillSettings, [MODEL]), (DecodeSettings, [MODEL]), (KvstoreSettings, [])]


@pytest.mark.parametrize(("settings", "flags"), MOVERS)
def test_each_registered_backend_can_be_set_and_may_be_missing_and_another_is_refused(
    settings: type[ServiceSettings], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    choices = [*(f"{name}?" for name in BACKENDS), "tcp"]
    set_so = settings.from_args([*flags, f"--transfer-backends={','.join(choices)}"])
    assert set_so.transfer_paths == choices
    with pytest.raises(SystemExit):
        settings.from_args([*flags, "--transfer-backends=shm,pigeon?"])
    said = capsys.readouterr().err
    assert "no transfer backend 'pigeon?', there are: " in said
    assert all(name in said for name in BACKENDS)


ROLES: list[tuple[type[ServiceSettings], str, str]] = [
    (PrefillSettings, "prefill", "decode"),
    (DecodeSettings, "decode", "prefill"),
]


@pytest.mark.parametrize(("settings", "role", "other"), ROLES)
def test_the_roles_of_a_worker_include_the_one_in_which_it_starts(
    settings: type[ServiceSettings], role: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings.from_args([MODEL, f"--roles={role}"]).model_dump()["roles"] == role
    with pytest.raises(SystemExit):
        settings.from_args([MODEL, f"--roles={other}"])
    said = capsys.readouterr().err
    assert f"--roles (HALFMOON_ROLES) is '{other}'" in said
    assert f"this service starts as {role}: write {role},{other}" in said
