"""Who may ask, and how much: tenants with their API keys, read from a file.

    [[tenants]]
    name = "lab"
    key_sha256 = ["9f86d08…"]      # several while a key is being replaced
    requests_per_minute = 600      # left out: no limit
    tokens_per_minute = 200000
    max_concurrent = 32
    operator = true                # may look at /debug, and so at what all tenants do

The file has hashes only. A key is 256 random bits, so a plain hash of it can't be turned back.

    python -m halfmoon_conductor.tenants add tenants.toml lab [--operator]

makes a key, adds its tenant to the file, and prints the key: the only time it is to be seen.
"""

import hashlib
import secrets
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

#: How keys begin, so that scanners for leaked secrets can know them.
KEY_PREFIX = "hm-"
#: Between a tenant's name and what its requests say: no name has it.
_SEPARATOR = "\x1f"


def salt_of(tenant: str, cache_salt: str) -> str:
    """Derive what enters the block hashes of a request.

    Each tenant's salts are a space of their own, and so are those of requests without a key: a
    tenant's begin with its name, which is never empty, the others with the separator. Only a
    request with neither has the empty salt of the shared cache.

    Args:
        tenant: the tenant's name; empty for a request without a key.
        cache_salt: what the request says; any text.
    """
    return f"{tenant}{_SEPARATOR}{cache_salt}" if tenant or cache_salt else ""


class TenantsFileError(Exception):
    """The file can't be used: the text says why."""


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant and its limits; None is no limit."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    key_sha256: tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...]
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    #: Of prompts and answers together.
    tokens_per_minute: Annotated[float, Meta(gt=0)] | None = None
    #: Requests being answered at once.
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    #: Whether its keys open what is for operators.
    operator: bool = False

    def salt(self, cache_salt: str) -> str:
        """What enters the block hashes: no tenant can make another's."""
        return salt_of(self.name, cache_salt)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: tuple[Tenant, ...] = ()


class Tenants:
    """All of them, found by their keys."""

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
        """Those of a file.

        Raises:
            BadTenants: it can't be read, or says what it must not.
        """
        return cls(_read(path).tenants)

    def of(self, key: str) -> Tenant | None:
        """Whose key this is. What is compared are hashes: times tell nothing of a key."""
        return self._by_hash.get(hash_api_key(key))

    def __len__(self) -> int:
        return len({tenant.name for tenant in self._by_hash.values()})


def hash_api_key(key: str) -> str:
    """As the file has it."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def new_key() -> str:
    """256 bits of chance."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def add_tenant(path: Path, name: str, *, operator: bool = False) -> str:
    """Add a tenant without limits, or one more key to one that is there; the key.

    Args:
        path: the file.
        name: of the tenant.
        operator: whether it may see what is for operators; one that may already, still may.

    Raises:
        BadTenants: the name or the file can't be used.
    """
    key = new_key()
    tenants = list(_read(path).tenants) if path.exists() else []
    hashes: tuple[str, ...] = (hash_api_key(key),)
    for index, tenant in enumerate(tenants):
        if tenant.name == name:
            hashes = (*tenant.key_sha256, *hashes)
            tenants[index] = msgspec.structs.replace(
                tenant, key_sha256=hashes, operator=operator or tenant.operator
            )
            break
    else:
        try:
            new = {"name": name, "key_sha256": hashes, "operator": operator}
            tenants.append(msgspec.convert(new, Tenant))
        except msgspec.ValidationError:
            raise TenantsFileError(
                f"{name!r} can't be a tenant's name: letters, digits, '.', '_' and '-', 64 at most"
            ) from None
    path.touch(mode=0o600)
    path.write_text("\n".join(_written(tenant) for tenant in tenants))
    return key


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
    """The command line; the exit status."""
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
