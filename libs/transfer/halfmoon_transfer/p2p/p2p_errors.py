"""What can go wrong with objects.

P2PError
├── NotPublished   there is no object of this name
├── NameTaken      there is another one, or this client holds it already
├── WrongBuffers   the buffers are not of the object's sizes, or the folder is not usable
├── Replaced       somebody published another object of this name meanwhile
└── Unavailable    nobody who holds a shard could give it; the text says which and why
"""

from halfmoon_transfer.interface import TransferError


class P2PError(TransferError):
    """The base."""


class NotPublished(P2PError):
    """There is no object of this name."""


class NameTaken(P2PError):
    """There is another object of this name, or this client holds it already."""


class WrongBuffers(P2PError):
    """The buffers given don't fit the object; or the folder can't be one, or become one."""


class ObjectReplaced(P2PError):
    """Another object was published under the name while this one was fetched."""


class ShardUnavailable(P2PError):
    """A shard could not be had from anybody; the text says why."""
