"""Pages of earlier prompts: decode is chosen by them, and a landing shares them if all may know."""

from typing import Any

import pytest

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.messages import Cancel, PrefillCost, ReserveDecode, Stage, StartPrefill
from halfmoon_protocol.sampling import Sampling
from halfmoon_scheduling.placement import page_holders
from halfmoon_scheduling.placement.page_holders import PageHolders
from halfmoon_testing.scheduling_inputs import LAYOUT, a_request
from tests.scheduling.core import D0, D1, P0, Core, asked, message_to, sent

KEEPS: dict[str, Any] = {"keeps_pages": True, "skips_held_blocks": True}


def hashes(text: str) -> list[BlockHash]:
    return [BlockHash(text[: i + 1].encode()) for i in range(len(text))]


def test_the_longest_known_beginning_counts() -> None:
    holders = PageHolders()
    holders.put(hashes("ab"), D0, 1)
    holders.put(hashes("abcd"), D1, 2)
    assert holders.find(hashes("abcdef")) == (D1, 2)
    assert holders.find(hashes("abc")) == (D0, 1)
    assert holders.find(hashes("a")) is None
    assert holders.find([]) is None
    holders.put(hashes("ab"), D1, 1)  # the newest worker of a prompt counts
    holders.put([], D0, 1)
    assert holders.find(hashes("ab")) == (D1, 1)


def test_the_oldest_prompts_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_holders, "MAX_PROMPTS", 2)
    holders = PageHolders()
    for text in ("a", "b", "a", "c"):
        holders.put(hashes(text), D0, 1)
    assert holders.find(hashes("b")) is None
    assert holders.find(hashes("a")) == holders.find(hashes("c")) == (D0, 1)


class Talk(Core):
    """A conversation with a cluster of two decode workers."""

    def __init__(self, **decode: Any) -> None:
        super().__init__()
        self.decode = decode
        self.n = 0
        cost = PrefillCost(1.0, 1e-2) if "local_prefill_tokens" in decode else None
        self.join("prefill-0", skips_held_blocks=True, prefill_cost=cost)
        for worker in (D0, D1):
            self.join(worker, **decode)

    def turn(self, n_tokens: int = 200) -> WorkerId:
        """Where the next turn is decoded."""
        self.n += 1
        (worker,) = asked(self.arrive(f"cmpl-{self.n}", n_tokens=n_tokens)).values()
        return worker


def a_talk(**decode: Any) -> Talk:
    """Its first turn was decoded at decode-1, since decode-0 had no room."""
    talk = Talk(**decode)
    talk.load("decode-0", free_pages=3)
    assert talk.turn(100) == D1
    talk.reserved("decode-1")
    talk.prefilled("decode-1" if "local_prefill_tokens" in decode else "prefill-0")
    talk.finish()
    talk.load("decode-0")
    return talk


@pytest.mark.parametrize("local", [{}, {"local_prefill_tokens": 4096}])
def test_the_next_turn_goes_where_the_one_before_it_was_decoded(local: dict[str, Any]) -> None:
    if local:
        local = local | {"prefill_cost": PrefillCost(1e-6, 1e-9)}
    talk = a_talk(**KEEPS, **local)
    talk.load("decode-1", free_pages=50)
    assert talk.turn() == D1


@pytest.mark.parametrize("but", ["keeps no pages", "is busier", "has no room"])
def test_it_goes_elsewhere_if_that_worker(but: str) -> None:
    talk = a_talk() if but == "keeps no pages" else a_talk(**KEEPS)
    if but == "is busier":
        talk.load("decode-1", n_running=1)
    elif but == "has no room":
        talk.load("decode-1", free_pages=3)
    assert talk.turn() == D0


def test_a_worker_that_was_restarted_has_no_pages() -> None:
    talk = a_talk(**KEEPS)
    talk.lose("decode-1")
    assert talk.turn(150) == D0
    talk.lose("decode-0")
    for worker in (D1, D0):
        talk.join(worker, generation=2, **KEEPS)
    assert talk.turn() == D0


# -- landings that share pages -------------------------------------------------------------------

SIZE = LAYOUT.block_size
N_TOKENS = 2 * SIZE + 8
KNOWS: dict[str, Any] = {"skips_held_blocks": True}


def a_core(prefill: dict[str, Any], decode: dict[str, Any]) -> Core:
    core = Core()
    core.join("prefill-0", **prefill)
    core.join("decode-0", **decode)
    return core


def reserve(core: Core, **fields: Any) -> ReserveDecode:
    message = message_to(core.arrive(**({"n_tokens": N_TOKENS} | fields)), D0)
    assert isinstance(message, ReserveDecode)
    return message


def test_prefill_is_told_which_blocks_decode_has() -> None:
    core = a_core(KNOWS, KEEPS)
    assert reserve(core).block_hashes == a_request(n_tokens=N_TOKENS).block_hashes
    assert message_to(core.reserved(n_held_blocks=2), P0).n_held_blocks == 2


@pytest.mark.parametrize(
    ("prefill", "decode"), [({}, KEEPS), (KNOWS, {}), (KNOWS, {"skips_held_blocks": True})]
)
def test_decode_gets_no_hashes_where_a_side_does_not_know_them(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    core = a_core(prefill, decode)
    assert reserve(core).block_hashes == ()
    assert message_to(core.reserved(n_held_blocks=0), P0).n_held_blocks == 0


@pytest.mark.parametrize(
    ("prefill", "n_held"), [({}, 1), (KNOWS, 3), (KNOWS, 2**40)], ids=["unasked", "all", "absurd"]
)
def test_a_landing_that_claims_what_it_can_not_hold_is_given_up(
    prefill: dict[str, Any], n_held: int
) -> None:
    core = a_core(prefill, KEEPS)
    reserve(core)
    assert (D0, Cancel) in (commands := sent(core.reserved(n_held_blocks=n_held)))
    assert StartPrefill not in [kind for _, kind in commands]


@pytest.mark.parametrize("knows", [True, False])
def test_every_stage_of_a_group_must_know_held_blocks(knows: bool) -> None:
    core = Core()
    for i in range(2):
        stage, skips = Stage("group", i, 2, chunk_tokens=SIZE), knows or i == 0
        fields: dict[str, Any] = {"stage": stage, "prefill_cost": PrefillCost(0.0, 1e-3)}
        core.join(f"prefill-{i}", n_blocks=1024, skips_held_blocks=skips, **fields)
    core.join("decode-0", n_blocks=1024, **KEEPS)
    assert bool(reserve(core, n_tokens=1000).block_hashes) == knows
    start = message_to(core.reserved(n_held_blocks=1 if knows else 0), P0)
    assert len(start.stages) == 1, "no group was chosen"


@pytest.mark.parametrize("scored", [True, False])
def test_a_decode_worker_that_prefills_shares_pages_unless_it_scores_the_prompt(
    scored: bool,
) -> None:
    cost = PrefillCost(1e-6, 1e-9)
    decode = KEEPS | {"local_prefill_tokens": 4096, "prefill_cost": cost}
    core = a_core({"prefill_cost": PrefillCost(5.0, 1.0)}, decode)
    sampling = Sampling(temperature=0.0, prompt_logprobs=0 if scored else None)
    assert bool(reserve(core, sampling=sampling).block_hashes) != scored
    assert sent(core.reserved(n_held_blocks=0)) == [(D0, StartPrefill)]
