"""Read tenants, their API keys and their limits from a file.

    [[tenants]]
    name = "lab"
    key_sha256 = ["9f86d08…"]      # several while a key is being replaced
    requests_per_minute = 600      # left out: no limit
    tokens_per_minute = 200000
    max_concurrent = 32
    operator = true                # may read /debug, which shows the requests of all tenants

The file has only hashes. A key is 256 random bits, so its plain hash can't be reversed.

    python -m halfmoon_conductor.tenants add tenants.toml lab [--operator]

makes a key, adds its hash to the file and prints the key. It is not shown again. The file is
replaced whole, and two that are added at once are both there.
"""

import hashlib
import secrets
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon_metadata.whole_file import file_lock, replace_file
from halfmoon_protocol.salts import salt_of

#: Prefix of all keys, by which scanners for leaked secrets recognise them.
KEY_PREFIX = "hm-"


class TenantsFileError(Exception):
    """A tenants file that can't be used; the text says why."""


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant and its limits; None is no limit."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    key_sha256: tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...]
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    #: Tokens of prompts and answers together.
    tokens_per_minute: Annotated[float, Meta(gt=0)] | None = None
    #: Requests being answered at once.
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    #: Whether its keys open the routes for operators.
    operator: bool = False

    def salt(self, cache_salt: str) -> str:
        """Return the salt of the tenant's block hashes; no other tenant can produce it."""
        return salt_of(self.name, cache_salt)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: tuple[Tenant, ...] = ()


class Tenants:
    """Find tenants by their API keys."""

    def __init__(self, tenants: tuple[Tenant, ...]) -> None:
        self._by_hash: dict[str, Tenant] = {}
        names: set[str] = set()
        for tenant in tenants:
            if tenant.name in names:
                raise TenantsFileError(f"two tenants are called {tenant.name}")
            names.add(tenant.name)
            for hashed in tenant.key_sha256:
                if hashed in self._by_hash:
                    raise TenantsFileError(
                        f"{tenant.name} and {self._by_hash[hashed].name} have the same key"
                    )
                self._by_hash[hashed] = tenant

    @classmethod
    def read(cls, path: Path) -> "Tenants":
        """Read the tenants of a file.

        Raises:
            TenantsFileError: the file can't be read, or is not valid.
        """
        return cls(_read(path).tenants)

    def of(self, key: str) -> Tenant | None:
        """Return the tenant with this key. Comparing hashes leaks no timing information on keys."""
        return self._by_hash.get(hash_api_key(key))

    def __len__(self) -> int:
        return len({tenant.name for tenant in self._by_hash.values()})


def hash_api_key(key: str) -> str:
    """Return the hash of a key as the file stores it."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def new_key() -> str:
    """Return a key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def add_tenant(path: Path, name: str, *, operator: bool = False) -> str:
    """Add a tenant without limits, or another key to an existing tenant; return the key.

    Args:
        path: the file.
        name: the tenant's name.
        operator: whether the tenant is an operator; an existing operator stays one.

    Raises:
        TenantsFileError: the name or the file is not valid, or the file can't be replaced.
    """
    key = new_key()
    try:
        with file_lock(path):
            tenants = list(_read(path).tenants) if path.exists() else []
            _add_key(tenants, name, hash_api_key(key), operator=operator)
            text = "\n".join(_written(tenant) for tenant in tenants)
            replace_file(path, text.encode())
    except OSError as error:
        raise TenantsFileError(
            f"tenants file {path} can't be replaced: {error.strerror or error}; it stays as it "
            "was. Give a file whose folder this user may write to"
        ) from None
    return key


def _add_key(tenants: list[Tenant], name: str, hashed: str, *, operator: bool) -> None:
    for index, tenant in enumerate(tenants):
        if tenant.name == name:
            tenants[index] = msgspec.structs.replace(
                tenant,
                key_sha256=(*tenant.key_sha256, hashed),
                operator=operator or tenant.operator,
            )
            return
    try:
        new = {"name": name, "key_sha256": (hashed,), "operator": operator}
        tenants.append(msgspec.convert(new, Tenant))
    except msgspec.ValidationError:
        raise TenantsFileError(
            f"{name!r} can't be a tenant's name: letters, digits, '.', '_' and '-', 64 at most"
        ) from None


def _read(path: Path) -> _File:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise TenantsFileError(f"tenants file {path}: {error}") from None


def _written(tenant: Tenant) -> str:
    lines = ["[[tenants]]", f'name = "{tenant.name}"', "key_sha256 = ["]
    lines += [f'    "{hashed}",' for hashed in tenant.key_sha256]
    lines.append("]")
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
        if (value := getattr(tenant, name)) is not None:
            lines.append(f"{name} = {value}")
    if tenant.operator:
        lines.append("operator = true")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    operator = "--operator" in arguments
    match [argument for argument in arguments if argument != "--operator"]:
        case ["add", path, name]:
            try:
                print(add_tenant(Path(path), name, operator=operator))
            except TenantsFileError as error:
                print(error, file=sys.stderr)
                return 1
            return 0
    print("usage: python -m halfmoon_conductor.tenants add FILE NAME [--operator]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
