"""Write the output items of a response, and each item's events."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from halfmoon_conductor.api.answer_stream import AnswerPart, Thought
from halfmoon_conductor.api.responses.responses_objects import (
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseStatus,
)
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_ids import tool_call_name

#: The part of an item that text goes into; its name is also that of the part's events.
_PartType = Literal["output_text", "reasoning_text"]


class OutputItems:
    """Collect the output items one after the other, and write each item's events.

    Args:
        name: from which the answer's ids are made.
        event: writes one event.
    """

    def __init__(self, name: str, event: Callable[..., bytes]) -> None:
        self._name = name
        self._event = event
        #: Finished items.
        self.done: list[OutputItem] = []
        #: The part of the open item; None: no item is open.
        self._open: _PartType | None = None
        self._texts: list[str] = []

    def add(self, part: AnswerPart) -> Iterator[bytes]:
        """Add text or a thought to its open item, or a call, which is an item of its own."""
        if isinstance(part, ParsedCall):
            yield from self._close("completed")
            yield from self._call(part)
        elif isinstance(part, Thought):
            yield from self._add_text("reasoning_text", part.text)
        else:
            yield from self._add_text("output_text", part)

    def end(self, status: ResponseStatus) -> Iterator[bytes]:
        """Close the open item; an empty answer has an empty message."""
        if not self.done and self._open is None:
            yield from self._add_text("output_text", "")
        yield from self._close(status)

    def _add_text(self, part: _PartType, text: str) -> Iterator[bytes]:
        if self._open != part:
            yield from self._close("completed")
            self._open = part
            item = self._item("in_progress", None)
            yield self._event(
                "response.output_item.added", output_index=len(self.done), item=item.model_dump()
            )
            empty = _part(part, "").model_dump()
            yield self._event("response.content_part.added", **self._location, part=empty)
        if text:
            self._texts.append(text)
            yield self._event(
                f"response.{part}.delta", **self._location, delta=text, **_LOGPROBS[part]
            )

    def _call(self, call: ParsedCall) -> Iterator[bytes]:
        item = FunctionCall(
            type="function_call",
            id=self._id_of("fc"),
            call_id=f"call_{tool_call_name(self._name, 0, len(self.done))}",
            name=call.name,
            arguments=call.arguments,
            status="completed" if call.whole else "incomplete",
        )
        location = {"output_index": len(self.done)}
        started = item.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._event("response.output_item.added", **location, item=started.model_dump())
        call_location = {**location, "item_id": item.id}
        yield self._event(
            "response.function_call_arguments.delta", **call_location, delta=item.arguments
        )
        yield self._event(
            "response.function_call_arguments.done",
            **call_location,
            name=item.name,
            arguments=item.arguments,
        )
        yield self._event("response.output_item.done", **location, item=item.model_dump())
        self.done.append(item)

    def _close(self, status: ResponseStatus) -> Iterator[bytes]:
        if (part := self._open) is None:
            return
        text = "".join(self._texts)
        item = self._item(status, text)
        yield self._event(f"response.{part}.done", **self._location, text=text, **_LOGPROBS[part])
        whole = _part(part, text).model_dump()
        yield self._event("response.content_part.done", **self._location, part=whole)
        yield self._event(
            "response.output_item.done", output_index=len(self.done), item=item.model_dump()
        )
        self._open, self._texts = None, []
        self.done.append(item)

    @property
    def _location(self) -> dict[str, Any]:
        """The location of the open item's text."""
        return {"item_id": self._item_id, "output_index": len(self.done), "content_index": 0}

    @property
    def _item_id(self) -> str:
        return self._id_of("rs" if self._open == "reasoning_text" else "msg")

    def _id_of(self, kind: str) -> str:
        """Return the id of the next item, which leads to its response (`item_references`)."""
        return f"{kind}_{self._name}_{len(self.done)}" if self.done else f"{kind}_{self._name}"

    def _item(self, status: ResponseStatus, text: str | None) -> OutputItem:
        """Return the open item with its text; None: without any content yet."""
        if self._open == "reasoning_text":
            return ReasoningItem(
                type="reasoning",
                id=self._item_id,
                status=status,
                summary=[],
                content=[] if text is None else [ReasoningText(type="reasoning_text", text=text)],
                encrypted_content=None,
            )
        return OutputMessage(
            type="message",
            id=self._item_id,
            status=status,
            role="assistant",
            content=[] if text is None else [_output_text(text)],
        )


#: Further fields of the events of a part.
_LOGPROBS: dict[_PartType, dict[str, Any]] = {"output_text": {"logprobs": []}, "reasoning_text": {}}


def _part(part: _PartType, text: str) -> OutputText | ReasoningText:
    if part == "reasoning_text":
        return ReasoningText(type="reasoning_text", text=text)
    return _output_text(text)


def _output_text(text: str) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])
