# SPDX-License-Identifier: Apache-2.0
"""The documentation is true as far as a program can tell. That its examples run: `cli/test_doc_blocks.py`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import megagraph
from megagraph.cli import main
from megagraph.config import MODULES, UPSTREAM_MODULES
from megagraph.reasons import EagerReason

ROOT = Path(__file__).resolve().parent.parent
DOCS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SCOPES, PERFORMANCE = ROOT / "docs" / "scopes.md", ROOT / "docs" / "performance.md"
UNPATCHED = "unpatched eager, packs as they come, our attention and RoPE"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
# A path in the tree: in backticks, with a folder of ours in front or as a file of the root.
FOLDERS = "benchmarks|csrc|docs|megagraph|tests"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*|Makefile|README\.md|pyproject\.toml|setup\.py)`")
# Written by commands; not in every tree.
WRITTEN = ("benchmarks/results/", "megagraph/_build_info.py")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    return FENCE.sub("", read(path))


def anchors(path: Path) -> set[str]:
    """Headings as GitHub spells their anchors."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def rows_of(path: Path, *headings: str) -> dict[str, list[str]]:
    """Rows of the first table whose first columns are called `headings`: first cell to the others."""
    rows: dict[str, list[str]] = {}
    inside = False
    for line in prose(path).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[: len(headings)] == [*headings] and not rows:
            inside = True
        elif not cells:
            inside = False
        elif inside and set(cells[0]) != {"-"}:
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def test_the_table_of_options_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out in read(ROOT / "docs" / "configuration.md")


def test_every_eager_reason_has_its_section_in_order_which_begins_with_its_remedy() -> None:
    text = LINK.sub(lambda link: link[0].partition("]")[0][1:], read(ROOT / "docs" / "reasons.md"))
    sections = re.findall(r"^## `(\w+)`$(?:\n\n(.+)$)?", text, re.MULTILINE)
    assert [name for name, _begins in sections] == [reason.name for reason in EagerReason]
    for reason, (_name, begins) in zip(EagerReason, sections, strict=True):
        assert begins.replace("`", "").startswith(reason.remedy[0].upper() + reason.remedy[1:]), reason


def test_the_page_of_the_api_names_what_is_public() -> None:
    page = read(ROOT / "docs" / "api.md")
    assert [name for name in megagraph.__all__ if name != "__version__" and name not in page] == []


def test_the_site_has_every_page_and_the_readme_leads_to_it() -> None:
    pages = re.findall(r": ([\w-]+\.md)$", read(ROOT / ".ci" / "mkdocs.yml"), re.MULTILINE)
    assert sorted(pages) == sorted([*(p.name for p in DOCS[1:]), "index.md", "changelog.md"])
    linked = {link.partition("#")[0] for link in LINK.findall(prose(ROOT / "README.md"))}
    assert {named(path) for path in DOCS if path.parent.name == "docs"} <= linked


def test_long_pages_are_read_to_their_end() -> None:
    """`.ci/sizes` bounds the README and all pages together."""
    for page, most in (("scopes", 9_000), ("architecture", 14_000), ("expert_parallel", 5_000)):
        assert len(read(ROOT / "docs" / f"{page}.md")) <= most, page


def clauses(path: Path) -> list[str]:
    """What ends with a full stop, a colon or a semicolon, or is an item or a cell; code is one word."""
    lines = re.sub(r"`[^`]*`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose(path))).splitlines()
    texts = [""]
    for line in map(str.strip, lines):
        if line.startswith("|"):
            texts += [*line.strip("|").split("|"), ""]
        elif item := re.match(r"(?:[-*]|\d+\.) (.*)", line):
            texts.append(item[1])
        elif not line or line.startswith("#"):
            texts.append("")
        else:
            texts[-1] += f" {line}"
    return [part.strip() for text in texts for part in re.split(r"(?<=[.!?:;])[)\"*]*\s", text)]


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_sentences_are_read_in_one_breath_where_names_a_place_and_tables_are_of_words(path: Path) -> None:
    """Sentences of 40 words, with brackets inside of brackets, were read by nobody."""
    lines = [line for line in prose(path).splitlines() if "|" in line]
    assert max((len(line) for line in lines if line.startswith("|")), default=0) <= 200
    assert max((len(cell.strip()) for line in lines for cell in line.split("|")), default=0) <= 120
    assert [part for part in clauses(path) if len(part.split()) > 25] == []
    assert [part for part in clauses(path) if part.startswith("Where ")] == []


def test_decisions_are_few_and_short() -> None:
    entries = re.split(r"^### .+$", read(ROOT / "docs" / "decisions.md"), flags=re.MULTILINE)[1:]
    bodies = [re.split(r"^## ", entry, flags=re.MULTILINE)[0].strip() for entry in entries]
    assert 0 < len(bodies) <= 40 and max(map(len, bodies)) <= 600


def test_the_page_of_scopes_says_which_are_built() -> None:
    rows = rows_of(SCOPES, "scope")
    assert list(rows) == [name for name in UPSTREAM_MODULES if not name.startswith("full")]
    for name, (_layers, state) in rows.items():
        assert state == ("built" if name in MODULES else "not built: refused by name"), name


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_files_and_benchmarks_that_a_page_names_exist_and_links_lead_to_a_heading(path: Path) -> None:
    told, run = PATH.findall(prose(path)), re.findall(r"python -m benchmarks (\w+)", read(path))
    broken = [name for name in told if not name.startswith(WRITTEN) and not (ROOT / name).exists()]
    broken += [name for name in run if not (ROOT / "benchmarks" / f"bench_{name}.py").is_file()]
    for link in LINK.findall(prose(path)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        if not page.is_file() or (anchor and anchor not in anchors(page)):
            broken.append(link)
    assert broken == []


def figures_of(name: str) -> dict[tuple[str, str | None], dict[str, Any]]:
    """Figures of a result, by name and rival."""
    figures = json.loads(read(ROOT / "benchmarks" / "results" / f"{name}.json"))["figures"]
    return {(it["name"], it["rival"]): it for it in figures}


def test_the_readme_and_the_page_of_figures_tell_of_one_recorded_run() -> None:
    """The README said 154.1 -> 44.6 ms and docs/performance.md 423 -> 44, of the same model."""
    figures = figures_of("step")
    told = rows_of(ROOT / "README.md", "model", "GPU busy in eager")
    page = rows_of(PERFORMANCE, "model", "megagraph", "floor")
    assert told.keys() == page.keys() and len(told) >= 5
    for model in told:
        case = re.sub(r"(\d),(\d)", r"\1\2", re.sub(r" \d+ layers,", "", model))
        step = figures[f"{case}: step, median", UNPATCHED]
        ours, eager = (f"{step[key]:.0f}" for key in ("value", "rival_value"))
        busy, *walls = told[model]
        assert [wall.strip("*") for wall in walls] == [f"{eager} ms", f"{ours} ms"], model
        assert [page[model][place].strip("*") for place in (0, 2)] == [ours, eager], model
        kernels = figures[f"{case}: kernel time of a step", UNPATCHED]
        assert busy == f"{min(kernels['rival_value'] / step['rival_value'], 1) * 100:.0f} %", model


def test_figures_of_a_whole_job_are_those_of_its_file() -> None:
    rows = rows_of(PERFORMANCE, "name in the file")
    assert len(rows) >= 8
    for name, cells in rows.items():
        pattern = re.escape(name).replace(r"\.\.\.", r"\d+")
        (found,) = (it for (of, _), it in figures_of("training").items() if re.fullmatch(pattern, of))
        for cell, key in zip(cells, ("rival_value", "value"), strict=True):
            if cell:
                number = float(cell.replace(",", "").split()[0])
                assert number == pytest.approx(found[key], rel=0.01), (name, key)
