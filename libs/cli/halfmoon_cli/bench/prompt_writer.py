"""Write prompts as token ids: a function of each part's key and a salt. No I/O.

The tokens of a part are drawn once and kept as JSON, since traces repeat their blocks.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from halfmoon_cli.bench.load_plan import PlannedRequest, PromptPart

#: Bytes of parts that are kept for later requests.
_KEPT_BYTES = 64 << 20


class PromptWriter:
    """Writes prompts.

    Args:
        vocabulary: token ids to draw from.
        salt: equal salts give equal prompts, different ones different prompts.
    """

    def __init__(self, vocabulary: Sequence[int], salt: str) -> None:
        self._ids = [str(token).encode() for token in vocabulary]
        self._salt = salt
        #: Parts as JSON without brackets, in order of their last use.
        self._parts: OrderedDict[PromptPart, bytes] = OrderedDict()
        self._n_kept = 0

    def prompt(self, parts: Sequence[PromptPart]) -> msgspec.Raw:
        """Return the JSON list of a prompt's token ids."""
        return msgspec.Raw(b"[%b]" % b",".join([self._part(part) for part in parts]))

    def _part(self, part: PromptPart) -> bytes:
        if (known := self._parts.get(part)) is not None:
            self._parts.move_to_end(part)
            return known
        dice = random.Random(f"{self._salt} {part.key}")
        ids = b",".join(dice.choices(self._ids, k=part.n_tokens))
        self._parts[part] = ids
        self._n_kept += len(ids)
        while self._n_kept > _KEPT_BYTES and len(self._parts) > 1:
            self._n_kept -= len(self._parts.popitem(last=False)[1])
        return ids


class RequestFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all requests of a run share."""

    model: str
    #: Whether answers get as long as planned, past the model's end of text.
    ignore_eos: bool = True


def request_body(form: RequestFormat, writer: PromptWriter, planned: PlannedRequest) -> bytes:
    """Return the JSON of one request to /v1/completions."""
    body: dict[str, Any] = {
        "model": form.model,
        "prompt": writer.prompt(planned.parts),
        "max_tokens": planned.n_output,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if form.ignore_eos:
        body["ignore_eos"] = True
    if planned.priority:
        # In a trace the largest goes first, in requests the lowest.
        body["priority"] = -planned.priority
    return msgspec.json.encode(body)
