"""A hook of mkdocs: links from the pages to files outside of docs/, and back, lead on in the site as in a checkout."""

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
