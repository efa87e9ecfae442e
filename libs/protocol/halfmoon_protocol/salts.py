"""Derive the salts of block hashes from tenants and from what clients send."""

#: Separates a tenant's name from the request's salt; no tenant name contains it.
_SEPARATOR = "\x1f"


def salt_of(tenant: str, cache_salt: str) -> str:
    """Derive the salt of a request's block hashes.

    Each tenant's salts are a space of their own, and so are those of requests without a key. A
    tenant's salts begin with its name, which is never empty; the others begin with the separator.
    Only a request with neither tenant nor salt has the empty salt of the shared cache.

    Args:
        tenant: the tenant's name; empty for a request without a key.
        cache_salt: the request's `cache_salt`; any text.
    """
    return f"{tenant}{_SEPARATOR}{cache_salt}" if tenant or cache_salt else ""
