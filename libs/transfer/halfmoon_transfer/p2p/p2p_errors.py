"""Define the errors of P2P objects.

P2PError
├── NotPublished       there is no object of this name
├── NameTaken          there is another one, or this client holds it already
├── WrongBuffers       the buffers are not of the object's sizes, or the folder is not usable
├── ObjectReplaced     another object of this name was published meanwhile
└── ShardUnavailable   no holder of a shard could deliver it; the text says which and why
"""

from halfmoon_transfer.interface import TransferError


class P2PError(TransferError):
    """Base of all errors of P2P objects."""


class NotPublished(P2PError):
    """There is no object of this name."""


class NameTaken(P2PError):
    """There is another object of this name, or this client holds it already."""


class WrongBuffers(P2PError):
    """The buffers don't fit the object, or the folder can't be published or created."""


class ObjectReplaced(P2PError):
    """Another object was published under the name while this one was fetched."""


class ShardUnavailable(P2PError):
    """No holder of a shard could deliver it; the text says why."""
