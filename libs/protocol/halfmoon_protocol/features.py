"""Name what a worker may lack, and tell which of it a request needs.

A worker's record lists the features that it has. A conductor gives a request only to workers with
all that it needs, and refuses it by name where there is none. So a small worker can serve plain
requests beside complete ones. A record without a list has every feature of the first version
(`FIRST_VERSION`): workers of before this list existed have them all.

Names that a peer does not know are ignored: a later version may add some.
"""

from collections.abc import Iterable

from halfmoon_protocol.messages import WorkerInfo
from halfmoon_protocol.sampling import Sampling, Stopping

SAMPLING = "sampling"
LOGPROBS = "logprobs"
PROMPT_LOGPROBS = "prompt_logprobs"
PENALTIES = "penalties"
LOGIT_BIAS = "logit_bias"
GRAMMAR = "grammar"
MIN_TOKENS = "min_tokens"

#: Features that a request may need of the workers that choose its tokens, with their meanings.
MEANINGS = {
    SAMPLING: "draws tokens, by the draw that the protocol defines: a temperature above 0",
    LOGPROBS: "reports log probabilities of new tokens",
    PROMPT_LOGPROBS: "reports log probabilities of the prompt's tokens; asked of prefill alone",
    PENALTIES: "applies repetition, presence and frequency penalties",
    LOGIT_BIAS: "adds to the logits of given tokens",
    GRAMMAR: "holds answers to a grammar",
    MIN_TOKENS: "draws no stop token before `min_new_tokens` new ones are there",
}
ALL: tuple[str, ...] = tuple(MEANINGS)
_NONE: frozenset[str] = frozenset()
_ALL = frozenset(ALL)
#: Features of workers whose record lists none: those of before the list existed.
FIRST_VERSION = _ALL - {MIN_TOKENS}


def needed_features(sampling: Sampling, stopping: Stopping, role: str) -> frozenset[str]:
    """Return the features that a request needs of a worker in this role."""
    if sampling == _PLAIN and not stopping.masks:
        return _NONE
    asked = {
        SAMPLING: sampling.temperature > 0,
        LOGPROBS: sampling.logprobs is not None,
        PROMPT_LOGPROBS: sampling.prompt_logprobs is not None and role == "prefill",
        PENALTIES: sampling.penalises,
        LOGIT_BIAS: bool(sampling.logit_bias),
        GRAMMAR: bool(sampling.grammar),
        MIN_TOKENS: stopping.masks,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)


_PLAIN = Sampling(temperature=0.0)


def stated_features(info: WorkerInfo) -> frozenset[str]:
    """Return the features of a worker, by its record."""
    return FIRST_VERSION if info.features is None else frozenset(info.features)


def common_features(infos: Iterable[WorkerInfo]) -> frozenset[str]:
    """Return the features that all of these workers have; all features, if there is none."""
    return _ALL.intersection(*(stated_features(info) for info in infos))
