"""Name the layers of a prompt that one prefill worker computes."""

from dataclasses import dataclass

from halfmoon_protocol.stage_layers import stage_layers


@dataclass(frozen=True, slots=True)
class PromptShare:
    """The layers of a prompt that one worker computes: all, or those of one pipeline stage.

    Stage 0 answers for all of them.
    """

    stage: int = 0
    n_stages: int = 1

    @property
    def is_whole(self) -> bool:
        """Return whether this worker computes all layers."""
        return self.n_stages == 1

    @property
    def is_first(self) -> bool:
        """Return whether this worker begins the prompt, and answers its conductor."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Return whether this worker chooses the first token."""
        return self.stage + 1 == self.n_stages

    def layers(self, n_layers: int) -> range:
        """Return the layers of this stage."""
        return stage_layers(n_layers, self.n_stages, self.stage)

    def n_pages(self, n_blocks: int) -> int:
        """Return how many pages of all layers hold this share of so many blocks.

        For workers whose pages have the layers of one stage alone.
        """
        return -(-n_blocks // self.n_stages)


#: The share of a worker that computes a prompt by itself.
WHOLE_PROMPT = PromptShare()
