"""How servers are named in flags."""

import pytest

from halfmoon_servers.bridge.server_target import (
    BadTarget,
    ServerTarget,
    check_targets,
    parse_target,
)


def test_a_server_is_a_url_with_endpoints_behind_it() -> None:
    assert parse_target("http://h:8001/v1/", "both") == ServerTarget("http://h:8001")
    assert parse_target(
        "https://h/base, events=tcp://h:5557,replay=tcp://h:5558", "prefill"
    ) == ServerTarget("https://h/base", "prefill", "tcp://h:5557", "tcp://h:5558")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:8001",
        "ftp://h",
        "http://",
        "http://h:port",
        "http://h:99999",
        "http://h?x=1",
        "http://h,events",
        "http://h,events=h:5557",
        "http://h,replay=tcp://h:1",
        "http://h,events=tcp://h:1,events=tcp://h:2",
        "http://h,other=tcp://h:1",
    ],
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(BadTarget):
        parse_target(text, "both")


def test_half_a_pair_and_a_server_twice_are_refused_with_a_way_out() -> None:
    both, prefill = ServerTarget("http://a"), ServerTarget("http://b", "prefill")
    decode = ServerTarget("http://c", "decode")
    check_targets([both, prefill, decode])
    with pytest.raises(BadTarget, match="--prefill needs --decode"):
        check_targets([both, prefill])
    with pytest.raises(BadTarget, match="--decode needs --prefill"):
        check_targets([decode])
    with pytest.raises(BadTarget, match="http://a is named twice"):
        check_targets([both, both])
    with pytest.raises(BadTarget, match="0 servers"):
        check_targets([])
