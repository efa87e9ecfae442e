"""The page at `/` in a real Chromium, over clusters of real processes."""

import io
import itertools
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from halfmoon_cli.common.demo_model import demo_model_folder
from halfmoon_conductor.tenants import add_tenant
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.observability.operator_tokens import operator_token
from tests.e2e.conftest import LiveCluster, StartCluster

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import (  # noqa: E402
    Browser,
    FloatRect,
    Locator,
    Page,
    ViewportSize,
    expect,
    sync_playwright,
)

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).parents[2] / "docs/page"
#: Set: pictures are of the demo model, and go into docs/.
SCREENSHOTS = bool(os.environ.get("HALFMOON_SCREENSHOTS"))
#: A token for each byte; slow enough for a stream to be seen streaming.
FAKE = "fake://moon?step_s=0.01&token_s=0.0001"
#: For the demo model: pools of a size that its prompts fill to some part.
SMALL = ["--pool-mib", "16", "--block-size", "16"]
NAMES = """
    Ada Alice Ben Bella Carl Clara Daisy Dora Elsa Emma Finn Fiona Gina Hugo Ida Iris Ivan Jack Joy
    Kai Kate Leo Lena Luna Mark Maya Mia Nina Noah Nora Olga Omar Otto Paul Pia Rosa Ruth Sara Sven
    Theo Tom Uma Vera Wanda Yusuf Zoe
""".split()  # noqa: SIM905 - easier to read than a list
LIMITS = ["--ttft-slo-s", "2", "--tbt-slo-s", "0.5"]
WIDE = ViewportSize(width=1440, height=1000)
NARROW = ViewportSize(width=360, height=780)
#: Of the page's pictures in docs/, besides its first screen.
SIZES = {
    "wide": WIDE,
    "narrow": NARROW,
    "1920": ViewportSize(width=1920, height=1080),
    "820": ViewportSize(width=820, height=1180),
}
#: What README.md shows.
FIRST_SCREEN = FloatRect(x=0, y=0, width=1440, height=620)
LIST, OTHER = "A list, then a question", "Another question"

OpenPage = Callable[..., AbstractContextManager[Page]]
TakePicture = Callable[[Locator, str], None]


def chromium() -> str:
    """Where it is.

    Raises:
        pytest.skip.Exception: nowhere.
    """
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    pytest.skip("there is no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    expect.set_options(timeout=60_000)
    # Closed with this module: its event loop would be in the way of other tests'.
    with sync_playwright() as playwright:
        arguments = ["--disable-dev-shm-usage"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        with playwright.chromium.launch(executable_path=path, args=arguments) as browser:
            yield browser


@pytest.fixture
def open_page(browser: Browser) -> OpenPage:
    """``with open_page(url, color_scheme="dark") as page``: it must behave all the time."""

    @contextmanager
    def opened(url: str, *, may_fail: str = "", **options: Any) -> Iterator[Page]:
        with browser.new_context(viewport=WIDE, reduced_motion="reduce") as context:
            context.set_default_timeout(60_000)
            page = context.new_page()
            complaints: list[str] = []
            origins: set[str] = set()

            def on_console(message: Any) -> None:
                if message.type in ("error", "warning"):
                    complaints.append(message.text)

            def on_request(request: Any) -> None:
                parts = urlsplit(request.url)
                origins.add(f"{parts.scheme}://{parts.netloc}")

            page.on("console", on_console)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", on_request)
            page.emulate_media(**options)
            page.goto(f"{url}/")
            yield page
            assert origins == {url}
            assert [c for c in complaints if not (may_fail and re.search(may_fail, c))] == []

    return opened


@pytest.fixture
def picture(tmp_path: Path) -> TakePicture:
    """``picture(part, "group")`` saves a part of the page in both colours."""
    folder = DOCS if SCREENSHOTS else tmp_path

    def take(part: Locator, name: str) -> None:
        for colours in ("light", "dark"):
            part.page.emulate_media(color_scheme=colours)
            path = folder / f"{name}-{colours}.png"
            save_small(part.screenshot(animations="disabled"), path)
            assert 2_000 < path.stat().st_size < 100_000

    return take


SIZE: dict[str, Any] = {
    "n_prefill": 2,
    "n_decode": 2,
    "n_kvstore": 2,
    "extra": {"conductor": LIMITS},
}


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> Iterator[LiveCluster]:
    with start_cluster(FAKE, **SIZE) as live:
        yield live


def card(page: Page, worker: str) -> Any:
    return page.locator(f'#map [data-key="{worker}"]')


def wait_until_answered(page: Page, n: int = 1) -> None:
    expect(page.locator("#chat .reused")).to_have_count(n)


def send(page: Page, text: str, **settings: str) -> None:
    """Ask in the playground, with settings by their labels."""
    if settings:
        page.get_by_text("System message, length, temperature").click()
    for label, value in settings.items():
        page.get_by_label(label.replace("_", " "), exact=label == "System_message").fill(value)
    page.get_by_label("Your message").fill(text)
    page.get_by_role("button", name="Send").click()


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    width: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return width


# -- what is shown -------------------------------------------------------------------------------


def test_a_request_is_seen_in_numbers_charts_and_decisions_beside_the_configuration(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    with open_page(cluster.url) as page:
        answer = cluster.complete(prompt=[7] * 300, max_tokens=20)
        row = decision_row(page, answer["id"])
        expect(row).to_contain_text("20 tokens")
        expect(row.locator('[data-label="prompt"]')).to_have_text("300")
        (decision,) = [d for d in cluster.decisions() if d["request_id"] == answer["id"]]
        expect(row).to_contain_text(decision["placement"]["chosen"]["worker_id"])
        expect(row).to_contain_text(decision["placement"]["decode"])
        for chart, label in (
            ("ttft", r"half of them within"),
            ("tbt", r"half of them within"),
            ("throughput", r"Tokens per second: lately [1-9]"),
            ("hits", r"cache: lately \d+ %"),
        ):
            plot = page.locator(f"#{chart} .plot")
            expect(plot).to_have_attribute("aria-label", re.compile(label))
        expect(page.locator("#summary")).to_contain_text(re.compile(r"[1-9]\d* in a minute"))
        expect(page.locator("#failures")).to_contain_text("none")
        expect(page.locator("#events li.joined").first).to_contain_text("joined")
        page.get_by_text("Running configuration").click()
        setting = page.locator(".settings div").filter(has_text="ttft slo s")
        expect(setting).to_contain_text("2")


def test_a_chart_has_its_limit_its_range_and_the_numbers_under_the_pointer(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    second = {"at_s": 998, "ttft": None, "tbt": {"n": 3, "p50_s": 0.02, "p90_s": 0.08}}
    told = {"now_s": 1000.0, "ttft_slo_s": 2.0, "tbt_slo_s": 0.25, "seconds": [second]}
    with open_page(cluster.url) as page:
        page.route("**/debug/latencies*", lambda route: route.fulfill(json=told))
        # Only what is new is asked for: what came twice would count twice.
        with page.expect_request("**/debug/latencies?after_s=998"):
            page.reload()
        chart = page.locator("#tbt")
        plot = chart.locator(".plot")
        expect(plot).to_have_attribute(
            "aria-label",
            "Time between tokens: lately half of them within 20 ms, nine of ten within 80 ms",
        )
        expect(chart).to_contain_text("limit 250 ms")
        page.get_by_role("button", name="10 min").click()
        expect(chart).to_contain_text("−8 min")
        box = plot.bounding_box()
        assert box is not None
        plot.hover(position={"x": box["width"] - 15, "y": box["height"] / 2})
        expect(chart.locator(".tip")).to_be_visible()
        expect(chart.locator(".tip")).to_contain_text(
            "20 ms · 80 msp50 · p90 of 3 samples, 2 s ago"
        )


def test_an_open_decision_tells_why_there_and_why_not_elsewhere_and_is_marked_on_the_map(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    cluster.complete(prompt=[8] * 200, max_tokens=4)
    with open_page(cluster.url) as page:
        button = page.locator("tr.decision button").first
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-expanded", "true")
        decision = cluster.decisions()[-1]
        expect(page.locator(".why .reason")).to_have_text(decision["why"])
        for row in decision["placement"]["estimates"]:
            candidate = page.locator(".candidates tr").filter(has_text=row["worker_id"])
            expect(candidate).to_contain_text(row["why_not"] or "chosen")
        chosen = decision["placement"]["chosen"]["worker_id"]
        expect(card(page, chosen)).to_have_class(re.compile("selected"))
        came_s = decision["course"]["ttft_s"]
        told = re.search(r"It came in ([\d.]+) (m?s):", page.locator(".why").inner_text())
        assert told is not None
        unit_s = {"s": 1.0, "ms": 0.001}[told[2]]
        assert float(told[1]) * unit_s == pytest.approx(came_s, rel=0.06)
        cluster.complete(prompt=[8] * 20, max_tokens=2)
        expect(page.locator("#decisions-note")).to_contain_text("1 newer one: close this one")
        page.keyboard.press("Enter")
        expect(page.locator(".why")).to_have_count(0)


def test_the_pool_shows_tiers_holders_and_copies_under_way(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    told = cluster.get("/debug/cluster")
    stores = of_role(told, "kvstore")
    first, second = (worker["worker_id"] for worker in stores)
    for worker in stores:
        worker["load"]["memory"] |= {"n_stored": 25, "n_blocks": 100}
        worker["load"]["disk"] = {"n_stored": 50, "n_blocks": 200}
    told["block_bytes"] = 2**20
    common = {"n_blocks": 2, "uses": 9.0, "last_request_id": "a"}
    told["hot_prefixes"] = [
        {"prefix": "aa" * 16, "n_tokens": 32, "holders": [first, second], **common},
        {"prefix": "bb" * 16, "n_tokens": 1024, "holders": [first], **common},
        {"prefix": "cc" * 16, "n_tokens": 64, "holders": [], **common},
    ]
    told["copies"] = [{"prefix": "bb" * 16, "n_blocks": 2, "source": first, "target": second}]
    with open_page(cluster.url) as page:
        page.route("**/debug/cluster", lambda route: route.fulfill(json=told))
        page.reload()
        pool = page.locator("#pool-body")
        expect(pool).to_contain_text("50.0 MiB of 200 MiB, 25 %")
        expect(pool).to_contain_text("100 MiB of 400 MiB, 25 %")
        expect(pool).to_contain_text("1.5 of each hot prefix")
        rows = pool.locator(".prefix")
        expect(rows.nth(0)).to_have_text(re.compile("a{10}.*32.*holds it.*holds it"))
        expect(rows.nth(1)).to_have_text(re.compile("b{10}.*1,024.*holds it.*is copied to it"))
        expect(rows.nth(2)).to_have_text(re.compile("c{10}.*64.*nono"))
        expect(pool).to_contain_text(f"{first} → {second}: 2 blocks")
        rows.nth(1).hover()
        expect(page.locator("#map .kvstore.holds")).to_have_count(1)
        # Too many stores for columns: their names stand below the prefix.
        told["workers"] += [{**stores[0], "worker_id": f"more-{i}"} for i in range(9)]
        expect(rows.nth(0)).to_contain_text(f"{first}, {second}")
        expect(rows.nth(2)).to_contain_text("no holder")
        expect(pool.locator("th.store")).to_have_count(0)


@pytest.mark.pictured
def test_a_step_is_red_by_its_limit_alone(
    cluster: LiveCluster, open_page: OpenPage, picture: TakePicture
) -> None:
    told = cluster.get("/debug/cluster")
    for worker, tbt_s in zip(of_role(told, "decode"), (0.095, 0.01), strict=True):
        worker["load"] |= {"tbt_s": tbt_s, "n_running": 4, "context_tokens": 3000}
    with open_page(cluster.url) as page:
        page.route("**/debug/cluster", lambda route: route.fulfill(json=told))
        steps = page.locator("#map .decode").get_by_role("meter", name="step")
        high = page.locator("#map .decode .high")
        told["scheduling"]["tbt_slo_s"], told["pools"]["decode"] = None, 0.05
        expect(steps.nth(0)).to_have_attribute("aria-valuetext", "95 ms")
        expect(page.locator("#map .column.decode")).to_contain_text("50 ms on average")
        expect(high).to_have_count(0)
        told["scheduling"]["tbt_slo_s"], told["pools"]["decode"] = 0.05, 1.0
        expect(high).to_have_count(1)
        expect(steps.nth(0).locator(".high")).to_be_visible()
        picture(page.locator("#map"), "fault-limit")
        told["scheduling"]["tbt_slo_s"] = 0.2
        expect(high).to_have_count(0)


def of_role(told: Any, role: str) -> list[Any]:
    """The workers of a role in `/debug/cluster`, by their ids."""
    workers = [worker for worker in told["workers"] if worker["role"] == role]
    return sorted(workers, key=lambda worker: str(worker["worker_id"]))


def test_a_decision_is_found_by_a_part_of_its_request_id(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    wanted = cluster.complete(prompt=[11] * 30, max_tokens=2)["id"].partition("-")[2]
    cluster.complete(prompt=[12] * 30, max_tokens=2)
    with open_page(cluster.url) as page:
        search = page.get_by_label("Search by request id")
        search.fill(wanted[:12])
        expect(page.locator("tr.decision")).to_have_count(1)
        expect(page.locator("tr.decision")).to_contain_text(wanted[:8])
        search.fill("no such id")
        expect(page.locator("#decisions-body")).to_contain_text("None of the kept decisions")
        expect(page.locator("#summary")).to_contain_text(re.compile(r"of the last [1-9]"))
        search.fill("")
        expect(page.locator("tr.decision").nth(1)).to_be_visible()


# -- a group, a fault that is healed, and traces ---------------------------------------------------

TRACE_URL = "http://127.0.0.1:16686/trace/{trace_id}"


@pytest.fixture(scope="module")
def traced_group(start_cluster: StartCluster) -> Iterator[LiveCluster]:
    """A cluster with a group of two prefill workers, whose conductor traces requests."""
    extra = {
        "conductor": [*LIMITS, "--trace-url", TRACE_URL],
        "prefill": ["--group-chunk-tokens", "256"],
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HALFMOON_TRACES", "true")
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        with start_cluster(FAKE, n_prefill=2, n_decode=2, group_size=2, extra=extra) as live:
            yield live


@pytest.mark.pictured
def test_prefill_workers_that_compute_together_stand_in_one_frame(
    traced_group: LiveCluster, open_page: OpenPage, picture: TakePicture
) -> None:
    prompt = [i % 900 for i in range(3000)]
    with open_page(traced_group.url) as page:
        frame = page.locator("#map .group")
        expect(frame.locator(".group-head")).to_have_text("group-0long prompts in 2 stages")
        expect(frame.locator(".card .name")).to_have_text(["prefill-0", "prefill-1"])
        expect(card(page, "prefill-1")).to_contain_text("stage 2 of 2")
        answer = traced_group.complete(prompt=prompt, max_tokens=2)
        row = decision_row(page, answer["id"])
        expect(row).to_contain_text("group-0")
        row.click()
        expect(frame.locator(".card.selected")).to_have_count(2)
        expect(page.locator("#map .way.chosen")).to_have_count(2)  # each stage writes its layers
        expect(page.locator("#map .card.decode .state")).to_have_text(["idle", "idle"])
        picture(page.locator("#map"), "group")
        page.set_viewport_size(NARROW)
        expect(frame).to_be_visible()
        assert overflow(page) <= 0

        told = traced_group.get("/debug/cluster")
        first, second = of_role(told, "prefill")
        page.route("**/debug/cluster", lambda route: route.fulfill(json=told))
        first["stage"], second["stage"] = second["stage"], first["stage"]
        expect(frame.locator(".card .name")).to_have_text(["prefill-1", "prefill-0"])
        second["draining"] = True
        expect(frame).to_contain_text("1 of 2 stages: none is computed together")


def decision_row(page: Page, answer_id: str) -> Locator:
    return page.locator("tr.decision").filter(has_text=answer_id.partition("-")[2][:8])


@pytest.mark.pictured
def test_a_lost_worker_its_requests_and_its_return_stand_among_the_events(
    traced_group: LiveCluster, open_page: OpenPage, picture: TakePicture
) -> None:
    def under_way() -> list[Any]:
        courses = [(d, d["course"] or {}) for d in traced_group.decisions()]
        return [d for d, c in courses if c.get("n_tokens") == 77 and c["ttft_s"] is not None]

    with ExitStack() as stack:
        page = stack.enter_context(open_page(traced_group.url))
        if SCREENSHOTS:  # so that there is something to be seen in the charts
            stack.enter_context(others_asking(traced_group))
            page.wait_for_timeout(30_000)
        client = stack.enter_context(ThreadPoolExecutor(1))
        answer = client.submit(traced_group.complete, prompt=[5] * 77, max_tokens=500)
        traced_group.until(lambda: bool(under_way()))
        lost = under_way()[-1]["placement"]["decode"]
        traced_group.process(lost).signal(signal.SIGKILL)
        left = page.locator("#events li.left").first
        expect(left).to_contain_text(
            re.compile(rf"{lost} left: .+; [1-9]\d* requests? placed again")
        )
        expect(card(page, lost)).to_have_attribute("data-state", "gone")
        expect(page.locator("#map-note")).to_contain_text(", 1 gone")
        expect(page.locator("#failures .mark")).to_have_count(1)
        expect(page.locator("#failures rect.chosen")).not_to_have_count(0)
        traced_group.cluster.restart(lost)
        expect(card(page, lost)).to_have_attribute("data-state", "live")
        newest = page.locator("#events li").first
        expect(newest).to_have_class("joined")
        expect(newest).to_contain_text(f"{lost} joined")
        expect(page.locator("#map-note")).not_to_contain_text("gone")
        assert answer.result()["usage"]["completion_tokens"] == 500
        if SCREENSHOTS:
            page.wait_for_timeout(8_000)
        picture(page.locator("#activity"), "fault-healed")


@pytest.mark.pictured
def test_a_decision_on_a_sampled_request_leads_to_its_trace_and_no_other_does(
    traced_group: LiveCluster, open_page: OpenPage, picture: TakePicture
) -> None:
    def ask(trace_id: str, flags: str) -> str:
        answer = httpx.post(
            f"{traced_group.url}/v1/completions",
            json={"model": traced_group.model, "prompt": [9] * 50, "max_tokens": 4},
            headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-{flags}"},
            timeout=60,
        )
        return str(answer.json()["id"])

    sampled, unsampled = ask("5a" * 16, "01"), ask("b7" * 16, "00")
    with open_page(traced_group.url) as page:
        link = page.get_by_role("link", name="Trace of this request")
        decision_row(page, unsampled).click()
        expect(page.locator(".why")).to_be_visible()
        expect(link).to_have_count(0)
        decision_row(page, sampled).click()
        expect(link).to_have_attribute("href", TRACE_URL.format(trace_id="5a" * 16))
        expect(link).to_have_attribute("target", "_blank")
        picture(page.locator("tr.open"), "decision-trace")


# -- the playground ------------------------------------------------------------------------------


def test_the_playground_streams_and_the_second_time_shows_what_was_reused_and_from_where(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    with open_page(cluster.url) as page:
        page.get_by_role("button", name=LIST).click()
        page.get_by_role("button", name="Send").click()
        reply = page.locator(".said.assistant")
        expect(reply).to_have_attribute("aria-busy", "true")
        expect(reply).to_contain_text(re.compile(r"t\d+"))
        expect(page.locator("#chat .meta")).to_contain_text("first token")
        wait_until_answered(page)
        assert len(reply.inner_text().split()) == 64
        expect(page.locator("#chat .reused")).to_contain_text("Reused 0 of")
        expect(page.locator("#chat .meta")).to_contain_text("between tokens")
        expect(page.locator("#chat .meta")).to_contain_text("✗ the list says")

        page.get_by_role("button", name="Ask again").click()
        wait_until_answered(page, 2)
        second = page.locator("#chat .reused").last
        expect(second).to_contain_text(re.compile(r"Reused [\d,]+ of [\d,]+ tokens \(9\d %\)"))
        expect(second).to_contain_text(re.compile(r"from kvstore-\d at prefill-\d, answered by"))
        expect(page.locator("#runs tbody tr")).to_have_count(2)
        expect(page.locator("#pool-body [data-state=held]")).not_to_have_count(0)
        reuse = cluster.get("/debug/cluster")["reuse"]
        share = int(100 * reuse["n_cached"] / reuse["n_tokens"] + 0.5)
        tile = page.locator("#summary .tile").filter(has_text="Read from cache")
        expect(tile.locator(".tile-value")).to_have_text(f"{share} %")
        page.locator("#pool-body .prefix").first.focus()
        expect(page.locator("#map .kvstore.holds")).not_to_have_count(0)

        page.get_by_role("button", name="why there?").last.click()
        expect(page.locator(".why")).to_contain_text("read from kvstore-")
        expect(page.locator("#map .kvstore.selected")).to_have_count(1)
        expect(page.locator("#map .way.chosen")).to_have_count(2)  # read, and written


def test_what_is_asked_for_is_what_the_form_and_the_conversation_say(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    with open_page(cluster.url) as page:

        def asked(button: str) -> Any:
            with page.expect_request("**/v1/chat/completions") as request:
                page.get_by_role("button", name=button).click()
            return request.value.post_data_json

        page.get_by_text("System message, length, temperature").click()
        page.get_by_label("System message", exact=True).fill("Be brief.")
        page.get_by_label("Tokens at the most").fill("8")
        page.get_by_label("Temperature", exact=True).fill("0.5")
        message = page.get_by_label("Your message")
        message.fill("One")
        message.press("Shift+Enter")  # a line, and not the end of the message
        expect(message).to_have_value("One\n")
        first = asked("Send")
        wait_until_answered(page)
        message.fill("Two")
        second = asked("Send")
        wait_until_answered(page, 2)
        third = asked("Ask again")
        wait_until_answered(page, 3)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One\n"}]
    assert first["messages"] == said
    assert (first["max_tokens"], first["temperature"]) == (8, 0.5)
    *before, answer, two = second["messages"]
    assert before == said
    assert (answer["role"], len(answer["content"].split())) == ("assistant", 8)
    assert two == {"role": "user", "content": "Two"}
    assert third == second


def test_an_answer_that_breaks_off_says_so(cluster: LiveCluster, open_page: OpenPage) -> None:
    streams = [
        ('{"id": "chatcmpl-1", "choices": []}', "the stream broke off"),
        ('{"error": {"message": "decode-0 is gone"}}', "decode-0 is gone"),
    ]
    with open_page(cluster.url) as page:
        said = iter([f"data: {data}\n\n" for data, _ in streams])
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=next(said), content_type="text/event-stream"),
        )
        for _, told in streams:
            send(page, "Hello")
            expect(page.locator("#chat .meta.error").last).to_have_text(told)


def test_an_answer_can_be_stopped_and_nothing_runs_on(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    with open_page(cluster.url) as page:
        send(page, "Go on for long.", Tokens_at_the_most="3000")
        expect(page.locator(".said.assistant")).to_contain_text(re.compile(r"t\d+"))
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#chat .meta")).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        cluster.until(lambda: cluster.decisions()[-1]["course"]["end"] == "cancelled")


def test_nothing_is_sent_before_it_is_known_who_answers(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    with open_page(cluster.url) as page:
        message, send = page.get_by_label("Your message"), page.get_by_role("button", name="Send")
        expect(send).to_be_enabled()  # it has asked, and won't until it is loaded anew
        held: list[Any] = []
        page.route("**/v1/models", lambda route: held.append(route))
        with page.expect_request("**/v1/models"):
            page.reload()
        message.fill("Hello")
        message.press("Enter")
        expect(send).to_be_disabled()
        expect(message).to_have_value("Hello")
        held[0].continue_()
        send.click()
        wait_until_answered(page)


def test_a_refusal_is_told_where_the_answer_would_be(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    with open_page(cluster.url, may_fail="status of 400") as page:
        send(page, "Hello", System_message="Be brief. " * 500)
        expect(page.locator("#chat .meta.error")).to_contain_text("4096")
        expect(page.get_by_label("Your message")).to_have_value("Hello")


# -- roles ---------------------------------------------------------------------------------------


def test_a_worker_changes_its_role_by_the_switch_on_its_card(
    start_cluster: StartCluster, open_page: OpenPage
) -> None:
    flexible = ["--roles", "prefill,decode", "--role-cooldown-s", "0"]
    extra = {"decode": flexible}
    with (
        start_cluster(FAKE, n_prefill=1, n_decode=2, n_kvstore=0, extra=extra) as live,
        open_page(live.url, may_fail="status of 409") as page,
    ):

        def switch(worker: str) -> Any:
            return page.get_by_label(f"Role of {worker}")

        def in_column(role: str, worker: str) -> Any:
            return page.locator(f'#map .column.{role} [data-key="{worker}"][data-state="live"]')

        expect(switch("decode-1")).to_have_value("auto")
        expect(switch("prefill-0")).to_be_hidden()
        expect(page.locator("#roles-note")).to_contain_text("role_changes is off")
        switch("decode-1").select_option("prefill")
        expect(in_column("prefill", "decode-1")).to_contain_text("pinned to prefill")
        expect(in_column("prefill", "decode-1")).not_to_contain_text("asked")
        expect(page.locator('#map .column.decode [data-key="decode-1"]')).to_have_count(0)
        expect(switch("decode-1")).to_have_value("prefill")

        switch("decode-0").select_option("prefill")
        expect(card(page, "decode-0").get_by_role("alert")).to_contain_text(
            "the last decode worker"
        )
        expect(switch("decode-0")).to_have_value("auto")

        switch("decode-1").select_option("auto")
        expect(card(page, "decode-1")).not_to_contain_text("pinned")
        expect(in_column("prefill", "decode-1")).to_have_count(1)
        assert live.complete(prompt=[1] * 40, max_tokens=4)["usage"]["completion_tokens"] == 4


# -- how it looks --------------------------------------------------------------------------------


def background(page: Page) -> str:
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


def test_colours_follow_the_system_until_somebody_chooses(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    with open_page(cluster.url, color_scheme="dark") as page:
        dark = background(page)
        page.emulate_media(color_scheme="light")
        light = background(page)
        assert dark != light
        page.emulate_media(color_scheme="dark")
        page.get_by_role("button", name="Colours: as the system").click()
        expect(page.get_by_role("button", name="Colours: light")).to_be_visible()
        assert background(page) == light
        page.get_by_role("button", name="Colours: light").click()
        expect(page.get_by_role("button", name="Colours: dark")).to_be_visible()
        page.emulate_media(color_scheme="light")
        assert background(page) == dark
        page.reload()
        assert background(page) == dark


def test_a_narrow_window_has_nothing_beside_it(cluster: LiveCluster, open_page: OpenPage) -> None:
    cluster.complete(prompt=[9] * 200, max_tokens=4)
    with open_page(cluster.url) as page:
        page.set_viewport_size(NARROW)
        page.get_by_role("button", name=LIST).click()
        page.get_by_role("button", name="Send").click()
        wait_until_answered(page)
        page.get_by_role("button", name="why there?").click()
        expect(page.locator(".why")).to_be_visible()
        expect(page.locator("#map .card").first).to_be_visible()
        for width in (NARROW["width"], 820, 1000, 1240, 2560):
            page.set_viewport_size(ViewportSize(width=width, height=900))
            assert overflow(page) <= 0, width
            table = "(e) => e.scrollWidth - e.clientWidth"
            assert page.locator("#decisions-body .scroll").evaluate(table) <= 0, width


def test_all_workers_are_there_and_everything_that_can_be_used_has_a_name(
    cluster: LiveCluster, open_page: OpenPage
) -> None:
    cluster.complete(prompt=[10] * 20, max_tokens=2)
    with open_page(cluster.url) as page:
        expect(page.locator("tr.decision").first).to_be_visible()
        expect(page.locator("#map .card")).to_have_count(6)
        for worker in cluster.live():
            expect(card(page, worker)).to_have_attribute("data-state", "live")
        # Workers of one role have no switch.
        expect(page.locator("#map .role-line:visible")).to_have_count(0)
        expect(page.locator("#roles-note")).to_be_hidden()
        for role in ("banner", "main"):
            expect(page.get_by_role(role)).to_have_count(1)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, textarea, a')]
                .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim()))
                .map((e) => e.outerHTML)"""
        )
        assert nameless == []


@pytest.mark.pictured
def test_screenshots_of_all_widths_in_both_colours(
    start_cluster: StartCluster, open_page: OpenPage, tmp_path: Path, request: Any
) -> None:
    """`make screenshots` has them in docs/, of the demo model while others ask it too."""
    with ExitStack() as stack:
        if SCREENSHOTS:
            plan: Any = {"n_prefill": 2, "n_decode": 2, "n_kvstore": 2}
            shown = [*LIMITS, "--admission", "none"]  # a busy machine is to refuse nothing
            plan["extra"] = {"conductor": shown, "prefill": SMALL, "decode": SMALL}
            plan["extra"]["kvstore"] = ["--capacity-mib", "24"]
            plan["served_model_name"] = "halfmoon-demo"
            live = stack.enter_context(start_cluster(str(demo_model_folder()), **plan))
            stack.enter_context(others_asking(live))
        else:
            live = request.getfixturevalue("cluster")
        folder = DOCS if SCREENSHOTS else tmp_path
        folder.mkdir(exist_ok=True)
        page = stack.enter_context(open_page(live.url, color_scheme="light"))
        if SCREENSHOTS:  # so that there is something to be seen in the charts
            page.wait_for_timeout(45_000)
        for example, n in ((LIST, 1), (OTHER, 2)):
            page.get_by_role("button", name=example).click()
            page.get_by_role("button", name="Send").click()
            expect(page.locator("#runs tbody tr")).to_have_count(n)
        page.get_by_role("button", name="why there?").click()
        for colours in ("light", "dark"):
            page.emulate_media(color_scheme=colours)
            for name, size in SIZES.items():
                page.set_viewport_size(size)
                page.evaluate("window.scrollTo(0, 0)")
                path = folder / f"{name}-{colours}.png"
                shot = page.screenshot(full_page=SCREENSHOTS, animations="disabled")
                save_small(shot, path)
                assert 10_000 < path.stat().st_size < 300_000
        page.set_viewport_size(WIDE)
        page.emulate_media(color_scheme="light")
        first = page.screenshot(clip=FIRST_SCREEN, animations="disabled")
        save_small(first, folder / "first-screen.png")
        pictures = sum(path.stat().st_size for path in folder.glob("*.png"))
        assert pictures < 2_000_000, "a clone and a visit of README.md stay small"


@contextmanager
def others_asking(live: LiveCluster) -> Iterator[None]:
    """Two more clients, with lists of their own."""
    over = threading.Event()

    def ask(seed: int) -> None:
        dice = random.Random(seed)
        for n in itertools.count():
            of = random.Random(n // 6 % 3 + 10 * seed)  # several questions on each list
            names = of.sample(NAMES, 12 * seed)
            facts = [f"{name} has room {of.randrange(100, 999)}." for name in names]
            question = f"What room does {dice.choice(names)} have?"
            message = {"role": "user", "content": " ".join([*facts, question])}
            live.post("/v1/chat/completions", model=live.model, messages=[message], max_tokens=24)
            if over.wait(dice.uniform(0.2, 1.5)):
                return

    with ThreadPoolExecutor() as clients:
        asked = [clients.submit(ask, seed) for seed in (1, 2)]
        try:
            yield
        finally:
            over.set()
        for each in asked:
            each.result()


def save_small(png: bytes, path: Path) -> None:
    """With 256 colours: a third of the bytes, and nothing to be seen of it."""
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


# -- keys, and a conductor that is gone ----------------------------------------------------------


def test_with_tenants_a_key_is_asked_for_and_kept_in_the_tab_alone(
    start_cluster: StartCluster, open_page: OpenPage, tmp_path: Path
) -> None:
    tenants = tmp_path / "tenants.toml"
    plain, operator = add_tenant(tenants, "lab"), add_tenant(tenants, "ops", operator=True)
    extra = {"conductor": ["--tenants", str(tenants)]}
    with (
        start_cluster(FAKE, key=operator, n_kvstore=0, extra=extra) as live,
        open_page(live.url, may_fail="status of 40[13]|ERR_CONNECTION") as page,
    ):

        def give(key: str) -> None:
            page.get_by_label("Key", exact=True).fill(key)
            page.get_by_role("button", name="Use it").click()

        expect(page.locator("#key-dialog")).to_be_visible()
        assert page.locator("#map .card").count() == 0
        give("hm-wrong")
        expect(page.locator("#banner")).to_contain_text("An operator's API key, or")
        page.get_by_role("button", name="Enter a key").click()
        give(plain)
        expect(page.locator("#banner")).to_contain_text("no operator's")
        send(page, "Hello")
        wait_until_answered(page)
        page.get_by_role("button", name="Another key").click()
        give(operator)
        expect(page.locator("#map .card")).to_have_count(2)
        expect(page.locator("#banner")).to_be_hidden()
        page.reload()
        expect(page.locator("#map .card")).to_have_count(2)
        assert operator not in page.evaluate("JSON.stringify(localStorage)")
        assert operator in page.evaluate("JSON.stringify(sessionStorage)")

        live.process("conductor-0").signal(signal.SIGKILL)
        expect(page.locator("#banner")).to_contain_text("does not answer")
        expect(page.get_by_role("button", name="Ask now")).to_be_visible()
        expect(page.locator("#live")).to_have_text("not connected")


def test_a_token_in_the_address_opens_the_page_and_leaves_the_address_bar(
    start_cluster: StartCluster, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "the cluster's key for tests"
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", key)
    with (
        start_cluster(FAKE, n_kvstore=1) as live,
        open_page(live.url, may_fail="status of 401") as page,
    ):
        expect(page.locator("#key-dialog")).to_be_visible()
        page.goto(f"{live.url}/#token=hm-of-a-tenant")  # not a token of operators
        expect(page.locator("#key-dialog")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
        page.goto(f"{live.url}/#token={operator_token(key)}")
        expect(page.locator("#map .card")).to_have_count(3)
        expect(page.locator("#key-dialog")).to_be_hidden()
        assert page.url == f"{live.url}/"
        page.reload()
        expect(page.locator("#map .card")).to_have_count(3)
        assert operator_token(key) not in page.evaluate("JSON.stringify(localStorage)")

        # Nothing has happened yet, and the page says what to do.
        for place, text in (
            (".conductor", "conductor-0"),
            ("#live", "live"),
            ("#model", "moon"),
            ("#decisions-body", "No requests yet"),
            ("#pool-body", "No hot prefix yet"),
        ):
            expect(page.locator(place)).to_contain_text(text)
        pages = card(page, "prefill-0").get_by_role("meter", name="pages")
        expect(pages).to_have_attribute("aria-valuetext", "0 %")
        plot = page.locator("#ttft .plot")
        expect(plot).to_have_attribute("aria-label", "Time to first token: nothing yet")
