"""Define the piece of an answer that one token adds."""

import msgspec

from halfmoon_conductor.engine_io.gateway_interface import Finish
from halfmoon_protocol.logprobs import TokenScore


class OutputPiece(msgspec.Struct, frozen=True):
    """The piece of an answer that one token adds; its text is often empty."""

    text: str
    token: int
    finish: Finish = ""
    #: Index of the choice that this piece belongs to.
    index: int = 0
    score: TokenScore | None = None
    #: The stop string that ended the text.
    stop_string: str | None = None

    @property
    def is_cut(self) -> bool:
        """True if a limit or a stop string ended the text, and not the model."""
        return self.finish == "length" or self.stop_string is not None
