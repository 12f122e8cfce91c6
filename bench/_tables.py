"""Tables of the pages about a subject: each renders the file of one result."""

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from statistics import mean, median
from typing import Any

from flexdilated.masks.core import bytes_text, tokens_text

from ._measures import with_unit
from ._report import Document, condition, markdown, with_condition

Figures = Mapping[str, Any]
Render = Callable[[Document], str]
Columns = Mapping[str, Callable[[Any], object]]  # of each header the cell of a line


def table(lines: Iterable[Any], columns: Columns) -> str:
    return markdown([[cell(line) for cell in columns.values()] for line in lines], list(columns))


def of_rows(columns: Columns, lines: Callable[[Document], Iterable[Any]] = itemgetter("rows")) -> Render:
    """A line for each of a result's rows, or of what `lines` makes of it; under it with what that was measured."""
    return lambda document: with_condition(table(lines(document), columns), document)


def detail(name: str, as_text: Callable[[Any], str] = str) -> Callable[[Figures], str]:
    return lambda row: as_text(row["detail"][name])


def before(mark: str) -> Callable[[Figures], str]:
    """What a row measures, up to this mark."""
    return lambda row: row["measure"].partition(mark)[0]


def reached(row: Figures) -> str:
    return "yes" if row["met"] else "**no**"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def seconds(number: float) -> str:
    return f"{number:.3g} s"


_MEASURE, _TARGET, _FIGURE = map(itemgetter, ("measure", "target", "measured_text"))
_HELD = {"": _MEASURE, "target": _TARGET, "measured": _FIGURE}

# docs/performance.md

_WAYS = ("forward", "backward")
_AROUND = ("moves", "sums", "merges", "masks", "fills", "rest")  # shares of the time beside the kernel's


def rates(document: Document) -> str:
    """Each pattern's useful FLOPs a second in either direction, and below them what the kernel alone reaches."""
    about = document["rows"][0]["detail"]
    found, headers = about["patterns"], ["pattern", "computed / useful"]
    for way in _WAYS:
        headers += [f"{way}, GFLOP/s", "of matmul", "of dense", "around the kernel"]
    lines = []
    for name, forward in found["forward"].items():
        line = [name, f"{forward['waste']:.2f}"]
        for figures, dense in ((found[way][name], found[way]["dense"]) for way in _WAYS):
            around = sum(figures["shares"][kind] for kind in _AROUND)
            shares = figures["of_matmul"], figures["rate"] / dense["rate"], around
            line += [f"{figures['rate'] / 1e9:.0f}", *map(percent, shares)]
        lines.append(line)
    first, *_, last = (_kernel(about, shape) for shape in about["kernel_rates"])
    matmul = f"The matmul ran at {about['matmul_rate'] / 1e9:.0f} GFLOP/s; of that PyTorch's kernel alone reaches"
    return with_condition(f"{markdown(lines, headers)}\n\n{matmul} {first}, and {last}.", document)


def _kernel(about: Figures, shape: str) -> str:
    forward, backward = (percent(about["kernel_rates"][shape][way] / about["matmul_rate"]) for way in _WAYS)
    return f"{forward} forward and {backward} backward on problems of {shape} queries × keys"


_CLAIMED = {"claim": _MEASURE, "claimed": detail("claimed"), "here": _FIGURE, "reached": reached}


def claims(document: Document) -> str:
    lines = list(enumerate(document["rows"], start=1))
    columns = {"": itemgetter(0)} | {name: lambda each, cell=cell: cell(each[1]) for name, cell in _CLAIMED.items()}
    return with_condition(table(lines, columns), document)


def claims_notes(document: Document) -> str:
    return "\n".join(f"{number}. {_note(row)}" for number, row in enumerate(document["rows"], start=1))


def _note(row: Figures) -> str:
    """What was measured in a claim's stead, with times in ms and each detail in the unit that its name holds."""
    found = dict(row["detail"])
    here, source, _ = (found.pop(name) for name in ("here", "source", "claimed"))
    times = [f"{timing['name']} {with_unit(timing['median_s'] * 1e3, 'ms')}" for timing in row["timings"]]
    beside = "; ".join((*times, *(_beside(name, value) for name, value in found.items())))
    return f"{here[0].upper()}{here[1:]}. {beside[0].upper()}{beside[1:]}. Source: {source}."


def _beside(name: str, value: float | str) -> str:
    words = name.split("_")
    for unit, shown, size in (("bytes", "MiB", 2**20), ("percent", "%", 1)):
        if unit in words and not isinstance(value, str):
            return f"{' '.join(word for word in words if word != unit)}: {with_unit(value / size, shown)}"
    text = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return f"{' '.join(words)}: {text}"


def pool_claims(document: Document) -> str:
    rows = [row for row in document["rows"] if "claimed" in row["detail"]]
    sources = "\n".join(f"* {source}" for source in dict.fromkeys(row["detail"]["source"] for row in rows))
    return with_condition(f"{table(rows, _CLAIMED)}\n\nSources:\n\n{sources}", document)


# docs/howto/compiling.md

_OTHER = "torch's own attention"


def first_steps(document: Document) -> str:
    """Seconds of each first step, and what is measured beside them in a line below."""
    compared = [row for row in document["rows"] if _OTHER in row["detail"]]
    columns = {
        "": lambda row: row["measure"].removesuffix(f", over that with {_OTHER}"),
        "flexdilated": lambda row: seconds(row["detail"]["flexdilated"]["first_s"]),
        f"with {_OTHER}": lambda row: seconds(row["detail"][_OTHER]["first_s"]),
        "a later step": lambda row: seconds(row["detail"]["flexdilated"]["later_s"]),
    }
    others = [f"* {row['measure']}: {row['measured_text']}" for row in document["rows"] if row not in compared]
    return with_condition("\n".join((table(compared, columns), "", *others)), document)


def lengths(document: Document) -> str:
    found = document["rows"][0]["detail"]
    columns = {
        "lengths": itemgetter(0),
        "graphs": lambda each: each[1]["compilations"],
        f"all {len(found['lengths'])} steps": lambda each: seconds(each[1]["seconds_of_all_steps"]),
        f"the {found['steps_that_nowhere_compile']} steps that nowhere compile": lambda each: seconds(
            each[1]["seconds_of_steps_that_nowhere_compile"]
        ),
        "these again": lambda each: seconds(each[1]["seconds_of_these_again"]),
    }
    name = before(":")(document["rows"][0])
    return f"{table(found['ways'].items(), columns)}\n\n{name}: {condition(document)}"


# docs/howto/choosing.md and docs/performance.md

against_dense = of_rows(
    {
        "forward + backward": before(", forward"),
        "peak": detail("peak_bytes", bytes_text),
        "dense SDPA's": detail("dense_peak_bytes", bytes_text),
        "ratio": _FIGURE,
    }
)


def _deviation(point: Figures) -> float:
    return point["predicted_bytes"] / point["measured_bytes"] - 1


def _worst(document: Document) -> list[tuple[str, int, Figures]]:
    """Of each kind of step how many points there are, and the one whose prediction is farthest off."""
    points = [point for row in document["rows"] for point in row["detail"]["peaks"]]
    lines = []
    for kind, name in {None: "`attend`", False: "LongNet", True: "LongNet, checkpointed"}.items():
        of_kind = [point for point in points if point["checkpoint"] is kind]
        lines.append((name, len(of_kind), max(of_kind, key=lambda point: abs(_deviation(point)))))
    return lines


peaks = of_rows(
    {
        "": itemgetter(0),
        "cases": itemgetter(1),
        "the farthest off": lambda each: f"{each[2]['pattern']}, {each[2]['dtype']}",
        "predicted": lambda each: bytes_text(each[2]["predicted_bytes"]),
        "measured": lambda each: bytes_text(each[2]["measured_bytes"]),
        "deviation": lambda each: f"{100 * _deviation(each[2]):+.1f} %",
    },
    _worst,
)


def checkpointing(document: Document) -> str:
    memory, time = document["rows"]
    lines = [
        (way, *(bytes_text(memory["detail"][name]) for name in names), seconds(timing["median_s"]))
        for way, timing, names in (
            ("plain", time["timings"][0], ("peak_bytes", "predicted_bytes")),
            ("with checkpointing", time["timings"][1], ("checkpointed_peak_bytes", "predicted_checkpointed_bytes")),
        )
    ]
    lines.append(("ratio", memory["measured_text"], "", time["measured_text"]))
    headers = (before(", forward")(memory), "peak memory", "predicted", "a step")
    return with_condition(markdown(lines, headers), document)


_SHOWN = (8, 24, 80, 141)  # GiB


def longest(device: str) -> Render:
    def render(document: Document) -> str:
        found = document["rows"][0]["detail"]["longest"][device]
        names = list(found["bytes_a_token"])
        lines = [("bytes a token", *(bytes_text(each) for each in found["bytes_a_token"].values()))]
        for each in found["longest"]:
            if each["budget_bytes"] >> 30 not in _SHOWN:
                continue
            lines.append((bytes_text(each["budget_bytes"]), *(tokens_text(each[name]) for name in names)))
        return with_condition(markdown(lines, ("", *names)), document)

    return render


# docs/howto/ranks.md

# Of rows that were counted without processes: what an exchange receives beside an all-gather, if no heads share keys.
keys_received = of_rows(
    {
        "": itemgetter(0),
        "order and heads": itemgetter(1),
        "needed, mean of ranks": lambda each: f"{mean(each[2]['tokens_a_kv_head']):,.0f}",
        "all-gather": lambda each: f"{each[2]['all_gather_tokens_a_kv_head']:,.0f}",
        "ratio": lambda each: f"{each[2]['all_gather_ratio']:.0f} ×",
    },
    lambda document: [
        (before(", counted")(row), case, figures)
        for row in document["rows"]
        for case, figures in row["detail"].items()
        if "all_gather_ratio" in figures and case.endswith(", 16 of keys")
    ],
)
# Most over mean work of a rank in either order, where there are most ranks.
balance = of_rows(
    {
        "": before(", zigzag"),
        **{name: detail(name, lambda each: f"{each['max_over_mean']:.3f}") for name in ("contiguous", "zigzag")},
    },
    lambda document: [row for row in document["rows"] if ", 64 ranks," in row["measure"]],
)


def single_buffers(document: Document) -> str:
    (found,) = (row["detail"] for row in document["rows"] if "sizes" in row["detail"])
    columns = {
        "size": lambda each: bytes_text(each["bytes"]),
        "leased": lambda each: f"{1e6 * each['leased_s']:,.0f} µs",
        "made by torch": lambda each: f"{1e6 * each['made_s']:,.0f} µs",
        "time saved": lambda each: f"{100 * (1 - each['leased_s'] / each['made_s']):+.0f} %",
    }
    return with_condition(table(found["sizes"][::2], columns), document)


def codec_bytes(document: Document) -> str:
    rows = [row for row in document["rows"] if "claimed" in row["detail"]]
    columns = {
        "codec": detail("codec", "`{}`".format),
        "saved of float32": _FIGURE,
        "saved of bfloat16": detail("percent_saved_of_bfloat16", "{:.3g} %".format),
        "claimed": detail("claimed"),
        "pays on links below": detail("pays_below_bytes_a_second", lambda rate: f"{bytes_text(rate)}/s"),
    }
    return with_condition(f"{table(rows, columns)}\n\nThe claim: {rows[0]['detail']['source']}.", document)


_ERRORS = ("mean_row_error", "largest_row_error", "proven_bound", "output_error")
codec_errors = of_rows(
    {
        "codec": itemgetter(0),
        "rows": itemgetter(1),
        **{name.replace("_", " "): lambda each, name=name: f"{100 * each[2][name]:.2g} %" for name in _ERRORS},
    },
    lambda document: [
        (f"`{before(':')(row)}`", kind, figures)
        for row in document["rows"]
        if "normal" in row["detail"]
        for kind, figures in row["detail"].items()
    ],
)

# docs/howto/slide_encoder.md: of the rows of times, whose detail holds the peaks too

_MIB = 1 << 20
received = of_rows(
    {
        "": before(": attention_received"),
        "forward": lambda row: seconds(row["timings"][0]["median_s"]),
        "attention received": lambda row: seconds(row["timings"][1]["median_s"]),
        "peak memory of the two": detail(
            "peak_bytes", lambda peak: " and ".join(f"{peak[name] / _MIB:.0f} MiB" for name in ("forward", "received"))
        ),
        "an N x M matrix": detail("matrix_bytes", lambda size: f"{size / _MIB:,.0f} MiB"),
    },
    lambda document: document["rows"][::2],
)

# docs/contributing/kernels.md


def interpreted(document: Document) -> str:
    """Of each result the largest share of its budget, by dtype."""
    cases = document["cases"].values()
    names = sorted({name for case in cases for name in case["shares"]}, key=_order)
    lines = []
    for dtype in sorted({case["dtype"] for case in cases}):
        mine = [case for case in cases if case["dtype"] == dtype]
        dims = ", ".join(map(str, sorted({case["head_dim"] for case in mine})))
        largest = (f"{max(case['shares'].get(name, 0.0) for case in mine):.2f}" for name in names)
        lines.append((dtype, str(len(mine)), dims, *largest))
    return with_condition(markdown(lines, ("dtype", "cases", "head dims", *names)), document)


def _order(name: str) -> tuple[bool, bool, str]:
    return name not in ("out", "lse"), name not in ("out", "lse", "dq", "dk", "dv"), name


def counted(document: Document) -> str:
    """A line for the cases of one figure and target: what their names share, and the range of what was found."""
    groups: dict[tuple[str, float], list[tuple[list[str], float]]] = {}
    for name, case in document["cases"].items():
        parts = name.split(", ")
        groups.setdefault((parts[0], case["target"]), []).append((parts, case["figure"]))
    lines = []
    for (_, target), cases in groups.items():
        names, figures = [parts for parts, _ in cases], [figure for _, figure in cases]
        shared = ", ".join(part for part in names[0] if all(part in name for name in names))
        low, high = (f"{bound(figures):g}" for bound in (min, max))
        lines.append((shared, len(cases), f"≤ {target:g}", high if low == high else f"{low} to {high}"))
    return with_condition(markdown(lines, ("", "cases", "target", "found")), document)


def versions(document: Document) -> str:
    """A line for each torch that the suite was run with."""
    lines = []
    for torch_version, case in document["cases"].items():
        packages, left_out = case["packages"], sum(case["left_out"].values())
        lines.append(
            (
                torch_version,
                f"CUDA {case['cuda']}" if case["cuda"] else "CPU",
                packages["transformers"] or "—",
                case["versions"]["python"],
                case["date"][:10],
                f"{case['passed']:,}",
                str(len(case["failed"])),
                str(left_out),
            )
        )
    return markdown(lines, ("torch", "build", "transformers", "Python", "run", "passed", "failed", "left out"))


def left_out(document: Document) -> str:
    """Why tests were left out, and how many with each torch."""
    counts = {torch_version: case["left_out"] for torch_version, case in document["cases"].items()}
    reasons = dict.fromkeys(reason for reasons in counts.values() for reason in reasons)
    lines = [(reason, *(str(own.get(reason, "")) for own in counts.values())) for reason in reasons]
    return markdown(lines, ("left out", *counts))


def code(document: Document) -> str:
    """Of each device and head dim the bytes that the patterns' kernels spill: the median, and the most."""
    found: dict[tuple[str, str], dict[str, Figures]] = {}
    for key, figures in document["cases"].items():
        device, _, rest = key.partition(", ")
        pattern, _, dim = rest.rpartition(", ")
        found.setdefault((device, dim), {})[pattern] = figures
    lines = []
    for device, dim in sorted(found, key=lambda each: (each[0] != "sm_90", int(each[1]))):
        patterns = found[device, dim]
        line = [f"{device}, head dim {dim}", str(len(patterns))]
        for way in _WAYS:
            spilled = {name: figures[way]["spill_stores"] for name, figures in patterns.items()}
            most = max(spilled, key=spilled.__getitem__)
            worst = f"{spilled[most]:,} ({most})" if spilled[most] else "0"
            line += [f"{median(spilled.values()):,.0f}", worst]
        lines.append(line)
    headers = ("", "patterns", "forward, median", "most", "backward, median", "most")
    return with_condition(markdown(lines, headers), document)
