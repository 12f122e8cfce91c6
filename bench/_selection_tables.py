"""Tables of what chosen, drawn and refined blocks cost and find."""

from collections.abc import Mapping
from pathlib import Path

from ._report import Document, conditions, markdown, read, with_condition
from ._tables import Figures, Render, before, percent

_ALL, _FAR = "all bytes", "copies from afar"
_PLACES = (_ALL, _FAR)


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


def learned(results: Path) -> str:
    """What each way of reading learned, and the time of its training step over that of dense attention."""
    document, steps = read(results, "byte_model"), read(results, "byte_step")
    times = {f"a step, {before(', ')(row)}": row["detail"]["times"] for row in steps["rows"]}
    measured = "\n\n".join(conditions([document, steps]))
    return f"\n{_bits_table(document['rows'][0]['detail']['ways'], times)}\n\n{measured}\n"


def read_untrained(document: Document) -> str:
    """The same of dense models that are read in other ways; measured with what learned."""
    return _bits_table(document["rows"][1]["detail"]["ways"], {})


def _bits_table(ways: Figures, times: Mapping[str, Figures]) -> str:
    """A line a way: bits of all bytes and of copies from afar; of these, what the way costs over others; its times."""
    references = _references(ways)
    lines = []
    for name in dict.fromkeys([*ways, *(way for column in times.values() for way in column)]):
        figure = ways.get(name, {"bits": {}, "over": {}})
        lines.append(
            (
                name,
                *(f"{figure['bits'][place]:.2f}" if place in figure["bits"] else "" for place in _PLACES),
                *(_bits(figure["over"].get(other, {}).get(_FAR)) for other in references),
                *(f"{column[name]:.2f} ×" for column in times.values()),
            )
        )
    headers = ("keys read", *_PLACES, *(f"{_FAR}, over {name}" for name in references), *times)
    return markdown(lines, headers)


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


def recipe(*names: str) -> Render:
    """The figures of recipes, a sentence each."""
    return lambda document: "\n".join(_sentence(name, document) for name in names)


def _sentence(name: str, document: Document) -> str:
    cases = {
        row["measure"].partition(", ")[2].removesuffix(": times as fast as dense"): row["measured_text"]
        for row in document["rows"]
        if row["measure"].startswith(f"{name}, ")
    }
    return f"`{name}` over dense attention: {'; '.join(f'{case}: {text}' for case, text in cases.items())}."
