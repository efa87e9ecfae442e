"""Workers that are one server: what they hold is used there alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.messages import StartDecode, StartPrefill
from halfmoon_scheduling.commands import Reject, Resubmit
from halfmoon_scheduling.events import Request
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.placement.placement_explanations import explain_rejected_candidate
from halfmoon_testing.scheduling_inputs import a_request
from tests.scheduling.core import D0, Core, asked, message_to, only, sent


class Fleet(Core):
    """A conductor in front of servers, each three workers."""

    def __init__(self, n_servers: int, **config: Any) -> None:
        super().__init__(**config)
        for i in range(n_servers):
            for role in ("prefill", "decode", "kvstore"):
                self.join(f"{role}-{i}", server=f"server-{i}")

    def fill(self, decode: str) -> None:
        self.load(decode, free_pages=0)

    def place(self, request: Request) -> tuple[str, StartPrefill, str]:
        """Return the decode worker, the command to prefill, and the prefill worker."""
        ((rid, decode),) = asked(self.arrive(request)).items()
        commands = self.reserved(decode, rid)
        ((prefill, kind),) = sent(commands)
        assert kind is StartPrefill
        return decode, message_to(commands, prefill), prefill


@given(
    placement=st.sampled_from(sorted(PLACEMENT_MODES)),
    n_servers=st.integers(1, 4),
    held=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    full=st.sets(st.integers(0, 3), max_size=3),
    prompts=st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
def test_a_prompt_is_decoded_where_it_is_prefilled_and_nothing_is_fetched(
    placement: str, n_servers: int, held: list[int], full: set[int], prompts: list[int]
) -> None:
    fleet = Fleet(n_servers, placement=placement, replication_bytes_per_s=1e9)
    for i in range(n_servers):
        fleet.hold(f"kvstore-{i}", a_request(n_tokens=100, prompt=0), held[i])
        if i in full and len(full & set(range(n_servers))) < n_servers:
            fleet.fill(f"decode-{i}")
    for n, prompt in enumerate(prompts):
        request = a_request(f"cmpl-{n}", n_tokens=100, prompt=prompt)
        decode, start, prefill = fleet.place(request)
        server = int(prefill[-1])
        assert decode == f"decode-{server}"
        assert server not in full or full >= set(range(n_servers))
        assert start.cached is None and start.store_in is None
        chosen = fleet.chosen
        assert chosen.transfer_blocks == 0
        own = held[server] if prompt == 0 else 0
        assert chosen.n_blocks == own


@pytest.mark.parametrize("placement", ["kvcache_centric", "min_ttft", "cache_aware"])
def test_a_prompt_goes_to_the_server_that_holds_its_prefix(placement: str) -> None:
    fleet = Fleet(3, placement=placement)
    request = a_request(n_tokens=100)
    fleet.hold("kvstore-2", request, 5)
    assert fleet.place(request)[2] == "prefill-2"


def test_a_server_without_room_is_not_chosen_while_another_has_some() -> None:
    fleet = Fleet(2)
    request = a_request(n_tokens=100)
    fleet.hold("kvstore-0", request, 6)
    fleet.fill("decode-0")
    assert fleet.place(request)[2] == "prefill-1"
    placement, mode = fleet.placement, PLACEMENT_MODES["kvcache_centric"]
    why = [explain_rejected_candidate(row, placement, mode) for row in placement.estimates]
    assert why == ["its server has no room to decode", ""]


def test_an_idle_server_is_preferred_to_one_that_decodes() -> None:
    fleet = Fleet(2)
    request = a_request("cmpl-1", n_tokens=100)
    assert fleet.place(request)[2] == "prefill-0"
    fleet.prefilled()
    assert fleet.place(a_request("cmpl-2", n_tokens=100, prompt=1))[2] == "prefill-1"


def test_a_server_takes_nothing_until_both_of_its_roles_are_there() -> None:
    fleet = Fleet(0)
    fleet.join("prefill-0", server="server-0")
    fleet.join("decode-1", server="server-1")
    assert only(fleet.arrive(), Reject).kind == "unavailable"
    fleet.join("decode-0", server="server-0")
    assert fleet.place(a_request("cmpl-2"))[2] == "prefill-0"


def test_a_request_that_fits_no_server_is_refused() -> None:
    # The prompt fits the prefill worker of one server and the decode worker of the other.
    fleet = Fleet(0)
    for name, n_blocks in (("prefill-0", 64), ("decode-0", 2), ("prefill-1", 2), ("decode-1", 64)):
        fleet.join(name, server=f"server-{name[-1]}", n_blocks=n_blocks)
    reject = only(fleet.arrive(n_tokens=100), Reject)
    assert reject.kind == "too_long"
    assert reject.reason == "100 tokens and up to 8 new ones fit no server"


def test_a_server_computes_what_only_others_hold() -> None:
    fleet = Fleet(1)
    for name in ("prefill-8", "decode-9", "kvstore-9"):
        fleet.join(name)
    request = a_request(n_tokens=100)
    fleet.hold("kvstore-9", request, 6)
    assert fleet.place(request)[2] == "prefill-8"
    rows = fleet.placement.estimates
    assert {row.worker_id: row.n_blocks for row in rows} == {"prefill-0": 0, "prefill-8": 6}


def test_workers_without_a_server_work_with_each_other_beside_servers() -> None:
    fleet = Fleet(1)
    fleet.join("prefill-8")
    fleet.join("decode-9")
    fleet.join("kvstore-9")
    fleet.fill("decode-0")
    request = a_request(n_tokens=100)
    fleet.hold("kvstore-0", request, 6)
    fleet.hold("kvstore-9", request, 2)
    decode, start, prefill = fleet.place(request)
    assert (prefill, decode) == ("prefill-8", "decode-9")
    rows = fleet.placement.estimates
    prefixes = {row.worker_id: (row.source, row.n_blocks) for row in rows}
    assert prefixes == {"prefill-0": ("kvstore-0", 6), "prefill-8": ("kvstore-9", 2)}
    assert start.cached is not None and start.cached.kvstore.worker_id == "kvstore-9"
    assert not start.cached.replicas, "a server's blocks are read by itself alone"
    assert start.store_in is not None and start.store_in.worker_id == "kvstore-9"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_failed_try_goes_to_another_server(phase: str) -> None:
    fleet = Fleet(2)
    request = a_request("cmpl-1", n_tokens=100)
    fleet.hold("kvstore-0", request, 6)
    fleet.place(request)
    if phase == "decode":
        fleet.prefilled()
        commands = fleet.decode_failed(reason="the stream ended in silence", culprit=D0)
    else:
        commands = fleet.prefill_failed(reason="HTTP status 500")
    assert isinstance(commands[-1], Resubmit)
    again = a_request("cmpl-1~2", n_tokens=100, attempt=2)
    assert fleet.place(again)[2] == "prefill-1"


def test_what_a_prefill_server_says_of_its_kv_reaches_the_decode_server() -> None:
    fleet = Fleet(0)
    fleet.join("kvstore-0", server="http://a")
    fleet.join("prefill-0", home_kvstore="kvstore-0")
    fleet.join("prefill-1")
    fleet.join("decode-0")
    request = a_request(n_tokens=100, cache_salt="tenant-a")
    fleet.hold("kvstore-0", request, 3)
    decode, start, prefill = fleet.place(request)
    assert (prefill, decode) == ("prefill-0", "decode-0"), "its own cache is a reason to choose it"
    assert start.cached is None and start.store_in is None
    assert start.cache_salt == "tenant-a"
    started = message_to(fleet.prefilled(kv_transfer_params='{"remote_host":"h"}'), D0)
    assert isinstance(started, StartDecode)
    assert started.kv_transfer_params == '{"remote_host":"h"}'
    assert started.history == request.token_ids, "the server fetches the KV of these tokens"
