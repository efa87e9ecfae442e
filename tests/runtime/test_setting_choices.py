"""Settings whose value is a name in a registry: each name is taken, any other is refused."""

import pytest

from halfmoon_conductor.settings import ConductorSettings
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.cache.eviction_policies import EVICTION_POLICIES
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS
from halfmoon_transfer.backends import BACKENDS
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings

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
def test_each_registered_name_can_be_set(
    settings: type[ServiceSettings], field: str, names: list[str], flags: list[str]
) -> None:
    for name in names:
        assert getattr(settings.from_args([*flags, f"--{flag(field)}={name}"]), field) == name


@pytest.mark.parametrize(("settings", "field", "names", "flags"), CHOICES)
def test_another_name_is_refused_with_those_that_there_are(
    settings: type[ServiceSettings],
    field: str,
    names: list[str],
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        settings.from_args([*flags, f"--{flag(field)}=psychic"])
    said = capsys.readouterr().err
    assert f"--{flag(field)} (HALFMOON_{field.upper()}) is 'psychic'" in said
    assert f"there are: {', '.join(names)}" in said


@pytest.mark.parametrize(("settings", "field", "names", "flags"), CHOICES)
def test_the_help_lists_the_names(
    settings: type[ServiceSettings], field: str, names: list[str], flags: list[str]
) -> None:
    assert ", ".join(names) in (settings.model_fields[field].description or "")


MODEL = "--model=fake://tiny"
MOVERS = [(PrefillSettings, [MODEL]), (DecodeSettings, [MODEL]), (KvstoreSettings, [])]


@pytest.mark.parametrize(("settings", "flags"), MOVERS)
def test_each_registered_backend_can_be_set_and_may_be_missing(
    settings: type[ServiceSettings], flags: list[str]
) -> None:
    choices = ", ".join(f"{name}?" for name in BACKENDS) + ",tcp"
    set_so = settings.from_args([*flags, f"--transfer-backends={choices}"])
    assert set_so.transfer_paths == [*(f"{name}?" for name in BACKENDS), "tcp"]


@pytest.mark.parametrize(("settings", "flags"), MOVERS)
def test_another_backend_is_refused_with_those_that_there_are(
    settings: type[ServiceSettings], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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
