"""Generated sequences of messages that nobody should send, to each worker and to the conductor.

Callers that may be namesakes of the conductor say valid, bent, repeated and reordered messages
about their own requests, a victim's, and none at all, while the victim generates. It gets its
exact tokens, the worker lives, its books hold after every sequence, no message is left to the
last line of defence, and in the end nothing is held.

HALFMOON_SEQUENCES says how many sequences each test tries, HALFMOON_SEED with which seed; `make
fuzz-messages` sets both. Where CI is set, the seed is the same each time.
"""

import asyncio
import os
from collections.abc import Callable
from random import Random, SystemRandom
from typing import Any

import msgspec
import pytest

from halfmoon_conductor.workers.worker_links import _Member
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol import error_codes
from halfmoon_protocol.examples import EXAMPLES
from halfmoon_protocol.ids import BlockHash, ConductorId, RequestId, Ticket, WorkerId
from halfmoon_protocol.messages import (
    BlocksReserved,
    CachedPrefix,
    Cancel,
    CommitBlocks,
    DecodeFailed,
    DecodeRefused,
    DecodeReserved,
    DropBlocks,
    Hello,
    KvstoreAddress,
    KvstoreRefused,
    LeaseBlocks,
    Message,
    PrefillFailed,
    Produced,
    ReleaseLease,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    RevokeBlocks,
    ShareEnded,
    SnapshotBlocks,
    StartPrefill,
    TokensProduced,
    Unwelcome,
    VerifyBlocks,
    Welcome,
    WorkerInfo,
)
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.scheduling_inputs import a_worker
from halfmoon_testing.worker_caller import WorkerCaller, mutate_message
from halfmoon_transfer.engine import TransferEngine
from tests.nightly import by_day
from tests.services.asking import (
    LAYOUT,
    ORACLE,
    address_of,
    chain_of,
    dial,
    n_failed,
    reserve,
    start_decode,
    start_prefill,
)

LocalCluster = Callable[..., Any]
N_SEQUENCES = int(os.environ.get("HALFMOON_SEQUENCES") or by_day(200, at_night=2000))
SIZE = LAYOUT.block_size
NAMES = ("", "conductor-0", "conductor-0", "somebody")
N_PAGES = 8
N_NEW = 6


@pytest.fixture
def random() -> Random:
    drawn = 1 if os.environ.get("CI") else SystemRandom().getrandbits(32)
    seed = int(os.environ.get("HALFMOON_SEED") or drawn)
    print(f"HALFMOON_SEED={seed}")
    return Random(seed)


REFUSALS = (DecodeRefused, DecodeFailed, PrefillFailed, ShareEnded, KvstoreRefused)


class Crowd:
    """Callers of one worker, and what they might say."""

    def __init__(self, cluster: Any, worker: str, random: Random) -> None:
        self.cluster, self.random = cluster, random
        self.worker, self.task = cluster.worker(worker), cluster.members[worker].task
        self.callers: list[WorkerCaller] = []
        self.said: list[Message] = []
        self.n_said = 0

    async def dial(self, name: str) -> WorkerCaller:
        caller = await dial(self.cluster, self.worker.info.worker_id)
        if name:
            await caller.send(Hello(conductor_id=ConductorId(name), session=1))
        return caller

    async def speak(self, make: Callable[[WorkerCaller], Message]) -> None:
        """One sequence."""
        random = self.random
        while len(self.callers) < len(NAMES):
            self.callers.append(await self.dial(NAMES[len(self.callers)]))
        for _ in range(random.randint(3, 14)):
            i = random.randrange(len(self.callers))
            match random.random():
                case x if x < 0.03:
                    await self.callers[i].close()
                    self.callers[i] = await self.dial(NAMES[i])
                    continue
                case x if x < 0.2 and self.said:
                    message: Message | None = random.choice(self.said[-12:])
                case x if x < 0.25:
                    message = random.choice(EXAMPLES)
                case x if x < 0.55:
                    message = mutate_message(make(self.callers[i]), random)
                case _:
                    message = make(self.callers[i])
            if message is not None:
                self.said.append(message)
                self.n_said += 1
                await self.callers[i].send(message)
            if random.random() < 0.5:
                await asyncio.sleep(random.choice((0, 0, 0.001, 0.002)))

    async def close(self) -> None:
        for caller in self.callers:
            await caller.close()


async def haunt(
    cluster: Any,
    crowd: Crowd,
    make: Callable[[WorkerCaller], Message],
    hush: Callable[[], list[Message]],
) -> None:
    """Sequence after sequence beside a victim; each caller ends its own things in between."""
    before, random = n_failed(), crowd.random
    for _ in range(N_SEQUENCES):
        # Some prompts come again, so that blocks are read from a kvstore, too.
        prompt = [(random.randrange(6) * 131 + i * 7) % 990 for i in range(random.randint(1, 70))]
        victim = asyncio.create_task(cluster.generate(prompt, N_NEW))
        await crowd.speak(make)
        async with asyncio.timeout(60):
            assert await victim == ORACLE.expected(prompt, N_NEW)
        assert not crowd.task.done()
        if hasattr(crowd.worker, "check"):
            crowd.worker.check()
        cluster.core.check()
        assert Strict.n_failed == 0, "a forward pass failed"
        assert n_failed() == before, "only the last line of defence held"
        for caller in crowd.callers:
            await caller.send(*hush())
            for refusal in (m for m in caller.received if isinstance(m, REFUSALS)):
                was_asked_for = not refusal.reason  # the end of a stopped share
                assert was_asked_for or refusal.code in error_codes.ALL, refusal
            caller.received.clear()
    print(f"{N_SEQUENCES} sequences, {crowd.n_said} messages")


def sampling(random: Random) -> Sampling:
    return random.choice(
        (
            Sampling(temperature=0.0),
            Sampling(seed=3, repetition_penalty=1.5),
            Sampling(logit_bias=((random.choice((5, 996, 997, 2**32 - 1)), 1.0),)),
            Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2),
        )
    )


def name_for(random: Random, held: list[RequestId]) -> RequestId:
    """Mostly one of a few of the callers' own, sometimes the victim's."""
    if held and random.random() < 0.3:
        return random.choice(held)
    return RequestId(f"mine-{random.randrange(4)}")


def n_of(request_id: str) -> int:
    """Tokens of the prompt of a caller's request."""
    return {"mine-0": 1, "mine-1": 16, "mine-2": 17}.get(request_id, 40)


def a_greeting(random: Random) -> Message:
    hello = Hello(conductor_id=ConductorId(random.choice(NAMES)), session=1)
    return random.choice((hello, Unwelcome(reason="not mine")))


def a_start(
    cluster: Any, random: Random, request_id: str, n_tokens: int, landing: Landing
) -> StartPrefill:
    tokens, store = [random.randrange(997) for _ in range(n_tokens)], address_of(cluster)
    return start_prefill(
        request_id,
        tokens,
        landing,
        n_new=3,
        block_hashes=chain_of(tokens, salt="own"),
        landing_expires_s=random.choice((0.0, 0.001, 9.0, 9.0)),
        sampling=sampling(random),
        cached=random.choice((None, CachedPrefix(store, 2, (store,)))),
        store_in=random.choice((None, store)),
    )


class Strict(FakeEngine):
    """An engine that fails a whole batch for one token outside of its vocabulary, as a model's
    does, and counts that."""

    n_failed = 0

    def forward(self, runs: Any, **hooks: Any) -> Any:
        for run in runs:
            history = run.draw.history if run.draw is not None else ()
            biased = [t for t, _ in run.draw.sampling.logit_bias] if run.draw is not None else []
            tokens = [*run.token_ids, *history, *biased]
            if not 0 <= min(tokens) <= max(tokens) < self.n_vocab or len(history) > 4096:
                Strict.n_failed += 1
                raise ValueError("a token that is not in the vocabulary")
        return super().forward(runs, **hooks)


OWN = [RequestId(f"mine-{i}") for i in range(4)]


def hush() -> list[Message]:
    return [Cancel(request_id=request_id) for request_id in OWN]


@pytest.mark.parametrize("local_prefill_tokens", [0, 64])
async def test_nothing_said_to_a_decode_worker_harms_another_conductors_requests(
    local_cluster: LocalCluster, random: Random, local_prefill_tokens: int
) -> None:
    def start_local(caller: WorkerCaller) -> Message:
        """Mostly of a landing that this caller has reserved."""
        landed = [m for m in caller.received if isinstance(m, DecodeReserved)]
        if not landed:
            return Cancel(request_id=name_for(random, []))
        chosen = random.choice(landed[-3:])
        return a_start(cluster, random, chosen.request_id, n_of(chosen.request_id), chosen.landing)

    def make(caller: WorkerCaller) -> Message:
        if local_prefill_tokens and random.random() < 0.3:
            return start_local(caller)
        request_id = name_for(random, worker.batch.request_ids())
        n_new = random.choice((1, 2, 5, 30))
        match random.randrange(11):
            case 0 | 1 | 2:
                return reserve(request_id, n_of(request_id), n_new)
            case 3 | 4 | 5 | 6 | 7 | 8:
                own = [m.request_id for m in caller.received if isinstance(m, DecodeReserved)]
                if own and random.random() < 0.8:
                    request_id = random.choice(own)
                return start_decode(
                    request_id,
                    random.choice((0, 5, 7, 996, 997, 2**31)),
                    random.choice((1, n_of(request_id))),
                    n_new,
                    sampling=sampling(random),
                    history=(random.choice((1, 996, 997)),) * n_of(request_id),
                )
            case 9:
                return Cancel(request_id=request_id, landing_in_doubt=random.random() < 0.5)
            case _:
                return a_greeting(random)

    settings = {
        "landing_ttl_s": 3.0,
        "quarantine_s": 0.05,
        "local_prefill_tokens": local_prefill_tokens,
    }
    async with local_cluster(Strict, n_pages=200, decode_settings=settings) as cluster:
        crowd = Crowd(cluster, "decode-0", random)
        worker = crowd.worker
        await haunt(cluster, crowd, make, hush)
        await crowd.close()
        await cluster.settled()


async def test_nothing_said_to_a_prefill_worker_harms_another_conductors_requests(
    local_cluster: LocalCluster, random: Random
) -> None:
    def make(_: WorkerCaller) -> Message:
        request_id = name_for(random, list(worker.jobs))
        pages = random.sample(range(N_PAGES), random.choice((0, 1, 3, N_PAGES)))
        match random.randrange(8):
            case 0 | 1 | 2 | 3:
                landing = Landing(memory.region, tuple(pages), LAYOUT)
                n_tokens = random.choice((1, 15, 16, 17, 40, 100))
                start = a_start(cluster, random, request_id, n_tokens, landing)
                return msgspec.structs.replace(start, priority=random.choice((0, -5, 2**40)))
            case 4 | 5:
                return Cancel(request_id=request_id)
            case _:
                return a_greeting(random)

    async with local_cluster(Strict, chunk_tokens=16, n_pages=200) as cluster:
        crowd = Crowd(cluster, "prefill-0", random)
        worker = crowd.worker
        with TransferEngine.open("own", metadata=cluster.store, backends=("memory",)) as transfer:
            memory = transfer.allocate(N_PAGES * LAYOUT.block_bytes)
            await haunt(cluster, crowd, make, hush)
            await crowd.close()
            await cluster.settled()


async def test_nothing_said_to_a_kvstore_harms_another_clients_blocks(
    local_cluster: LocalCluster, random: Random
) -> None:
    def make(caller: WorkerCaller) -> Message:
        ticket = Ticket(f"t-{random.randrange(5)}")
        chain = [BlockHash(f"own-{random.randrange(3)}-{i}".encode()) for i in range(40)]
        hashes = tuple(chain[: random.choice((0, 1, 3, 40))])
        if random.random() < 0.1:
            hashes = tuple(random.choices(chain, k=4))
        held = worker.tiers.memory.hashes() if worker.tiers is not None else []
        others = tuple(random.sample(held, min(len(held), 5)))
        reserved = [m for m in caller.received if isinstance(m, BlocksReserved)]
        places = reserved[-1].places if reserved else ()
        match random.randrange(13):
            case 0 | 1 | 2:
                return ReserveBlocks(
                    ticket=ticket,
                    layout=LAYOUT,
                    hashes=hashes,
                    parent=random.choice((None, *chain[:2])),
                    token_ids=(0,) * (len(hashes) * SIZE),
                    tenant=random.choice(("", "lab")),
                )
            case 3:
                return CommitBlocks(ticket=ticket, checksums=(7,) * len(places))
            case 4:
                return RevokeBlocks(ticket=ticket)
            case 5 | 6:
                return LeaseBlocks(
                    ticket=ticket, layout=LAYOUT, hashes=random.choice((hashes, others))
                )
            case 7:
                return random.choice((RenewLease(ticket=ticket), ReleaseLease(ticket=ticket)))
            case 8:
                return ReplicateBlocks(
                    ticket=ticket,
                    source=KvstoreAddress(WorkerId("none"), 1, "mem://none"),
                    layout=LAYOUT,
                    hashes=hashes,
                    parent=None,
                    token_ids=(),
                )
            case 9:
                return random.choice((DropBlocks(hashes=others), VerifyBlocks(hashes=others)))
            case 10:
                return SnapshotBlocks(ticket=ticket)
            case _:
                return a_greeting(random)

    def let_go() -> list[Message]:
        tickets = [Ticket(f"t-{i}") for i in range(5)]
        ends = [(RevokeBlocks(ticket=t), ReleaseLease(ticket=t)) for t in tickets]
        return [message for pair in ends for message in pair]

    async with local_cluster(kvstore_mib=1) as cluster:
        crowd = Crowd(cluster, "kvstore-0", random)
        worker = crowd.worker
        await haunt(cluster, crowd, make, let_go)
        await crowd.close()
        await cluster.settled()
        memory = worker.tiers.memory
        memory.check()
        memory.expire(cluster.clock.now() + 1000.0)
        assert (memory.n_reserved, memory.n_leased) == (0, 0)
        # What strangers stored is evicted like anything else: no block stays for ever.
        assert len(memory.victims(memory.n_stored)) == memory.n_stored


EVIL = ("prefill-9", "decode-9", "kvstore-9")


class SilentLink:
    """A link that takes all messages, and whose worker says nothing."""

    def send_now(self, message: Message) -> None:
        """Take a message."""

    def break_off(self, reason: str) -> None:
        """Stay up."""


def about(message: Message, request_id: RequestId) -> Message:
    """The same of another request."""
    match message:
        case TokensProduced():
            produced = tuple(
                Produced(request_id, one.token, one.finish) for one in message.produced
            )
            return msgspec.structs.replace(message, produced=produced)
        case _ if hasattr(message, "request_id"):
            return msgspec.structs.replace(message, request_id=request_id)
    return message


async def test_nothing_that_workers_say_harms_requests_of_other_workers(
    local_cluster: LocalCluster, random: Random
) -> None:
    async with local_cluster() as cluster:
        hub, core = cluster.hub, cluster.core
        n_said = 0
        heard: list[tuple[Any, Any]] = []
        real = hub._receive

        def listen(member: Any, message: Any) -> None:
            real(member, message)
            heard.append((member, message))

        hub._receive = listen
        evil = {}
        taker: Any = SilentLink()
        for name in EVIL:
            info = a_worker(name, layout=LAYOUT, model="m", draining=True)
            evil[name] = hub._members[info.worker_id] = _Member(info, link=taker)

        def worker_said(member: Any, message: Any) -> None:
            """One that drains gets no requests, so that the victim does not depend on it."""
            nonlocal n_said
            n_said += 1
            if isinstance(message, Welcome) and member.info.worker_id in EVIL:
                record: WorkerInfo = message.worker
                message = Welcome(worker=msgspec.structs.replace(record, draining=True))
            member.link = member.link or taker
            member.refused = ""
            real(member, message)
            core.check()

        for _ in range(N_SEQUENCES):
            prompt = [(random.randrange(6) * 131 + i * 7) % 990 for i in range(40)]
            victim = asyncio.create_task(cluster.generate(prompt, N_NEW))
            live = RequestId(f"cmpl-{cluster.n_requests + 1}")
            for _ in range(random.randint(3, 20)):
                late = random.choice(heard[-60:]) if heard else None
                member = evil[random.choice(EVIL)]
                match random.random():
                    case x if x < 0.3 and late is not None:
                        worker_said(*late)  # twice or late, from the worker that said it
                    case x if x < 0.5 and late is not None:
                        worker_said(member, late[1])  # from another one
                    case x if x < 0.6:
                        worker_said(member, Welcome(worker=member.info))
                    case _:
                        message = about(random.choice(EXAMPLES), live)
                        if random.random() < 0.5:
                            message = mutate_message(message, random) or message
                        if isinstance(message, Welcome):
                            name = WorkerId(random.choice((*EVIL, "decode-0")))
                            message = Welcome(
                                worker=msgspec.structs.replace(message.worker, worker_id=name)
                            )
                        worker_said(member, message)
                await asyncio.sleep(random.choice((0, 0, 0.001)))
            async with asyncio.timeout(60):
                assert await victim == ORACLE.expected(prompt, N_NEW)
        print(f"{N_SEQUENCES} sequences, {n_said} messages")
        await cluster.settled()
