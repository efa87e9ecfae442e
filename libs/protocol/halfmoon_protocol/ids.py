"""Define a type for each kind of id, so that one can't be passed for another."""

from typing import NewType

#: One try at one client's request. The next try gets a new id
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
    """Return the id of try number `attempt` (2 for the first retry) of a client's request."""
    return RequestId(f"{original_request_id(request_id)}~{attempt}")


def original_request_id(request_id: RequestId) -> str:
    """Return the client's request of a try: the id without its try number."""
    return request_id.split("~", 1)[0]
