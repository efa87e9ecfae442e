"""Define the piece of an answer that one token adds."""

import msgspec

from halfmoon_conductor.engine_io.gateway_interface import Finish
from halfmoon_protocol.logprobs import TokenScore


class OutputPiece(msgspec.Struct, frozen=True):
    """What one token adds to the answer; often no text at all."""

    text: str
    token: int
    finish: Finish = ""
    #: Which of the request's choices this belongs to.
    index: int = 0
    score: TokenScore | None = None
    #: The stop string that ended the text.
    stop_string: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the text ends here, and not because the model ended it."""
        return self.finish == "length" or self.stop_string is not None
