"""The page of results: every row of every question against its target, with its file, machine and commit."""

from collections.abc import Sequence
from pathlib import Path

from ._headlines import counts, figure, question
from ._markdown import markdown
from ._table import Document, all_documents, conditions, points_table

RESULTS = Path("docs/results.md")


def results_parts(results: Path) -> dict[str, str]:
    """A section a question, and what each was measured with."""
    documents = all_documents(results)
    sections = "\n\n".join(_section(document, results) for document in documents)
    return {"results": f"\n{sections}\n", "machines": "\n" + "\n\n".join(conditions(documents)) + "\n"}


def _section(document: Document, results: Path) -> str:
    name = document["name"]
    asked = f"{question(document)} [{name}.json](../{results.as_posix()}/{name}.json)"
    parts = [f"## {name}", asked]
    if document["rows"]:
        parts.append(_rows(document["rows"]))
    if document["points"] and name == "sweep":
        parts.append(points_table(document["points"]))
    return "\n\n".join(parts)


def _rows(rows: Sequence[Document]) -> str:
    """What all rows say in the same words after their last colon is said once, above them."""
    split = [row["measure"].rpartition(": ") for row in rows]
    what = {measure for _, _, measure in split}
    once = len(what) == 1 and all(case for case, _, _ in split)
    cases = [case if once else row["measure"] for row, (case, _, _) in zip(rows, split, strict=True)]
    lines = [(case, row["target"], figure(row), _met(row)) for case, row in zip(cases, rows, strict=True)]
    return markdown(lines, (what.pop() if once else "measure", "target", "measured", "met"))


def _met(row: Document) -> str:
    if "not_verified" in row:
        return "**not verified**"
    return "yes" if counts(row) else "**no**" if row["met"] is False else "—"
