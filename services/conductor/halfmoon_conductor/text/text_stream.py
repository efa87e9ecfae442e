"""Turn an answer's tokens into text as they arrive: detokenize, and cut at a stop string."""

from collections.abc import Sequence

from halfmoon_conductor.text.detokenizer import Detokenizer
from halfmoon_conductor.text.stop_strings import StopStringMatcher


class TextStream:
    """Turn tokens into pieces of text that never have to be retracted.

    Args:
        detokenizer: a new one of the model's tokenizer.
        stops: stop strings, none empty.
        min_tokens: number of first tokens whose text is not searched for stop strings.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stops)
        self._n_unmatched = min_tokens

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the text; no more text is returned."""
        return self._matcher.matched is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the text."""
        return self._matcher.matched

    def push(self, token: int) -> str:
        """Return the text that is certain with this token; often empty."""
        piece = self._detokenizer.push(token)
        if self._n_unmatched > 0:
            self._n_unmatched -= 1
            return piece
        return self._matcher.feed(piece)

    def finish(self) -> str:
        """Return all text held back, unless it completes a stop string."""
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()
