"""The docs tell the truth where a machine can check it: names, files, settings, tests, numbers.

In README, CONTRIBUTING and docs, in backticks:

    module.path:Qualified.name       is defined in our sources (they are parsed, not imported)
    halfmoon_something               is a package, or else a metric
    tests/…/test_x.py::test_name     is a test
    services/…, libs/…, docs/…       is a file or folder
    make target                      is a target of the Makefile

A link, one of CHANGELOG too, leads to a file, and its `#anchor` to a heading, as GitHub names it.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from halfmoon_conductor.settings import ConductorSettings
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_protocol.messages import ALL_MESSAGES
from halfmoon_runtime.setting_names import SECRETS
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_servers.bridge.bridge_settings import BridgeSettings
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS: tuple[type[ServiceSettings], ...] = (
    ConductorSettings, PrefillSettings, DecodeSettings, KvstoreSettings, BridgeSettings,
)  # fmt: skip

_NAME = re.compile(r"`(halfmoon_\w+(?:\.\w+)*)(?::([\w.]+))?`")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_PATH = re.compile(r"`((?:libs|services|tests|docs|benchmarks|\.ci)/[^`\s:]*)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
_ANCHORED = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?)[ #]*$", re.MULTILINE)
_CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
_MAKE = re.compile(r"\bmake ([a-z]+)\b")
_ROW = re.compile(r"^\| `--([\w-]+)` \| ([^|]*?) *\|", re.MULTILINE)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT)).removesuffix(".md")


@pytest.fixture(params=PAGES, ids=page_id)
def page(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


#: The changelog's links hold; names in it may be those of its time.
also_in_the_changelog = pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_id
)


@cache
def definitions(source: Path) -> frozenset[str]:
    """Qualified names of all classes, functions and assigned names of a file."""
    return frozenset(_defined(ast.parse(source.read_text(), str(source)), ""))


def _defined(scope: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(scope):
        match node:
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from _defined(node, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
            case ast.Assign(targets=targets):
                yield from (prefix + each.id for each in targets if isinstance(each, ast.Name))


def source_of(module: str) -> Path | None:
    """The file of one of our modules or packages."""
    relative = module.replace(".", "/")
    for home in [*ROOT.glob("libs/*"), *ROOT.glob("services/*")]:
        for candidate in (home / f"{relative}.py", home / relative / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def is_metric(name: str) -> bool:
    """Whether our sources have a metric of this name; the library's counters gain _total."""
    quoted = (f'"{name}"', f'"{name.removesuffix("_total")}"')
    return any(each in text for text in source_texts() for each in quoted)


@cache
def source_texts() -> tuple[str, ...]:
    sources = [*ROOT.glob("libs/*/halfmoon_*/**/*.py"), *ROOT.glob("services/*/halfmoon_*/**/*.py")]
    return tuple(source.read_text() for source in sources)


def test_names_in_the_docs_exist_in_the_sources(page: Path) -> None:
    missing = []
    for module, name in _NAME.findall(page.read_text()):
        if is_metric(module):
            continue
        source = source_of(module)
        if source is None or (name and name not in definitions(source)):
            missing.append(f"{module}:{name}")
    assert not missing, f"{page.name} names what is not there: {', '.join(missing)}"


def test_tests_in_the_docs_exist(page: Path) -> None:
    missing = [
        f"{path}::{name}"
        for path, name in _TEST.findall(page.read_text())
        if not (ROOT / path).is_file() or name not in definitions(ROOT / path)
    ]
    assert not missing, f"{page.name} names tests that are not there: {', '.join(missing)}"


@also_in_the_changelog
def test_links_and_paths_in_the_docs_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    paths = [path for path in _PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    assert not links + paths, f"{page.name} leads nowhere: {links + paths}"


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub names them: it counts equal ones."""
    found: Counter[str] = Counter()
    named = set()
    for heading in _HEADING.findall(_FENCED.sub("", page.read_text())):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
        named.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return frozenset(named)


@also_in_the_changelog
def test_anchors_of_links_in_the_docs_are_headings_there(page: Path) -> None:
    missing = [
        f"{link}#{anchor}"
        for link, anchor in _ANCHORED.findall(_FENCED.sub("", page.read_text()))
        if (target := page.parent / link if link else page).suffix == ".md"
        and anchor not in anchors(target)
    ]
    assert not missing, f"{page.name} leads to no heading: {', '.join(missing)}"


def test_make_targets_in_the_docs_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = {name for code in _CODE.findall(page.read_text()) for name in _MAKE.findall(code)}
    assert named <= targets, f"{page.name} names targets that are not there: {named - targets}"


def test_the_continuous_integration_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in ("make check", "make test"):
        assert re.search(rf"^within \d+ {command}( \|\||$)", script, re.MULTILINE)
        assert re.search(rf"^{command}$", readme, re.MULTILINE)


def test_every_setting_is_listed_with_its_default() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    sections = re.split(r"^### ", text, flags=re.MULTILINE)
    shared = ServiceSettings.model_fields.keys() - SECRETS
    for settings in SETTINGS:
        (section,) = [part for part in sections if part.startswith(f"{_role(settings)}\n")]
        rows = dict(_ROW.findall(section))
        (common,) = [part for part in sections if part.startswith("every service\n")]
        expected = {
            name.replace("_", "-"): _default(settings, name)
            for name in settings.model_fields
            if name not in shared | SECRETS
            or (name in shared and _default(settings, name) != _default(ServiceSettings, name))
        }
        assert rows == expected, f"{settings.__name__} and docs/operating.md differ"
        assert dict(_ROW.findall(common)) == {
            name.replace("_", "-"): _default(ServiceSettings, name) for name in shared
        }
    assert all(f"`HALFMOON_{name.upper()}`" in text for name in SECRETS)


def _role(settings: type[ServiceSettings]) -> str:
    package, *rooms, _ = settings.__module__.split(".")
    return rooms[0] if package == "halfmoon_workers" else package.removeprefix("halfmoon_")


def _default(settings: type[ServiceSettings], name: str) -> str:
    """As the table writes it."""
    field = settings.model_fields[name]
    if field.is_required():
        return "(required)"
    if field.default_factory is dict:
        return "`{}`"
    if field.default_factory is not None:
        return "(this machine)"
    return "" if field.default in ("", None) else f"`{field.default}`"


def test_every_message_is_in_the_protocols_tables() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    tags = {kind.__struct_config__.tag for kind in ALL_MESSAGES}
    rows = r"^\| `([a-z_]+)` \| [^|]*(?:→|both ways|published)[^|]* \|"
    assert tags == set(re.findall(rows, text, re.MULTILINE))


def test_the_worked_hash_is_the_golden_one() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    golden = msgspec.json.decode(
        (ROOT / "libs" / "protocol" / "golden" / "block_hashes.json").read_bytes()
    )[0]
    assert golden["root_hex"] in text
    assert all(block in text for block in golden["hashes_hex"])


def test_every_failure_names_a_test() -> None:
    text = (ROOT / "docs" / "failures.md").read_text()
    numbers = re.findall(r"^\| ([A-Z]\d+) \| (?!`tests/)", text, re.MULTILINE)
    tested = set(re.findall(r"^\| ([A-Z]\d+) \| `tests/", text, re.MULTILINE))
    assert numbers
    assert len(numbers) == len(set(numbers))
    assert set(numbers) == tested


def test_each_promise_of_security_has_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    promises = [
        line
        for section in re.split(r"^## ", text, flags=re.MULTILINE)
        if section.startswith("Promises")
        for line in section.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| against"))
    ]
    assert len(promises) > 15
    assert [line for line in promises if "`tests/" not in line] == []
