"""Workers that are one server: what they hold is used there alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    DecodeFailed,
    DecodeLoad,
    DecodeReserved,
    PrefillFailed,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    ToConductor,
)
from halfmoon_protocol.sampling import Sampling
from halfmoon_scheduling.commands import AnyCommand, Reject, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import MessageReceived, Request, RequestArrived, WorkerJoined
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.placement.placement_explanations import explain_rejected_candidate
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

ROLES = ("prefill", "decode", "kvstore")


class Fleet:
    """A conductor in front of servers, each three workers; its books are audited."""

    def __init__(self, n_servers: int, **config: Any) -> None:
        self.conductor = Conductor(SchedulingConfig(**config))
        for i in range(n_servers):
            for role in ROLES:
                self.join(f"{role}-{i}", server=f"server-{i}")

    def join(self, name: str, **fields: Any) -> list[AnyCommand]:
        return self.handle(WorkerJoined(a_worker(name, **fields)))

    def handle(self, event: Any) -> list[AnyCommand]:
        commands = self.conductor.handle(event, 0.0)
        self.conductor.check()
        return commands

    def hear(self, worker: str, message: ToConductor) -> list[AnyCommand]:
        return self.handle(MessageReceived(WorkerId(worker), message))

    def hold(self, kvstore: str, request: Request, n_blocks: int) -> None:
        self.hear(kvstore, BlocksSnapshot(sequence=-1, hashes=request.block_hashes[:n_blocks]))

    def fill(self, decode: str) -> None:
        load = DecodeLoad(
            n_running=0, n_reserved=0, context_tokens=0, free_pages=0, n_pages=64, step_s=0
        )
        self.hear(decode, load)

    def place(self, request: Request) -> tuple[str, StartPrefill, str]:
        """Return the decode worker, the command to prefill, and the prefill worker."""
        (reserve,) = self.handle(RequestArrived(request))
        assert isinstance(reserve, Send) and isinstance(reserve.message, ReserveDecode)
        granted = DecodeReserved(
            request_id=request.request_id, landing=a_landing(reserve.worker_id), expires_s=60.0
        )
        (start,) = self.hear(reserve.worker_id, granted)
        assert isinstance(start, Send) and isinstance(start.message, StartPrefill)
        return reserve.worker_id, start.message, start.worker_id


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
        chosen = fleet.conductor.decisions[-1].placement.chosen
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
    decision = fleet.conductor.decisions[-1]
    mode = PLACEMENT_MODES["kvcache_centric"]
    why = [
        explain_rejected_candidate(row, decision.placement, mode)
        for row in decision.placement.estimates
    ]
    assert why == ["its server has no room to decode", ""]


def test_a_request_waits_while_no_server_has_room() -> None:
    fleet = Fleet(2)
    for decode in ("decode-0", "decode-1"):
        fleet.fill(decode)
    assert fleet.handle(RequestArrived(a_request())) == []
    load = DecodeLoad(
        n_running=0, n_reserved=0, context_tokens=0, free_pages=64, n_pages=64, step_s=0
    )
    (reserve,) = fleet.hear("decode-1", load)
    assert isinstance(reserve, Send) and reserve.worker_id == "decode-1"


def test_an_idle_server_is_preferred_to_one_that_decodes() -> None:
    fleet = Fleet(2)
    request = a_request("cmpl-1", n_tokens=100)
    assert fleet.place(request)[2] == "prefill-0"
    fleet.hear("prefill-0", a_prefill_done("cmpl-1"))
    assert fleet.place(a_request("cmpl-2", n_tokens=100, prompt=1))[2] == "prefill-1"


def test_a_server_takes_nothing_until_both_of_its_roles_are_there() -> None:
    fleet = Fleet(0)
    fleet.join("prefill-0", server="server-0")
    fleet.join("decode-1", server="server-1")
    (reject,) = fleet.handle(RequestArrived(a_request("cmpl-1")))
    assert isinstance(reject, Reject) and reject.kind == "unavailable"
    fleet.join("decode-0", server="server-0")
    assert fleet.place(a_request("cmpl-2"))[2] == "prefill-0"


def test_a_request_that_fits_no_server_is_refused() -> None:
    # The prompt fits the prefill worker of one server and the decode worker of the other.
    fleet = Fleet(0)
    for name, n_blocks in (("prefill-0", 64), ("decode-0", 2), ("prefill-1", 2), ("decode-1", 64)):
        fleet.join(name, server=f"server-{name[-1]}", n_blocks=n_blocks)
    (reject,) = fleet.handle(RequestArrived(a_request(n_tokens=100)))
    assert isinstance(reject, Reject) and reject.kind == "too_long"
    assert reject.reason == "100 tokens and up to 8 new ones fit no server"


def test_a_server_computes_what_only_others_hold() -> None:
    fleet = Fleet(1)
    for name in ("prefill-8", "decode-9", "kvstore-9"):
        fleet.join(name)
    request = a_request(n_tokens=100)
    fleet.hold("kvstore-9", request, 6)
    assert fleet.place(request)[2] == "prefill-8"
    rows = fleet.conductor.decisions[-1].placement.estimates
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
    rows = fleet.conductor.decisions[-1].placement.estimates
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
    if phase == "prefill":
        failed: ToConductor = PrefillFailed(
            request_id=request.request_id, reason="HTTP status 500", retryable=True
        )
        commands = fleet.hear("prefill-0", failed)
    else:
        fleet.hear("prefill-0", a_prefill_done("cmpl-1"))
        failed = DecodeFailed(
            request_id=request.request_id,
            reason="the stream ended in silence",
            retryable=True,
            culprit=WorkerId("decode-0"),
        )
        commands = fleet.hear("decode-0", failed)
    assert isinstance(commands[-1], Resubmit)
    again = a_request("cmpl-1~2", n_tokens=100, attempt=2)
    assert fleet.place(again)[2] == "prefill-1"


def test_what_a_prefill_server_says_of_its_kv_reaches_the_decode_server() -> None:
    fleet = Fleet(0)
    fleet.join("kvstore-0", server="http://a")
    fleet.join("prefill-0", home_kvstore="kvstore-0")
    fleet.join("prefill-1")
    fleet.join("decode-0")
    request = a_request("cmpl-1", n_tokens=100)
    fleet.hold("kvstore-0", request, 3)
    decode, start, prefill = fleet.place(request)
    assert (prefill, decode) == ("prefill-0", "decode-0"), "its own cache is a reason to choose it"
    assert start.cached is None and start.store_in is None
    done = a_prefill_done("cmpl-1", kv_transfer_params='{"remote_host":"h"}')
    (started,) = (c.message for c in fleet.hear("prefill-0", done) if isinstance(c, Send))
    assert isinstance(started, StartDecode)
    assert started.kv_transfer_params == '{"remote_host":"h"}'
    assert started.history == request.token_ids, "the server fetches the KV of these tokens"


def test_the_salt_reaches_the_servers() -> None:
    fleet = Fleet(1)
    request = a_request("cmpl-1", cache_salt="tenant-a", sampling=Sampling(temperature=0.0))
    assert fleet.place(request)[1].cache_salt == "tenant-a"
    assert RequestId("cmpl-1") == request.request_id
