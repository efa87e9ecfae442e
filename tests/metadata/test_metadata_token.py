"""A metadata server of a cluster with a key serves those who know the key, and nobody else."""

from collections.abc import Iterator

import httpx
import pytest

from halfmoon_metadata import MemoryStore, MetadataRefused, open_store
from halfmoon_metadata.metadata_token import metadata_token, metadata_tokens
from tests.metadata.conftest import HttpServer

KEY = "only good for a test of tokens"
TOKEN = metadata_token(KEY)


@pytest.fixture(scope="module")
def one_server() -> Iterator[HttpServer]:
    server = HttpServer(MemoryStore(), tokens=[TOKEN])
    yield server
    server.stop()


@pytest.fixture
def server(one_server: HttpServer) -> HttpServer:
    one_server.store = MemoryStore()
    return one_server


@pytest.fixture(scope="module")
def web() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False) as client:
        yield client


@pytest.fixture
def url(server: HttpServer) -> str:
    return f"http://127.0.0.1:{server.port}/metadata"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", b"")],
        [("authorization", b"Bearer")],
        [("authorization", f"Bearer {KEY}".encode())],
        [("authorization", f"Basic {TOKEN}".encode())],
        [("authorization", f"Bearer {TOKEN}0".encode())],
        [("authorization", f"Bearer {TOKEN}".encode())] * 2,
        [("authorization", b"Bearer \xff\xfe")],
        [("x-api-key", TOKEN.encode())],
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST", "HEAD"])
def test_no_other_header_opens_it(
    server: HttpServer, url: str, web: httpx.Client, method: str, headers: list[tuple[str, bytes]]
) -> None:
    encoded = [(name.encode(), value) for name, value in headers]
    for path in ("", "/increment", "/nothing"):
        answer = web.request(method, url + path, params={"key": "a"}, headers=encoded)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in answer.text
    assert server.store.list("") == {}


def test_while_a_key_is_changed_a_client_shows_its_first_key_and_a_server_takes_each() -> None:
    new = f"{KEY}, changed"
    steps = [KEY, f"{KEY}\n{new}", f"{new}\n{KEY}", new]
    for i, here in enumerate([*steps, ""]):
        server = HttpServer(MemoryStore(), tokens=metadata_tokens(here))
        for j, there in enumerate(steps):
            store = open_store(f"http://127.0.0.1:{server.port}/metadata", cluster_key=there)
            if abs(i - j) <= 1 or here == "":  # without a key it serves those with one, too
                store.put("a", b"1")
            elif {i, j} == {0, 3}:
                with pytest.raises(MetadataRefused, match="HALFMOON_CLUSTER_KEY"):
                    store.put("a", b"1")
            store.close()
        server.stop()
    assert metadata_tokens(steps[1]) == (metadata_token(KEY), metadata_token(new))
