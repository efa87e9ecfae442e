"""`halfmoon status`: what a conductor says, as a terminal shows it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app
from halfmoon_cli.status.debug_responses import StatusLatencies, StatusQuantiles, StatusSecond
from halfmoon_cli.status.latency_trend import BUCKET_S, SHOWN_S, latency_trend
from halfmoon_cli.status.text_charts import sparkline
from halfmoon_testing.processes.cli_terminal import run_on_terminal
from halfmoon_testing.scripted_endpoint import ScriptedEndpoint

CLUSTER: dict[str, Any] = {
    "conductor": {"conductor_id": "conductor-7", "metadata": "redis"},
    "model": "moon",
    "layout": {"block_size": 16, "n_layers": 4},
    "block_bytes": 8192,
    "scheduling": {"placement": "min_ttft", "admission": "early", "seed": 0},
    "requests": {"waiting": 3, "prefilling": 0, "decoding": 2},
    "pools": {"prefill": 0.25, "decode": 0.0},
    "reuse": {"n_prompts": 4, "n_tokens": 1000, "n_cached": 750, "n_transferred": 50},
    "workers": [
        {
            "worker_id": "prefill-0",
            "role": "prefill",
            "home": "kvstore-0",
            "heard_s_ago": 0.1,
            "load": {
                "n_requests": 3,
                "queue_s": 1.25,
                "queued_tokens": 4096,
                "free_pages": 20,
                "n_pages": 100,
            },
        },
        {
            "worker_id": "decode-0",
            "role": "decode",
            "draining": True,
            "heard_s_ago": 61.0,
            "load": {
                "n_running": 5,
                "n_reserved": 1,
                "context_tokens": 9000,
                "step_s": 0.02,
                "tbt_s": 0.025,
                "free_pages": 50,
                "n_pages": 100,
            },
        },
        {
            "worker_id": "kvstore-0",
            "role": "kvstore",
            "heard_s_ago": None,
            "load": {
                "n_readers": 1,
                "memory": {"n_stored": 300, "n_blocks": 400},
                "disk": {"n_stored": 10, "n_blocks": 100},
                "lookups": {"memory": 80, "disk": 10, "missing": 10},
            },
        },
        {"worker_id": "decode-9", "role": "decode", "refused": "another model"},
    ],
    "unreachable": [
        {
            "worker_id": "decode-5",
            "role": "decode",
            "address": "tcp://10.9.9.9:5",
            "for_s": 90.0,
            "reason": "connection refused",
            "advice": "set --advertise-host",
        }
    ],
    "gone": [{"worker_id": "decode-3", "reason": "its lease ended", "s_ago": 12.0}],
    "hot_prefixes": [
        {"prefix": "51bee5217b03d000", "n_tokens": 256, "uses": 7.9, "holders": ["kvstore-0"]}
    ],
}
DECISIONS: dict[str, Any] = {
    "now_s": 105.0,
    "decisions": [
        {
            "request_id": "old",
            "at_s": 1.0,
            "outcome": "rejected",
            "reason": "ttft would be 9 s",
            "why": "ttft would be 9 s",
            "placement": {"chosen": {"worker_id": "prefill-0"}, "decode": None},
            "course": None,
        },
        {
            "request_id": "new",
            "at_s": 102.0,
            "outcome": "placed",
            "why": "prefill-0: the only one that could",
            "placement": {"chosen": {"worker_id": "prefill-0", "ttft_s": 0.134}, "decode": "d"},
            "course": {"n_tokens": 356, "n_cached": 256, "ttft_s": 0.604},
        },
    ],
    "refusals": {"ttft": 3, "pages": 0},
}
LATENCIES: dict[str, Any] = {
    "now_s": 1000.0,
    "ttft_slo_s": 2.0,
    "tbt_slo_s": None,
    "seconds": [
        {"at_s": 990, "ttft": {"n": 1, "p50_s": 0.5, "p90_s": 0.7}, "tbt": None},
        {"at_s": 999, "ttft": {"n": 3, "p50_s": 0.3, "p90_s": 0.3}, "tbt": None},
    ],
}


@pytest.fixture
def conductor(endpoint: ScriptedEndpoint) -> ScriptedEndpoint:
    endpoint.pages |= {
        "/debug/cluster": CLUSTER,
        "/debug/decisions": DECISIONS,
        "/debug/latencies": LATENCIES,
    }
    return endpoint


def status(conductor: ScriptedEndpoint, *arguments: str) -> Result:
    wanted = ["status", "--url", conductor.url, *arguments]
    return CliRunner().invoke(app, wanted, env={"COLUMNS": "200"})


def row(output: str, first: str) -> list[str]:
    """The cells of the line that starts with this."""
    (line,) = [line for line in output.splitlines() if line.startswith(first)]
    return line.split()


def test_everything_that_operators_ask_for_is_there(conductor: ScriptedEndpoint) -> None:
    result = status(conductor)
    assert result.exit_code == 0, result.output
    for words in (
        "moon · conductor-7, metadata redis · blocks of 16 tokens, 8 KiB",
        "placement min_ttft · admission early",
        "requests: 3 waiting, 2 decoding · load over its limit: prefill 0.25",
        "reused: 75.0% of 1,000 tokens in 4 prompts, 50 of them from another kvstore",
        "decode-9 is refused: another model",
        "decode-5 is unreachable at tcp://10.9.9.9:5 since 90 s: connection refused",
        "set --advertise-host",
        "decode-3 went 12 s ago: its lease ended",
        "refused since the start, for want of: 3 ttft",
    ):
        assert words in result.output
    out = result.output
    assert row(out, "prefill-0 ") == [
        "prefill-0",
        *["3", "1.25", "s", "4,096", "████████░░", "80%", "kvstore-0"],
    ]
    assert row(out, "decode-0 ")[1:8] == ["draining", "5", "1", "9,000", "20", "ms", "25"]
    assert "silent for 61 s" in out
    assert row(out, "kvstore-0 ")[1:6] == ["300", "████████░░", "75%", "█░░░░░░░░░", "10%"]
    assert row(out, "kvstore-0 ")[6:] == ["90%", "of", "100", "1", "not", "heard", "yet"]
    # Means of the seconds by their samples: (0.5 + 3 · 0.3) / 4, (0.7 + 3 · 0.3) / 4.
    assert row(out, "TTFT ")[:7] == ["TTFT", "350", "ms", "400", "ms", "2.00", "s"]
    assert row(out, "TBT ")[:4] == ["TBT", "–", "–", "–"]
    assert row(out, "51bee5217b03 ") == ["51bee5217b03", "256", "7.9", "kvstore-0"]


def test_decisions_stand_with_the_newest_first_and_what_came_of_them(
    conductor: ScriptedEndpoint,
) -> None:
    out = status(conductor).output
    assert row(out, "3.00 s ago")[3:10] == ["356", "256", "604", "ms", "134", "ms", "prefill-0:"]
    assert row(out, "104 s ago")[-6:] == ["rejected:", "ttft", "would", "be", "9", "s"]
    assert out.index("3.00 s ago") < out.index("104 s ago")
    assert "104 s ago" not in status(conductor, "--decisions", "1").output
    assert "last decisions" not in status(conductor, "--decisions", "0").output


def test_programs_get_what_the_conductor_says(conductor: ScriptedEndpoint) -> None:
    told = json.loads(status(conductor, "--json").stdout)
    assert told == {"cluster": CLUSTER, "decisions": DECISIONS, "latencies": LATENCIES}


def test_a_conductor_that_says_less_is_shown_as_far_as_it_goes(
    endpoint: ScriptedEndpoint,
) -> None:
    endpoint.pages["/debug/cluster"] = {"workers": [], "model": None}
    result = status(endpoint)
    assert result.exit_code == 0
    assert "no model yet" in result.output and "no prefill worker" in result.output


@pytest.mark.parametrize("pages", [{}, {"/debug/cluster": {"data": []}}])
def test_who_is_no_conductor_is_told_so(endpoint: ScriptedEndpoint, pages: dict[str, Any]) -> None:
    endpoint.pages |= pages
    result = status(endpoint)
    assert result.exit_code == 1
    assert "not as a conductor of Halfmoon" in result.stderr and "--url" in result.stderr


def test_a_key_is_sent_and_asked_for(conductor: ScriptedEndpoint) -> None:
    conductor.key = "secret"
    assert "--api-key" in status(conductor).stderr
    assert status(conductor, "--api-key", "secret").exit_code == 0


def test_a_watch_goes_on_through_a_conductor_that_is_gone_for_a_while(
    conductor: ScriptedEndpoint,
) -> None:
    wanted = ["status", "--url", conductor.url, "--watch", "--every", "0.1"]
    with run_on_terminal(wanted, {"LINES": "60"}, end="\x03") as terminal:
        terminal.until("conductor-7")
        page = conductor.pages.pop("/debug/cluster")
        terminal.until("not as a conductor")
        conductor.pages["/debug/cluster"] = page
        terminal.until("conductor-7")


# Drawing


@given(st.lists(st.none() | st.floats(0, 1e6), max_size=40))
def test_a_sparkline_has_a_character_for_each_value(values: list[float | None]) -> None:
    line = sparkline(values)
    assert len(line) == len(values)
    assert [c == " " for c in line] == [value is None for value in values]
    known = [value for value in values if value]
    if known:
        assert line[values.index(max(known))] == "█"


def test_a_minute_is_drawn_with_its_newest_second_last() -> None:
    quantiles = StatusQuantiles(1, 0.1, 0.2)
    seconds = [StatusSecond(at_s, quantiles) for at_s in (100.0, 940.0, 941.0, 999.0)]
    found = latency_trend(StatusLatencies(now_s=1000.0, seconds=seconds), "ttft")
    assert found.n == 3
    assert len(found.p90s_s) == SHOWN_S // BUCKET_S
    assert [i for i, value in enumerate(found.p90s_s) if value is not None] == [0, 29]
    assert latency_trend(StatusLatencies(now_s=1000.0, seconds=seconds), "tbt").n == 0


def test_names_from_the_wire_do_not_command_the_terminal(conductor: ScriptedEndpoint) -> None:
    conductor.pages["/debug/cluster"] = {**CLUSTER, "model": "\x1b[2J[red]x"}
    out = status(conductor).output
    assert "\x1b" not in out and "[red]x" in out
