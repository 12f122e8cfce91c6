"""Tables of what chosen, drawn and refined blocks cost and find."""

from ._report import Document, markdown, with_condition
from ._tables import Figures, Render, before, percent

_ALL, _FAR = "all bytes", "copies from afar"
_PLACES = (_ALL, "quarter 1", "quarter 4", _FAR)


def chosen_cost(document: Document) -> str:
    """A line a way and length: times as fast as dense attention, and the share of choosing."""
    lines: dict[str, list[str]] = {}
    for row in document["rows"]:
        way, _, rest = row["measure"].rpartition(", forward")
        if "choosing_share" in row["detail"]:
            share = [] if rest.startswith(" + backward") else [percent(row["detail"]["choosing_share"])]
            lines.setdefault(way, []).extend((row["measured_text"], *share))
    table = [(*way.rsplit(", ", 1), *line) for way, line in lines.items()]
    headers = ("who chooses", "tokens", "forward", "of it choosing", "forward + backward")
    even = [row for row in document["rows"] if "times_as_fast" in row["detail"]]
    from_on = "; ".join(f"{before(', forward')(row)}: {row['measured_text']}" for row in even)
    told = f"No slower than dense attention from, forward: {from_on}."
    return with_condition(f"{markdown(table, headers)}\n\n{told}", document)


def found(document: Document) -> str:
    """A line a way of reading: the share found in each task, and paired differences, in points."""
    tasks = {before(" in ")(row): row["detail"]["ways"] for row in document["rows"]}
    headers = ["keys read", *(f"{task}{each}" for task in tasks for each in ("", ", over the window", ", over exact"))]
    lines = []
    for way in next(iter(tasks.values())):
        line = [way]
        for figure in (ways[way] for ways in tasks.values()):
            line += [percent(figure["found"]), _points(figure["over_window"]), _points(figure.get("over_exact"))]
        lines.append(line)
    return with_condition(markdown(lines, headers), document)


def _points(ends: list[float] | None) -> str:
    return "" if ends is None or ends[0] == ends[1] == 0 else f"{100 * ends[0]:+.0f} to {100 * ends[1]:+.0f}"


def _bits(ends: list[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:+.2f} to {ends[1]:+.2f}"


def bits(row: int) -> Render:
    """A line a way of reading: bits of all bytes and of copies from afar; of these, what the way costs over others."""

    def render(document: Document) -> str:
        ways = document["rows"][row]["detail"]["ways"]
        references = _references(ways)
        lines = [
            (
                name,
                *(f"{figure['bits'][place]:.2f}" for place in _PLACES),
                *(_bits(figure["over"].get(other, {}).get(_FAR)) for other in references),
            )
            for name, figure in ways.items()
        ]
        headers = ("keys read", *_PLACES, *(f"{_FAR}, over {name}" for name in references))
        return with_condition(markdown(lines, headers), document)

    return render


def exchanges(document: Document) -> str:
    """A line for each two ways: bits of the usual and of the other, of copies from afar, and the differences."""
    lines = []
    for row in document["rows"]:
        ways = row["detail"]["ways"]
        (than,) = _references(ways)
        for name, figure in ways.items():
            if name != than:
                two = (f"{each['bits'][_FAR]:.2f}" for each in (ways[than], figure))
                apart = (_bits(figure["over"][than][place]) for place in (_FAR, _ALL))
                lines.append((before(":")(row), than, name, *two, *apart))
    headers = ("", "usual", "other", "bits of the usual", "bits of the other", "difference", "difference of all bytes")
    return with_condition(markdown(lines, headers), document)


def _references(ways: Figures) -> list[str]:
    """Those over which differences were taken."""
    return [name for name in ways if any(name in figure["over"] for figure in ways.values())]


def step_times(document: Document) -> str:
    """A line a way: a training step's time over dense attention's."""
    columns = {before(", ")(row): row["detail"]["times"] for row in document["rows"]}
    ways = next(iter(columns.values()))
    lines = [(way, *(f"{times[way]:.2f} ×" for times in columns.values())) for way in ways]
    return with_condition(markdown(lines, ("keys read", *columns)), document)


def recipe(name: str) -> Render:
    """A recipe's figures in one sentence."""

    def render(document: Document) -> str:
        cases = {
            row["measure"].partition(", ")[2].removesuffix(": times as fast as dense"): row["measured_text"]
            for row in document["rows"]
            if row["measure"].startswith(f"{name}, ")
        }
        return f"`{name}` over dense attention: {'; '.join(f'{case}: {text}' for case, text in cases.items())}."

    return render
