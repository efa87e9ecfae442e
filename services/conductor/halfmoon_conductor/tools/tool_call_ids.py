"""Name the tool calls of an answer: an answer that is computed again has the same names."""

from hashlib import blake2b


def tool_call_name(answer_id: str, choice: int, number: int) -> str:
    """Return 32 hex digits for one call; other answers have others.

    Args:
        answer_id: unique to the answer.
        choice: index of the choice.
        number: of the call or the item within the choice.
    """
    return blake2b(f"{answer_id}/{choice}/{number}".encode(), digest_size=16).hexdigest()
