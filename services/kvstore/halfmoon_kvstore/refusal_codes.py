"""Name the code of an error by which a command is refused."""

from halfmoon_protocol import error_codes
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_runtime.kvstore_clients import KvstoreUnavailable
from halfmoon_scheduling.cache.block_cache import CacheError
from halfmoon_transfer.interface import TransferError


def code_of(error: Exception) -> str:
    """Return the code (`error_codes`) of an error of a put, a lease or a copy."""
    match error:
        case CacheError():
            return error.code
        case LayoutMismatch():
            return error_codes.LAYOUT_MISMATCH
        case KvstoreUnavailable() | TransferError():
            return error_codes.PEER_FAILED
        case _:
            return error_codes.INVALID
