"""Define the request that the conductor generates an answer for."""

import msgspec

from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallRules


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, ready for the gateway, and what the front itself must do with its tokens."""

    #: The client's name of the answer, ``cmpl-…`` or ``chatcmpl-…``.
    id: str
    #: One for each choice: the first prompt's `n_per_prompt`, then the next one's.
    generations: tuple[GenerationRequest, ...]
    n_per_prompt: int = 1
    stop_strings: tuple[str, ...] = ()
    #: Text that each prompt's choices begin with; empty when there is to be none.
    echoes: tuple[str, ...] = ()
    #: False when a client wants scores of its prompt and no new token: one is made in vain.
    shows_new: bool = True
    #: The calls of tools that answers may have; None: text is text.
    calling: ToolCallRules | None = None

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(each.prompt_token_ids) for each in self.generations[:: self.n_per_prompt])

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """The prompt of a choice."""
        return self.generations[index].prompt_token_ids

    def echo_of(self, index: int) -> str:
        """What a choice begins with."""
        return self.echoes[index // self.n_per_prompt] if self.echoes else ""
