"""Files that are replaced are there whole, whatever ends the writing."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from halfmoon_metadata.whole_file import create_file, file_lock, replace_file, replacing_file
from halfmoon_testing.full_disk import no_files_above


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(OSError), no_files_above(100):
        replace_file(path, bytes(1000))
    with pytest.raises(KeyboardInterrupt), replacing_file(path) as draft:
        draft.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_file_keeps_its_mode_and_a_new_one_is_its_owners_alone(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    replace_file(path, b"after")
    assert mode_of(path) == mode
    replace_file(tmp_path / "new", b"")
    assert mode_of(tmp_path / "new") == 0o600
    replace_file(path, b"again", mode=0o444)
    assert mode_of(path) == 0o444


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.chown(path, 1234, 4321)
    replace_file(path, b"after")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 4321)


def test_a_link_stays_and_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"before")
    link.symlink_to(target)
    replace_file(link, b"after")
    assert link.is_symlink()
    assert target.read_bytes() == b"after"
    program = "from pathlib import Path; from halfmoon_metadata.whole_file import replace_file; "
    program += "replace_file(Path('/dev/stdout'), b'said')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"said"


def test_a_file_that_comes_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    create_file(path, b"first")
    create_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_changes_that_several_make_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()

    def add() -> None:
        for _ in range(20):
            with file_lock(path):
                replace_file(path, path.read_bytes() + b".", durable=False)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == b"." * 80
