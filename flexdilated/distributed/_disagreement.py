"""What ranks disagree in, in words."""

import json
from collections import defaultdict
from collections.abc import Sequence

_SHOWN = 8  # values, or runs of ranks: where every rank of many has its own, a few say enough


def disagreement(facts: Sequence[dict[str, str]]) -> str:
    """Which facts differ, and which ranks have what; facts[rank] holds what the rank has written, by name."""
    differing = []
    for name in dict.fromkeys(name for has in facts for name in has):
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for rank, has in enumerate(facts):
            holders[has.get(name, "nothing")].append(rank)
        if len(holders) > 1:
            differing.append(f"{name}: {_who_has_what(holders)}")
    return f"all ranks must make the same call; they disagree in {'. And in '.join(differing)}"


def _who_has_what(holders: dict[str, list[int]]) -> str:
    """The majority first."""
    ordered = sorted(holders.items(), key=lambda holder: -len(holder[1]))
    shown = [f"{named(who)} {'has' if len(who) == 1 else 'have'} {value}" for value, who in ordered[:_SHOWN]]
    return "; ".join(shown + [f"{len(ordered) - _SHOWN} more values"] * (len(ordered) > _SHOWN))


def named(ranks: Sequence[int]) -> str:
    """Ascending ranks in words, runs of them as such: "ranks 0 to 2, 5"; "" if there are none."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    shown = ", ".join(texts[:_SHOWN] + [f"{len(texts) - _SHOWN} more runs"] * (len(texts) > _SHOWN))
    return shown and f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def as_call(facts: str) -> str:
    """Written facts as keywords: "num_tokens=8, dtype=torch.float32"."""
    return ", ".join(f"{name}={value}" for name, value in json.loads(facts).items())
