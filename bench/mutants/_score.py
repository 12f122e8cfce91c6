"""The result: how many of the sample were caught, by file and by operator, and what is known of each that was not."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from ._journal import Entry, Journal
from ._mutants import Mutant

# What a survivor is: no input tells it apart; only how fast something is or how much memory it takes differs; only
# the words of a message differ; an accelerator alone would tell; a test is missing, or is not among those that ran.
KINDS = ("equivalent", "only speed", "only words", "needs a device", "hole")
# 95 % of a normal distribution lie within.
_Z = 1.959964


def interval(caught: int, tried: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, spread = caught / tried, _Z**2 / tried
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * sqrt(share * (1 - share) / tried + spread / (4 * tried)) / (1 + spread)
    return middle - half, middle + half


def verdicts_in(path: Path) -> dict[str, Mapping[str, str]]:
    """name of the mutant -> {"is": one of KINDS, "because": text}."""
    verdicts = json.loads(path.read_text())
    unknown = {name: found["is"] for name, found in verdicts.items() if found["is"] not in KINDS}
    if unknown:
        raise ValueError(f"a verdict must be one of {', '.join(KINDS)}; got {unknown}")
    return verdicts


def _share(caught: int, tried: int) -> dict[str, Any]:
    low, high = interval(caught, tried)
    return {"caught": caught, "tried": tried, "share": caught / tried, "interval_95": [low, high]}


def _by(pairs: Iterable[tuple[str, bool]]) -> dict[str, dict[str, int]]:
    tried, caught = Counter(), Counter()
    for name, was_caught in pairs:
        tried[name] += 1
        caught[name] += was_caught
    return {name: {"caught": caught[name], "tried": tried[name]} for name in sorted(tried)}


def result(order: Sequence[Mutant], journal: Journal, verdicts: Mapping[str, Mapping[str, str]], **facts: Any) -> dict:
    """Plain data, of the mutants of the order that were tried to the end; a later try of a survivor counts beside."""
    first, last = _tries(journal)
    tried = [mutant for mutant in order if mutant.name in last]
    caught = {mutant.name: _is_caught(last[mutant.name]) for mutant in tried}
    alive = [mutant for mutant in tried if not caught[mutant.name]]
    kinds = Counter(verdicts.get(mutant.name, {}).get("is", "hole") for mutant in alive)
    same = sum(kinds[kind] for kind in KINDS[:3])
    controls = [entry for entry in journal.entries if entry["name"].startswith("control ")]
    return {
        "name": "mutants",
        **facts,
        "mutants": len(order),
        "at_first": _share(sum(_is_caught(first[mutant.name]) for mutant in tried), len(tried)),
        "with_the_tests_since": _share(sum(caught.values()), len(tried)),
        "without_equivalent_ones": _share(sum(caught.values()), len(tried) - same),
        "alive_by_kind": {kind: kinds[kind] for kind in KINDS},
        "out_of_time": sum(last[mutant.name]["verdict"] == "timeout" for mutant in tried),
        "controls": {"passed": sum(entry["verdict"] == "survived" for entry in controls), "run": len(controls)},
        "by_operator": _by((mutant.operator, caught[mutant.name]) for mutant in tried),
        "by_file": _by((mutant.file, caught[mutant.name]) for mutant in tried),
        "survivors": [_survivor(mutant, verdicts) for mutant in sorted(alive)],
        "caught_since": [
            {**_change(mutant), "by": last[mutant.name]["by"]}
            for mutant in sorted(tried)
            if caught[mutant.name] and not _is_caught(first[mutant.name])
        ],
    }


def _tries(journal: Journal) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Of each mutant, how the first round ended, with all its efforts, and how the last one did."""
    first: dict[str, Entry] = {}
    last: dict[str, Entry] = {}
    for entry in journal.entries:
        last[entry["name"]] = entry
        if entry["round"] == 0:
            first[entry["name"]] = entry
    return first, last


def _is_caught(entry: Entry) -> bool:
    return entry["verdict"] in ("killed", "timeout")


def _change(mutant: Mutant) -> dict[str, Any]:
    shorter = {"before": mutant.before, "after": mutant.after}
    shorter = {name: " ".join(text.split()) for name, text in shorter.items()}
    return {"file": mutant.file, "line": mutant.line, "operator": mutant.operator, **shorter}


def _survivor(mutant: Mutant, verdicts: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    return {**_change(mutant), **verdicts.get(mutant.name, {"is": "hole", "because": "not looked at"})}
