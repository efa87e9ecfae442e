"""Prompts out of parts: token ids or words, a function of the part's key and a salt. No I/O.

A part's tokens are made once and kept as JSON, since traces repeat their blocks: what is left
to do for a request is to join bytes.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from halfmoon_cli.bench.load.load_plan import PlannedRequest, PromptPart

ApiKind = Literal["completions", "chat"]

#: Asked of a tokenizer: its ids are those of ordinary text, none of them special.
SAMPLE_TEXT = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye job word business issue side kind head house service friend father power hour game line"
    " end member law car city community name president team minute idea kid body information back"
    " parent face level office door health person art war history party result change morning"
    " reason research girl guy moment air teacher force education"
)
#: Short words that most vocabularies have whole; what a text prompt is made of.
WORDS = tuple(SAMPLE_TEXT.split())

#: Bytes of parts that are kept for the next request with them.
_KEPT_BYTES = 64 << 20


class PromptVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What prompts are written in."""

    #: Token ids to draw from; None: words.
    tokens: tuple[int, ...] | None = None
    #: Tokens that a word makes, on average.
    tokens_per_word: float = 1.0


class PromptWriter:
    """Writes prompts.

    Args:
        alphabet: what to draw from.
        salt: other salts give other prompts; the same one gives the same.
    """

    def __init__(self, alphabet: PromptVocabulary, salt: str) -> None:
        self._alphabet = alphabet
        self._salt = salt
        letters: Sequence[object] = WORDS if alphabet.tokens is None else alphabet.tokens
        self._letters = [str(letter).encode() for letter in letters]
        self._join = b" " if alphabet.tokens is None else b","
        #: Parts as JSON without what encloses a whole prompt; the one used last stands last.
        self._parts: OrderedDict[PromptPart, bytes] = OrderedDict()
        self._n_kept = 0

    def prompt(self, parts: Sequence[PromptPart]) -> msgspec.Raw:
        """A prompt's JSON: a list of ids, or a text."""
        inner = self._join.join([self._part(part) for part in parts])
        return msgspec.Raw(b'"%b"' % inner if self._alphabet.tokens is None else b"[%b]" % inner)

    def _part(self, part: PromptPart) -> bytes:
        if (made := self._parts.get(part)) is not None:
            self._parts.move_to_end(part)
            return made
        n = part.n_tokens
        if self._alphabet.tokens is None:
            n = max(1, round(n / self._alphabet.tokens_per_word))
        dice = random.Random(f"{self._salt} {part.key}")
        made = self._join.join(dice.choices(self._letters, k=n))
        self._parts[part] = made
        self._n_kept += len(made)
        while self._n_kept > _KEPT_BYTES and len(self._parts) > 1:
            self._n_kept -= len(self._parts.popitem(last=False)[1])
        return made


class RequestFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are put."""

    model: str
    api: ApiKind = "completions"
    #: Answers are as long as the plan says, whatever the model would like.
    ignore_eos: bool = True
    temperature: float | None = 0.0

    @property
    def path(self) -> str:
        """Behind the endpoint's base URL."""
        return "/completions" if self.api == "completions" else "/chat/completions"


def request_body(form: RequestFormat, writer: PromptWriter, planned: PlannedRequest) -> bytes:
    """The JSON of one request."""
    prompt = writer.prompt(planned.parts)
    body: dict[str, Any] = {"model": form.model}
    if form.api == "completions":
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    body["max_tokens"] = planned.n_output
    if form.temperature is not None:
        body["temperature"] = form.temperature
    if form.ignore_eos:
        body["ignore_eos"] = True
    if planned.priority:
        # In requests the lowest goes first.
        body["priority"] = -planned.priority
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)
