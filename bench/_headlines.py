"""README's tables: a line a question, what falls short in full words, and how time and memory grow."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ._markdown import markdown
from ._problem import tokens_text
from ._result import with_unit
from ._run import question_text
from ._table import Document, all_documents, is_headline

_FIGURES = {"forward": "forward", "backward": "backward", "peak_bytes": "peak memory"}


def readme_parts(results: Path) -> dict[str, str]:
    """The questions with targets and their answers, those that miss, and the sweep."""
    documents = [document for document in all_documents(results) if is_headline(document["name"])]
    asked = [document for document in documents if document["rows"]]
    answers = markdown([_answer(document) for document in asked], ("#", "question", "target", "measured", "met"))
    return {
        "answers": f"\n{answers}\n",
        "short": f"\n{_short(asked)}\n",
        "growth": f"\n{_growth(results / 'sweep.json')}\n",
        "machines": "  \n".join(dict.fromkeys(_machine(document) for document in documents)),
    }


def _answer(document: Document) -> tuple[str, ...]:
    """One line: each target that a question has, and the range of what was measured against it."""
    rows = document["rows"]
    targets: dict[str, list[Document]] = {}
    for row in rows:
        targets.setdefault(row["target"], []).append(row)
    measured = ", ".join(_range(against) for against in targets.values())
    return document["name"], question(document), ", ".join(targets), measured, _verdict(rows)


def question(document: Document) -> str:
    """In the words of the module that asks now, or, for another machine's suite, of the file."""
    try:
        return question_text(document["name"])
    except KeyError:
        return str(document["question"])


def _verdict(rows: Sequence[Document]) -> str:
    met = sum(counts(row) for row in rows)
    if len(rows) == 1:
        return "yes" if met else "**no**"
    return f"{met} of {len(rows)}" if met == len(rows) else f"**{met} of {len(rows)}**"


def counts(row: Document) -> bool:
    """Whether a row meets its target, with all its checks passed."""
    return row["met"] is True and "not_verified" not in row


def _range(rows: Sequence[Document]) -> str:
    numbers = sorted((row for row in rows if row["measured"] is not None), key=lambda row: float(row["measured"]))
    if not numbers:
        return "not measured"
    low, high = figure(numbers[0]), figure(numbers[-1])
    text = high if low == high else f"{low.partition(' ')[0]} to {high}"
    return text if len(numbers) == len(rows) else f"{text}, {len(rows) - len(numbers)} not measured"


def figure(row: Document) -> str:
    """What was measured; a miss has the digits that tell it from its bound."""
    bound = row["target"][2:]
    if row["met"] is not False or row["measured_text"] != bound:
        return str(row["measured_text"])
    return f"{row['measured']:.4g} {bound.partition(' ')[2]}".rstrip()


def _short(documents: Iterable[Document]) -> str:
    """Each row that misses its target, is not measured, or not verified, in the words of its file."""
    lines = [
        f"* {document['name']}: {row['measure']}: **{_shown(row)}**, target {row['target']}"
        for document in documents
        for row in document["rows"]
        if not counts(row)
    ]
    return "\n".join(lines) or "Nothing: every target is met."


def _shown(row: Document) -> str:
    return f"{figure(row)}, not verified" if "not_verified" in row else figure(row)


def _growth(path: Path) -> str:
    """What is measured, and a line a length: each figure of the library, and beside it that of dense attention."""
    document = json.loads(path.read_text())
    points = document["points"]
    attentions = list(dict.fromkeys(point["attention"] for point in points))
    found = {(point["num_tokens"], point["attention"]): point for point in points}
    headers = ["tokens", *(text for name in _FIGURES.values() for text in (name, *attentions[1:]))]
    lines = [
        [tokens_text(tokens), *(_cell(found.get((tokens, each)), key) for key in _FIGURES for each in attentions)]
        for tokens in dict.fromkeys(point["num_tokens"] for point in points)
    ]
    return f"{_swept(document['config'])}\n\n{markdown(lines, headers)}"


def _swept(config: dict[str, Any]) -> str:
    spec, size = config["spec"], config["sizes"][0]
    lengths, rates = (", ".join(map(str, spec[key])) for key in ("segment_lengths", "dilation_rates"))
    heads = "one head" if size["num_heads"] == 1 else f"{size['num_heads']} heads"
    causal = "causal" if spec["causal"] else "not causal"
    return f"{spec['name']} (segments {lengths}; rates {rates}; {causal}), {heads} of dim {size['head_dim']}, float32:"


def _cell(point: Document | None, key: str) -> str:
    if point is None:
        return "—"
    return f"{point[key] / 2**20:,.0f} MiB" if key == "peak_bytes" else with_unit(point[key]["median_s"], "s")


def _machine(document: Document) -> str:
    machine, versions = document["machine"], document["versions"]
    gpu = f"{machine['gpu']}; " if "gpu" in machine else ""
    tiny = "; tiny sizes" if document["small"] else ""
    return f"On {gpu}{machine['cpu']}, {machine['threads']} threads; torch {versions['torch']}{tiny}."
