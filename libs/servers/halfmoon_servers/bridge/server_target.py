"""Name the servers to bridge: a URL, a role, and where KV events are if the server does not say."""

from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec

#: "both" prefills and decodes; the others are one half of a prefill and decode pair.
ServerRole = Literal["both", "prefill", "decode"]
#: Servers behind one bridge.
MAX_SERVERS = 1024
_FORM = "URL[,events=tcp://HOST:PORT[,replay=tcp://HOST:PORT]]"


class BadTarget(ValueError):
    """A server's flag that can't be used; the text has the reason and the form."""


class ServerTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server to bridge."""

    url: str
    role: ServerRole = "both"
    #: ZeroMQ endpoints of its KV events, and of their replay; empty: as the server describes.
    events: str = ""
    replay: str = ""


def parse_target(text: str, role: ServerRole) -> ServerTarget:
    """Parse the value of a flag, such as ``http://h:8001,events=tcp://h:5557``.

    Raises:
        BadTarget: of another form.
    """
    url, *options = (part.strip() for part in text.split(","))
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018 - raises for a number that is no port
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment:
        raise BadTarget(f"{url!r} is no URL of a server such as http://127.0.0.1:8001 ({_FORM})")
    fields: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name not in ("events", "replay") or name in fields:
            raise BadTarget(f"{option!r} behind {url}: it is events=… or replay=…, each once")
        if not value.startswith(("tcp://", "ipc://")):
            raise BadTarget(f"{name}={value!r} of {url}: it is a ZeroMQ endpoint, tcp://HOST:PORT")
        fields[name] = value
    if "replay" in fields and "events" not in fields:
        raise BadTarget(f"{url}: replay= needs events= beside it")
    # An API's URL often ends in /v1, to which clients add paths.
    return ServerTarget(url.rstrip("/").removesuffix("/v1"), role, **fields)


def check_targets(targets: Sequence[ServerTarget]) -> None:
    """Check that servers can work together.

    Raises:
        BadTarget: none, too many, one twice, or half of a prefill and decode pair.
    """
    if not 1 <= len(targets) <= MAX_SERVERS:
        raise BadTarget(f"{len(targets)} servers: there are 1 to {MAX_SERVERS}")
    urls = [target.url for target in targets]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise BadTarget(f"{twice} is named twice: name each server once")
    roles = {target.role for target in targets}
    if ("prefill" in roles) != ("decode" in roles):
        there, missing = ("prefill", "decode") if "prefill" in roles else ("decode", "prefill")
        raise BadTarget(f"--{there} needs --{missing} beside it: neither half answers by itself")
