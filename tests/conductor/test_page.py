"""The page as it is served: what its files may hold, and that its colours can be read."""

import re
from importlib.resources import files
from itertools import pairwise

import httpx
import pytest

PAGE = {
    each.name: each.read_text()
    for each in files("halfmoon_conductor.page").joinpath("assets").iterdir()
}
SCRIPTS = {name: text for name, text in PAGE.items() if name.endswith(".js")}


@pytest.mark.parametrize("name", ["", *(f"page/{name}" for name in PAGE)])
async def test_each_file_is_served_with_headers_that_keep_a_browser_here(
    client: httpx.AsyncClient, name: str
) -> None:
    answer = await client.get(f"/{name}")
    assert answer.status_code == 200
    kind = {"": "html", "js": "javascript"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    assert kind in answer.headers["content-type"]
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = await client.get(f"/{name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_what_is_not_there_is_an_error_of_the_usual_shape(client: httpx.AsyncClient) -> None:
    for path in ("/page/", "/page/none.js", "/page/../debug.py"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"]


def test_the_html_has_no_script_or_style_within_and_every_file_it_names() -> None:
    html = PAGE["index.html"]
    assert re.findall(r"<style|<script(?![^>]*\ssrc=)|\sstyle=|\son[a-z]+=", html) == []
    named = re.findall(r'(?:src|href)="page/([^"]+)"', html)
    named += [each for text in SCRIPTS.values() for each in re.findall(r'from "\./([^"]+)"', text)]
    assert set(named) <= set(PAGE)
    assert set(PAGE) - set(named) == {"index.html"}, "a file that nothing asks for"


def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup() -> None:
    for name, text in PAGE.items():
        links = set(re.findall(r"\bhttps?://[^\s\"'`)]+", text))
        assert links <= {"http://www.w3.org/2000/svg"}, name
    for name, text in SCRIPTS.items():
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, name


# -- colours -------------------------------------------------------------------------------------

Colours = dict[str, str]


def schemes() -> dict[str, Colours]:
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", PAGE["base.css"])
    return {
        "light": {name: light for name, light, _ in pairs},
        "dark": {name: dark for name, _, dark in pairs},
    }


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i:j], 16) / 255 for i, j in pairwise((1, 3, 5, 7))]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_of_text_can_be_read_on_every_ground(scheme: str) -> None:
    colours = schemes()[scheme]
    roles = "prefill", "decode", "kvstore"
    for text in ("ink", "ink-2", "ink-3", "accent", *roles, "bad", "warn", "good"):
        for ground in ("surface", "raised", "bg"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["accent-ink"], colours["accent"]) >= 4.5
    assert contrast(colours["ink"], colours["bad-soft"]) >= 4.5
