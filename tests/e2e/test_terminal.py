"""What a terminal shows of a cluster of real processes: `halfmoon chat`, `bench`, `status`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app
from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e

#: Tokens of the cluster's blocks, and of the trace's.
BLOCK = 16


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> Iterator[LiveCluster]:
    blocks = {role: ["--block-size", str(BLOCK)] for role in ("prefill", "decode")}
    with start_cluster("fake://tiny", n_prefill=2, extra=blocks) as running:
        yield running


def halfmoon(cluster: LiveCluster, *arguments: str) -> Result:
    command, *rest = arguments
    result = CliRunner().invoke(app, [command, "--url", cluster.url, *rest], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output + cluster.logs()
    return result


def test_asking_the_same_again_shows_what_was_reused(cluster: LiveCluster) -> None:
    asked = ("chat", "--max-tokens", "4", "--stats", "--temperature", "0", "a question " * 9)
    first = halfmoon(cluster, *asked)
    assert cached_tokens(first) == 0

    def reused() -> bool:
        """Whether the blocks have come to the pool, and word of them to the conductor."""
        again = halfmoon(cluster, *asked)
        assert again.stdout == first.stdout != ""
        return cached_tokens(again) >= 5 * BLOCK

    cluster.until(reused)


def cached_tokens(answer: Result) -> int:
    (n_cached,) = re.findall(r"(\d+) of \d+ prompt", answer.stderr)
    return int(n_cached)


def test_a_trace_finds_the_prefixes_cached_that_its_hash_ids_say(
    cluster: LiveCluster, tmp_path: Path
) -> None:
    # Six prompts of three whole blocks and a bit: the first two blocks are those of the one before.
    rows = [
        {
            "timestamp": 200 * i,
            "input_length": 3 * BLOCK + 5,
            "output_length": 4,
            "hash_ids": [0, 1, 10 + i, 20 + i],
        }
        for i in range(6)
    ]
    trace, path = tmp_path / "trace.jsonl", tmp_path / "run.json"
    trace.write_text("\n".join(map(json.dumps, rows)))
    bench = ("bench", "--json", str(path))
    halfmoon(
        cluster,
        *(*bench, "--trace", str(trace), "--block-tokens", str(BLOCK), "--ttft-slo", "60"),
    )
    (run,) = json.loads(path.read_text())["runs"]
    summary = run["summary"]
    assert (summary["n_finished"], summary["n_good"]) == (6, 6)
    assert summary["n_prompt_tokens"] == 6 * (3 * BLOCK + 5)
    assert summary["n_output_tokens"] == 6 * 4
    # All but the first one's: never more than what is shared, and that at once or a moment later.
    assert 0 < summary["n_cached_tokens"] <= 5 * 2 * BLOCK
    assert summary["bundled"] == 0.0
    # Token ids are those of the tokenizer, or of a vocabulary that is named.
    lengths = ("--input-tokens", "60", "--shared-prefix", "40", "--output-tokens", "3")
    for form in ((), ("--vocab", "900")):
        halfmoon(cluster, *bench, "--rate", "50", "--requests", "8", *lengths, *form)
        summary = json.loads(path.read_text())["runs"][0]["summary"]
        assert (summary["n_finished"], summary["n_output_tokens"]) == (8, 24)
        assert summary["n_prompt_tokens"] == 8 * 100


def test_the_status_of_a_cluster_has_its_workers_and_what_was_just_decided(
    cluster: LiveCluster,
) -> None:
    halfmoon(cluster, "chat", "--max-tokens", "3", "what is new? " * 9)
    told = json.loads(halfmoon(cluster, "status", "--json").stdout)
    n_cached, n_tokens = told["cluster"]["reuse"]["n_cached"], told["cluster"]["reuse"]["n_tokens"]
    # A second's latencies are shown once it is over.
    cluster.until(lambda: re.search(r"^TTFT +\d", halfmoon(cluster, "status").output, re.MULTILINE))
    output = halfmoon(cluster, "status").output
    for name in ("prefill-0", "prefill-1", "decode-0", "kvstore-0"):
        assert re.search(rf"^{name} .*%", output, re.MULTILINE), output
    assert f"blocks of {BLOCK} tokens" in output
    assert f"reused: {n_cached / n_tokens:.1%} of {n_tokens:,} tokens" in output
    # What was decided last is first, with what came of it.
    newest = told["decisions"]["decisions"][-1]
    below = output[output.index("last decisions") :].splitlines()[1]
    assert f"{newest['course']['n_tokens']}" in below and newest["why"][:40] in below
