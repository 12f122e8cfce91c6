"""The figures of docs/planted_bugs.md: how many of the mutants were caught, from the file of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._markdown import markdown

PLANTED_BUGS = Path("docs/planted_bugs.md")
_KINDS = {
    "equivalent": "no input tells them apart",
    "only speed": "only time or memory differs: a limit, a shortcut, an estimate",
    "only words": "only the words of a message differ",
    "needs a device": "only an accelerator would tell",
    "hole": "a test is missing, or is not among those that ran",
}


def mutants_parts(results: Path) -> dict[str, str]:
    """The part between the page's marks."""
    found = json.loads((results / "mutants.json").read_text(encoding="utf-8"))
    return {"mutants": f"\n{_text(found)}\n"}


def _text(found: Mapping[str, Any]) -> str:
    first, since, told = (found[name] for name in ("at_first", "with_the_tests_since", "without_equivalent_ones"))
    controls = found["controls"]
    lines = [
        f"Of {found['mutants']:,} mutants, {since['tried']} were drawn (seed {found['seed']}) and tried on commit "
        f"{found['commit'][:7]}. Caught were {_share(first)}. Tests written for what came out alive catch "
        f"{len(found['caught_since'])} more: {_share(since)}. Of those that anything but time, memory and words could "
        f"tell from the original, that is {_share(told)}.",
        "",
        f"* {found['out_of_time']} of the caught ran out of time.",
        f"* The same tests ran {controls['run']} times on the tree as it is, and passed {controls['passed']} times.",
        f"* Alive are {sum(found['alive_by_kind'].values())}: "
        + "; ".join(f"{number} where {_KINDS[kind]}" for kind, number in found["alive_by_kind"].items() if number)
        + ". Each stands in `bench/results/mutants.json`, with what it changes and why it is that.",
        "",
        _table(found["by_operator"]),
    ]
    return "\n".join(lines)


def _share(part: Mapping[str, Any]) -> str:
    low, high = part["interval_95"]
    return f"{part['caught']} of {part['tried']}, {part['share']:.1%} (95 % interval {low:.1%} to {high:.1%})"


def _table(by_operator: Mapping[str, Mapping[str, int]]) -> str:
    rows = [(name, each["tried"], each["caught"]) for name, each in by_operator.items()]
    return markdown(rows, ("operator", "tried", "caught"))
