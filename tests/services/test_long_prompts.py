"""Prompts that take longer than what they hold at kvstores lasts: it is renewed until they end."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_runtime.clock import FakeClock
from tests.services.asking import ORACLE, prompt_of

LocalCluster = Callable[..., Any]
#: Seconds of a lease and of a reservation; it is renewed three times as often.
TTL_S = 0.6
WITHIN_S = 60.0


class HeldUp(FakeEngine):
    """An engine whose forward passes wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    def forward(self, *args: Any, **hooks: Any) -> Any:
        assert self.go_on.wait(WITHIN_S)
        return super().forward(*args, **hooks)


class Renewed:
    """Counts what a kvstore is asked to renew, and lets its time pass with that."""

    def __init__(self, kvstore: Any, clock: FakeClock) -> None:
        self.tickets: list[str] = []
        really = kvstore.tiers.renew

        def renew(owner: str, ticket: Any, now: float) -> bool:
            self.tickets.append(ticket)
            known = really(owner, ticket, now)
            # By far more than a lease lasts, once it is renewed a few times.
            clock.advance(TTL_S / 6)
            return bool(known)

        kvstore.tiers.renew = renew


@pytest.mark.parametrize("n_known", [300, 150], ids=["all of it cached", "half of it cached"])
async def test_a_prompt_that_outlasts_its_lease_and_its_reservation_keeps_both(
    local_cluster: LocalCluster, n_known: int
) -> None:
    clock = FakeClock()
    engines: list[HeldUp] = []

    def make() -> HeldUp:
        engines.append(HeldUp())
        return engines[-1]

    settings = {"lease_ttl_s": TTL_S, "reservation_ttl_s": TTL_S}
    async with local_cluster(make, kvstore_settings=settings, kvstore_clock=clock) as cluster:
        kvstore, prompt = cluster.worker("kvstore-0"), prompt_of(300)
        await cluster.generate(prompt[:n_known], 1)
        await cluster.settled()
        memory = kvstore.tiers.memory
        n_stored = memory.n_stored
        assert n_stored > 0
        prefill = engines[0]
        prefill.go_on.clear()
        generating = asyncio.create_task(cluster.generate(prompt, 20))
        await cluster.until(lambda: memory.n_leased > 0)
        renewed = Renewed(kvstore, clock)
        began_s = clock.now()
        # Four times what each of them lasts.
        await cluster.until(lambda: clock.now() > began_s + 4 * TTL_S, WITHIN_S)
        assert memory.n_leased > 0, "the lease ran out under the prompt"
        n_to_come = len(prompt) // kvstore.info.layout.block_size - n_stored
        assert memory.n_reserved == n_to_come, "the reservation ran out under the prompt"
        assert len(set(renewed.tickets)) >= (2 if n_to_come else 1)
        prefill.go_on.set()
        assert await generating == ORACLE.expected(prompt, 20)
        await cluster.settled()
        n_completed = (len(prompt) + 19) // 16 - len(prompt) // 16  # by decode
        assert memory.n_stored == n_stored + n_to_come + n_completed, "blocks were not kept"


async def test_after_a_prompt_nothing_is_renewed(local_cluster: LocalCluster) -> None:
    clock = FakeClock()
    async with local_cluster(
        kvstore_settings={"lease_ttl_s": TTL_S}, kvstore_clock=clock
    ) as cluster:
        prompt = prompt_of(300)
        for _ in range(3):
            await cluster.generate(prompt, 1)
        await cluster.settled()
        named = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
        assert not any("_renew_until_cancelled" in name for name in named)
