"""The text of one answer as its tokens arrive: detokenised, and cut at a stop string."""

from collections.abc import Sequence

from halfmoon_conductor.text.detokenizer import Detokenizer
from halfmoon_conductor.text.stop_strings import StopStringMatcher


class TextStream:
    """Tokens in, pieces of text out that will never have to be taken back.

    Args:
        detokenizer: fresh, of the model's tokenizer.
        stops: none of them empty.
        min_tokens: stop strings are not looked for in the text of so many first tokens.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stops)
        self._n_unmatched = min_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text: nothing comes out any more."""
        return self._matcher.matched is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the text."""
        return self._matcher.matched

    def push(self, token: int) -> str:
        """The text that is certain with this token; often empty."""
        piece = self._detokenizer.push(token)
        if self._n_unmatched > 0:
            self._n_unmatched -= 1
            return piece
        return self._matcher.feed(piece)

    def finish(self) -> str:
        """All that was held back, unless it completes a stop string."""
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()
