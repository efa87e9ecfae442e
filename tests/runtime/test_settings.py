"""Settings from flags and environment, and what a wrong one is told."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from halfmoon_runtime.setting_names import SECRETS
from halfmoon_runtime.settings import ServiceSettings


class BakerySettings(ServiceSettings):
    """One bakery."""

    oven_c: Annotated[int, Field(ge=50, le=300)] = Field(220, description="Heat, degrees Celsius")
    flour: str = Field(description="Kind of flour")
    patience_s: Annotated[float, Field(gt=0)] | None = Field(None, description="Seconds to wait")
    glaze: bool = Field(True, description="Whether to glaze")


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("HALFMOON_"):
            monkeypatch.delenv(name)


@pytest.fixture
def bakery_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for a DNS server that knows bakery.example."""

    def resolve(host: str, *_: object, **__: object) -> object:
        assert host == "bakery.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


#: What a service says as it refuses its settings: they have this status, and no traceback.
Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    def refuse(*flags: str, flour: str | None = "") -> str:
        given = [] if flour is None else ["--flour", flour]
        with pytest.raises(SystemExit) as ended:
            BakerySettings.from_args([*given, *flags])
        told = capsys.readouterr().err
        assert ended.value.code == 2 and "Traceback" not in told and "cheese" not in told
        return told

    return refuse


def opened(*flags: str) -> BakerySettings:
    return BakerySettings.from_args(["--flour", "", *flags])


def told_as(flag: str, value: str) -> str:
    return f"{flag} (HALFMOON_{flag[2:].replace('-', '_').upper()}) is {value!r}"


def test_flags_win_over_variables_and_these_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFMOON_OVEN_C", "180")
    monkeypatch.setenv("HALFMOON_FLOUR", "rye")
    monkeypatch.setenv("HALFMOON_STATUS_FILE", "is no setting")
    settings = BakerySettings.from_args(["--flour", "spelt", "--no-glaze", "--patience-s", "1.5"])
    assert settings.oven_c == 180
    assert settings.flour == "spelt"
    assert settings.glaze is False
    assert settings.patience_s == 1.5
    assert settings.worker_id == "service-0"


SECRET = "the moon is made of green cheese"


def test_a_secret_comes_from_the_environment_and_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opened().cluster_key.get_secret_value() == ""
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", SECRET)
    settings = opened()
    assert settings.cluster_key.get_secret_value() == SECRET
    assert "cheese" not in f"{settings} {settings!r} {settings.model_dump_json()}"
    with pytest.raises(SystemExit):
        BakerySettings.from_args(["--help"])
    assert "--cluster-key " not in capsys.readouterr().out


def test_the_cluster_key_may_come_from_a_file_that_is_ours_alone(
    tmp_path: Path, refusal: Refusal
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    settings = opened("--cluster-key-file", str(file))
    assert settings.cluster_key.get_secret_value() == SECRET
    assert "cheese" not in f"{settings} {settings!r} {settings.model_dump_json()}"
    file.chmod(0o644)
    assert f"chmod 600 {file}" in refusal("--cluster-key-file", str(file))


def test_a_secret_on_the_command_line_or_that_could_be_guessed_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    for flags in (["--cluster-key", SECRET], [f"--cluster-key={SECRET}"]):
        assert "set HALFMOON_CLUSTER_KEY" in refusal(*flags)
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "cheese")
    said = "HALFMOON_CLUSTER_KEY: value error, a cluster key of 6 characters: it needs 16"
    assert said in refusal()


def test_all_that_is_wrong_is_told_at_once_without_a_traceback(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_METRICS_PORT", "70000")
    flags = ["--oven-c", "301", "--patience-s", "soon", "--worker-id", "a b"]
    told = refusal(*flags, flour=None)
    for flag, value in [*zip(flags[::2], flags[1::2], strict=True), ("--metrics-port", "70000")]:
        assert told_as(flag, value) in told
    assert "less than or equal to 300" in told
    assert "--flour (HALFMOON_FLOUR) is missing" in told


@pytest.mark.parametrize("argv", [["--sugar", "1"], ["--flour"], ["stray"]])
def test_an_unknown_flag_is_refused(argv: list[str], refusal: Refusal) -> None:
    assert argv[0] in refusal(*argv, flour=None)


def test_help_describes_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        BakerySettings.from_args(["--help"])
    assert exit_.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Heat, degrees Celsius (default: 220)" in told
    assert "Kind of flour (required)" in told
    for name, field in BakerySettings.model_fields.items():
        assert (f"--{name.replace('_', '-')} " in told) == (name not in SECRETS)
        assert field.description


THIS_MACHINE = f"address of {socket.gethostname()}"


@pytest.mark.parametrize(
    ("argv", "advertised"),
    [
        ([], "127.0.0.1"), (["--host", "10.1.2.3"], "10.1.2.3"),
        (["--host", "0.0.0.0", "--advertise-host", "bakery"], "bakery"),
        (["--host", "bakery.example"], "bakery.example"),
        (["--host", "0.0.0.0"], THIS_MACHINE), (["--host", "::"], THIS_MACHINE),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("bakery_resolves")
def test_others_are_told_an_address_that_they_can_reach(
    argv: list[str], advertised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: f"address of {name}")
    assert opened("--allow-open-network", *argv).advertised_host == advertised


@pytest.mark.parametrize(
    ("flag", "address"),
    [
        ("--host", "0.0.0.0"), ("--host", "::"), ("--host", "10.1.2.3"),
        ("--host", "bakery.example"), ("--transfer-host", "127.0.0.1,10.1.2.3"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("bakery_resolves")
def test_without_a_key_nothing_is_served_beyond_loopback_unless_that_is_asked_for(
    flag: str, address: str, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    told, last = refusal(flag, address), address.split(",")[-1]
    assert told_as(flag, last) in told
    for way_out in ("HALFMOON_CLUSTER_KEY_FILE", "127.0.0.1", "HALFMOON_ALLOW_OPEN_NETWORK=True"):
        assert way_out in told
    open_one = opened(flag, address, "--allow-open-network")
    assert open_one.open_addresses == {flag[2:].replace("-", "_"): last}
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "a key of the bakeries")
    assert opened(flag, address).open_addresses == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(address: str) -> None:
    assert opened("--host", address).open_addresses == {}


def test_a_network_stands_for_this_machines_address_in_it() -> None:
    settings = opened("--host", "127.0.0.0/30", "--transfer-host", "127.0.0.0/30, 127.0.0.9")
    assert settings.host == settings.advertised_host == "127.0.0.1"
    assert settings.transfer_bind == settings.transfer_advertise == ["127.0.0.1", "127.0.0.9"]


def test_payloads_go_where_everything_goes_unless_told_otherwise() -> None:
    settings = opened("--host", "::", "--advertise-host", "oven", "--allow-open-network")
    assert settings.transfer_bind == ["::"]
    assert settings.transfer_advertise == ["oven"]


HOSTS = ("--host", "--advertise-host", "--transfer-host")
#: What is no host, for the flags of each, and what is said of it.
NO_HOSTS: list[tuple[tuple[str, ...], str, str]] = [
    (("--host",), "127.0.0.0/99", "is no network, such as 10.0.1.0/24"),
    (("--host",), "198.51.100.0/24", "this machine has no"),
    (("--transfer-host",), "0.0.0.0", "name them one by one"),
    (("--host", "--transfer-host"), "oven.invalid", "does not resolve on this machine"),
    (("--advertise-host",), "0.0.0.0", "stands for all addresses"),
    (("--advertise-host",), "::", "stands for all addresses"),
    (("--allowed-hosts",), "http://x", "is no name of a host"),
    (HOSTS, "127.0.0.1:9999", "has a port: name the host alone, 127.0.0.1"),
    (HOSTS, "oven.example:80", "has a port: name the host alone, oven.example"),
    (HOSTS, "[::1]:80", "has a port: name the host alone, [::1]"),
    (HOSTS, "[::1]", "is in brackets: write the address alone, ::1"),
    (HOSTS, "http://oven.example", "is a URL: name the host alone"),
    (HOSTS, "http://127.0.0.1:80/", "is a URL: name the host alone"),
    (HOSTS, "300.1.1.1", "is no IP address"),
    (HOSTS, "oven example", "is no name of a host"),
    (HOSTS, "user@oven", "is no name of a host"),
    (HOSTS, "a" * 300, "is no name of a host"),
]


@pytest.mark.parametrize(
    ("flag", "host", "reason"),
    [(flag, host, reason) for flags, host, reason in NO_HOSTS for flag in flags],
)
def test_a_host_that_is_none_is_told_by_what_is_wrong_and_not_by_a_missing_key(
    flag: str, host: str, reason: str, refusal: Refusal
) -> None:
    told = refusal(flag, host)
    assert f"{flag} (" in told and repr(host) in told
    assert reason in told and "cluster key" not in told
