"""Train the demo model: ``python -m tools.demo_model.train [FOLDER] [--tokens N]``.

Stories get longer and richer as the model gets better (`_LEVELS`). Only answers count, and of
an answer its first token most, since that says whose number it is. The same seed, machine and
threads give the same weights. They are written into FOLDER once a minute and at the end, with
tokenizer, config and chat template.
"""

import argparse
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers
from torch.nn import functional

from halfmoon_engine.demo import FOLDER
from halfmoon_testing.models.byte_tokenizer import write_tokenizer
from tools.demo_model.initial_weights import MAX_CONTEXT, make_model
from tools.demo_model.make_tokenizer import make_tokenizer
from tools.demo_model.stories import NO_TARGET, Encode, Recipe, write_story

transformers: Any = untyped_transformers

SEED = 1969
TOTAL_TOKENS = 8_000_000
THREADS = 2
_TOKENS_PER_STEP = 4096
#: Short stories are cheap in tokens and dear in operations: fewer of them per step.
_TOKENS_PER_SHORT_STEP, _SHORT = 2048, 128
_LEARNING_RATE = 6e-3
_WARM_UP_STEPS = 50
#: From this share of the tokens on, the learning rate falls to nothing.
_COOLING_FROM = 0.5
_FIRST_TOKEN_WEIGHT = 4.0
#: A level is mastered when so many answers begin right, as a moving average.
_MASTERED = 0.85
_THIS_LEVEL = 0.6
_REPORT_S, _SAVE_S = 10.0, 60.0

_COPYING = Recipe(
    bare=1, adjacent=1, echo=1, chat=0, filler=0, made_up=0, unknown=0, four_digits=1,
    questions=(0.6, 0.6),
)  # fmt: skip
_SOME_QUESTIONS = replace(_COPYING, adjacent=0.1, echo=0.4, chat=0.3)
_SOME_KINDS = replace(_SOME_QUESTIONS, echo=0.2, chat=0.5, bare=0.5)
_SOME_NOISE = Recipe(
    bare=0.4, echo=0.2, chat=0.5, filler=0.2, made_up=0.1, unknown=0.03, four_digits=0.9
)
_GOAL = Recipe()
#: Tokens of a story, and what is in it.
_LEVELS = (
    (64, _COPYING),
    (64, replace(_COPYING, adjacent=0.3)),
    (64, _SOME_QUESTIONS),
    (96, _SOME_KINDS),
    (96, _SOME_NOISE),
    (128, replace(_SOME_NOISE, bare=0.3, filler=0.3, made_up=0.3, unknown=0.05)),
    *((n_tokens, _GOAL) for n_tokens in (192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)),
)


@dataclass
class _Progress:
    """State of a training run; the same in every run, as it has no clock."""

    #: Tokens to train on in all.
    total_tokens: int
    level: int = 0
    mastery: float = 0.0
    n_steps: int = 0
    n_tokens: int = 0

    @property
    def done(self) -> float:
        return self.n_tokens / self.total_tokens

    @property
    def learning_rate(self) -> float:
        warm = min(1.0, (self.n_steps + 1) / _WARM_UP_STEPS)
        return _LEARNING_RATE * warm * min(1.0, (1.02 - self.done) / (1 - _COOLING_FROM))

    def on_step(self, level: int, accuracy: float) -> None:
        """Go on to the next level if this one is mastered."""
        if level != self.level:
            return
        self.mastery = 0.9 * self.mastery + 0.1 * accuracy
        if self.mastery > _MASTERED and level + 1 < len(_LEVELS):
            self.level, self.mastery = level + 1, 0.5


def train(folder: Path, n_tokens: int = TOTAL_TOKENS) -> None:
    """Train a new model on so many tokens, and write it into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    dice = random.Random(SEED)
    tokenizer = make_tokenizer()
    write_tokenizer(tokenizer, folder, max_context=MAX_CONTEXT)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    model = make_model()
    optimizers = _optimizers(model)
    progress = _Progress(n_tokens)
    log = _Log(model, progress, folder)
    while progress.done < 1:
        level = _choose_level(dice, progress.level)
        inputs, targets = _batch(dice, level, encode)
        loss, accuracy = _step(model, optimizers, inputs, targets, progress.learning_rate)
        progress.n_steps += 1
        progress.n_tokens += inputs.numel()
        progress.on_step(level, accuracy)
        log.on_step(loss, accuracy)
    log.finish()


def _choose_level(dice: random.Random, level: int) -> int:
    """Choose a level: mostly the current one, else one below, the longer the likelier."""
    if level + 1 < len(_LEVELS) and dice.random() < _THIS_LEVEL:
        return level
    return max(dice.randrange(level + 1), dice.randrange(level + 1))


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices, and AdamW for embeddings and norms."""
    embeddings = model.model.embed_tokens.weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embeddings]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embeddings]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _batch(dice: random.Random, level: int, encode: Encode) -> tuple[torch.Tensor, torch.Tensor]:
    """Write stories of one length; return ids and targets, both [stories, tokens]."""
    n_tokens, recipe = _LEVELS[level]
    per_step = _TOKENS_PER_SHORT_STEP if n_tokens <= _SHORT else _TOKENS_PER_STEP
    stories = [write_story(dice, recipe, n_tokens, encode) for _ in range(per_step // n_tokens)]
    inputs, targets = zip(*stories, strict=True)
    return torch.tensor(inputs), torch.tensor(targets)


def _step(
    model: Any,
    optimizers: list[torch.optim.Optimizer],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    learning_rate: float,
) -> tuple[float, float]:
    """Learn from a batch; return its loss, and the share of answers that began right."""
    counts = targets != NO_TARGET
    first = counts.clone()
    first[:, 1:] &= ~counts[:, :-1]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[counts]).float()
    wanted, first = targets[counts], first[counts]
    weights = torch.where(first, _FIRST_TOKEN_WEIGHT, 1.0)
    losses = functional.cross_entropy(logits, wanted, reduction="none")
    loss: Any = (losses * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    right = (logits.argmax(-1) == wanted)[first]
    return float(loss.item()), right.float().mean().item()


class _Log:
    """Report the progress of a training run, and save the model now and then."""

    def __init__(self, model: Any, progress: _Progress, folder: Path) -> None:
        self._model, self._progress, self._folder = model, progress, folder
        self._began = self._reported = self._saved = time.monotonic()
        self._losses: list[float] = []
        self._accuracies: list[float] = []

    def on_step(self, loss: float, accuracy: float) -> None:
        """Report and save after a step, if it is time."""
        self._losses.append(loss)
        self._accuracies.append(accuracy)
        now = time.monotonic()
        if now - self._reported >= _REPORT_S:
            print(self._line(now - self._began), flush=True)
            self._reported = now
            self._losses.clear()
            self._accuracies.clear()
        if now - self._saved >= _SAVE_S:
            self.save()
            self._saved = now

    def save(self) -> None:
        """Write weights and configs; the tokenizer is there from the start."""
        self._model.save_pretrained(self._folder)
        for path in self._folder.iterdir():
            path.chmod(0o644)

    def finish(self) -> None:
        """Save the last time, and print the time it took."""
        self.save()
        elapsed_s = time.monotonic() - self._began
        print(
            f"wrote {self._folder} after {elapsed_s / 60:.1f} min, "
            f"{time.process_time() / 60:.1f} min of processor time",
            flush=True,
        )

    def _line(self, elapsed_s: float) -> str:
        progress, n = self._progress, len(self._losses)
        left_s = elapsed_s * (1 / progress.done - 1)
        return (
            f"{progress.done:4.0%}  step {progress.n_steps}  "
            f"{progress.n_tokens / elapsed_s:,.0f} tokens/s  "
            f"stories to {_LEVELS[progress.level][0]:,} tokens  "
            f"loss {sum(self._losses) / n:.3f}  answers begun right "
            f"{sum(self._accuracies) / n:.1%}  {left_s / 60:.1f} min left"
        )


def main() -> None:
    """Train into the folder that the command line names; without one, into the package's."""
    parser = argparse.ArgumentParser(description="Train Halfmoon's demo model.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--tokens", type=int, default=TOTAL_TOKENS, help="tokens to train on")
    chosen = parser.parse_args()
    train(chosen.folder, chosen.tokens)


if __name__ == "__main__":
    main()
