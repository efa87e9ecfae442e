"""Spread the positions of short stories over a long context, while training.

A story of a thousand tokens costs a fraction of one of eight thousand. Gaps between its
positions show the model distances that only the long one would have. The idea is that of PoSE
(Zhu et al., "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise
Training", 2023).
"""

import random
from typing import Any

import torch

#: Stories whose positions have gaps, and the last position that gaps lead to.
_SHARE = 0.3
_END = 9216
_MAX_GAPS = 3
#: In shorter stories, gaps would mostly tear questions and answers apart.
_SHORTEST = 192


class WidePositions:
    """Replace the positions that a model's rotary embedding reads, until drawn anew.

    The model itself still sees positions without gaps: it takes gaps for borders between texts.
    """

    def __init__(self, model: Any) -> None:
        #: [1, tokens]; None: positions without gaps.
        self.positions: torch.Tensor | None = None
        rotary = model.model.rotary_emb
        usual = rotary.forward

        def forward(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return usual(states, position_ids if self.positions is None else self.positions)

        rotary.forward = forward

    def draw(self, dice: random.Random, n_tokens: int) -> None:
        """Draw positions for stories of this length, with gaps in some."""
        self.positions = None
        if dice.random() > _SHARE or not _SHORTEST <= n_tokens < _END:
            return
        positions = torch.arange(n_tokens)
        room = dice.uniform(0, _END - n_tokens)
        cuts = sorted(dice.random() for _ in range(_MAX_GAPS - 1))
        for share in (b - a for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)):
            positions[dice.randrange(1, n_tokens) :] += int(room * share)
        self.positions = positions[None]
