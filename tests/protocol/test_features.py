"""Which features a request needs, and which a record states."""

import msgspec
import pytest

from halfmoon_protocol import features
from halfmoon_protocol.examples import WORKER
from halfmoon_protocol.features import common_features, needed_features, stated_features
from halfmoon_protocol.sampling import Sampling, Stopping

GREEDY = Sampling(temperature=0.0)
PLAIN = Stopping(max_new_tokens=9, stop_token_ids=(2,))


def greedy(**fields: object) -> Sampling:
    return msgspec.structs.replace(GREEDY, **fields)


@pytest.mark.parametrize(
    ("sampling", "needed"),
    [
        (GREEDY, set()),
        (Sampling(temperature=0.5), {features.SAMPLING}),
        (greedy(logprobs=0), {features.LOGPROBS}),
        (greedy(presence_penalty=0.5), {features.PENALTIES}),
        (greedy(logit_bias=((3, 1.0),)), {features.LOGIT_BIAS}),
        (greedy(grammar="start: %json {}"), {features.GRAMMAR}),
        (Sampling(logprobs=2, grammar="x"), {"sampling", "logprobs", "grammar"}),
    ],
)
def test_a_request_needs_what_its_sampling_asks_for(sampling: Sampling, needed: set[str]) -> None:
    for role in ("prefill", "decode"):
        assert needed_features(sampling, PLAIN, role) == needed


def test_stop_tokens_that_must_wait_need_a_worker_that_masks_them() -> None:
    for stops, n_min, needed in (((2,), 0, set()), ((), 3, set()), ((2,), 3, {"min_tokens"})):
        stopping = Stopping(max_new_tokens=9, stop_token_ids=stops, min_new_tokens=n_min)
        for role in ("prefill", "decode"):
            assert needed_features(GREEDY, stopping, role) == needed


def test_scores_of_the_prompt_are_asked_of_prefill_alone() -> None:
    asked = greedy(prompt_logprobs=0)
    assert needed_features(asked, PLAIN, "prefill") == {features.PROMPT_LOGPROBS}
    assert needed_features(asked, PLAIN, "decode") == set()


def test_a_record_without_a_list_has_the_first_features_and_an_empty_list_has_none() -> None:
    unsaid, plain = (msgspec.structs.replace(WORKER, features=f) for f in (None, ()))
    first = set(features.ALL) - {features.MIN_TOKENS}
    assert stated_features(unsaid) == first
    assert stated_features(plain) == set()
    assert common_features([]) == set(features.ALL)
    assert common_features([unsaid]) == first
    assert common_features([unsaid, plain]) == set()


def test_features_of_later_versions_are_read_and_change_nothing() -> None:
    later = msgspec.structs.replace(WORKER, features=("grammar", "telepathy"))
    read = msgspec.json.decode(msgspec.json.encode(later), type=type(WORKER))
    assert common_features([read]) == {"grammar"}
