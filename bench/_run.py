"""Ask one question in a process of its own and keep its answer, with all that is needed to judge it."""

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from ._apart import DiedApart, run_apart
from ._machine import commit, machine, versions
from ._questions import QUESTIONS

Document = dict[str, Any]


def ask(name: str, *, small: bool, results: Path | None) -> Document | None:
    """The answer as plain data, also written to `results`/<name>.json; None if the question failed.

    A failure prints its reason to stderr; whatever file an earlier run left stays as it is.
    """
    print(f"{name}: {question_text(name)}", file=sys.stderr, flush=True)
    start = perf_counter()
    try:
        answer = run_apart(answer_to, name, small)
    except DiedApart as error:
        print(f"{name} failed: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{name}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    document = {
        "name": name,
        "question": question_text(name),
        "small": small,
        **answer,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        written = results / f"{name}.part"  # a command that is killed here leaves the earlier file whole
        written.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        written.replace(results / f"{name}.json")
    return document


def answer_to(name: str, small: bool) -> Document:
    """Configuration, rows and points of one question, as plain data."""
    question = QUESTIONS[name]
    config = question.SMALL if small else question.FULL
    return {"config": asdict(config), **question.run(config).to_data()}


def question_text(name: str) -> str:
    """The question in words."""
    return QUESTIONS[name].__doc__.splitlines()[0]
