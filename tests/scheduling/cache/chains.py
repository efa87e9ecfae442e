"""Blocks that are named by the beginnings of their prompts."""

from halfmoon_protocol.ids import BlockHash


def chain(name: str) -> list[BlockHash]:
    """Return blocks of a prompt: the i-th is named by the prompt's first i letters."""
    return [BlockHash(name[:i].encode()) for i in range(1, len(name) + 1)]
