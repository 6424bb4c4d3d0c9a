# SPDX-License-Identifier: Apache-2.0
"""The documentation is true where a program can tell: examples run, lists are whole, links lead."""

import re
from pathlib import Path

import pytest

from megagraph.cli import main
from megagraph.config import MODULES, UPSTREAM_MODULES, GraphConfig
from megagraph.decide.reasons import EagerReason

ROOT = Path(__file__).resolve().parent.parent
DOCS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
# A path in the tree: in backticks, with a folder of ours in front or as a file of the root.
FOLDERS = "benchmarks|csrc|docs|megagraph|tests"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*|Makefile|README\.md|pyproject\.toml|setup\.py)`")
# Written by commands; not in every tree.
WRITTEN = ("benchmarks/results/", "megagraph/_build_info.py")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(read(path)) if found == language]


def prose(path: Path) -> str:
    return FENCE.sub("", read(path))


def anchors(path: Path) -> set[str]:
    """Headings as GitHub spells their anchors."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_every_python_block_is_python(path: Path) -> None:
    for code in blocks(path, "python"):
        compile(code, named(path), "exec")


def rows_of(path: Path, heading: str) -> dict[str, list[str]]:
    """Rows of the first table whose first column is called `heading`: first cell to the others."""
    rows: dict[str, list[str]] = {}
    inside = False
    for line in prose(path).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] == heading and not rows:
            inside = True
        elif not cells:
            inside = False
        elif inside and set(cells[0]) != {"-"}:
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def test_the_table_of_options_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out in read(ROOT / "docs" / "configuration.md")


def test_the_toml_examples_are_accepted(tmp_path: Path) -> None:
    examples = blocks(ROOT / "docs" / "configuration.md", "toml")
    assert examples
    for number, text in enumerate(examples):
        file = tmp_path / f"{number}.toml"
        file.write_text(text, encoding="utf-8")
        assert GraphConfig.from_toml(file).all_capacities()


def test_every_eager_reason_has_its_heading_in_order() -> None:
    headings = re.findall(r"^## `(\w+)`$", read(ROOT / "docs" / "reasons.md"), re.MULTILINE)
    assert headings == [reason.name for reason in EagerReason]


SCOPES = ROOT / "docs" / "scopes.md"


def cells_of(path: Path) -> list[str]:
    rows = [line for line in prose(path).splitlines() if "|" in line]
    return [cell.strip() for row in rows for cell in row.split("|")]


@pytest.mark.parametrize(("page", "most"), [("scopes.md", 9_000), ("architecture.md", 14_000)])
def test_long_pages_are_read_to_their_end(page: str, most: int) -> None:
    """`.ci/sizes` bounds the README and all pages together."""
    assert len(read(ROOT / "docs" / page)) <= most


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_tables_are_of_words_and_not_of_paragraphs(path: Path) -> None:
    lines = [line for line in prose(path).splitlines() if line.startswith("|")]
    assert max(map(len, lines), default=0) <= 200
    assert max(map(len, cells_of(path)), default=0) <= 120


def test_decisions_are_few_and_short() -> None:
    entries = re.split(r"^### .+$", read(ROOT / "docs" / "decisions.md"), flags=re.MULTILINE)[1:]
    bodies = [re.split(r"^## ", entry, flags=re.MULTILINE)[0].strip() for entry in entries]
    assert 0 < len(bodies) <= 40 and max(map(len, bodies)) <= 600


def test_the_page_of_scopes_says_which_are_built() -> None:
    rows = rows_of(SCOPES, "scope")
    assert list(rows) == [name for name in UPSTREAM_MODULES if not name.startswith("full")]
    for name, (_layers, state) in rows.items():
        assert state == ("built" if name in MODULES else "not built: refused by name"), name


def test_every_benchmark_that_a_page_names_exists() -> None:
    for path in DOCS:
        for name in re.findall(r"python -m benchmarks (\w+)", read(path)):
            assert (ROOT / "benchmarks" / f"bench_{name}.py").is_file(), f"{named(path)}: {name}"


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_every_file_that_a_page_names_exists(path: Path) -> None:
    told = PATH.findall(prose(path))
    missing = [name for name in told if not name.startswith(WRITTEN) and not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_every_link_leads_to_a_page_and_a_heading(path: Path) -> None:
    broken = []
    for link in LINK.findall(prose(path)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        if not page.is_file() or (anchor and anchor not in anchors(page)):
            broken.append(link)
    assert broken == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(prose(ROOT / "README.md"))}
    assert {named(path) for path in DOCS if path.parent.name == "docs"} <= linked
