"""The commands `halfmoon simulate` and `halfmoon paper`, in this process."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app


def halfmoon(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


QUICK = ("simulate", "l-eval", "--requests", "20", "--prefill", "1", "--decode", "1")


def test_a_simulation_prints_a_table_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    out, pictures = tmp_path / "run.json", tmp_path / "pictures"
    result = halfmoon(*QUICK, "--json", str(out), "--with-requests", "--plots", str(pictures))
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())
    assert row["summary"]["n_finished"] == 20
    assert len(row["requests"]) == 20
    assert "prefill-0: the only one that could" in row["requests"][0]["why"]
    assert "placement kvcache_centric: the least TTFT" in result.output
    assert {path.name for path in pictures.iterdir()} == {
        "ttft.png",
        "tbt.png",
        "load.png",
        "hit_rate.png",
        "rejections.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())


@pytest.mark.parametrize("more", [(), ("--coupled", "1"), ("--sweep", "prefill=1,2")])
def test_the_last_line_says_what_is_not_modelled(more: tuple[str, ...]) -> None:
    result = halfmoon(*QUICK, *more)
    assert result.exit_code == 0, result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("simulated, not measured")
    assert "lost messages" in last and "--help" in last


def test_a_sweep_has_a_row_for_each_combination_and_understands_the_names_of_options(
    tmp_path: Path,
) -> None:
    out = tmp_path / "sweep.json"

    def sweep(*axes: str) -> dict[str, Any]:
        words = [word for axis in axes for word in ("--sweep", axis)]
        plots = ("--plots", str(tmp_path / "pictures"))
        result = halfmoon(*QUICK, *words, *plots, "--jobs", "1", "--json", str(out))
        assert result.exit_code == 0, result.output
        return {row["label"]: row["summary"] for row in json.loads(out.read_text())}

    assert list(sweep("placement=random,min_ttft", "rate_per_s=0.5,2")) == [
        "placement=random @ rate_per_s=0.5",
        "placement=random @ rate_per_s=2",
        "placement=min_ttft @ rate_per_s=0.5",
        "placement=min_ttft @ rate_per_s=2",
    ]
    assert (tmp_path / "pictures" / "goodput.png").is_file()
    found = sweep("prefill=1,2", "seed=3")
    assert list(found) == ["n_prefill=1, seed=3", "n_prefill=2, seed=3"]
    one, two = (summary["ttft_s"]["mean"] for summary in found.values())
    assert two < one


def test_eviction_policies_are_compared_at_six_capacities() -> None:
    result = halfmoon("simulate", "conversation", "--requests", "200", "--policy", "all")
    assert result.exit_code == 0, result.output
    lines = map(str.split, result.output.splitlines())
    rows = {words[1]: words[3::2] for words in lines if len(words) > 3}
    for name in ("lru", "lfu", "fifo", "length_aware", "length_aware_later", "patience"):
        rates = [float(rate) for rate in rows[name]]
        assert len(rates) == 6
        assert rates == sorted(rates), "more blocks never hit less"
        assert 0 < rates[-1] < 1


def test_an_eviction_policy_that_is_not_there_is_said_and_those_that_are() -> None:
    result = halfmoon("simulate", "conversation", "--requests", "20", "--policy", "lru,belady")
    assert result.exit_code == 2
    assert "no eviction policy 'belady'" in result.output and "patience" in result.output
    assert "blocks that fit" not in result.output, "it is said before anything is computed"


def test_processes_of_a_sweep_give_the_results_of_one(tmp_path: Path) -> None:
    texts = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        sweep = ("--sweep", "placement=random,min_ttft", "--jobs", jobs)
        assert halfmoon(*QUICK, *sweep, "--json", str(out)).exit_code == 0
        texts.append(out.read_text())
    assert texts[0] == texts[1]


LONG = ("simulate", "simulated-16k", "--requests", "5", "--prefill", "2", "--decode", "1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*LONG, "--group-size", "2"), "groups of 2"),
        ((*LONG, "--local-prefill", "256"), "local up to 256"),
        ((*QUICK, "--coupled", "2", "--prefix-caching", "--chunked", "2048"), "2 coupled"),
    ],
)
def test_other_shapes_of_clusters_can_be_simulated(words: tuple[str, ...], told: str) -> None:
    result = halfmoon(*words)
    assert result.exit_code == 0, result.output
    assert told in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("simulate", "nowhere.jsonl"), "nowhere.jsonl"),
        ((*QUICK, "--costs", "abacus"), "llama3-70b-a800x8"),
        ((*QUICK, "--placement", "psychic"), "kvcache_centric"),
        ((*QUICK, "--sweep", "colour=red"), "n_prefill"),
        ((*QUICK, "--sweep", "placement"), "NAME=VALUE"),
        ((*QUICK, "--sweep", "speedup=fast"), "speedup=fast"),
        ((*QUICK, "--fault", "decode-9@5"), "decode-9"),
        ((*QUICK, "--fault", "decode-0"), "WORKER@SECONDS"),
        ((*QUICK, "--fault", "decode-0@-5"), "-5 s"),
        ((*QUICK, "--fault", "decode-0@nan"), "nan s"),
        ((*QUICK, "--coupled", "2", "--fault", "decode-0@5"), "coupled instances have none"),
        ((*QUICK, "--rate", "nan"), "rate_per_s is nan"),
        ((*QUICK, "--sweep", "speedup=1,0"), "speedup is 0"),
        ((*QUICK, "--coupled", "2", "--sweep", "n_instances=0"), "n_instances is 0"),
        ((*QUICK, "--json", "nowhere/run.json"), "nowhere"),
        (("paper", "waste"), "cache-policies"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(arguments: tuple[str, ...], named: str) -> None:
    result = halfmoon(*arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert "Traceback" not in result.output


def test_a_paper_prints_ours_beside_theirs_and_writes_a_page_or_its_part_of_one(
    tmp_path: Path,
) -> None:
    part, page = tmp_path / "page.md", tmp_path / "papers.md"
    page.write_text("# Old\n\n| `capacity` | old |\n\n## ratio: kept\n\nkept\n\n## capacity: old\n")
    paper = ("paper", "capacity", "--requests", "200")
    result = halfmoon(*paper, "--markdown", str(part), "--page", str(page))
    assert result.exit_code == 0, result.output
    assert "published" in result.output
    assert part.read_text().startswith("## capacity")
    text = page.read_text()
    assert "## ratio: kept\n\nkept\n" in text
    assert "## capacity: Hit rate over capacity" in text
    assert "| `capacity` | share of the maximum with 3 M tokens" in text
    assert "old" not in text.lower().replace("holds", "")


@pytest.mark.e2e
def test_processes_of_a_sweep_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    words = [*QUICK, "--requests", "100000", "--sweep", "prefill=1,2", "--jobs", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "halfmoon_cli", *words], cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as command:
        parent = psutil.Process(command.pid)

        def workers() -> list[psutil.Process]:
            children = parent.children()
            return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

        deadline_s = time.monotonic() + 120
        while len(workers()) < 2:
            assert command.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        children = parent.children()
        command.kill()
        assert not psutil.wait_procs(children, 60)[1]
