"""Go on from stored responses and their items, and store new ones.

OpenAI's `previous_response_id` and `item_reference`.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec
from pydantic import TypeAdapter

from halfmoon_conductor.api.responses.responses_objects import OutputItem, ResponseObject
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.errors import (
    InvalidRequest,
    NotSupported,
    PreviousResponseNotFound,
    UnknownResponse,
)
from halfmoon_conductor.inputs.body_parsing import count_keys, find_duplicate_key
from halfmoon_conductor.inputs.preparation_messages import ExpandedBody
from halfmoon_conductor.routes.item_references import MARK, replace_references
from halfmoon_conductor.stored_responses.response_store import (
    MAX_STORED_BYTES,
    ResponseStore,
    StoredResponse,
)

_OUTPUT: TypeAdapter[Sequence[OutputItem]] = TypeAdapter(list[OutputItem])
_FIELD = "previous_response_id"
_MAX_ID_CHARACTERS = 128
#: Most bytes that are kept of a body: these, and so many for each token of its prompt.
_FREE_BYTES, _BYTES_PER_TOKEN = 64 * 1024, 32


class _Input(msgspec.Struct):
    """A body's input, as it is written there."""

    input: msgspec.Raw


class ResponseConversations:
    """Read and write the responses of a store.

    Args:
        store: keeps responses; None: nothing is stored, and each request has all of its input.
    """

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def expand(self, content: bytes, tenant: str) -> ExpandedBody:
        """Return a body whose input has in full what it refers to in stored responses.

        That is the conversation of the response that it goes on from, and items. A body that
        refers to nothing, or is not JSON of the right form, is returned as it is.

        Raises:
            InvalidRequest: it refers to too much, or has a key twice.
            NotSupported: nothing is stored here.
            PreviousResponseNotFound: the response is not stored.
            ServiceUnavailable: the store fails.
            UnknownItem: an item is not stored.
        """
        is_escaped = b"\\u" in content
        names_response = is_escaped or _FIELD.encode() in content
        names_items = is_escaped or MARK in content
        if not (names_response or names_items):
            return ExpandedBody(content, False)
        try:
            fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
            name = msgspec.json.decode(fields.get(_FIELD, b"null"), type=str | None)
            items = given = _items_of(fields["input"])
            if items is not None and names_items:
                items = await replace_references(items, partial(self._find_item, tenant)) or items
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError):
            return ExpandedBody(content, False)  # the body's own check says what is wrong
        if items is None or (name is None and items is given):
            return ExpandedBody(content, False)
        n_known = len(fields) + sum(count_keys(bytes(raw)) for raw in fields.values())
        if count_keys(content) != n_known:
            await asyncio.to_thread(find_duplicate_key, content)
        if name is not None:
            items = await self._conversation_before(tenant, name) + b"," + items
        fields["input"] = msgspec.Raw(b"[" + items + b"]")
        return ExpandedBody(msgspec.json.encode(fields), True)

    async def _conversation_before(self, tenant: str, name: str) -> bytes:
        found = await self._find(self._storing(_FIELD), tenant, name)
        if found is None:
            raise PreviousResponseNotFound(
                f"{_FIELD} names {name[:_MAX_ID_CHARACTERS]!r}, which is not stored: responses are "
                f"kept for {self._storing(_FIELD).ttl_s:g} s unless store is false; send the whole "
                "conversation.",
                param=_FIELD,
            )
        return bytes(found.items)[1:-1]

    async def _find_item(self, tenant: str, response_id: str) -> StoredResponse | None:
        return await self._find(self._storing("input"), tenant, response_id)

    def _storing(self, field: str) -> ResponseStore:
        if self._store is None:
            what = "item_reference" if field == "input" else field
            raise NotSupported(
                f"{what} is not supported, as this server stores no responses: send the whole "
                "conversation.",
                param=field,
            )
        return self._store

    def content_to_store(
        self, body: ResponsesRequest, expanded: ExpandedBody | None, n_prompt: int
    ) -> bytes:
        """Return the bytes to keep until the response is complete; empty: it is not stored.

        They are bounded by the prompt's tokens, and so is what all requests under way keep.

        Args:
            body: the request, as it was understood.
            expanded: the same, as `expand` returned it.
            n_prompt: tokens of its prompt.

        Raises:
            InvalidRequest: it names a response in a form that only a lenient parser reads.
        """
        if body.previous_response_id is not None and not (expanded and expanded.is_expanded):
            raise InvalidRequest(
                f"{_FIELD} was not found in the body's text: send strict JSON in UTF-8.",
                param=_FIELD,
            )
        most = min(MAX_STORED_BYTES, _FREE_BYTES + _BYTES_PER_TOKEN * n_prompt)
        if self._store is None or expanded is None or body.store is False:
            return b""
        return expanded.content if len(expanded.content) <= most else b""

    async def save(self, tenant: str, content: bytes, response: ResponseObject) -> bool:
        """Store a response with its conversation; return whether it is stored.

        Args:
            tenant: whose it is.
            content: what `content_to_store` returned.
            response: is to be stored.
        """
        if self._store is None or not content:
            return False
        try:
            items = _items_of(msgspec.json.decode(content, type=_Input).input)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False  # what a more lenient parser took
        if items is None:
            return False
        output = _OUTPUT.dump_json(list(response.output))
        stored = StoredResponse(
            msgspec.Raw(response.model_dump_json().encode()),
            msgspec.Raw(b"[" + items + b"," + output[1:]),
        )
        return await self._store.save(tenant, response.id, stored)

    @property
    def stores(self) -> bool:
        """True if responses are stored here."""
        return self._store is not None

    async def get(self, tenant: str, response_id: str) -> bytes:
        """Return a stored response as JSON.

        Raises:
            UnknownResponse: it is not stored.
            ServiceUnavailable: the store fails.
        """
        if self._store is not None:
            found = await self._find(self._store, tenant, response_id)
            if found is not None:
                return bytes(found.response)
        raise _unknown(response_id)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Remove a stored response.

        Raises:
            UnknownResponse: it is not stored.
            ServiceUnavailable: the store fails.
        """
        if (
            self._store is None
            or not _is_id(response_id)
            or not await self._store.delete(tenant, response_id)
        ):
            raise _unknown(response_id)

    async def _find(
        self, store: ResponseStore, tenant: str, response_id: str
    ) -> StoredResponse | None:
        return await store.find(tenant, response_id) if _is_id(response_id) else None


def _items_of(given: bytes) -> bytes | None:
    """Return an input's items without brackets; None: it is neither a text nor a list of some."""
    given = bytes(given).strip()
    if given[:1] == b'"':
        return b'{"role":"user","content":' + given + b"}"
    if given[:1] == b"[":
        return given[1:-1].strip() or None
    return None


def _is_id(text: str) -> bool:
    name = text.removeprefix("resp_")
    return (
        name != text
        and len(text) <= _MAX_ID_CHARACTERS
        and name.isascii()
        and name.replace("-", "").isalnum()
    )


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(
        f"{response_id[:_MAX_ID_CHARACTERS]!r} is no stored response: it was never stored here, "
        "was removed, or its time is over.",
        param="response_id",
    )
