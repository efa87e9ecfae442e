"""The layers of a cached prefix, from one replica or another: by hand, with transfers at will."""

import asyncio
import gc
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future

import pytest

from halfmoon_prefix_cache.prefix_fetch import LayerArrivals, LayerFetch, PrefixFetch
from halfmoon_transfer.interface import Cancelled, Lost, Report, TimedOut, Transfer, TransferError
from halfmoon_transfer.threads.future_await import await_future

N_LAYERS = 4
ONE_BY_ONE = tuple(range(i, i + 1) for i in range(N_LAYERS))


class ByHand(Transfer):
    """A transfer that ends when the test says so; one that is cancelled ends at once."""

    def __init__(self, replica: str, group: range) -> None:
        self.replica, self.group = replica, group
        self.future: Future[Report] = Future()

    def arrive(self) -> None:
        self.future.set_result(Report(len(self.group), 0.0, (self.replica,), 0))

    def fail(self) -> None:
        self.future.set_exception(Lost(f"{self.replica} is gone"))

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> Report:
        return self.future.result(timeout_s)

    def cancel(self) -> None:
        if not self.done():
            self.future.set_exception(Cancelled("not wanted"))

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        self.future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[object, None, Report]:
        return await_future(self.future)


class SlowToEnd(ByHand):
    """A transfer that goes on for a while after it was cancelled, as a thread does."""

    def cancel(self) -> None:
        pass


class Bench:
    """A read, its transfers so far, and the replicas that there are."""

    def __init__(
        self,
        *replicas: str,
        groups: Sequence[range] = ONE_BY_ONE,
        patience_s: float = 60.0,
        kind: type[ByHand] = ByHand,
    ) -> None:
        self.replicas = list(replicas)
        self.kind = kind
        self.transfers: list[ByHand] = []
        self.errors: list[tuple[str, int]] = []
        self.read = PrefixFetch(groups, self.submit, self.take_over, patience_s)

    def submit(self, group: range) -> ByHand:
        self.transfers.append(self.kind(self.replicas[0], group))
        return self.transfers[-1]

    async def take_over(self, error: TransferError, n_here: int) -> bool:
        assert all(t.done() for t in self.transfers), "pages are still written to"
        self.errors.append((str(error), n_here))
        del self.replicas[0]
        return bool(self.replicas)

    async def asked(self, replica: str) -> list[ByHand]:
        """What is asked of a replica, in the order of layers; waits until it is."""
        while not (found := [t for t in self.transfers if t.replica == replica]):
            await asyncio.sleep(0)
        while found[-1].group.stop < N_LAYERS:  # one group is asked for after the other
            await asyncio.sleep(0)
            found = [t for t in self.transfers if t.replica == replica]
        return found

    async def paths(self) -> list[str]:
        async with asyncio.timeout(20):
            return [(await layer).path[0] for layer in self.read.layers]


async def test_layers_are_announced_in_their_order_without_a_turn_of_the_event_loop() -> None:
    bench = Bench("a")
    first, second, third, _ = await bench.asked("a")
    announced: list[int] = []
    numbers: dict[Transfer, int] = {layer: i for i, layer in enumerate(bench.read.layers)}
    for layer in bench.read.layers:
        layer.add_done_callback(lambda done: announced.append(numbers[done]))
    third.arrive()
    second.arrive()
    assert announced == []
    first.arrive()
    assert announced == [0, 1, 2]
    bench.read.cancel()
    with pytest.raises(Cancelled):
        await bench.read.layers[3]


@pytest.mark.parametrize("n_cancels", [1, 3])
async def test_layers_end_when_their_reads_are_over_though_cancelled_while_another_failed(
    n_cancels: int,
) -> None:
    bench = Bench("a", "b", kind=SlowToEnd)
    first, *others = await bench.asked("a")
    first.fail()
    for _ in range(n_cancels):
        await asyncio.sleep(0.01)  # it waits for the others to end
        bench.read._task.cancel()
    await asyncio.sleep(0.01)
    assert not any(layer.done() for layer in bench.read.layers), "pages are still written to"
    for other in others:
        ByHand.cancel(other)
    for layer in bench.read.layers:
        with pytest.raises(Cancelled):
            await layer
    assert bench.errors == []


def test_a_late_callback_of_a_replica_that_was_given_up_announces_nothing() -> None:
    layers = [LayerFetch(lambda: None) for _ in range(N_LAYERS)]
    arrivals = LayerArrivals(layers)
    given_up, other = ByHand("a", range(1)), ByHand("b", range(1))
    arrivals.expect(given_up.group, given_up)
    arrivals.expect_no_more()
    arrivals.expect(other.group, other)
    given_up.arrive()
    assert arrivals.n_here == 0 and not layers[0].done()
    other.arrive()
    assert layers[0].result(0).path == ("b",)


def test_a_layer_of_a_replica_that_was_given_up_is_not_kept_for_its_turn() -> None:
    layers = [LayerFetch(lambda: None) for _ in range(N_LAYERS)]
    arrivals = LayerArrivals(layers)
    early, first = ByHand("a", range(1, 2)), ByHand("b", range(1))
    arrivals.expect(early.group, early)
    early.arrive()
    arrivals.expect_no_more()
    arrivals.expect(first.group, first)
    first.arrive()
    assert arrivals.n_here == 1 and not layers[1].done()


def test_a_layer_that_comes_after_the_end_stays_ended() -> None:
    layers = [LayerFetch(lambda: None) for _ in range(N_LAYERS)]
    arrivals = LayerArrivals(layers)
    late = ByHand("a", range(1))
    arrivals.expect(late.group, late)
    arrivals.end(Cancelled("not wanted"))
    late.arrive()
    for layer in layers:
        with pytest.raises(Cancelled):
            layer.result(0)


@pytest.mark.parametrize("groups", [ONE_BY_ONE, (range(1), range(1, 3), range(3, 4))])
async def test_after_an_error_another_replica_brings_the_groups_that_are_missing(
    groups: Sequence[range],
) -> None:
    bench = Bench("a", "b", groups=groups)
    first, second, *_ = await bench.asked("a")
    first.arrive()
    await bench.read.layers[0]
    second.fail()
    rest = await bench.asked("b")
    assert [t.group for t in rest] == list(groups[1:])
    for transfer in rest:
        transfer.arrive()
    assert await bench.paths() == ["a", "b", "b", "b"]
    assert bench.errors == [("a is gone", 1)]


async def test_the_layers_of_a_group_are_there_together_and_its_bytes_count_once() -> None:
    bench = Bench("a", groups=(range(1), range(1, 4)))
    first, rest = await bench.asked("a")
    rest.arrive()
    assert not any(layer.done() for layer in bench.read.layers)
    first.arrive()
    assert all(layer.done() for layer in bench.read.layers)
    assert sum(layer.result(0).n_bytes for layer in bench.read.layers) == N_LAYERS


async def test_layers_that_came_before_their_turn_are_read_anew_from_another_replica() -> None:
    bench = Bench("a", "b")
    first, *early = await bench.asked("a")
    for transfer in early:
        transfer.arrive()
    first.fail()
    again = await bench.asked("b")
    assert [t.group for t in again] == list(ONE_BY_ONE)
    again[0].arrive()
    assert not bench.read.layers[1].done(), "bytes of two replicas in one prefix"
    for transfer in again[1:]:
        transfer.arrive()
    assert await bench.paths() == ["b"] * N_LAYERS


async def test_one_that_brings_nothing_for_too_long_is_given_up() -> None:
    bench = Bench("a", patience_s=0.01)
    with pytest.raises(TimedOut, match=r"no layer came for 0\.01 s"):
        await bench.read.layers[0]
    [(error, n_here)] = bench.errors
    assert "0.01 s" in error and n_here == 0


async def test_when_no_replica_is_left_the_missing_layers_end_with_the_last_error() -> None:
    bench = Bench("a", "b")
    (await bench.asked("a"))[0].fail()
    first, second, *_ = await bench.asked("b")
    first.arrive()
    second.fail()
    assert (await bench.read.layers[0]).path == ("b",)
    for layer in bench.read.layers[1:]:
        with pytest.raises(Lost, match="b is gone"):
            await layer


async def test_cancelled_it_ends_once_nothing_is_under_way() -> None:
    bench = Bench("a", "b")
    transfers = await bench.asked("a")
    transfers[0].arrive()
    await bench.read.layers[0]
    for layer in bench.read.layers:
        layer.cancel()
    for layer in bench.read.layers[1:]:
        with pytest.raises(Cancelled):
            await layer
    assert all(transfer.done() for transfer in transfers)
    assert bench.errors == []
    bench = Bench("a")
    bench.read.cancel()  # before it began
    with pytest.raises(Cancelled):
        await bench.read.layers[0]
    assert bench.transfers == []


async def test_a_wait_that_was_cut_off_leaves_no_exception_behind_that_nobody_takes() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    bench = Bench("a", patience_s=0.01)
    with pytest.raises(TimedOut):
        await bench.read.layers[-1]
    del bench
    for _ in range(3):
        gc.collect()
        await asyncio.sleep(0)
    assert complaints == []
