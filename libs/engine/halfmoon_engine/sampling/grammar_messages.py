"""What a worker and the child process of a grammar say to each other."""

from typing import Literal

import msgspec


class GrammarChildConfig(msgspec.Struct, frozen=True):
    """What the template is made of."""

    #: Text of the model's ``tokenizer.json``, without truncation and padding.
    tokenizer: str
    #: Logits of a row.
    n_vocab: int
    #: Tokens that end an answer; allowed once the grammar is fulfilled.
    eos_token_ids: tuple[int, ...]


class AdvanceGrammar(msgspec.Struct, frozen=True, array_like=True):
    """AdvanceGrammar an answer by these tokens, and say which may come next."""

    #: The same text in every request to one process.
    grammar: str
    #: The answer's name at this process.
    key: int
    #: Tokens that this process has followed before; 0 begins the answer anew.
    n_before: int
    tokens: tuple[int, ...]


class GrammarAdvanced(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `AdvanceGrammar`."""

    #: "left": the answer is none of the grammar; "unknown": tokens before these are missing here.
    outcome: Literal["mask", "invalid", "left", "unknown"]
    #: One bit for each token, the lowest first.
    mask: bytes = b""
    #: Why it was not followed.
    reason: str = ""
