"""Tenants: their keys, which the file does not have, and their rates."""

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halfmoon_conductor.http_server.auth_middleware import Principal
from halfmoon_conductor.http_server.token_bucket import TokenBucket
from halfmoon_conductor.tenants import (
    Tenant,
    Tenants,
    TenantsFileError,
    add_tenant,
    hash_api_key,
    main,
)
from halfmoon_protocol.blocks import block_hashes
from halfmoon_testing.full_disk import no_files_above


def test_a_key_is_made_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    lab, moon = add_tenant(path, "lab"), add_tenant(path, "moon")
    assert re.fullmatch(r"hm-[\w-]{43}", lab)
    assert lab not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    tenants = Tenants.read(path)
    assert [tenants.of(key) and tenants.of(key).name for key in (lab, moon)] == ["lab", "moon"]  # type: ignore[union-attr]
    assert tenants.of(lab + "x") is tenants.of("") is tenants.of("\ud800") is None


def test_a_second_key_of_a_tenant_works_beside_the_first_and_limits_stay(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    old = add_tenant(path, "lab")
    path.write_text(path.read_text() + "tokens_per_minute = 5.5\nmax_concurrent = 2\n")
    new = add_tenant(path, "lab")
    tenants = Tenants.read(path)
    assert tenants.of(old) == tenants.of(new)
    assert len(tenants) == 1
    tenant = tenants.of(new)
    assert tenant is not None
    assert (tenant.tokens_per_minute, tenant.max_concurrent) == (5.5, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[tenants]]\nname = 'a b'\nkey_sha256 = []", "name"),
        ("[[tenants]]\nname = 'a'\nkey_sha256 = ['plain']", "key_sha256"),
        ("[[tenants]]\nname = 'a'\nkey_sha256 = []\nrequests = 1", "requests"),
        ("[[tenants]]\nname = 'a'\nkey_sha256 = []\ntokens_per_minute = 0", "tokens_per_minute"),
        ("[[tenants]]\nname = 'a'\nkey_sha256 = []\n" * 2, "two tenants are called a"),
        ("tenants = 1", "array"),
        ("[[", "tenants file"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(TenantsFileError, match=told):
        Tenants.read(path)


def test_two_tenants_cannot_have_one_key() -> None:
    hashed = (hash_api_key("hm-a"),)
    with pytest.raises(TenantsFileError, match="have the same key"):
        Tenants((Tenant("lab", hashed), Tenant("moon", hashed)))


def test_the_command_prints_the_key_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "tenants.toml")
    assert main(["add", path, "lab"]) == 0
    key = capsys.readouterr().out.strip()
    assert Tenants.read(Path(path)).of(key) is not None
    assert main(["add", path, "no good"]) == 1
    assert "'no good'" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["add", str(tmp_path), "lab"]) == 1


def test_tenants_that_are_added_at_once_are_all_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda i: add_tenant(path, f"lab-{i % 10}"), range(40)))
    tenants = Tenants.read(path)
    assert len(tenants) == 10
    assert all(tenants.of(key) for key in keys)


def test_a_file_that_can_not_be_written_whole_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tenants.toml"
    key = add_tenant(path, "lab")
    path.chmod(0o640)
    before = path.read_text()
    with no_files_above(len(before)):
        assert main(["add", str(path), "moon"]) == 1
    told = capsys.readouterr()
    assert (told.out, path.read_text()) == ("", before)
    assert f"tenants file {path} can't be replaced" in told.err
    assert Tenants.read(path).of(key) is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_operator_is_made_by_the_command_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    plain, operator = add_tenant(path, "lab"), add_tenant(path, "lab", operator=True)
    third, other = add_tenant(path, "lab"), add_tenant(path, "moon")
    assert main(["add", str(path), "ops", "--operator"]) == 0
    tenants = Tenants.read(path)
    found = [tenants.of(key) for key in (plain, operator, third, other)]
    assert [tenant and tenant.operator for tenant in found] == [True, True, True, False]
    assert path.read_text().count("operator = true") == 2


@given(st.text(max_size=5), st.text(max_size=5))
def test_no_salt_of_one_tenant_gives_anothers_blocks(mine: str, theirs: str) -> None:
    tokens = list(range(16))

    def first_block(salt: str) -> bytes:
        return block_hashes(tokens, model="m", salt=salt, block_size=16)[0]

    lab, moon = Tenant("lab", ()), Tenant("moon", ())
    assert first_block(lab.salt(mine)) != first_block(moon.salt(theirs))
    assert (first_block(lab.salt(mine)) == first_block(lab.salt(theirs))) == (mine == theirs)


_FORGED = st.one_of(st.text(max_size=5), st.builds("{}\x1f{}".format, st.text("lab"), st.text()))


@given(_FORGED, _FORGED)
@example("lab\x1f", "")
@example("lab\x1fsecret", "secret")
@example("\x1flab\x1fsecret", "secret")
def test_no_salt_without_a_key_is_a_tenants_however_it_is_forged(forged: str, theirs: str) -> None:
    anybody, lab = Principal(None), Principal(Tenant("lab", ()))
    assert anybody.salt(forged) != lab.salt(theirs)
    assert lab.salt(forged) != anybody.salt(theirs)
    assert (anybody.salt(forged) == anybody.salt(theirs)) == (forged == theirs)
    assert anybody.salt(None) == ""


def test_a_minutes_worth_may_be_taken_at_once_and_comes_back_steadily() -> None:
    bucket = TokenBucket(60)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(30, 10.0) == pytest.approx(20.0)
    assert bucket.wait_s(10, 10.0) == 0
    assert bucket.wait_s(60, 1000.0) == 0
    # More than that needs a full bucket, and what was overdrawn is waited for.
    bucket = TokenBucket(60)
    assert bucket.wait_s(500, 0.0) == 0
    bucket.take(90, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(31.0)
    assert bucket.wait_s(500, 0.0) == pytest.approx(90.0)
