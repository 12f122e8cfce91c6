"""A hook of mkdocs: links from pages to files outside of docs/ lead on in the site, which also opens from the disk."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {"CHANGELOG.md", "CONTRIBUTING.md"}  # pages of the site that lie outside of docs/
LINK = re.compile(r"(?<=\]\()(?:\.\./|docs/)([^()#\s]+)")
CELL_CODE = re.compile(r"`[^`\n]*`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """What pages link to outside of docs/ becomes a file of the site, by its path from the repository's root."""
    pages = [file.content_string for file in files.documentation_pages() if _at_root(file)]
    for path in sorted(BESIDE.union(*map(LINK.findall, pages))):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A page's text with its links as the site's files lie: those of docs/ beside CONTRIBUTING.md and bench/.

    In a table, code needs a backslash before a bar where repository browsers show it; here it would be seen.
    """
    if _at_root(page.file):
        markdown = LINK.sub(r"\1", markdown)
    return "\n".join(
        CELL_CODE.sub(lambda code: code[0].replace(r"\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    )


def _at_root(file: File) -> bool:
    return "/" not in file.src_uri


def on_post_build(config: MkDocsConfig) -> None:
    """From the disk browsers do not search, but the theme asks for an index there, and its script stops without one."""
    Path(config.site_dir, "search", "search_index.js").write_text("var __index = new Promise(() => {})\n")
