"""A live conductor's journal replays to the same commands, whatever befell its workers."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_conductor.journal_file import main
from halfmoon_scheduling.commands import Resubmit
from halfmoon_scheduling.conductor.journal import read_journal, replay_journal
from halfmoon_scheduling.events import KvChanged, RequestFinished, WorkerLost

pytestmark = pytest.mark.e2e


def stream(cluster: Any, prompt: list[int], n_new: int) -> Iterator[dict[str, Any]]:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": n_new, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_a_journal_with_a_killed_worker_replays_to_the_same_commands(
    start_cluster: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "conductor.journal"
    extra = {"conductor": ["--journal-path", str(path), "--placement", "min_ttft"]}
    model = "fake://slow?step_s=0.02&max_context=8192"  # a stream outlives the kill by seconds
    with start_cluster(model, n_prefill=2, n_decode=2, n_kvstore=2, extra=extra) as cluster:
        prompt = list(range(300))
        for i in range(3):
            cluster.complete(prompt=[*prompt, i], max_tokens=4)
        for n_seen, _ in enumerate(stream(cluster, prompt, 200), start=1):
            if n_seen == 10:
                decode = cluster.decisions()[-1]["placement"]["decode"]
                cluster.process(decode).signal(signal.SIGKILL)
        assert n_seen >= 200
    with path.open("rb") as source:
        entries = list(read_journal(source)[1])
    kinds = {type(entry.event) for entry in entries}
    assert {WorkerLost, KvChanged, RequestFinished} <= kinds
    assert any(isinstance(command, Resubmit) for entry in entries for command in entry.commands)
    with path.open("rb") as source:
        assert replay_journal(source) == (len(entries), None)
    assert main([str(path)]) == 0
    assert f"{len(entries)} entries" in capsys.readouterr().out
