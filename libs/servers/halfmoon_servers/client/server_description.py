"""Define what a server says of itself."""

from typing import Literal

import msgspec

from halfmoon_servers.kv_events.event_endpoint import EventEndpoint

#: What a server's API and metrics are those of.
ServerKind = Literal["vllm", "sglang", "other"]


class ServerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One server, as it describes itself at a moment."""

    url: str
    kind: ServerKind
    #: Empty: the server does not say.
    version: str
    #: The id by which requests name the model.
    model: str
    #: The model's folder or name at a hub; empty: the server does not say.
    model_root: str
    #: Most tokens of prompt and answer together.
    max_model_len: int
    #: Tokens of a block of its prefix cache; None: the server does not say.
    block_size: int | None
    #: Blocks of its cache, over all data-parallel ranks; None: the server does not say.
    n_blocks: int | None
    #: Where it publishes KV events, one for each data-parallel rank; empty: it does not.
    event_endpoints: tuple[EventEndpoint, ...] = ()


class ReportedLoad(msgspec.Struct, frozen=True):
    """Tell how busy a server is, over all its data-parallel ranks."""

    n_running: int
    n_waiting: int
    #: The part of its KV cache that running requests use, 0 to 1.
    kv_usage: float
