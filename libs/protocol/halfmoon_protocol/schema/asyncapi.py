"""Write the AsyncAPI document of the ZeroMQ sockets: channels, operations, replies, security.

AsyncAPI has no binding for ZeroMQ, so `x-zmq` says which sockets there are and which frames they
carry. Payloads are those of messages.json.
"""

from typing import Any

from halfmoon_protocol import codec
from halfmoon_protocol.messages import ALL_MESSAGES, Message
from halfmoon_protocol.schema.ports import COMMAND_PORTS, EVENT_PORTS, CommandPort, EventPort

Document = dict[str, Any]

_ABOUT = """\
What conductors and workers say to each other over ZeroMQ. Operations are those of a worker: it \
receives commands and sends answers and events. A caller does the opposite.

A worker binds a ROUTER for commands and a PUB for events, on any TCP ports, and writes both \
endpoints into its record in the metadata server. That is why channels have no address. \
docs/protocol.md has the rules that no schema can state: order, connections, write permission, and \
what a wrong message costs."""
_CURVE = """\
CURVE (https://rfc.zeromq.org/spec/26/), if the cluster has a key; without one, sockets are in \
the clear. ROUTER and PUB are its servers. All ports with one cluster key share a pair, and all \
callers another one. The secret keys are HMAC-SHA-256 of the texts in `x-zmq-curve` under the \
cluster key. A port lets in callers with the callers' public key alone (ZAP)."""
_FRAME = "u8 version | MessagePack map, or what the message's schema says"
_CONTENT = "application/vnd.halfmoon.frame"


def asyncapi_document() -> Document:
    """Return the whole document."""
    ports: list[CommandPort | EventPort] = [*COMMAND_PORTS, *EVENT_PORTS]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Halfmoon between services",
            "version": f"{codec.VERSION}.0.0",
            "description": _ABOUT,
            "license": {
                "name": "Apache-2.0",
                "url": "https://www.apache.org/licenses/LICENSE-2.0",
            },
            "tags": [{"name": role.role} for role in EVENT_PORTS],
        },
        "defaultContentType": _CONTENT,
        "servers": dict(server for role in EVENT_PORTS for server in _servers(role.role)),
        "channels": {_channel_name(port): _channel(port) for port in ports},
        "operations": dict(each for port in ports for each in _operations(port)),
        "components": {
            "messages": {
                **{message.__name__: _message(message) for message in ALL_MESSAGES},
                "KvEvents": _KV_EVENTS,
            },
            "securitySchemes": {
                "curve": {
                    "type": "asymmetricEncryption",
                    "description": _CURVE,
                    "x-zmq-curve": {
                        "ports": "halfmoon curve port 1",
                        "callers": "halfmoon curve caller 1",
                        "keyId": "halfmoon key id 1",
                    },
                }
            },
        },
    }


def _servers(role: str) -> list[tuple[str, Document]]:
    """Return both sockets of workers of a role."""
    sockets = {"commands": "ROUTER", "events": "PUB"}
    return [
        (
            f"{role}_{kind}",
            {
                "host": "{host}:{port}",
                "protocol": "zmtp",
                "protocolVersion": "3.1",
                "description": f"The {socket} of a {role} worker: `{kind}` of its record.",
                "security": [{"$ref": "#/components/securitySchemes/curve"}],
                "tags": [{"name": role}],
                "variables": {
                    "host": {"description": f"Host in `{kind}` of the worker's record."},
                    "port": {"description": f"TCP port in `{kind}` of the worker's record."},
                },
            },
        )
        for kind, socket in sockets.items()
    ]


def _channel_name(port: CommandPort | EventPort) -> str:
    return f"{port.name}_commands" if isinstance(port, CommandPort) else f"{port.role}_events"


def _channel(port: CommandPort | EventPort) -> Document:
    if isinstance(port, CommandPort):
        names = [each.__name__ for each in dict.fromkeys([*port.taken, *port.sent])]
        kind, about = "commands", f"{port.callers} ask, the worker answers on the same connection."
        frames: Any = [{"name": "message", "description": _FRAME}]
        zmq = {"worker": "ROUTER", "caller": "DEALER", "frames": frames}
    else:
        names = [port.load.__name__, *(["KvEvents"] if port.has_kv_events else [])]
        kind, about = "events", f"What a {port.role} worker publishes, for all who subscribe."
        zmq = {"worker": "PUB", "caller": "SUB", "subscription": "", "frames": "by message"}
    return {
        "address": None,
        "title": _channel_name(port).replace("_", " "),
        "description": about,
        "servers": [{"$ref": f"#/servers/{port.role}_{kind}"}],
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
        "x-zmq": {
            **zmq,
            "heartbeatIntervalSeconds": 1,
            "heartbeatTimeoutSeconds": 3,
            "maxFrameBytes": codec.MAX_MESSAGE_BYTES,
        },
    }


def _operations(port: CommandPort | EventPort) -> list[tuple[str, Document]]:
    channel = _channel_name(port)
    if isinstance(port, EventPort):
        sent = [port.load.__name__, *(["KvEvents"] if port.has_kv_events else [])]
        return [
            (f"{port.role}_publishes_{name}", _operation("send", channel, [name])) for name in sent
        ]
    operations = [
        (
            f"{port.name}_receives_{command.__name__}",
            _operation(
                "receive",
                channel,
                [command.__name__],
                [answer.__name__ for answer in port.answers.get(command, ())],
            ),
        )
        for command in port.taken
    ]
    operations += [
        (f"{port.name}_sends_{each.__name__}", _operation("send", channel, [each.__name__]))
        for each in port.sends
    ]
    return operations


def _operation(
    action: str, channel: str, messages: list[str], answers: list[str] | None = None
) -> Document:
    def named(names: list[str]) -> list[Document]:
        return [{"$ref": f"#/channels/{channel}/messages/{name}"} for name in names]

    operation: Document = {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": named(messages),
    }
    if answers:
        operation["reply"] = {
            "channel": {"$ref": f"#/channels/{channel}"},
            "messages": named(answers),
        }
    return operation


def _message(message: type[Message]) -> Document:
    return {
        "name": str(message.__struct_config__.tag),
        "title": message.__name__,
        "summary": " ".join(str(message.__doc__).split("\n\n")[0].split()),
        "contentType": _CONTENT,
        "payload": _payload(f"./messages.json#/$defs/{message.__name__}"),
    }


def _payload(reference: str) -> Document:
    """Return a reference to a schema. AsyncAPI's own dialect knows no `prefixItems`."""
    return {
        "schemaFormat": "application/schema+json;version=draft-2020-12",
        "schema": {"$ref": reference},
    }


_KV_EVENTS: Document = {
    "name": "kv_events",
    "title": "KvEvents",
    "summary": "What a kvstore stored and removed, in vLLM's format.",
    "contentType": "application/vnd.msgpack",
    "x-zmq-frames": [
        {"name": "topic", "description": "kv@ and the worker's id, in UTF-8"},
        {"name": "sequence", "description": "8 bytes, signed, big-endian"},
        {"name": "payload", "description": "MessagePack, as the payload's schema says"},
    ],
    "payload": _payload("./kv_events.json#/$defs/KvEventPayload"),
}
