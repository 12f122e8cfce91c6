"""The pages of results and README's table: what stands between their marks, from the files of results."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ._benchmarks_page import BENCHMARKS, benchmarks_parts
from ._buffers_page import BUFFERS, buffers_parts
from ._catalogue import ENTRIES, MILLION, Entry
from ._claims_page import PAGE as CLAIMS
from ._claims_page import claims_parts
from ._compiling_page import COMPILING, compiling_parts
from ._describe_page import DESCRIBE, describe_parts
from ._distributed_page import DISTRIBUTED, distributed_parts
from ._headlines import readme_parts
from ._markdown import markdown
from ._memory_page import MEMORY, memory_parts
from ._performance_page import PERFORMANCE, performance_parts
from ._pictures import file_name
from ._problem import tokens_text
from ._received_page import RECEIVED, received_parts
from ._results_page import RESULTS, results_parts
from ._table import Document, condition
from .bench_catalogue import BUILD_MB, BUILD_S, WASTE

Figures = Mapping[str, Any]

README, PAGE = Path("README.md"), Path("docs/catalogue.md")
_MARK = re.compile(r"(<!-- (?P<name>[^>]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def write_pages(results: Path) -> None:
    """Put the results into README.md and the pages that show figures, between their marks.

    A page whose file of results is not there stays as it is, which is said on stderr.
    """
    for path, parts_from in PAGES.items():
        try:
            parts = parts_from(results)
        except FileNotFoundError as error:
            if error.filename is None:
                raise  # there is no result at all
            print(f"{path} stays as it is; it shows {error.filename}, which is not there", file=sys.stderr)
            continue
        path.write_text(filled(path.read_text(encoding="utf-8"), parts), encoding="utf-8")


def filled(text: str, parts: Mapping[str, str]) -> str:
    """The text with each part between the marks of its name. Raises ValueError if the names are not the same."""
    found = [match["name"] for match in _MARK.finditer(text)]
    if sorted(found) != sorted(parts):
        raise ValueError(f"each part needs its marks, once; got marks {sorted(found)} for parts {sorted(parts)}")
    return _MARK.sub(lambda match: f"{match[1]}{parts[match['name']]}\n{match[3]}", text)


def catalogue_parts(results: Path) -> dict[str, str]:
    """The table of all patterns, and the figures of each."""
    document = json.loads((results / "catalogue.json").read_text())
    figures = document["rows"][0]["detail"]["patterns"]
    parts = {entry.name: _section(entry, figures[entry.name]) for entry in ENTRIES}
    return {"all patterns": _table(figures, document), **parts}


def _section(entry: Entry, figures: Figures) -> str:
    heads = f", {entry.num_heads} heads" if entry.num_heads > 1 else ""
    larger = f" (`{entry.million}`)" if entry.million else ""
    lines = [
        f"![{entry.name}](images/catalogue/{file_name(entry)})",
        "",
        f"Drawn: `{entry.small}`  ",
        f"Measured: `{entry.text}`{heads}: {_density(figures)} of pairs, waste {figures['waste']:.3f} "
        f"({figures['layout']})  ",
        f"Tables for {tokens_text(figures['built_tokens'])} tokens{larger}: {_cost(figures, 'build')}",
    ]
    if not WASTE.met_by(figures["waste"]):
        lines += ["", f"*Waste:* {entry.waste_why}"]
    if not _built(figures) and entry.build_why:
        lines += ["", f"*At a million tokens:* {entry.build_why}"]
    return "\n".join(lines)


def _table(figures: Mapping[str, Figures], document: Document) -> str:
    headers = ("pattern", "density", "waste", "computed as", "tokens", "`BlockMask`", "plan and lists")
    lines = [_line(entry, figures[entry.name]) for entry in ENTRIES]
    table = markdown(lines, headers)
    return f"\n{table}\n\n{condition(document)}\n"


def _line(entry: Entry, figures: Figures) -> tuple[str, ...]:
    anchor = entry.name.partition(",")[0]
    return (
        f"[{entry.name}](#{anchor})",
        _density(figures),
        f"{figures['waste']:.3f}" if WASTE.met_by(figures["waste"]) else f"**{figures['waste']:.3f}**",
        figures["layout"],
        tokens_text(figures["built_tokens"]),
        _cost(figures, "build") if _built(figures) else f"**{_cost(figures, 'build')}**",
        _cost(figures, "plan"),
    )


def _density(figures: Figures) -> str:
    percent = 100 * figures["density"]
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _cost(figures: Figures, what: str) -> str:
    """Time and memory; a peak below the page size of the measurement is no memory."""
    return f"{figures[f'{what}_s']:.2g} s, {max(0.0, figures[f'{what}_mb']):.0f} MB"


def _built(figures: Figures) -> bool:
    within = BUILD_S.met_by(figures["build_s"]) and BUILD_MB.met_by(figures["build_mb"])
    return within and figures["built_tokens"] == MILLION


PAGES: dict[Path, Callable[[Path], Mapping[str, str]]] = {
    README: readme_parts,
    PAGE: catalogue_parts,
    PERFORMANCE: performance_parts,
    COMPILING: compiling_parts,
    MEMORY: memory_parts,
    DISTRIBUTED: distributed_parts,
    CLAIMS: claims_parts,
    BUFFERS: buffers_parts,
    RECEIVED: received_parts,
    DESCRIBE: describe_parts,
    BENCHMARKS: lambda _: benchmarks_parts(),
    RESULTS: results_parts,
}
