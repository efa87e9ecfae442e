"""Folders as objects: whole or not at all, and nowhere but where they belong."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon_transfer.p2p import P2PSettings, P2PStore, ShardUnavailable, WrongBuffers
from halfmoon_transfer.p2p import object_record as records
from halfmoon_transfer.p2p.folder_objects import check_file_path, get_folder, publish_folder

FILES = {
    "config.json": b"{}",
    "model-00001.safetensors": bytes(range(256)) * 9_000,
    "nested/deep/tokens.txt": b"x" * 70_001,
    "nested/empty": b"",
}


@pytest.fixture
def stores(make_world: Any) -> Iterator[list[P2PStore]]:
    """Three clients over TCP."""
    world = make_world("tcp")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                P2PStore(world.open(name), world.metadata, P2PSettings(patience_s=0.2))
            )
            for name in ("publisher", "first", "second")
        ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    for label, data in FILES.items():
        (folder / label).parent.mkdir(parents=True, exist_ok=True)
        (folder / label).write_bytes(data)
    (folder / "nothing").mkdir()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_arrives_as_it_is_and_is_served_on(
    stores: list[P2PStore], folder: Path, tmp_path: Path
) -> None:
    publisher, first, second = stores
    publish_folder(publisher, "model", folder)
    get_folder(first, "model", tmp_path / "a" / "first")
    assert contents(tmp_path / "a" / "first") == FILES
    publisher.unpublish("model")
    (tmp_path / "second").mkdir()
    get_folder(second, "model", tmp_path / "second")
    assert contents(tmp_path / "second") == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "checkpoint", "second"]


def test_links_to_files_are_followed(stores: list[P2PStore], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    (folder / "link").symlink_to(tmp_path / "blob")
    publish_folder(stores[0], "model", folder)
    get_folder(stores[1], "model", tmp_path / "got")
    assert contents(tmp_path / "got") == FILES | {"link": b"blob"}
    assert not (tmp_path / "got" / "link").is_symlink()


def test_a_folder_that_fails_to_arrive_leaves_nothing(
    stores: list[P2PStore], folder: Path, tmp_path: Path
) -> None:
    publish_folder(stores[0], "model", folder)
    with (folder / "model-00001.safetensors").open("r+b") as file:
        file.write(b"other")
    with pytest.raises(ShardUnavailable, match="another checksum"):
        get_folder(stores[1], "model", tmp_path / "got")
    for label, data in FILES.items():
        with (folder / label).open("r+b") as file:
            file.write(data)
    (folder / "config.json").write_bytes(b"")
    with pytest.raises(ShardUnavailable, match="got shorter"):
        get_folder(stores[1], "model", tmp_path / "got")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_exists_is_not_overwritten(
    stores: list[P2PStore], folder: Path, tmp_path: Path
) -> None:
    publish_folder(stores[0], "model", folder)
    with pytest.raises(WrongBuffers, match="exists"):
        get_folder(stores[1], "model", folder)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WrongBuffers, match="exists"):
        get_folder(stores[1], "model", tmp_path / "file")
    assert contents(folder) == FILES


def test_what_is_no_folder_is_said(stores: list[P2PStore], tmp_path: Path) -> None:
    publisher, first, _ = stores
    publisher.publish("memory", [b"abc"])
    with pytest.raises(WrongBuffers, match="memory is not a folder"):
        get_folder(first, "memory", tmp_path / "got")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongBuffers, match="no file"):
        publish_folder(publisher, "nothing", tmp_path / "empty")


@pytest.mark.parametrize(
    "label",
    [
        "/etc/passwd",
        "../up",
        "a/../../up",
        "a//b",
        "./a",
        "a/",
        "",
        "..",
        "a\0b",
        "a\nb",
        "x" * 2000,
    ],
)
def test_names_that_lead_out_of_the_folder_are_refused(
    stores: list[P2PStore], tmp_path: Path, label: str
) -> None:
    publisher, first, _ = stores
    with pytest.raises(WrongBuffers, match="not the path of a file"):
        check_file_path(label)
    record = publisher.publish("evil", [b"abc"], labels=["fine"])
    evil = msgspec.structs.replace(record, labels=(label,))
    first._catalog._store.put(records.PREFIX + "evil", records.encode(evil))
    with pytest.raises(WrongBuffers, match="not the path of a file"):
        get_folder(first, "evil", tmp_path / "got")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("labels", [["a", "a"], ["a", "a/b"], ["a/b/c", "a"]])
def test_files_in_one_place_are_refused(
    stores: list[P2PStore], tmp_path: Path, labels: list[str]
) -> None:
    stores[0].publish("odd", [b"abc", b"def"], labels=labels)
    with pytest.raises(WrongBuffers, match="two of its files are in one place"):
        get_folder(stores[1], "odd", tmp_path / "got")
    assert list(tmp_path.iterdir()) == []
