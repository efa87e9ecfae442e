"""An etcd with users: who is let in, and tokens that end in the middle of use."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from halfmoon_metadata import MetadataRefused, open_store
from halfmoon_metadata.stores.etcd_store import EtcdStore
from halfmoon_testing.processes.etcd_server import EtcdServer
from tests.installed_programs import needs_programs

pytestmark = needs_programs("etcd")
PASSWORD = "s3cr3t: @/?%"


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer(root_password=PASSWORD) as server:
        yield server


def logins(store: EtcdStore) -> list[httpx.Request]:
    """Requests for a token, from now on."""
    seen: list[httpx.Request] = []

    def note(request: httpx.Request) -> None:
        if request.url.path.endswith("/auth/authenticate"):
            seen.append(request)

    store._client.event_hooks = {"request": [note]}
    return seen


def jwt_tokens(folder: Path) -> str:
    """Make the key of etcd's signed tokens, and return etcd's option for them."""
    key = rsa.generate_private_key(65537, 2048)
    private, public = folder / "token.key", folder / "token.pub"
    private.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return f"jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=5m"


@contextmanager
def opened(url: str) -> Iterator[EtcdStore]:
    store = open_store(url)
    assert isinstance(store, EtcdStore)
    with closing(store):
        yield store


def test_a_user_with_its_password_reads_and_writes(server: EtcdServer) -> None:
    with opened(server.url) as store:
        seen = logins(store)
        store.put("k", b"1", ttl_s=60)
        assert store.compare_and_swap("k", b"1", b"2")
        assert (store.list(""), store.increment("n"), store.delete("k")) == ({"k": b"2"}, 1, True)
        assert len(seen) == 1  # the token is kept


def test_others_are_refused_and_no_password_is_said(server: EtcdServer) -> None:
    server.call("/auth/user/add", {"name": "guest", "password": "of the house"})
    server.log_in()
    for login, reason in (
        ("", "etcd://user:password@host"),
        ("root:wr0ng@", "check the user and password"),
        ("nobody:wr0ng@", "check the user and password"),
        ("guest:of%20the%20house@", "grant this user's role"),
    ):
        with (
            opened(f"etcd://{login}127.0.0.1:{server.port}") as store,
            pytest.raises(MetadataRefused, match=f"127.0.0.1:{server.port}.*{reason}") as refused,
        ):
            store.get("k")
        assert "wr0ng" not in str(refused.value)


def test_a_user_at_a_server_without_users_is_told_to_leave_it_out(etcd_server: EtcdServer) -> None:
    with (
        opened(f"etcd://root:x@127.0.0.1:{etcd_server.port}") as store,
        pytest.raises(MetadataRefused, match="leave user and password out"),
    ):
        store.get("k")


@pytest.mark.parametrize("tokens", ["simple", "jwt"])
def test_a_change_of_users_ends_tokens_and_no_call_notices(tmp_path: Path, tokens: str) -> None:
    options = {"auth-token": jwt_tokens(tmp_path)} if tokens == "jwt" else {}
    with EtcdServer(root_password=PASSWORD, options=options) as server, opened(server.url) as store:
        assert store.compare_and_swap("counted", None, b"0")
        seen = logins(store)
        for n in range(2):
            if tokens == "jwt":
                server.call("/auth/user/add", {"name": f"another-{n}", "password": "x"})
            else:
                server.call("/auth/user/changepw", {"name": "root", "password": PASSWORD})
            server.log_in()
            with ThreadPoolExecutor(4) as threads:
                counts = list(threads.map(store.increment, ["counted"] * 4))
            assert sorted(counts) == [4 * n + 1, 4 * n + 2, 4 * n + 3, 4 * n + 4]
        assert len(seen) == 2  # one login for each change, not one for each thread
