"""Run one measure in a process of its own and keep its answer, with all that is needed to judge it."""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from . import (
    attention,
    buffers,
    catalogue,
    compiling,
    decoding,
    features,
    flex,
    integrations,
    memory,
    planning,
    quality,
    ranks,
    roofline,
    selection,
    single_keys,
)
from ._machine import conditions
from ._measures import REGISTERED, Measure
from ._processes import DiedApart, run_apart

# The order in which they are measured and shown; importing a subject has registered its measures.
_SUBJECTS = (
    attention,
    features,
    flex,
    single_keys,
    selection,
    planning,
    decoding,
    compiling,
    memory,
    ranks,
    buffers,
    catalogue,
    integrations,
    roofline,
    quality,
)
MEASURES: dict[str, Measure] = {
    each.name: each for module in _SUBJECTS for each in REGISTERED if each.run.__module__ == module.__name__
}

Document = dict[str, Any]


def ask(name: str, *, small: bool, results: Path | None) -> Document | None:
    """The answer as plain data, also written to `results`/<name>.json; None if the measure failed.

    A failure prints its reason to stderr; the file of an earlier run stays.
    """
    question = MEASURES[name].question
    print(f"{name}: {question}", file=sys.stderr, flush=True)
    start = perf_counter()
    try:
        answer = run_apart(answer_to, name, small)
    except DiedApart as error:
        print(f"{name} failed: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{name}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    document = {"name": name, "question": question, "small": small, **answer, **conditions()}
    if results is not None:
        write(document, results)
    return document


def answer_to(name: str, small: bool) -> Document:
    """Configuration, rows and points of one measure, as plain data."""
    return MEASURES[name].answer(small=small)


def write(document: Document, results: Path) -> None:
    """To a file of its name; a command that is killed here leaves the earlier file whole."""
    results.mkdir(parents=True, exist_ok=True)
    written = results / f"{document['name']}.part"
    written.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    written.replace(results / f"{document['name']}.json")
