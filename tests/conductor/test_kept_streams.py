"""What a conductor keeps of streams: numbered events, and which streams go first."""

import random
from dataclasses import dataclass

import pytest

from halfmoon_conductor.resumption.event_log import EventLog
from halfmoon_conductor.resumption.resumption_limits import StreamPhase, choose_victim

TAG = "0" * 12


@dataclass(frozen=True)
class Kept:
    tenant: str
    phase: StreamPhase
    since_s: float
    n_bytes: int = 10


def victim(*streams: Kept) -> Kept:
    """The same for every order in which the streams are kept."""
    first = choose_victim(streams, lambda _: 1)
    for seed in range(5):
        mixed = random.Random(seed).sample(streams, len(streams))
        assert choose_victim(mixed, lambda _: 1) == first
    return first


def test_ended_streams_go_before_those_that_run_and_these_before_those_that_are_read() -> None:
    read = Kept("lab", StreamPhase.ATTACHED, 1)
    runs = Kept("lab", StreamPhase.DETACHED, 2)
    ended = Kept("lab", StreamPhase.ENDED, 3)
    assert victim(read, runs, ended) == ended
    assert victim(read, runs) == runs
    assert victim(read) == read
    oldest = Kept("lab", StreamPhase.ENDED, 0)
    assert victim(read, ended, oldest) == oldest, "of equal streams the oldest goes"


def test_the_tenant_with_most_streams_or_bytes_pays_and_an_empty_stream_frees_none() -> None:
    quiet = Kept("quiet", StreamPhase.ENDED, 0)
    loud = [Kept("loud", StreamPhase.ATTACHED, since_s) for since_s in (2, 1)]
    assert victim(quiet, *loud) == loud[1]
    large = Kept("few", StreamPhase.ATTACHED, 9, n_bytes=1000)
    empty = Kept("few", StreamPhase.ENDED, 0, n_bytes=0)
    small = [Kept("many", StreamPhase.ENDED, since_s) for since_s in range(5)]
    assert choose_victim([empty, *small, large], lambda each: each.n_bytes) == large


@pytest.mark.random_seeds(20)
def test_pieces_of_events_put_together_are_all_of_them_and_short(seed: int) -> None:
    dice = random.Random(seed)
    log = EventLog(TAG)
    for number in range(1, 60):
        n_before = log.n_events
        events = [
            b"data: %s\n\n" % (b"x" * dice.randint(0, 900)) for _ in range(dice.randint(1, 3))
        ]
        log.append(b"".join(events), f"{number:012x}")
        assert log.n_events == n_before + len(events)
    first = dice.randrange(log.n_events - 1)
    log.trim(first)
    n, pieces = first, list[bytes]()
    while n < log.n_events:
        piece, n = log.after(n, 1500)
        assert len(piece) <= 1500
        pieces.append(piece)
    numbers = [
        int(line[4:].split(b"-")[0])
        for line in b"".join(pieces).split(b"\n")
        if line.startswith(b"id: ")
    ]
    assert numbers == list(range(first + 1, log.n_events + 1))


def test_a_long_event_is_a_piece_by_itself() -> None:
    log = EventLog(TAG)
    log.append(b"data: %s\n\n" % (b"x" * 5000), TAG)
    log.append(b"data: short\n\n", TAG)
    piece, n = log.after(0, 100)
    assert (len(piece) > 5000, n) == (True, 1)


def test_a_trimmed_log_knows_its_numbers_and_holds_the_bytes_that_it_says() -> None:
    log = EventLog(TAG)
    for token in range(10):
        log.append(b"data: %d\n\n" % token, f"{token:012x}")
    log.trim(8)
    assert log.n_events == 10
    assert log.id_of(8) == f"8-{TAG}-{7:012x}"
    assert log.id_of(11) is None
    piece, n = log.after(7, 10_000)
    assert (len(piece), n) == (log.n_bytes, 10)
    log.trim(3)  # what is gone stays gone
    assert log.n_events == 10
