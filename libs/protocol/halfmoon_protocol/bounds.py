"""Bound the values in messages: types with the limits that decoding enforces.

A message with a value outside of them is malformed: it is counted, logged and dropped like any
frame that is no message. The limits are far above what a working peer sends. They keep numbers
finite (NaN and infinity are refused too) and small: arithmetic does not overflow, and no peer can
cause an endless loop or a huge allocation. A receiver itself checks values against its own state,
such as its vocabulary or its pool.
"""

from typing import Annotated

from msgspec import Meta

from halfmoon_protocol.ids import BlockHash, ConductorId, RequestId, Ticket, WorkerId

#: Characters of an id, a host name or a model's name.
MAX_NAME = 512
#: Characters of an endpoint or URL.
MAX_ADDRESS = 2048
#: The largest token id: a block hash takes 32 bits of each.
MAX_TOKEN_ID = 2**32 - 1
#: The largest number of anything.
MAX_COUNT = 2**48
#: The longest duration, positive or negative: 31 years.
MAX_SECONDS = 1e9
#: Features of a worker, and characters of a feature's name or an error's code.
MAX_FEATURES = 256
MAX_CODE = 64
#: Stages of one group of prefill workers.
MAX_STAGES = 256
#: Stop tokens of one request: each is compared with each new token.
MAX_STOP_TOKENS = 4096
#: Kvstores named for one read.
MAX_REPLICAS = 1024
#: Characters of a salt: a tenant's name, a separator, and the 1024 that a request may state.
MAX_SALT = 2048
#: Characters of the JSON object by which a server's KV is fetched; it names every block.
MAX_KV_TRANSFER_PARAMS = 2**20

#: Items of a list, and characters of a text, that nothing else bounds: no frame has room for more,
#: so this refuses none. It is `codec.MAX_MESSAGE_BYTES`.
MAX_ITEMS = 16 * 1024 * 1024


def unit(name: str) -> Meta:
    """Return what names the unit of a number in the JSON Schema; `schema.units` lists them."""
    return Meta(extra_json_schema={"x-unit": name})


_COUNT = Meta(ge=0, le=MAX_COUNT)
_POSITIVE = Meta(ge=1, le=MAX_COUNT)
_SECONDS = Meta(ge=0, le=MAX_SECONDS)
_ITEMS = Meta(max_length=MAX_ITEMS)

# texts

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS)]
Salt = Annotated[str, Meta(max_length=MAX_SALT)]
#: A text for people and logs. A receiver that shows it may cut it.
Reason = Annotated[str, _ITEMS]
#: A JSON object as text; empty: none. Halfmoon passes it on verbatim.
KvTransferParams = Annotated[str, Meta(max_length=MAX_KV_TRANSFER_PARAMS)]
KeyId = Annotated[
    str,
    Meta(
        pattern="^([0-9a-f]{16})?$",
        description="Id of the cluster key that a port serves with "
        "(`halfmoon_protocol.cluster_keys`); empty: none.",
    ),
]
FeatureNames = Annotated[
    tuple[Annotated[str, Meta(max_length=MAX_CODE)], ...], Meta(max_length=MAX_FEATURES)
]
ErrorCode = Annotated[
    str,
    Meta(
        max_length=MAX_CODE,
        description="Why, for programs (`halfmoon_protocol.error_codes`); empty: not said.",
    ),
]
WorkerName = Annotated[
    WorkerId,
    Meta(min_length=1, max_length=MAX_NAME, description="Name of a worker, such as `decode-0`."),
]
ConductorName = Annotated[
    ConductorId, Meta(max_length=MAX_NAME, description="Name of a conductor.")
]
RequestName = Annotated[
    RequestId,
    Meta(
        min_length=1,
        max_length=MAX_NAME,
        description="Names one try at one client's request: `cmpl-7f3a`, then `cmpl-7f3a~2`.",
    ),
]
TicketName = Annotated[
    Ticket,
    Meta(
        max_length=MAX_NAME,
        description="Names one put or one lease; its client chooses it, unique on its connection.",
    ),
]

# bytes

#: 24 letters of base64 may be 16, 17 or 18 bytes.
_BASE64_OF_16_BYTES = "^[A-Za-z0-9+/]{21}[AQgw]==$"
#: `halfmoon_protocol.blocks.HASH_BYTES` long.
HashBytes = Annotated[
    BlockHash,
    Meta(min_length=16, max_length=16, extra_json_schema={"pattern": _BASE64_OF_16_BYTES}),
]
Hashes = Annotated[tuple[HashBytes, ...], _ITEMS]

# numbers

#: A version of the protocol: the first byte of a frame.
Version = Annotated[int, Meta(ge=1, le=255), unit("version")]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID), unit("token id")]
TokenIds = Annotated[tuple[TokenId, ...], _ITEMS]
Count = Annotated[int, _COUNT, unit("count")]
Index = Annotated[int, _COUNT, unit("index")]
Bytes = Annotated[int, _COUNT, unit("bytes")]
PositiveBytes = Annotated[int, _POSITIVE, unit("bytes")]
Tokens = Annotated[int, _COUNT, unit("tokens")]
PositiveTokens = Annotated[int, _POSITIVE, unit("tokens")]
Blocks = Annotated[int, _COUNT, unit("blocks")]
Pages = Annotated[int, _COUNT, unit("pages")]
Layers = Annotated[int, _COUNT, unit("layers")]
Requests = Annotated[int, _COUNT, unit("requests")]
#: The larger one goes first.
Priority = Annotated[int, Meta(ge=-(2**40), le=2**40), unit("priority")]
#: The number of a KV event; -1: none.
Sequence = Annotated[
    int, Meta(ge=-1, le=2**62, extra_json_schema={"format": "int64"}), unit("index")
]
#: Time left until a deadline.
Seconds = Annotated[float, _SECONDS, unit("s")]
#: Measured or fitted seconds, which may be a little below 0.
Measured = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS), unit("s")]
SecondsPerToken = Annotated[float, _SECONDS, unit("s/token")]
SecondsPerTokenSquared = Annotated[float, _SECONDS, unit("s/token²")]
SecondsPerRequest = Annotated[float, _SECONDS, unit("s/request")]
#: xxh3-64. 64 bits: MessagePack has no larger integers.
Checksum = Annotated[
    int,
    Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1, "format": "uint64"}),
    unit("checksum"),
]
