"""Replace references to items of stored responses by the items: OpenAI's `item_reference`."""

import re
from collections.abc import Awaitable, Callable

import msgspec

from halfmoon_conductor.api.request_fields import MAX_TURNS
from halfmoon_conductor.errors import InvalidRequest, UnknownItem
from halfmoon_conductor.stored_responses.response_store import MAX_STORED_BYTES, StoredResponse

#: Is in the text of each input that has references, unless it is escaped.
MARK = b"item_reference"
#: Stored responses that one input may take items from: each is read from the store.
_MAX_RESPONSES = 16
_MAX_ID_CHARACTERS = 128
#: An input of no more commas has no more items: they are looked at on the event loop.
MAX_COMMAS = 256 * 1024
#: An item's kind, its response's name, and its place if it is not the first.
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9A-Za-z-]+)(?:_\d{1,9})?")


class _Item(msgspec.Struct):
    """The fields of an item that decide whether it is a reference."""

    type: object = None
    id: object = None


class _Stored(msgspec.Struct):
    """The id of a stored item; items of clients may have none."""

    id: object = None


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response that has an item; None: no response of ours has it."""
    found = _ITEM_ID.fullmatch(item_id) if len(item_id) <= _MAX_ID_CHARACTERS else None
    return None if found is None else f"resp_{found[1]}"


async def replace_references(
    items: bytes, find: Callable[[str], Awaitable[StoredResponse | None]]
) -> bytes | None:
    """Return an input's items with each reference replaced; None: none is.

    The last response that is referred to has the conversation before it. So most inputs need one.

    Args:
        items: JSON without the brackets of the list.
        find: returns a stored response by its id.

    Raises:
        InvalidRequest: an item is referred to twice, or they are too many or too large.
        UnknownItem: a reference is to nothing that is stored.
        msgspec.MsgspecError: the items are not JSON.
    """
    if items.count(b",") > MAX_COMMAS:
        return None  # a reference is refused by the body's own check, and texts are as good as ever
    parts = msgspec.json.decode(b"[" + items + b"]", type=list[msgspec.Raw])
    if len(parts) > MAX_TURNS:
        return None  # the body's own check says so
    names = ((place, _reference(part)) for place, part in enumerate(parts))
    places = {place: name for place, name in names if name is not None}
    if not places:
        return None
    if len(set(places.values())) < len(places):
        raise InvalidRequest("input refers to an item twice.", param="input")
    known: dict[str, msgspec.Raw] = {}
    read = set[str]()
    n_bytes = 0
    for place, name in reversed(places.items()):
        if name not in known:
            response_id = response_id_of(name)
            if response_id is None or response_id in read:
                raise _unknown(place, name)
            if len(read) == _MAX_RESPONSES:
                raise InvalidRequest(
                    f"input refers to items of more than {_MAX_RESPONSES} conversations: send "
                    "the items themselves.",
                    param="input",
                )
            read.add(response_id)
            found = await find(response_id)
            known |= {} if found is None else _by_id(found.items)
            if name not in known:
                raise _unknown(place, name)
        n_bytes += len(bytes(known[name]))
        if n_bytes > MAX_STORED_BYTES:
            raise InvalidRequest(
                f"input refers to items of over {MAX_STORED_BYTES} bytes together.", param="input"
            )
        parts[place] = known[name]
    return msgspec.json.encode(parts)[1:-1]


def _reference(item: msgspec.Raw) -> str | None:
    """Return the id that an item refers to; None: it is an item itself."""
    try:
        fields = msgspec.json.decode(item, type=_Item)
    except msgspec.ValidationError:
        return None  # no object: the body's own check says so
    is_one = fields.type == "item_reference" and isinstance(fields.id, str)
    return fields.id if is_one else None  # type: ignore[return-value]


def _by_id(items: msgspec.Raw) -> dict[str, msgspec.Raw]:
    found: dict[str, msgspec.Raw] = {}
    for item in msgspec.json.decode(items, type=list[msgspec.Raw]):
        name = msgspec.json.decode(item, type=_Stored).id
        if isinstance(name, str):
            found[name] = item
    return found


def _unknown(place: int, name: str) -> UnknownItem:
    return UnknownItem(
        f"input[{place}] refers to {name[:_MAX_ID_CHARACTERS]!r}, which is not stored: responses "
        "are kept for a time unless store is false; send the item itself.",
        param="input",
    )
