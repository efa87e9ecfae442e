"""Train the demo model: ``python -m tools.demo_model.train [FOLDER] [--tokens N]``.

Stories get longer and richer as the model gets better (`_LEVELS`). Only answers count, and of
an answer its first token most, since that says whose number it is. The same seed, machine and
threads give the same weights. They are written into FOLDER once a minute and at the end, with
tokenizer, config and chat template.

``--start OLD`` trains the model of another folder further, on stories of the goal from
``--shortest`` to ``--longest`` tokens; a share ``--skills`` of the steps has short stories of tools
and JSON. So a run that was cut off goes on, too.
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
from tools.demo_model.chat_template import CHAT_TEMPLATE
from tools.demo_model.earlier_weights import load_earlier
from tools.demo_model.initial_weights import MAX_CONTEXT, make_model
from tools.demo_model.make_tokenizer import make_tokenizer
from tools.demo_model.stories import write_story
from tools.demo_model.story_facts import Recipe
from tools.demo_model.story_text import NO_TARGET, Encode
from tools.demo_model.wide_positions import WidePositions

transformers: Any = untyped_transformers

SEED = 1969
TOTAL_TOKENS = 12_000_000
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
_GOAL = Recipe(tools=0.35, as_json=0.3)
#: Tokens of a story, and what is in it.
_GOAL_LEVELS = (
    (64, _COPYING),
    (64, replace(_COPYING, adjacent=0.3)),
    (64, _SOME_QUESTIONS),
    (96, _SOME_KINDS),
    (96, _SOME_NOISE),
    (128, replace(_SOME_NOISE, bare=0.3, filler=0.3, made_up=0.3, unknown=0.05)),
    *((n_tokens, _GOAL) for n_tokens in (192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)),
    *((n_tokens, _GOAL) for n_tokens in (6144, 8192)),
)
#: Short stories of tools and JSON: in a long one each question after the first can be answered
#: like the one before, and that is learnt sooner than what asks for a call or for JSON.
_SKILLS = replace(_GOAL, bare=0.15, chat=0.9, tools=0.5, as_json=0.65, questions=(0.5, 0.9))
#: One question, and few names that its answer could have.
_FIRST_QUESTIONS = replace(
    _SKILLS, bare=0.1, chat=1.0, filler=0.0, made_up=0.0, questions=(0.8, 1.0)
)
_PRACTICE = replace(_FIRST_QUESTIONS, bare=0.0, made_up=0.4, practice=1.0)
_LEVELS = (
    *_GOAL_LEVELS,
    *((n_tokens, _FIRST_QUESTIONS) for n_tokens in (64, 80, 96)),
    *((n_tokens, _SKILLS) for n_tokens in (112, 160, 224)),
    *((n_tokens, _PRACTICE) for n_tokens in (64, 96, 128)),
)
_FIRST_GOAL = next(i for i, (_, recipe) in enumerate(_LEVELS) if recipe is _GOAL)
_FIRST_SKILL = len(_GOAL_LEVELS)
#: Steps of a new model that have short stories of tools and JSON.
_SKILLS_SHARE = 0.4
_FIRST_PRACTICE = _FIRST_SKILL + 6
#: Steps of practice, and the tokens until which a new model has so many.
_PRACTICE_SHARE, _PRACTICE_TOKENS = 0.5, 600_000


@dataclass
class _Progress:
    """State of a training run; the same in every run, as it has no clock."""

    #: Tokens to train on in all.
    total_tokens: int
    top_rate: float = _LEARNING_RATE
    level: int = 0
    mastery: float = 0.0
    n_steps: int = 0
    n_tokens: int = 0

    @property
    def done(self) -> float:
        return self.n_tokens / self.total_tokens

    @property
    def learning_rate(self) -> float:
        """Return the rate of the next step: it rises at first, and falls in the end."""
        warm = min(1.0, (self.n_steps + 1) / _WARM_UP_STEPS)
        return self.top_rate * warm * min(1.0, (1.02 - self.done) / (1 - _COOLING_FROM))

    def on_step(self, level: int, accuracy: float) -> None:
        """Go on to the next level if this one is mastered."""
        if level != self.level:
            return
        self.mastery = 0.9 * self.mastery + 0.1 * accuracy
        if self.mastery > _MASTERED and level + 1 < len(_GOAL_LEVELS):
            self.level, self.mastery = level + 1, 0.5


@dataclass(frozen=True)
class Start:
    """Where a training begins that goes on from an earlier one."""

    #: The earlier model.
    folder: Path
    #: Tokens of stories, from and to.
    shortest: int
    longest: int
    learning_rate: float
    #: Share of steps that have short stories of tools and JSON.
    skills: float = _SKILLS_SHARE
    seed: int = SEED + 1


def train(folder: Path, n_tokens: int = TOTAL_TOKENS, start: Start | None = None) -> None:
    """Train a model on so many tokens, a new one without `start`; write it into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(THREADS)
    seed = start.seed if start else SEED
    torch.manual_seed(seed)
    dice = random.Random(seed)
    tokenizer = make_tokenizer()
    model = make_model()
    if start:
        load_earlier(model, tokenizer, start.folder)
    write_tokenizer(tokenizer, folder, max_context=MAX_CONTEXT, chat_template=CHAT_TEMPLATE)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    positions = WidePositions(model)
    optimizers = _optimizers(model)
    progress = _Progress(n_tokens, start.learning_rate if start else _LEARNING_RATE)
    log = _Log(model, progress, folder)
    while progress.done < 1:
        level = _choose_goal(dice, start) if start else _choose_level(dice, progress)
        inputs, targets = _batch(dice, level, encode)
        positions.draw(dice, inputs.shape[1])
        loss, accuracy = _step(model, optimizers, inputs, targets, progress.learning_rate)
        progress.n_steps += 1
        progress.n_tokens += inputs.numel()
        if not start:
            progress.on_step(level, accuracy)
        log.on_step(level, loss, accuracy)
    log.finish()


def _choose_level(dice: random.Random, progress: _Progress) -> int:
    """Choose a level: mostly the current one, else one below, the longer the likelier.

    Tools and JSON are there from the start: their answers copy names and words, and that is
    hard to learn for weights that have learnt to copy digits alone.
    """
    if progress.n_tokens < _PRACTICE_TOKENS and dice.random() < _PRACTICE_SHARE:
        return dice.randrange(_FIRST_PRACTICE, len(_LEVELS))
    if dice.random() < _SKILLS_SHARE:
        return dice.randrange(_FIRST_SKILL, len(_LEVELS))
    level = progress.level
    if level + 1 < len(_GOAL_LEVELS) and dice.random() < _THIS_LEVEL:
        return level
    return max(dice.randrange(level + 1), dice.randrange(level + 1))


def _choose_goal(dice: random.Random, start: Start) -> int:
    """Choose a level of short skills, or one of the goal whose length is in the range."""
    if dice.random() < start.skills:
        return dice.randrange(_FIRST_SKILL, len(_LEVELS))
    lengths = range(start.shortest, start.longest + 1)
    goals = range(_FIRST_GOAL, _FIRST_SKILL)
    return dice.choice([i for i in goals if _LEVELS[i][0] in lengths])


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
    is_short = n_tokens <= _SHORT or recipe is _SKILLS
    per_step = _TOKENS_PER_SHORT_STEP if is_short else _TOKENS_PER_STEP
    n_stories = max(1, per_step // n_tokens)
    stories = [write_story(dice, recipe, n_tokens, encode) for _ in range(n_stories)]
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
        #: Of each level that was trained since the last report.
        self._accuracies: dict[int, list[float]] = {}

    def on_step(self, level: int, loss: float, accuracy: float) -> None:
        """Report and save after a step, if it is time."""
        self._losses.append(loss)
        self._accuracies.setdefault(level, []).append(accuracy)
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
        progress = self._progress
        left_s = elapsed_s * (1 / progress.done - 1)
        accuracies = " ".join(
            f"{_LEVELS[level][0]}: {sum(shares) / len(shares):.0%}"
            for level, shares in sorted(self._accuracies.items())
        )
        return (
            f"{progress.done:4.0%}  step {progress.n_steps}  "
            f"{progress.n_tokens / elapsed_s:,.0f} tokens/s  "
            f"loss {sum(self._losses) / len(self._losses):.3f}  "
            f"answers begun right by tokens of the story {accuracies}  "
            f"{left_s / 60:.1f} min left, {time.process_time() / 60:.1f} min of processor time"
        )


def main() -> None:
    """Train into the folder that the command line names; without one, into the package's."""
    parser = argparse.ArgumentParser(description="Train Halfmoon's demo model.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--tokens", type=int, default=TOTAL_TOKENS, help="tokens to train on")
    parser.add_argument("--start", type=Path, help="train the model of this folder further")
    parser.add_argument("--shortest", type=int, default=192, help="with --start: tokens of a story")
    parser.add_argument("--longest", type=int, default=8192, help="with --start: tokens of a story")
    parser.add_argument("--rate", type=float, default=2e-3, help="with --start: learning rate")
    parser.add_argument(
        "--skills", type=float, default=_SKILLS_SHARE, help="with --start: share of tools and JSON"
    )
    parser.add_argument("--seed", type=int, default=SEED + 1, help="with --start: of the stories")
    chosen = parser.parse_args()
    start = None
    if chosen.start:
        start = Start(
            chosen.start, chosen.shortest, chosen.longest, chosen.rate, chosen.skills, chosen.seed
        )
    train(chosen.folder, chosen.tokens, start)


if __name__ == "__main__":
    main()
