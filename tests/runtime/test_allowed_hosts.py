"""Which names in a Host header are ours, and which name no host."""

import ssl
from pathlib import Path

import pytest

from halfmoon_runtime import allowed_hosts
from halfmoon_runtime.allowed_hosts import (
    AllowedHosts,
    BadHostHeader,
    host_of,
    own_names,
    read_allowed_hosts,
    read_host,
)
from halfmoon_runtime.host_check import hosts_to_check
from halfmoon_runtime.server_tls import server_context
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_testing.tls_authority import TlsAuthority


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("llm.example.com", "llm.example.com"), ("LLM.Example.COM.:8000", "llm.example.com"),
        ("my_service-1:", "my_service-1"), ("127.0.0.1:8000", "127.0.0.1"), ("[::1]", "::1"),
        ("[FE80::1]:80", "fe80::1"), ("a%2Db", "a%2db"),
    ],
)  # fmt: skip
def test_a_host_is_read_without_port_in_lower_case(header: str, host: str) -> None:
    assert read_host(header) == host


@pytest.mark.parametrize(
    "header",
    ["", ":80", ".", "a b", "a,b c", "a/b", "a@b", "a:b", "a:1:2", "::1", "[a]", "[1.2.3]", "[::1",
     "[::1%25eth0]", "a:65536", "a:99999999999", "ä", "a\x00", "a" * 254, "%", "%zz", "a%"],
)  # fmt: skip
def test_what_names_no_host_is_refused(header: str) -> None:
    with pytest.raises(BadHostHeader, match="Host header"):
        read_host(header)


def test_a_request_has_one_host_from_http_1_1_on() -> None:
    assert host_of([], "1.0") is None
    assert host_of(["a"], "1.0") == host_of(["a"], "1.1") == "a"
    for headers, version in (([], "1.1"), (["a", "a"], "1.1"), (["a", "b"], "1.0")):
        with pytest.raises(BadHostHeader):
            host_of(headers, version)


def test_names_are_listed_as_they_are_compared() -> None:
    text = " LLM.example.com., *.lab.example,mönd.example , [::1], 10.0.0.1,,"
    assert read_allowed_hosts(text) == (
        "llm.example.com", "*.lab.example", "xn--mnd-sna.example", "::1", "10.0.0.1",
    )  # fmt: skip
    assert read_allowed_hosts("") == ()


@pytest.mark.parametrize(
    "item", ["http://a.example", "a.example:8000", "a.example/", "a*.example", "a..*", "**", "a b",
             "[a]", "-", "ä" * 300],
)  # fmt: skip
def test_a_setting_that_is_no_name_is_named(item: str) -> None:
    with pytest.raises(ValueError, match="is no name of a host: write names without http://"):
        read_allowed_hosts(f"good.example,{item}")


def test_addresses_localhost_and_what_is_listed_are_ours() -> None:
    hosts = AllowedHosts(["front", "*.lab.example"])
    for ours in ("front", "a.lab.example", "a.b.lab.example", "localhost", "a.localhost"):
        assert hosts.allows(ours)
    for address in ("127.0.0.1", "10.1.2.3", "::1", "fe80::1"):
        assert hosts.allows(address)
    others = "back lab.example evillab.example front.evil.example xlocalhost 127.1 0x7f.1"
    for other in (*others.split(), "localhost.evil.example", "127.0.0.1.evil.example"):
        assert not hosts.allows(other)
        assert repr(other) in hosts.refusal(other)
        assert f"HALFMOON_ALLOWED_HOSTS={other}" in hosts.refusal(other)
    assert len(hosts.refusal("a" * 100_000)) < 1000


def test_this_machine_is_named_by_itself_and_by_its_file_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Gpu1.lab.example")
    file = tmp_path / "hosts"
    monkeypatch.setattr(allowed_hosts, "_HOSTS_FILE", file)
    assert own_names() == ("gpu1.lab.example", "gpu1", "gpu1.local"), "no file is no error"
    file.write_bytes(b"127.0.0.1 localhost\n127.0.1.1 gpu1.corp.example GPU1 # not.this\n"
                     b"0.0.0.0 ads.example\n\xff\xfe \xff\n")  # fmt: skip
    assert own_names() == ("gpu1.lab.example", "gpu1", "gpu1.local", "gpu1.corp.example")


def checked(*flags: str, has_keys: bool = False, tls: ssl.SSLContext | None = None) -> AllowedHosts:
    settings = ServiceSettings.from_args(["--allow-open-network", *flags])
    hosts = hosts_to_check(settings, tls, has_keys=has_keys)
    assert hosts is not None
    return hosts


def test_without_keys_a_service_answers_to_its_own_names() -> None:
    hosts = checked("--advertise-host", "Front.example.", "--allowed-hosts", "llm.example")
    for ours in (*own_names(), "front.example", "llm.example"):
        assert hosts.allows(ours)
    assert not hosts.allows("rebound.example")


def test_with_keys_names_count_only_if_some_are_listed_and_a_star_is_any_name() -> None:
    assert hosts_to_check(ServiceSettings.from_args([]), None, has_keys=True) is None
    hosts = checked("--allowed-hosts", "llm.example", has_keys=True)
    assert hosts.allows("llm.example") and not hosts.allows("rebound.example")
    for listed in ("*", "llm.example, *"):
        settings = ServiceSettings.from_args(["--allowed-hosts", listed])
        assert hosts_to_check(settings, None, has_keys=False) is None


def test_names_of_the_certificate_are_ours(tmp_path: Path) -> None:
    issued = TlsAuthority(tmp_path).issue("front.example", "*.fronts.example", "127.0.0.1")
    files = ["--tls-cert", str(issued.cert), "--tls-key", str(issued.key)]
    context = server_context(str(issued.cert), str(issued.key))
    names = checked(*files, tls=context)
    assert names.allows("front.example") and names.allows("a.fronts.example")
    assert not names.allows("rebound.example")
