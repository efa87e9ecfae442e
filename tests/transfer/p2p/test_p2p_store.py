"""Objects from one to many: what getters get, who serves it, and who may die meanwhile."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from halfmoon_metadata import MemoryStore, MetadataUnreachable
from halfmoon_transfer import Piece, Rejected
from halfmoon_transfer.p2p import (
    NameTaken,
    NotPublished,
    ObjectReplaced,
    P2PSettings,
    P2PStore,
    ShardUnavailable,
    WrongBuffers,
)
from halfmoon_transfer.p2p import object_record as records
from halfmoon_transfer.p2p.object_catalog import ObjectCatalog
from halfmoon_transfer.p2p.object_record import ObjectRecord

World = Any
SHARD = 100_000
SIZES = (250_000, 0, 1, 100_000)


class Peers:
    """P2P clients of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._stack = ExitStack()

    def open(self, name: str, **overrides: Any) -> P2PStore:
        engine = self.world.open(name)
        quick = P2PSettings(**({"patience_s": 0.3} | overrides))
        return self._stack.enter_context(P2PStore(engine, self.world.metadata, quick))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(params=["memory", "tcp"])
def peers(request: pytest.FixtureRequest, make_world: Any) -> Iterator[Peers]:
    peers = Peers(make_world(request.param))
    yield peers
    peers.close()


def content(seed: int = 0) -> list[bytearray]:
    dice = random.Random(seed)
    return [bytearray(dice.randbytes(size)) for size in SIZES]


def room() -> list[bytearray]:
    return [bytearray(size) for size in SIZES]


def checked(catalog: ObjectCatalog, name: str) -> ObjectRecord:
    record = catalog.read(name)
    assert record is not None
    record.check()
    return record


def sources(peers: Peers, name: str) -> dict[str, bool]:
    """Who holds it, and whether as gold."""
    record = checked(ObjectCatalog(peers.world.metadata), name)
    return {each.source.segment: each.gold for each in record.holders}


# Publishing and getting.


def test_a_getter_gets_exactly_what_was_published(peers: Peers) -> None:
    publisher, getter = peers.open("publisher"), peers.open("getter")
    given_, got = content(), room()
    steps: list[int] = []
    publisher.publish("weights", given_, shard_bytes=SHARD)
    report = getter.get_replica("weights", got, progress=steps.append)
    assert got == given_
    assert report.bytes_from == {"publisher": sum(SIZES)}
    assert (sum(steps), report.n_failures) == (report.n_bytes, 0)
    assert sources(peers, "weights") == {"publisher": True, "getter": False}


def test_the_last_one_out_takes_the_record_along(peers: Peers) -> None:
    publisher, getter = peers.open("publisher"), peers.open("getter")
    publisher.publish("weights", content())
    getter.get_replica("weights", room())
    publisher.unpublish("weights")
    getter.drop("weights")
    assert publisher.list() == []
    with pytest.raises(NotPublished, match="no object weights"):
        getter.get_replica("weights", room())


def test_buffers_are_their_owners_alone_after_dropping(peers: Peers) -> None:
    engine = peers.world.open("publisher")
    publisher, getter = P2PStore(engine, peers.world.metadata), peers.open("getter")
    publisher.publish("weights", content())
    record = publisher.lookup("weights")
    assert engine.stats().n_regions == 3
    publisher.unpublish("weights")
    assert engine.stats().n_regions == 0
    # Somebody who read the record before is refused, and says who it was.
    peers.world.metadata.put(records.PREFIX + "weights", records.encode(record))
    with pytest.raises(ShardUnavailable, match=r"publisher: .*no region of this key"):
        getter.get_replica("weights", room())
    assert getter._engine.stats().n_regions == 0


def test_peers_can_not_write_what_is_published(make_world: Any) -> None:
    peers = Peers(make_world("tcp"))
    publisher = peers.open("publisher")
    getter = peers.world.open("getter")
    given_ = content()
    place = publisher.publish("weights", given_).holders[0].places[0]
    assert place is not None
    local = getter.allocate(10)
    with pytest.raises(Rejected, match="read-only"):
        getter.submit("write", [Piece(local.region, 0, place.region, 0, 10)]).result(60)
    assert given_ == content()
    peers.close()


def test_several_may_publish_the_same_bytes(peers: Peers) -> None:
    first, second, getter = (peers.open(name) for name in ("first", "second", "getter"))
    first.publish("weights", content(), shard_bytes=SHARD)
    second.publish("weights", content(), shard_bytes=SHARD)
    assert sources(peers, "weights") == {"first": True, "second": True}
    first.unpublish("weights")
    got = room()
    assert getter.get_replica("weights", got).bytes_from == {"second": sum(SIZES)}
    assert got == content()


def test_other_bytes_need_another_name_or_a_replacement(peers: Peers) -> None:
    first, second, getter = (peers.open(name) for name in ("first", "second", "getter"))
    first.publish("weights", content(1))
    with pytest.raises(NameTaken, match="another object is published as weights: 350001 bytes"):
        second.publish("weights", content(2))
    second.publish("weights", content(2), replace=True)
    assert not first.serving("weights")
    assert second.serving("weights")
    got = room()
    getter.get_replica("weights", got)
    assert got == content(2)


def test_a_name_whose_holders_are_dead_is_free(peers: Peers) -> None:
    first, second = peers.open("first"), peers.open("second")
    first.publish("weights", content(1))
    first._engine.close()
    second.publish("weights", content(2))
    assert sources(peers, "weights") == {"second": True}


def test_one_client_holds_a_name_once(peers: Peers) -> None:
    publisher, getter = peers.open("publisher"), peers.open("getter")
    publisher.publish("weights", content())
    getter.get_replica("weights", room())
    with pytest.raises(NameTaken, match="publisher holds object weights already"):
        publisher.publish("weights", content())
    with pytest.raises(NameTaken):
        getter.get_replica("weights", room())
    with pytest.raises(NotPublished, match="not fetched by segment publisher"):
        publisher.drop("weights")
    with pytest.raises(NotPublished, match="not published by segment getter"):
        getter.unpublish("weights")
    getter.drop("weights")
    getter.get_replica("weights", room())


def test_buffers_must_fit(peers: Peers) -> None:
    publisher, getter = peers.open("publisher"), peers.open("getter")
    publisher.publish("weights", content())
    with pytest.raises(WrongBuffers, match="4 buffers of 350001 bytes, given were 1 of 10"):
        getter.get_replica("weights", [bytearray(10)])
    with pytest.raises(WrongBuffers, match="read-only"):
        getter.get_replica("weights", [bytes(each) for each in room()])
    assert getter._engine.stats().n_regions == 0
    got = room()
    getter.get_replica("weights", got)
    assert got == content()


def test_an_object_of_nothing_is_one_too(peers: Peers) -> None:
    publisher, getter = peers.open("publisher"), peers.open("getter")
    publisher.publish("nothing", [b"", b""])
    assert getter.get_replica("nothing", [bytearray(), bytearray()]).n_bytes == 0
    publisher.unpublish("nothing")
    assert sources(peers, "nothing") == {"getter": False}


def test_a_listing_counts_who_holds_what(peers: Peers) -> None:
    publisher, getter = peers.open("publisher"), peers.open("getter")
    publisher.publish("a/1", content(), shard_bytes=SHARD)
    publisher.publish("b/1", content())
    getter.get_replica("a/1", room())
    peers.world.metadata.put(records.PREFIX + "a/broken", b"{}")
    (line,) = publisher.list("a/")
    assert (line.name, line.n_bytes, line.n_buffers) == ("a/1", sum(SIZES), 4)
    assert (line.n_gold, line.n_replicas, line.n_partial) == (1, 1, 0)
    assert [each.name for each in publisher.list()] == ["a/1", "b/1"]


def test_names_that_would_not_print_are_refused(peers: Peers) -> None:
    publisher = peers.open("publisher")
    for name in ("", "x" * 201, "a\nb"):
        with pytest.raises(ValueError, match="1 to 200 printable characters"):
            publisher.publish(name, content())
    with pytest.raises(ValueError, match="1 labels for 4 buffers"):
        publisher.publish("weights", content(), labels=["a"])
    publisher.publish("weights", content())


# What goes wrong.


def test_bytes_that_changed_since_they_were_published_are_noticed(peers: Peers) -> None:
    publisher, getter = peers.open("publisher"), peers.open("getter")
    given_ = content()
    publisher.publish("weights", given_, shard_bytes=SHARD)
    given_[0][SHARD] ^= 1
    with pytest.raises(ShardUnavailable, match="publisher: shard 1 came with another checksum"):
        getter.get_replica("weights", room())
    assert sources(peers, "weights") == {"publisher": True}


def test_a_replica_with_wrong_bytes_is_replaced_by_a_good_source(peers: Peers) -> None:
    publisher, bad, getter = (peers.open(name) for name in ("publisher", "bad", "getter"))
    publisher.publish("weights", content(), shard_bytes=SHARD)
    spoilt = room()
    bad.get_replica("weights", spoilt)
    for each in spoilt:
        each[:] = bytes(len(each))
    got = room()
    report = getter.get_replica("weights", got)
    assert got == content()
    assert report.bytes_from == {"publisher": sum(SIZES)}
    assert report.n_failures > 0


def test_holders_that_died_are_taken_out_by_who_notices(peers: Peers) -> None:
    publisher, dead, getter = (peers.open(name) for name in ("publisher", "dead", "getter"))
    publisher.publish("weights", content(), shard_bytes=SHARD)
    dead.get_replica("weights", room())
    dead._engine.close()
    got = room()
    getter.get_replica("weights", got)
    assert got == content()
    assert sources(peers, "weights") == {"publisher": True, "getter": False}


def test_an_object_that_is_replaced_while_it_is_fetched_is_not_mixed(peers: Peers) -> None:
    first, second, getter = (peers.open(n) for n in ("first", "second", "getter"))
    first.publish("weights", content(1), shard_bytes=10_000)
    calls: list[int] = []

    def replace(n_bytes: int) -> None:
        calls.append(n_bytes)
        if len(calls) == 1:
            second.publish("weights", content(2), shard_bytes=10_000, replace=True)

    with pytest.raises(ObjectReplaced):
        getter.get_replica("weights", room(), progress=replace)
    assert sources(peers, "weights") == {"second": True}


def test_a_getter_that_is_interrupted_leaves_nothing_behind(peers: Peers) -> None:
    publisher, getter = peers.open("publisher"), peers.open("getter")
    publisher.publish("weights", content(), shard_bytes=10_000)
    calls: list[int] = []

    def interrupt(n_bytes: int) -> None:
        calls.append(n_bytes)
        if len(calls) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        getter.get_replica("weights", room(), progress=interrupt)
    assert sources(peers, "weights") == {"publisher": True}
    assert getter._engine.stats().n_regions == 0
    assert getter._engine.stats().n_live == 0
    getter.get_replica("weights", room())


class Moody(MemoryStore):
    """Fails as long as it is told to."""

    away = False

    def compare_and_swap(self, *arguments: Any, **options: Any) -> bool:
        if self.away:
            raise MetadataUnreachable("gone fishing")
        return super().compare_and_swap(*arguments, **options)


def test_a_get_goes_on_while_nothing_can_be_announced(make_world: Any) -> None:
    peers = Peers(make_world("memory"))
    peers.world.metadata = Moody()
    publisher, getter = peers.open("publisher"), peers.open("getter")
    publisher.publish("weights", content(), shard_bytes=SHARD)
    peers.world.metadata.away = True
    got = room()
    getter.get_replica("weights", got)
    assert got == content()
    peers.world.metadata.away = False
    assert sources(peers, "weights") == {"publisher": True}
    peers.close()
