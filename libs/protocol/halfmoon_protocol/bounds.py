"""Bound the values in messages: types with the limits that decoding enforces.

A message with a value outside of them is malformed: it is counted, logged and dropped like any
frame that is no message. The limits are far above what a working peer sends. They keep numbers
finite (NaN and infinity are refused too) and small: arithmetic does not overflow, and no peer can
cause an endless loop or a huge allocation. A receiver itself checks values against its own state,
such as its vocabulary or its pool.
"""

from typing import Annotated

from msgspec import Meta

from halfmoon_protocol.ids import ConductorId, RequestId, Ticket, WorkerId

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

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS)]
Salt = Annotated[str, Meta(max_length=MAX_SALT)]
#: A JSON object as text; empty: none. Halfmoon passes it on verbatim.
KvTransferParams = Annotated[str, Meta(max_length=MAX_KV_TRANSFER_PARAMS)]
#: Id of the cluster key that a port serves with (`halfmoon_protocol.cluster_keys`); empty: none.
KeyId = Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")]
WorkerName = Annotated[WorkerId, Meta(min_length=1, max_length=MAX_NAME)]
ConductorName = Annotated[ConductorId, Meta(max_length=MAX_NAME)]
RequestName = Annotated[RequestId, Meta(min_length=1, max_length=MAX_NAME)]
TicketName = Annotated[Ticket, Meta(max_length=MAX_NAME)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
#: A count of at least one.
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
#: The number of a KV event; -1: none.
Sequence = Annotated[int, Meta(ge=-1, le=2**62)]
#: Time left until a deadline.
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
#: Measured or fitted seconds, which may be a little below 0.
Measured = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
#: 64 bits: MessagePack has no larger integers.
Checksum = Annotated[int, Meta(ge=0)]
