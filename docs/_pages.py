"""A hook of mkdocs: links from pages to files outside of docs/ lead on in the site, which also opens from the disk."""

import re
import sys
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from bench._report import results_page  # noqa: E402 (the checkout is no package)

BESIDE = {"CHANGELOG.md", "CONTRIBUTING.md"}  # pages of the site that lie outside of docs/
RESULTS = "results.md"  # and the one that is made of bench/results/
LINK = re.compile(r"(?<=\]\()([^()#\s:]+)(?=[)#])")
CELL_CODE = re.compile(r"`[^`\n]*`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """What pages link to outside of docs/ becomes a file of the site, by its path from the repository's root."""
    made = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in sorted(BESIDE)]
    made.append(File.generated(config, RESULTS, content=results_page(ROOT / "bench" / "results")))
    pages = [file for file in [*files.documentation_pages(), *made] if file.is_documentation_page()]
    linked = {_in_repository(file, link) for file in pages for link in LINK.findall(file.content_string)}
    there = {path for path in linked if not path.startswith("docs/") and path not in BESIDE}
    for file in made:
        files.append(file)
    for path in sorted(path for path in there if (ROOT / path).is_file()):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A page's text with its links as the site's files lie: those of docs/ beside CONTRIBUTING.md and bench/.

    In a table, code needs a backslash before a bar where repository browsers show it; here it would be seen.
    """
    folder = dirname(page.file.src_uri)
    lines = LINK.sub(
        lambda link: relpath(_in_repository(page.file, link[0]).removeprefix("docs/"), folder or "."), markdown
    ).split("\n")
    return "\n".join(
        CELL_CODE.sub(lambda code: code[0].replace(r"\|", "|"), line) if line.startswith("|") else line
        for line in lines
    )


def _in_repository(file: File, link: str) -> str:
    """The path from the repository's root to what a link of a page leads to."""
    beside = file.src_uri in BESIDE
    return normpath(f"{'' if beside else 'docs/'}{dirname(file.src_uri)}/{link}").lstrip("/")


def on_post_build(config: MkDocsConfig) -> None:
    """From the disk browsers do not search, but the theme asks for an index there, and its script stops without one."""
    Path(config.site_dir, "search", "search_index.js").write_text("var __index = new Promise(() => {})\n")
