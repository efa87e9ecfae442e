"""Define the base of all messages: frozen, tagged, written as maps.

A message is a MessagePack map with its tag under ``"type"``. Unknown fields are ignored, so
that a newer peer may add some. A missing required field is an error.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """The base of every message. Subclasses set their tag and are listed in `messages`."""
