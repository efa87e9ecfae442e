"""How large the values in messages may be: types with the limits that decoding enforces.

A message with a value outside of them is malformed: it is counted, logged and dropped like any
frame that is no message. The limits are far above what a working peer sends. They keep numbers
finite (NaN and infinity are refused too) and small enough that no arithmetic on them overflows
and no loop or allocation follows a number that a peer made up. What depends on the receiver,
such as its vocabulary or its pool, the receiver checks by itself.
"""

from typing import Annotated

from msgspec import Meta

from halfmoon_protocol.ids import ConductorId, RequestId, Ticket, WorkerId

#: Characters of an id, a host name or a model's name.
MAX_NAME = 512
#: Characters of an endpoint or URL.
MAX_ADDRESS = 2048
#: The largest token id: block hashes are made of 32 bits of each.
MAX_TOKEN_ID = 2**32 - 1
MAX_COUNT = 2**48
#: Of a duration, either way: 31 years.
MAX_SECONDS = 1e9
#: Stages of one group of prefill workers.
MAX_STAGES = 256
#: Stop tokens of one request: each is compared with each new token.
MAX_STOP_TOKENS = 4096
#: Kvstores named for one read.
MAX_REPLICAS = 1024

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS)]
WorkerName = Annotated[WorkerId, Meta(min_length=1, max_length=MAX_NAME)]
ConductorName = Annotated[ConductorId, Meta(max_length=MAX_NAME)]
RequestName = Annotated[RequestId, Meta(min_length=1, max_length=MAX_NAME)]
TicketName = Annotated[Ticket, Meta(max_length=MAX_NAME)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
#: A number of things of which there is at least one.
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
#: Of a KV event; -1: none.
Sequence = Annotated[int, Meta(ge=-1, le=2**62)]
#: Until a deadline.
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
#: Measured or fitted: may come out a little below 0.
Measured = Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
#: 64 bits: MessagePack has no larger integers.
Checksum = Annotated[int, Meta(ge=0)]
