"""Find out in which forms a chat template reads messages, by rendering short conversations.

Clients send messages in OpenAI's forms. Most templates read these as they are; some know only one
of several forms, and refuse the others or write Python's words for them.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

TemplateMessage = Mapping[str, Any]
#: Renders messages that call the tools given, or raises.
Render = Callable[[Sequence[TemplateMessage], Sequence[Mapping[str, Any]]], str]
#: What a message that only calls has in place of a content.
NoContent = Literal["left out", "none", "empty"]

#: Characters of a call's id in templates that allow no other length.
_SHORT_ID = 9
_WORDS = ("halfmoon", "waxing")
_TEXT = " ".join(_WORDS)
_ROLES = ("system", "user", "assistant", "tool")
_NO_CONTENTS: tuple[NoContent, ...] = ("left out", "none", "empty")
_NAME = "tide_table"
_ARGUMENTS = {"harbour": "Husum"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Tides of a day.",
        "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}},
    },
}
_QUESTION = {"role": "user", "content": "When?"}


@dataclass(frozen=True)
class MessageForms:
    """The forms of messages that a template reads."""

    #: Roles whose contents may be lists of parts, and those whose contents must be.
    part_roles: frozenset[str] = frozenset()
    only_part_roles: frozenset[str] = frozenset()
    #: Whether a call's arguments must be the text of their JSON.
    argument_texts: bool = False
    #: Whether calls must have ids of nine letters and digits.
    short_ids: bool = False
    no_content: NoContent = "left out"

    def of(self, message: TemplateMessage) -> dict[str, Any]:
        """Return a message in the forms that the template reads.

        Args:
            message: contents are texts or lists of text parts; arguments of calls are objects,
                with their text beside them as `arguments_text`.
        """
        formed = {name: value for name, value in message.items() if value is not None}
        role = str(message.get("role"))
        content = formed.get("content")
        if isinstance(content, list) and role not in self.part_roles:
            content = formed["content"] = "\n".join(part["text"] for part in content)
        if isinstance(content, str) and role in self.only_part_roles:
            formed["content"] = [_part(content)]
        if "tool_calls" in formed:
            formed["tool_calls"] = [self._call(call) for call in formed["tool_calls"]]
            if content is None and self.no_content != "left out":
                formed["content"] = None if self.no_content == "none" else ""
        if "tool_call_id" in formed:
            formed["tool_call_id"] = self._id(formed["tool_call_id"])
        if (thoughts := formed.get("reasoning_content")) is not None:
            # Another name of the same, which some templates read.
            formed = {"thinking": thoughts, **formed}
        return formed

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        text = function.pop("arguments_text", None)
        if self.argument_texts:
            function["arguments"] = json.dumps(function["arguments"]) if text is None else text
        return {**call, "id": self._id(call["id"]), "function": function}

    def _id(self, call_id: str) -> str:
        if not self.short_ids or (len(call_id) == _SHORT_ID and call_id.isalnum()):
            return call_id
        return blake2b(call_id.encode(), digest_size=_SHORT_ID).hexdigest()[:_SHORT_ID]


def find_message_forms(render: Render) -> MessageForms:
    """Return the forms that a template reads; where it reads none, those of OpenAI's."""
    calls = _find_call_forms(render)

    def roles(content: Any) -> frozenset[str]:
        """Return the roles whose messages may have this content."""
        return frozenset(r for r in _ROLES if _reads(render, _conversation(r, content, calls)))

    return MessageForms(
        part_roles=roles(list(map(_part, _WORDS))),
        only_part_roles=roles([_part(_TEXT)]) - roles(_TEXT),
        argument_texts=calls.argument_texts,
        short_ids=calls.short_ids,
        no_content=calls.no_content,
    )


def _find_call_forms(render: Render) -> MessageForms:
    """Return the first forms of calls that a template reads; the first ones if it reads none."""
    candidates = [
        MessageForms(argument_texts=texts, short_ids=short, no_content=content)
        for short in (False, True)
        for texts in (False, True)
        for content in _NO_CONTENTS
    ]
    return next((each for each in candidates if _shows_call(render, each)), candidates[0])


def _shows_call(render: Render, forms: MessageForms) -> bool:
    text = _rendered(render, _calling_conversation("Low", forms))
    if text is None or _NAME not in text.partition(_QUESTION["content"])[2]:
        return False
    return repr(_ARGUMENTS) not in text


def _reads(render: Render, messages: Iterable[TemplateMessage]) -> bool:
    """Return whether the words of a message are in the text, and nothing of their parts' form."""
    text = _rendered(render, messages)
    if text is None:
        return False
    first, last = text.find(_WORDS[0]), text.rfind(_WORDS[1])
    return 0 <= first < last and "type" not in text[first:last]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _rendered(render: Render, messages: Iterable[TemplateMessage]) -> str | None:
    try:
        return render(list(messages), [_TOOL])
    except Exception:  # the template is a foreign program: it does not read this
        return None


def _conversation(role: str, content: Any, calls: MessageForms) -> list[TemplateMessage]:
    """Return a conversation in which one message of a role has a content."""
    message = {"role": role, "content": content}
    match role:
        case "system":
            return [message, _QUESTION]
        case "assistant":
            return [_QUESTION, message, _QUESTION]
        case "tool":
            return _calling_conversation(content, calls)
    return [message]


def _calling_conversation(result: Any, forms: MessageForms) -> list[TemplateMessage]:
    """Return a conversation with a call and its result."""
    call_id = f"call_{'0' * 32}"
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": _NAME, "arguments": _ARGUMENTS},
    }
    calling = forms.of({"role": "assistant", "tool_calls": [call]})
    answer = {"role": "tool", "tool_call_id": forms.of({"tool_call_id": call_id})["tool_call_id"]}
    return [_QUESTION, calling, {**answer, "name": _NAME, "content": result}]
