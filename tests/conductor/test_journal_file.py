from pathlib import Path

import pytest

from halfmoon_conductor.journal_file import JournalFile, main
from halfmoon_conductor.workers.shell import Shell
from halfmoon_runtime.clock import FakeClock
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.journal import encode_header, read_journal
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import Tick, WorkerJoined
from halfmoon_testing.scheduling_inputs import a_worker

CONFIG = SchedulingConfig()


def journal_of(path: Path, n_ticks: int, max_bytes: int = 1 << 20) -> None:
    journal = JournalFile(path, CONFIG, max_bytes=max_bytes)
    shell = Shell(Conductor(CONFIG), FakeClock(), recorders=[journal.record])
    shell.post(WorkerJoined(a_worker("prefill-0")))
    for _ in range(n_ticks):
        shell.post(Tick())
    journal.close()


def test_what_the_shell_posts_is_in_the_file_and_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    journal_of(path, 3)
    with path.open("rb") as source:
        assert len(list(read_journal(source)[1])) == 4
    assert main([str(path)]) == 0
    assert "4 entries, the same commands" in capsys.readouterr().out


def test_each_tick_writes_out_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = JournalFile(path, CONFIG, max_bytes=1 << 20)
    journal.record(1.0, WorkerJoined(a_worker("prefill-0")), [])
    journal.record(1.0, Tick(), [])
    with path.open("rb") as source:  # it is not closed
        assert len(list(read_journal(source)[1])) == 2
    journal.close()


def test_an_earlier_journal_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal_of(path, 5)
    before = path.read_bytes()
    journal_of(path, 1)
    assert (tmp_path / "journal.previous").read_bytes() == before


def test_a_full_journal_ends_with_a_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    limit = len(encode_header(CONFIG)) + 1000
    journal_of(path, 500, max_bytes=limit)
    assert limit - 200 < path.stat().st_size <= limit
    assert main([str(path)]) == 0


def test_a_difference_and_an_unreadable_file_have_their_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    journal = JournalFile(path, CONFIG, max_bytes=1 << 20)
    journal.record(0.0, WorkerJoined(a_worker("kvstore-0", layout=None)), [])
    journal.close()
    assert main([str(path)]) == 1  # it asks for a snapshot
    assert "entry 0 differs" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 2
    assert main([]) == 2
