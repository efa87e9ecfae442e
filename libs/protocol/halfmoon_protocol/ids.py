"""The names of things, as types: an id of one kind can't be passed where another is meant."""

from typing import NewType

#: One try at one client's request. A request that is placed again gets a new id
#: (``cmpl-7f3a~2``), so that a late message about the earlier try is recognised and dropped.
RequestId = NewType("RequestId", str)

#: One worker process by its stable name (``decode-0``). A restarted worker keeps the name
#: and gets a higher generation.
WorkerId = NewType("WorkerId", str)

#: One conductor process. Workers answer the conductor that asked.
ConductorId = NewType("ConductorId", str)

#: A chained block hash, `halfmoon_protocol.blocks.HASH_BYTES` long.
BlockHash = NewType("BlockHash", bytes)

#: Names one put or one lease at a kvstore; chosen by the client, unique per client.
Ticket = NewType("Ticket", str)


def retry_id(request_id: RequestId, attempt: int) -> RequestId:
    """The id of try number `attempt` (2 for the first retry) of a client's request."""
    return RequestId(f"{original_request_id(request_id)}~{attempt}")


def original_request_id(request_id: RequestId) -> str:
    """The client's request that a try belongs to: the id without its try number."""
    return request_id.split("~", 1)[0]
