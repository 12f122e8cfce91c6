"""Tables of what chosen, drawn and refined blocks cost and find."""

from collections.abc import Callable, Mapping
from typing import Any

from ._report import Document, condition, markdown, with_condition
from ._tables import percent

Figures = Mapping[str, Any]
_ALL, _FAR = "all bytes", "copies from afar"
_PLACES = (_ALL, "quarter 1", "quarter 4", _FAR)


def chosen_cost(document: Document) -> str:
    """A line a way and length: times as fast as dense attention, and the share of choosing."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in document["rows"]:
        way, _, rest = row["measure"].rpartition(", forward")
        if "choosing_share" not in row["detail"]:
            continue
        way, _, tokens = way.rpartition(", ")
        line = lines.setdefault((way, tokens), [])
        line.append(row["measured_text"])
        if not rest.startswith(" + backward"):
            line.append(percent(row["detail"]["choosing_share"]))
    even = [row for row in document["rows"] if "times_as_fast" in row["detail"]]
    table = [(way, tokens, *line) for (way, tokens), line in lines.items()]
    headers = ("who chooses", "tokens", "forward", "of it choosing", "forward + backward")
    from_on = [f"{row['measure'].partition(', forward')[0]}: {row['measured_text']}" for row in even]
    told = f"No slower than dense attention from, forward: {'; '.join(from_on)}."
    return f"{markdown(table, headers)}\n\n{told}\n\n{condition(document)}"


def found(document: Document) -> str:
    """A line a way of reading: the share found in each task, and paired differences."""
    tasks = {row["measure"].partition(" in ")[0]: row["detail"]["ways"] for row in document["rows"]}
    headers = ["keys read", *(f"{task}{each}" for task in tasks for each in ("", ", over the window", ", over exact"))]
    lines = []
    for way in next(iter(tasks.values())):
        line = [way]
        for ways in tasks.values():
            figure = ways[way]
            line += [percent(figure["found"]), _between(figure["over_window"]), _between(figure.get("over_exact"))]
        lines.append(line)
    return with_condition(lines, headers, document)


def _between(ends: list[float] | None) -> str:
    """An interval of differences, in points."""
    return "" if ends is None or ends[0] == ends[1] == 0 else f"{100 * ends[0]:+.0f} to {100 * ends[1]:+.0f}"


def bits(row: int) -> Callable[[Document], str]:
    """A line a way of reading: bits of all bytes and of copies from afar; of these, what the way costs over others."""

    def render(document: Document) -> str:
        ways = document["rows"][row]["detail"]["ways"]
        references = _references(ways)
        lines = []
        for name, figure in ways.items():
            over = [_apart(figure["over"].get(other, {}).get(_FAR)) for other in references]
            lines.append((name, *(f"{figure['bits'][place]:.2f}" for place in _PLACES), *over))
        headers = ("keys read", *_PLACES, *(f"{_FAR}, over {name}" for name in references))
        return with_condition(lines, headers, document)

    return render


def exchanges(document: Document) -> str:
    """A line for each two ways: bits of the usual and of the other, of copies from afar, and the differences."""
    lines = []
    for row in document["rows"]:
        text, ways = row["measure"].partition(":")[0], row["detail"]["ways"]
        (than,) = _references(ways)
        for name, figure in ways.items():
            if name != than:
                two = (f"{each['bits'][_FAR]:.2f}" for each in (ways[than], figure))
                lines.append((text, than, name, *two, *(_apart(figure["over"][than][at]) for at in (_FAR, _ALL))))
    headers = ("", "usual", "other", "bits of the usual", "bits of the other", "difference", "difference of all bytes")
    return with_condition(lines, headers, document)


def _references(ways: Figures) -> list[str]:
    """Those over which differences were taken."""
    return [name for name in ways if any(name in figure["over"] for figure in ways.values())]


def step_times(document: Document) -> str:
    """A line a way: a training step's time over dense attention's."""
    columns = {row["measure"].partition(", ")[0]: row["detail"]["times"] for row in document["rows"]}
    ways = next(iter(columns.values()))
    lines = [(way, *(f"{times[way]:.2f} ×" for times in columns.values())) for way in ways]
    return with_condition(lines, ("keys read", *columns), document)


def recipe(name: str) -> Callable[[Document], str]:
    """A recipe's figures in one sentence."""

    def render(document: Document) -> str:
        rows = [row for row in document["rows"] if row["measure"].startswith(f"{name}, ")]
        figures = [f"{_case(row['measure'])}: {row['measured_text']}" for row in rows]
        return f"`{name}` over dense attention: {'; '.join(figures)}."

    return render


def _case(measure: str) -> str:
    return measure.partition(", ")[2].removesuffix(": times as fast as dense")


def _apart(ends: list[float] | None) -> str:
    """An interval of differences in bits."""
    return "" if ends is None else f"{ends[0]:+.2f} to {ends[1]:+.2f}"
