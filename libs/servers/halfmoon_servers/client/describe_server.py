"""Read a server's description from its answers."""

from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from halfmoon_servers.client.server_description import ServerKind
from halfmoon_servers.kv_events.event_endpoint import EventEndpoint

_T = TypeVar("_T")
#: Data-parallel ranks of one server.
MAX_RANKS = 1024


class DescriptionGarbage(ValueError):
    """An answer that can't be read; the text says why."""


class ModelEntry(msgspec.Struct):
    """One model in ``/v1/models``, in the fields that vLLM and SGLang add."""

    id: str
    owned_by: str = ""
    root: str | None = None
    max_model_len: int | None = None
    parent: str | None = None

    @property
    def kind(self) -> ServerKind:
        """Return what serves the model."""
        match self.owned_by:
            case "vllm" | "sglang":
                return self.owned_by
            case _:
                return "other"


class _Models(msgspec.Struct):
    data: list[ModelEntry]


class _Version(msgspec.Struct):
    version: str = ""


class _EventSource(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str | None = "zmq"
    enable_kv_cache_events: bool = True


class SglangInfo(msgspec.Struct):
    """SGLang's ``/get_server_info``, in the fields that Halfmoon reads."""

    version: str = ""
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    kv_events_config: str | None = None
    dp_size: int | None = None


def read_models(data: bytes) -> ModelEntry:
    """Return the model of ``/v1/models`` that is no adapter.

    Raises:
        DescriptionGarbage: there is none.
    """
    models = _decode(data, _Models).data
    for model in models:
        if model.parent is None:
            return model
    raise DescriptionGarbage("/v1/models names no model")


def read_version(data: bytes) -> str:
    """Return vLLM's version from ``/version``; empty: it is not named."""
    return _decode(data, _Version).version[:100]


def read_event_sources(data: bytes, url: str) -> tuple[EventEndpoint, ...]:
    """Return the endpoints of vLLM's ``/kv_event_sources``, one for each data-parallel rank.

    Raises:
        DescriptionGarbage: it can't be read.
    """
    sources = _decode(data, dict[int, _EventSource])
    if len(sources) > MAX_RANKS:
        raise DescriptionGarbage(f"{len(sources)} ranks publish KV events, at most {MAX_RANKS} may")
    return tuple(
        _endpoint(source, rank, url)
        for rank, source in sorted(sources.items())
        if source.enable_kv_cache_events and source.publisher == "zmq"
    )


def read_sglang_info(data: bytes) -> SglangInfo:
    """Return the fields of SGLang's ``/get_server_info``.

    Raises:
        DescriptionGarbage: it can't be read.
    """
    return _decode(data, SglangInfo)


def sglang_event_endpoints(info: SglangInfo, url: str) -> tuple[EventEndpoint, ...]:
    """Return where SGLang publishes: the port of its setting, plus the rank.

    Raises:
        DescriptionGarbage: its setting can't be read.
    """
    if not info.kv_events_config:
        return ()
    source = _decode(info.kv_events_config.encode(), _EventSource)
    if source.publisher != "zmq":
        return ()
    n_ranks = min(max(info.dp_size or 1, 1), MAX_RANKS)
    return tuple(_endpoint(_of_rank(source, rank), rank, url) for rank in range(n_ranks))


def _endpoint(source: _EventSource, rank: int, url: str) -> EventEndpoint:
    host = urlsplit(url).hostname or "127.0.0.1"
    replay = source.replay_endpoint
    return EventEndpoint(
        _connectable(source.endpoint, host),
        None if replay is None else _connectable(replay, host),
        source.topic,
        rank,
    )


def _connectable(endpoint: str, host: str) -> str:
    """Return the endpoint that a subscriber connects to, where a server binds to all addresses."""
    if not endpoint.startswith("tcp://") or len(endpoint) > 1000:
        raise DescriptionGarbage(f"KV events at {endpoint[:100]!r}: only tcp:// can be followed")
    bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 65536):
        raise DescriptionGarbage(f"KV events at {endpoint!r}: no port from 1 to 65535")
    host = f"[{host}]" if ":" in host else host
    return f"tcp://{host if bound in ('*', '0.0.0.0', '[::]', '::') else bound}:{port}"


def _of_rank(source: _EventSource, rank: int) -> _EventSource:
    def shifted(endpoint: str) -> str:
        head, _, port = endpoint.rpartition(":")
        return f"{head}:{int(port) + rank}" if port.isascii() and port.isdigit() else endpoint

    replay = source.replay_endpoint
    return msgspec.structs.replace(
        source,
        endpoint=shifted(source.endpoint),
        replay_endpoint=None if replay is None else shifted(replay),
    )


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise DescriptionGarbage(str(error)) from None
