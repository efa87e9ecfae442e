"""A metadata server's URL names the file of its password, so that the URL holds none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon_metadata import MetadataRefused, open_store
from halfmoon_metadata.password_file import with_password_of_file
from halfmoon_metadata.store_registry import open_values
from tests.metadata.conftest import RedisServer

#: With every character that means something in a URL.
PASSWORD = "s3cr3t: @/?%#&="


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A server with a password; skips as `redis_server` does."""
    started = RedisServer(password=PASSWORD)
    yield started
    started.stop()


def test_a_redis_is_opened_with_the_password_of_the_file(server: RedisServer, file: Path) -> None:
    url = f"redis://127.0.0.1:{server.port}/0?password_file={file}"
    store = open_store(url)
    store.put("key", b"value")
    assert store.get("key") == b"value"
    store.close()
    values = open_values(url, ttl_s=60, max_bytes=1000)
    values.put("owner", "name", b"kept")
    assert values.get("owner", "name") == b"kept"
    values.close()
    file.write_text("wr0ng")
    store = open_store(url)
    with pytest.raises(MetadataRefused) as refused:
        store.get("key")
    store.close()
    assert "wr0ng" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:6379/0?password_file={file}", "redis://:{password}@h:6379/0"),
        (
            "rediss://me@h/1?password_file={file}&protocol=3",
            "rediss://me:{password}@h/1?protocol=3",
        ),
        ("etcds://me@h:2379?password_file={file}", "etcds://me:{password}@h:2379"),
        ("redis://h:6379/0?protocol=3", "redis://h:6379/0?protocol=3"),
        ("redis://:own@h:6379/0", "redis://:own@h:6379/0"),
    ],
)
def test_the_password_takes_the_place_of_the_file(url: str, expected: str, file: Path) -> None:
    password = "s3cr3t%3A%20%40%2F%3F%25%23%26%3D"
    found = with_password_of_file(url.format(file=file))
    assert found == expected.format(password=password)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:0wn@h/0?password_file={file}", "not the only password"),
        ("redis://h/0?password_file={file}&password_file=/b", "not the only password"),
        ("redis://h/0?password_file={file}x", "can't be read: No such file"),
        ("redis://h/0?password_file=", "can't be read"),
        ("redis://h/0?password_file=%00", "can't be read"),
    ],
)
def test_a_file_of_no_use_is_named_and_no_password(url: str, reason: str, file: Path) -> None:
    with pytest.raises(ValueError, match=f"metadata URL .*password_file .*{reason}") as refused:
        open_store(url.format(file=file))
    assert "s3cr3t" not in str(refused.value) and "0wn" not in str(refused.value)


def test_a_file_of_ours_that_others_may_read_is_refused_with_the_way_out(file: Path) -> None:
    file.chmod(0o644)
    with pytest.raises(ValueError, match=f"chmod 600 {file}"):
        open_store(f"redis://h/0?password_file={file}")
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty: put the password into it, or leave"):
        open_store(f"redis://h/0?password_file={file}")
