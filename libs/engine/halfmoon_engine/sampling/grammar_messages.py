"""Define the messages between a worker and the child process of a grammar."""

from typing import Literal

import msgspec


class GrammarChildConfig(msgspec.Struct, frozen=True):
    """Configuration of the template process."""

    #: Text of the model's ``tokenizer.json``, without truncation and padding.
    tokenizer: str
    #: Number of logits in a row.
    n_vocab: int
    #: Tokens that end an answer; allowed once the grammar is fulfilled.
    eos_token_ids: tuple[int, ...]


class AdvanceGrammar(msgspec.Struct, frozen=True, array_like=True):
    """Request to advance an answer by these tokens, and to return the next mask."""

    #: The same text in every request to one process.
    grammar: str
    #: Identifies the answer at this process.
    key: int
    #: Tokens that this process has followed already; 0 begins the answer anew.
    n_before: int
    tokens: tuple[int, ...]


class GrammarAdvanced(msgspec.Struct, frozen=True, array_like=True):
    """Answer to `AdvanceGrammar`."""

    #: "left": the answer is outside the grammar; "unknown": earlier tokens are missing here.
    outcome: Literal["mask", "invalid", "left", "unknown"]
    #: One bit for each token, the lowest first.
    mask: bytes = b""
    #: Reason when there is no mask.
    reason: str = ""
