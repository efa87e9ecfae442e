"""A password in a metadata server's URL is in no error and no log line."""

import pytest

from halfmoon_metadata import MetadataError, open_store
from halfmoon_metadata.redacted_url import redact_url
from halfmoon_metadata.tcp_ports import free_port

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cr3t@h:6379/0", "redis://…@h:6379/0"),
        ("redis://u:s3cr3t@with@at@h/0", "redis://…@h/0"),
        ("http://u:s3cr3t@h:1/metadata?a=b@c", "http://…@h:1/metadata?a=b@c"),
        ("http://h:1/metadata", "http://h:1/metadata"),
        ("no url at all", "no url at all"),
    ],
)
def test_user_and_password_are_not_shown(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "gopher://u:s3cr3t@h/0",
        "redis://u:s3cr3t@/0",
        "redis://u:s3cr3t@h:0/0",
        "redis://u:s3cr3t@h:port/0",
        "redis://u:s3cr3t@[h/0",
        "http://u:s3cr3t@h:99999999/metadata",
    ],
)
def test_a_url_that_is_refused_keeps_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="metadata URL") as refused:
        open_store(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("scheme", ["redis", "http"])
def test_a_server_that_is_away_keeps_its_password(scheme: str) -> None:
    path = {"redis": "/0", "http": "/metadata"}[scheme]
    store = open_store(f"{scheme}://u:s3cr3t@127.0.0.1:{free_port()}{path}")
    with pytest.raises(MetadataError) as failed:
        store.get("a")
    store.close()
    assert SECRET not in str(failed.value)
    assert SECRET not in repr(failed.value.__cause__)
