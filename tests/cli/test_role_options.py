"""`halfmoon up -o`: every setting of every role can be set, or is refused with the way out."""

import json
import re
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.up.embedded_cluster import START_ORDER, ClusterPlan, plan_processes
from halfmoon_cli.up.role_options import (
    HYBRID_OPTIONS,
    RESERVED_FLAGS,
    BadRoleOption,
    role_options,
)
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.setting_names import SECRETS
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.roles.role_settings import (
    read_decode_settings,
    read_prefill_settings,
    roles_of,
)

FAKE = "fake://tiny?step_s=0.001"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "conductor": ConductorSettings,
    "kvstore": KvstoreSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}
#: Where any text will not do.
VALUES = {
    "host": "127.0.0.2",
    "advertise_host": "peer.example",
    "allowed_hosts": "llm.example,*.lab.example",
    "metadata_host": "127.0.0.3",
    "transfer_host": "127.0.0.2",
    "tenant_quotas_mib": "lab=4096,*=256",
    "placement": "load_balance",
    "admission": "early",
    "eviction": "lfu",
    "queue_order": "slack",
    "engine_options": {"enforce_eager": "a=b c"},
    "transfer_backends": "tcp",
    "roles": "prefill,decode",
    "trace_url": "http://127.0.0.1/{trace_id}?a=b c",
}
#: Settings that are refused without each other.
PARTNERS = {"tls_cert": "tls_key", "tls_key": "tls_cert"}
#: Arguments of the processes of a cluster without options.
WITHOUT = {
    spec.name: spec.arguments for spec in plan_processes(ClusterPlan(model="m", http_port=1))
}
EVERY = [(role, name) for role in START_ORDER for name in SETTINGS[role].model_fields]


def other_value(name: str, field: FieldInfo) -> Any:
    """A value that the setting takes and does not have by default."""
    if name in VALUES:
        return VALUES[name]
    kind = field.annotation
    kinds = [each for each in get_args(kind) if each is not type(None)]
    if get_origin(kind) is Literal:
        return next(each for each in get_args(kind) if each != field.default)
    if kinds and get_origin(kinds[0]) is not None and get_origin(kinds[0]) is not Literal:
        kind = get_args(kinds[0])[0]
    elif kinds:
        kind = kinds[0]
    if kind is bool:
        return not field.default
    if kind is int:
        return 128 if name == "block_size" else (field.default or 0) + 1
    if kind is float:
        default = field.default or 0.0
        return next(each for each in (default + 1.25, default * 0.75) if is_taken(field, each))
    assert kind is str, f"{name} is of {kind}: say here what it may be"
    return "-a=b c"


def is_taken(field: FieldInfo, value: float) -> bool:
    """Whether the setting's bounds allow it."""
    try:
        TypeAdapter(Annotated[float, Field(), *field.metadata]).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(("role", "name"), EVERY)
def test_every_setting_of_every_role_is_set_or_refused_with_the_way_out(
    role: str, name: str
) -> None:
    settings = SETTINGS[role]
    flag = name.replace("_", "-")
    if flag in RESERVED_FLAGS or name in SECRETS:
        with pytest.raises(BadRoleOption) as refused:
            role_options([f"{role}.{flag}=x"])
        assert f"{role}.{flag}" in str(refused.value)
        assert re.search(r"use --|set HALFMOON_|names its processes", str(refused.value))
        return
    value = other_value(name, settings.model_fields[name])
    text = json.dumps(value) if isinstance(value, dict) else value
    partner = [f"{role}.{PARTNERS[name]}=x"] if name in PARTNERS else []
    extra = role_options([f"{role}.{flag}={text}", *partner])
    assert extra == role_options([f"{role}.{name}={text}", *partner])
    for spec in plan_processes(ClusterPlan(model="m", http_port=1, extra=extra)):
        if spec.role != role and spec.arguments == WITHOUT[spec.name]:
            continue
        got = getattr(SETTINGS[spec.role].from_args(spec.arguments), name, None)
        if spec.role == role:
            assert got == value, f"{spec.name}: {spec.arguments}"
        else:
            assert got != value


@pytest.mark.parametrize("role", START_ORDER)
def test_a_switch_takes_the_words_that_the_environment_takes(role: str) -> None:
    settings = SETTINGS[role]
    switches = [name for name, each in settings.model_fields.items() if each.annotation is bool]
    required = ["--model", "m"] if "model" in settings.model_fields else []
    if "stage_layers_only" in switches:  # it needs them
        required += ["--group", "g", "--stage", "0/2"]
    for name in switches:
        flag = f"--{name.replace('_', '-')}"
        for word, expected in [
            ("true", True),
            ("On", True),
            ("1", True),
            ("no", False),
            ("0", False),
        ]:
            assert getattr(settings.from_args([*required, f"{flag}={word}"]), name) is expected


def test_a_switch_that_is_neither_on_nor_off_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        PrefillSettings.from_args(["--model", "m", "--measure=maybe"])
    assert ended.value.code == 2
    assert "--measure is 'maybe': it is true or false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("127.0.0.3", "http://127.0.0.3:80"),
        ("127.0.0.0/8", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("::", "http://[::1]:80"),
    ],
)
def test_the_cluster_is_reached_where_its_conductor_was_told_to_listen(host: str, url: str) -> None:
    extra = role_options([f"conductor.host={host}"])
    assert ClusterPlan(model="m", http_port=80, extra=extra).url == url


def test_a_host_of_the_conductor_that_is_none_is_refused_before_anything_starts() -> None:
    result = CliRunner().invoke(app, ["up", "--model", FAKE, "-o", "conductor.host=10.0.0.0/99"])
    assert result.exit_code == 2
    assert "conductor.host" in result.output


def test_hybrid_workers_have_both_roles_and_prefill_any_prompt_while_they_decode() -> None:
    flags = role_options(HYBRID_OPTIONS)
    model = ["--model", FAKE]
    prefill = read_prefill_settings([*flags["prefill"], *model], "prefill")
    decode = read_decode_settings([*flags["decode"], *model], "decode")
    for settings in (prefill, decode):
        assert roles_of(settings) == ("prefill", "decode")
        assert isinstance(settings, DecodeSettings)
        assert settings.local_prefill_tokens >= 10**9
    conductor = ConductorSettings.from_args([*flags["conductor"], *model], "conductor")
    assert conductor.scheduling.role_changes


def test_hybrid_is_an_option_of_up() -> None:
    result = CliRunner().invoke(app, ["up", "--hybrid", "-o", "decode.targets=x"])
    assert result.exit_code == 2
    assert "decode.targets" in result.output
