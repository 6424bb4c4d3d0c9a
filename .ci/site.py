# SPDX-License-Identifier: Apache-2.0
"""Makes README.md and CHANGELOG.md, which lie above the folder of the site, pages of it."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
# As links of the README, and of the pages to it.
LINKS = (("](docs/", "]("), ("](CHANGELOG.md", "](changelog.md"))


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs once it has listed its own files."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for ours, theirs in LINKS:
            text = text.replace(ours, theirs)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page. Docstrings of the public names follow that of the API."""
    text = re.sub(r"\]\(\.\./(README|CHANGELOG)\.md", lambda it: f"]({PAGES[it[1] + '.md']}", markdown)
    if page.file.src_uri != "api.md":
        return text
    package = (ROOT / "megagraph" / "__init__.py").read_text(encoding="utf-8")
    names = sorted(re.findall(r"^    from \S+ import (\w+) as \1$", package, re.MULTILINE))
    return "\n".join([text, "## Docstrings", "", *(f"::: megagraph.{name}" for name in names), ""])
