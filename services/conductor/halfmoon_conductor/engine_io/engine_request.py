"""Define the request that the conductor generates an answer for."""

from typing import Literal

import msgspec

from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallRules

#: "begun": the prompt ends in a thought. "possible": an answer may begin with one.
ReasoningStart = Literal["begun", "possible"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the gateway takes it, with what the conductor does to its tokens."""

    #: The id of the answer, ``cmpl-…`` or ``chatcmpl-…``.
    id: str
    #: One for each choice: the first prompt's `n_per_prompt`, then the next prompt's.
    generations: tuple[GenerationRequest, ...]
    n_per_prompt: int = 1
    #: `ModelCard.fingerprint` of the model that answers.
    fingerprint: str = ""
    stop_strings: tuple[str, ...] = ()
    #: Text of each prompt, which its choices begin with; empty without `echo`.
    echoed_prompts: tuple[str, ...] = ()
    #: False when the client wants scores of its prompt and no new token; one is generated anyway.
    returns_new_tokens: bool = True
    #: The tool calls that answers may have; None: all text is text.
    tool_call_rules: ToolCallRules | None = None
    #: Whether answers begin with thoughts; None: all text is the answer.
    reasoning_start: ReasoningStart | None = None

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(each.prompt_token_ids) for each in self.generations[:: self.n_per_prompt])

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """Return the prompt of a choice."""
        return self.generations[index].prompt_token_ids

    def echo_of(self, index: int) -> str:
        """Return the text that a choice begins with."""
        return self.echoed_prompts[index // self.n_per_prompt] if self.echoed_prompts else ""
