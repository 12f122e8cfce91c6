"""Results as people read them: tables, README's headlines, the page of results, the parts of pages."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ._jobs import tokens_text
from ._measures import with_unit
from ._rules import LongNet
from ._run import MEASURES, Document
from .device import NAMES as DEVICE_NAMES

Part = Callable[[Path], str]
Columns = Mapping[str, Callable[[Any], object]]  # header: cell of a line

_MARK = re.compile(r"(<!-- (?P<name>[^>]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
NOTHING_SHORT = "Nothing: every target is met."


def markdown(lines: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """A table of texts; none is read as a number."""
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def table(lines: Iterable[Any], columns: Columns) -> str:
    return markdown([[cell(line) for cell in columns.values()] for line in lines], list(columns))


def read(results: Path, name: str) -> Document:
    """Raises FileNotFoundError if it has not been measured."""
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def all_documents(results: Path) -> list[Document]:
    """The answers in the folder, in the order of the measures; answers without a measure come last."""
    names = {path.stem for path in results.glob("*.json")}
    known = [name for name in (*MEASURES, *DEVICE_NAMES) if name in names]
    documents = [read(results, name) for name in (*known, *sorted(names - set(known)))]
    return [each for each in documents if {"rows", "machine", "commit"} <= set(each)]


def is_headline(name: str) -> bool:
    """Whether README shows it: measures with a row of the targets, the device suite, and the sweep."""
    return name == "sweep" or name in DEVICE_NAMES or (name in MEASURES and bool(MEASURES[name].code))


def question(document: Document) -> str:
    """As the measure asks it now; as the file has it for the device suite and for measures that are gone."""
    name = document["name"]
    return MEASURES[name].question if name in MEASURES else str(document["question"])


def condition(document: Document) -> str:
    """Machine, versions, commit and date of an answer, as a line of text."""
    machine, versions = document["machine"], document["versions"]
    gpu = f"{machine['gpu']}, {machine['gpu_memory_gib']} GiB; " if "gpu" in machine else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['memory_gib']} GiB; "
        f"Python {versions['python']}, torch {versions['torch']}, flexdilated {versions['flexdilated']}; "
        f"commit {document['commit']}; {document['date'][:10]}{'; tiny sizes' if document['small'] else ''}."
    )


def conditions(documents: Iterable[Document]) -> list[str]:
    """One line for each set of conditions that some of the answers share."""
    names: dict[str, list[str]] = {}
    for document in documents:
        names.setdefault(condition(document), []).append(document["name"])
    return [f"{', '.join(shared)}: {text}" for text, shared in names.items()]


def with_condition(text: str, document: Document) -> str:
    return f"{text}\n\n{condition(document)}"


def terminal_table(documents: Iterable[Document]) -> str:
    """One line a row: measure, target, figure, whether it is met."""
    lines = [
        (document["name"], row["measure"], row["target"], row["measured_text"], _met(row).strip("*"))
        for document in documents
        for row in document["rows"]
    ]
    return tabulate(lines, ("measure", "what", "target", "measured", "met"), disable_numparse=True)


def figure(row: Document) -> str:
    """The measured text; a miss has the digits that tell it from its bound."""
    bound = row["target"][2:]
    if row["met"] is not False or row["measured_text"] != bound:
        return str(row["measured_text"])
    return f"{row['measured']:.4g} {bound.partition(' ')[2]}".rstrip()


def counts(row: Document) -> bool:
    """Whether a row meets its target, with all its checks passed."""
    return row["met"] is True and "not_verified" not in row


def _met(row: Document) -> str:
    if "not_verified" in row:
        return "**not verified**"
    return "yes" if counts(row) else "**no**" if row["met"] is False else "—"


# README and docs/performance.md: a line a measure, what falls short in full words, and how time and memory grow.


def _headlines(results: Path) -> list[Document]:
    return [each for each in all_documents(results) if each["rows"] and is_headline(each["name"])]


def answers(results: Path) -> str:
    """Each target that a measure has, and the range of what was measured against it."""
    lines = []
    for document in _headlines(results):
        rows, targets = document["rows"], {}
        for row in rows:
            targets.setdefault(row["target"], []).append(row)
        met = sum(map(counts, rows))
        verdict = ("yes" if met else "no") if len(rows) == 1 else f"{met} of {len(rows)}"
        line = f"`{document['name']}`", question(document), ", ".join(targets), ", ".join(map(_range, targets.values()))
        lines.append((*line, verdict if met == len(rows) else f"**{verdict}**"))
    return _spaced(markdown(lines, ("measure", "question", "target", "measured", "met")))


def short(results: Path) -> str:
    """Each row that misses its target, is not measured, or not verified, in the words of its file."""
    lines = [
        f"* `{document['name']}`: {row['measure']}: **{figure(row)}{', not verified' * ('not_verified' in row)}**, "
        f"target {row['target']}"
        for document in _headlines(results)
        for row in document["rows"]
        if not counts(row)
    ]
    return _spaced("\n".join(lines) or NOTHING_SHORT)


def missed(results: Path) -> str:
    """A line for README: how many rows miss their target."""
    rows = [row for document in _headlines(results) for row in document["rows"]]
    misses = sum(not counts(row) for row in rows)
    which = "[which, and by how much](docs/performance.md#what-falls-short)"
    return f"{misses} of {len(rows)} figures miss their target: {which}." if misses else NOTHING_SHORT


def _range(rows: Sequence[Document]) -> str:
    numbers = sorted((row for row in rows if row["measured"] is not None), key=lambda row: float(row["measured"]))
    if not numbers:
        return "not measured"
    low, high = figure(numbers[0]), figure(numbers[-1])
    text = high if low == high else f"{low.partition(' ')[0]} to {high}"
    return text if len(numbers) == len(rows) else f"{text}, {len(rows) - len(numbers)} not measured"


def machines(results: Path) -> str:
    shown = [document for document in all_documents(results) if is_headline(document["name"])]
    return "  \n".join(dict.fromkeys(_machine(document) for document in shown))


def _machine(document: Document) -> str:
    machine, versions = document["machine"], document["versions"]
    gpu = f"{machine['gpu']}; " if "gpu" in machine else ""
    tiny = "; tiny sizes" if document["small"] else ""
    return f"On {gpu}{machine['cpu']}, {machine['threads']} threads; torch {versions['torch']}{tiny}."


def growth(results: Path) -> str:
    """Time and peak memory of the library and of dense attention at every length of the sweep."""
    document = read(results, "sweep")
    return _spaced(f"{_swept(document['config'])}\n\n{_swept_table(document)}")


def sizes(results: Path) -> str:
    """Some lengths of the sweep, the longest of all in a sentence, and how fast others are that compute the same."""
    names = "sweep", "vs_branch_loop", "vs_flex_attention", "computed_pairs"
    document, loop, flex, pairs = (read(results, name) for name in names)
    config, ours, dense = document["config"], *dict.fromkeys(point["attention"] for point in document["points"])
    found = {(point["num_tokens"], point["attention"]): point for point in document["points"]}
    longest = max(tokens for tokens, attention in found if attention == dense)
    sides, heads = (found[longest, ours], found[longest, dense]), config["sizes"][0]["num_heads"]
    times, peaks = [each["forward"]["median_s"] for each in sides], [each["peak_bytes"] for each in sides]
    spec = LongNet(**config["spec"])
    share = 100 * spec.pairs(num_tokens=longest, num_heads=heads) / (heads * longest**2)
    planned = next(row["detail"] for row in pairs["rows"] if row["measure"].startswith(f"{spec.label}, "))
    computed = share * planned[tokens_text(longest)]
    over_flex = {row["measure"].split(", ")[3]: f"{row['measured']:.0f} ×" for row in flex["rows"]}
    return (
        f"A call over {tokens_text(longest)} tokens takes {with_unit(times[0], 's')} forward, where dense attention "
        f"takes {with_unit(times[1], 's')}: {times[1] / times[0]:.0f} times as fast. The pairs that count, "
        f"once for each branch that holds them, are {share:.2g} % of dense attention's; those in the blocks that are "
        f"computed, once each where branches share them, {computed:.2g} %. "
        f"{_swept(config)[:-1]}, o{_machine(document)[1:-1]}; the peak, {peaks[0] / peaks[1]:.2g} × dense attention's "
        f"at {tokens_text(longest)}, is that of forward and backward; dense attention is "
        f"`scaled_dot_product_attention`:\n\n{_swept_table(document, (16384, 65536, 262144))}\n\n"
        f"Beside others that compute the same, on CPU too: {_range(loop['rows'])} as fast as torchscale's loop over "
        f"branches, forward and backward, at {_lengths(loop['rows'])} tokens; "
        f"{over_flex['union']} (of a union of branches) and {over_flex['mixture']} (of their mixture) as fast as "
        f"compiled FlexAttention in the order of the text, {tokens_text(flex['config']['size']['num_tokens'])} tokens, "
        f"forward."
    )


def _lengths(rows: Sequence[Document]) -> str:
    """The numbers of tokens that the rows' measures name."""
    return " and ".join(dict.fromkeys(length for row in rows for length in re.findall(r"\b\d+[KM]\b", row["measure"])))


def _swept(config: dict[str, Any]) -> str:
    spec, size = config["spec"], config["sizes"][0]
    lengths, rates = (", ".join(map(str, spec[key])) for key in ("segment_lengths", "dilation_rates"))
    heads = "one head" if size["num_heads"] == 1 else f"{size['num_heads']} heads"
    causal = "causal" if spec["causal"] else "not causal"
    return f"{spec['name']} (segments {lengths}; rates {rates}; {causal}), {heads} of dim {size['head_dim']}, float32:"


def _swept_table(document: Document, shown: Sequence[int] = ()) -> str:
    """A line for each length, or for the lengths in `shown`."""
    points, names = document["points"], {"forward": "forward", "backward": "backward", "peak_bytes": "peak memory"}
    attentions = list(dict.fromkeys(point["attention"] for point in points))
    found = {(point["num_tokens"], point["attention"]): point for point in points}

    def cell(tokens: int, attention: str, key: str) -> str:
        point = found.get((tokens, attention))
        if point is None:
            return "—"
        return f"{point[key] / 2**20:,.0f} MiB" if key == "peak_bytes" else with_unit(point[key]["median_s"], "s")

    headers = ["tokens", *(text for name in names.values() for text in (name, *attentions[1:]))]
    lines = [
        [tokens_text(tokens), *(cell(tokens, attention, key) for key in names for attention in attentions)]
        for tokens in dict.fromkeys(point["num_tokens"] for point in points)
        if not shown or tokens in shown
    ]
    return markdown(lines, headers)


# The site's page of results: a section a measure, every row against its target.

_ABOUT_RESULTS = """# Results: every figure against its target

Each row as it was measured, a measure a section: what was run, its target, the figure, and whether it is met. Where a
table's first column has a title of its own, that says what its figures are. Each section links its file, with the
timings and the configuration.
"""


def results_page(results: Path) -> str:
    documents = all_documents(results)
    parts = [_ABOUT_RESULTS, *map(_section, documents), "## Machines", *conditions(documents)]
    return "\n\n".join(parts) + "\n"


def _section(document: Document) -> str:
    name = document["name"]
    parts = [f"## {name}", f"{question(document)} [{name}.json](../bench/results/{name}.json)"]
    if document["rows"]:
        parts.append(_rows(document["rows"]))
    if document["points"] and name == "sweep":
        parts.append(_swept_table(document))
    return "\n\n".join(parts)


def _rows(rows: Sequence[Document]) -> str:
    """Words after the last colon that all rows share become the header of the first column."""
    split = [row["measure"].rpartition(": ") for row in rows]
    what = {measure for _, _, measure in split}
    once = len(what) == 1 and all(case for case, _, _ in split)
    lines = [
        (case if once else row["measure"], row["target"], figure(row), _met(row))
        for row, (case, _, _) in zip(rows, split, strict=True)
    ]
    return markdown(lines, (what.pop() if once else "measure", "target", "measured", "met"))


# Pages: the parts between their marks.


def write_pages(pages: Mapping[Path, Mapping[str, Part]], results: Path) -> None:
    """Put the results into the pages, each part between its marks.

    A part without its result is left unchanged, which is said on stderr.
    """
    for path, parts in pages.items():
        found: dict[str, str | None] = {}
        for name, part in parts.items():
            try:
                found[name] = part(results)
            except FileNotFoundError as error:
                print(f"{path}, {name}: stays as it is; {error.filename} is not there", file=sys.stderr)
                found[name] = None
        path.write_text(filled(path.read_text(encoding="utf-8"), found), encoding="utf-8")


def filled(text: str, parts: Mapping[str, str | None]) -> str:
    """The text with each part between the marks of its name; None leaves it. Raises ValueError if the names differ."""
    found = [match["name"] for match in _MARK.finditer(text)]
    if sorted(found) != sorted(parts):
        raise ValueError(f"each part needs its marks, once; got marks {sorted(found)} for parts {sorted(parts)}")

    def part(match: re.Match[str]) -> str:
        new = parts[match["name"]]
        return match[0] if new is None else f"{match[1]}{new}\n{match[3]}"

    return _MARK.sub(part, text)


def from_result(name: str, render: Callable[[Document], str]) -> Part:
    """A part that one result is rendered into."""
    return lambda results: _spaced(render(read(results, name)))


def _spaced(text: str) -> str:
    return f"\n{text}\n"


_PANELS = (
    ("forward", "s", lambda point: point["forward"]["median_s"]),
    ("backward", "s", lambda point: point["backward"]["median_s"]),
    ("peak memory, forward + backward", "MiB", lambda point: point["peak_bytes"] / 2**20),
)


def plot_sweep(document: Document, path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib, which the extra `plot` brings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    points = document["points"]
    tokens = sorted({point["num_tokens"] for point in points})
    for axes, (title, unit, value) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for name in dict.fromkeys(point["attention"] for point in points):
            own = [(point["num_tokens"], value(point)) for point in points if point["attention"] == name]
            if shown := [point for point in own if point[1] > 0]:  # at tiny sizes a peak may be 0
                axes.loglog(*zip(*shown, strict=True), "o-", label=name)
        axes.set(title=title, xlabel="tokens", ylabel=unit)
        axes.set_xticks(tokens, [tokens_text(count) for count in tokens])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(handles=axes.lines)
    figure.savefig(path, dpi=120)
