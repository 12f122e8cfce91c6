"""Answers as tables: for the terminal, and in Markdown from the files of results."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ._markdown import markdown
from ._problem import tokens_text
from ._questions import QUESTIONS
from .device._suite import NAMES as DEVICE_NAMES

Document = dict[str, Any]
_HEADERS = ("#", "measure", "target", "measured", "met")


def terminal_table(documents: Iterable[Document]) -> str:
    """One line a row: measure, target, measured, met."""
    lines = [(document["name"], *_cells(row)) for document in documents for row in document["rows"]]
    return tabulate(lines, _HEADERS, disable_numparse=True)


def is_headline(name: str) -> bool:
    """Whether README shows this question: those with targets from the start, and the sweep.

    C are on CPU, D on many ranks, G on a GPU.
    """
    return name == "sweep" or (name[0] in "CDG" and name[1:].isdigit())


def markdown_table(results: Path) -> str:
    """The answers in the folder, each line with its file, then the sweep and what it was measured with.

    Raises FileNotFoundError if the folder holds no answer.
    """
    documents = all_documents(results)
    lines = [
        (document["name"], *_cells(row), f"`{results.as_posix()}/{document['name']}.json`")
        for document in documents
        for row in document["rows"]
    ]
    parts = [markdown(lines, (*_HEADERS, "file"))] if lines else []
    parts += [points_table(document["points"]) for document in documents if document["points"]]
    return "\n\n".join([*parts, *conditions(documents)])


def _cells(row: Document) -> tuple[str, str, str, str]:
    verdict = {True: "yes", False: "no", None: "—"}[row["met"]]
    return row["measure"], row["target"], row["measured_text"], "not verified" if "not_verified" in row else verdict


def all_documents(results: Path) -> list[Document]:
    """The answers in the folder, in the order of the questions. Raises FileNotFoundError if there is none."""
    paths = [path for name in (*QUESTIONS, *DEVICE_NAMES) if (path := results / f"{name}.json").exists()]
    if not paths:
        raise FileNotFoundError(f"a table needs results in {results}; `python -m bench` writes them")
    return [json.loads(path.read_text()) for path in paths]


def points_table(points: list[Document]) -> str:
    """Seconds and peak of each point of the sweep."""
    lines = [
        (
            tokens_text(point["num_tokens"]),
            point["attention"],
            f"{point['forward']['median_s']:.3g} s",
            f"{point['backward']['median_s']:.3g} s",
            f"{point['peak_bytes'] / 2**20:,.0f} MiB",
        )
        for point in points
    ]
    headers = ("tokens", "attention", "forward", "backward", "peak memory")
    return markdown(lines, headers)


def conditions(documents: list[Document]) -> list[str]:
    """One line for each set of conditions that some of the answers share."""
    names: dict[str, list[str]] = {}
    for document in documents:
        names.setdefault(condition(document), []).append(document["name"])
    return [f"{', '.join(shared)}: {text}" for text, shared in names.items()]


def condition(document: Document) -> str:
    """With what an answer was measured, as a line of text."""
    machine, versions = document["machine"], document["versions"]
    gpu = f"{machine['gpu']}, {machine['gpu_memory_gib']} GiB; " if "gpu" in machine else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['memory_gib']} GiB; "
        f"Python {versions['python']}, torch {versions['torch']}, flexdilated {versions['flexdilated']}; "
        f"commit {document['commit']}; {document['date'][:10]}{'; tiny sizes' if document['small'] else ''}."
    )


def with_condition(lines: Iterable[Sequence[object]], headers: Sequence[str], document: Document) -> str:
    """A table in Markdown, and under it with what its answer was measured."""
    return f"{markdown(lines, headers)}\n\n{condition(document)}"
