"""Hold a story's text: token ids, and which of them the model shall learn to say.

Texts are given in pieces that are encoded one by one; the tokenizer splits wherever two of them
meet, so the pieces' tokens are those of the whole text (`tests/engine/test_demo_model.py`).
"""

from collections.abc import Callable

from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS, TURN_END, TURN_START

Encode = Callable[[str], list[int]]
#: Target of a position that is not learnt.
NO_TARGET = -100
#: What stands before a user's text, and between it and the answer.
TO_USER = f"{TURN_START}user\n"
TO_ANSWER = f"{TURN_END}\n{TURN_START}assistant\n"
_EOS = EOS_TOKEN_IDS[-1]


class Story:
    """Token ids, with targets at positions that precede an answer's token."""

    def __init__(self, n_tokens: int, encode: Encode) -> None:
        self.n_tokens = n_tokens
        self.ids: list[int] = []
        self.targets: list[int] = []
        self._encode = encode

    @property
    def is_full(self) -> bool:
        """True once the story has its tokens; the last piece may exceed them."""
        return len(self.ids) >= self.n_tokens

    def add(self, text: str) -> None:
        """Add text that is only read."""
        ids = self._encode(text)
        self.ids += ids
        self.targets += [NO_TARGET] * len(ids)

    def answer(self, text: str) -> None:
        """Add text that the model shall say, and the end token as its last target."""
        self.begin_answer(text)
        self.targets[-1] = _EOS

    def begin_answer(self, text: str) -> None:
        """Add text that the model shall say, and that does not end its answer."""
        for token in self._encode(text):
            self.targets[-1] = token
            self.ids.append(token)
            self.targets.append(NO_TARGET)

    def cut(self) -> tuple[list[int], list[int]]:
        """Return exactly `n_tokens` ids, and as many targets."""
        return self.ids[: self.n_tokens], self.targets[: self.n_tokens]
