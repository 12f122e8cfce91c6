"""Tables of the pages about a subject: each renders the file of one result."""

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from statistics import mean, median
from typing import Any

from flexdilated.masks.core import bytes_text, tokens_text

from ._report import Columns, Document, condition, markdown, table, with_condition

Figures = Mapping[str, Any]
Render = Callable[[Document], str]


def of_rows(columns: Columns, lines: Callable[[Document], Iterable[Any]] = itemgetter("rows")) -> Render:
    """A line for each of a result's rows, or of `lines`; below them the machine and the versions."""
    return lambda document: with_condition(table(lines(document), columns), document)


def detail(name: str, as_text: Callable[[Any], str] = str) -> Callable[[Figures], str]:
    return lambda row: as_text(row["detail"][name])


def before(mark: str) -> Callable[[Figures], str]:
    """The name of a row's measure up to this mark."""
    return lambda row: row["measure"].partition(mark)[0]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def seconds(number: float) -> str:
    return f"{number:.3g} s"


_MEASURE, _FIGURE = map(itemgetter, ("measure", "measured_text"))
_WAYS = ("forward", "backward")

# docs/performance.md

_AROUND = ("moves", "sums", "merges", "masks", "fills", "rest")  # shares of the time beside the kernel's


def rates(document: Document) -> str:
    """Each pattern's useful FLOPs a second in either direction, and below them the rate of the kernel alone."""
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
    kernel = []
    for shape, rates in about["kernel_rates"].items():
        forward, backward = (percent(rates[way] / about["matmul_rate"]) for way in _WAYS)
        kernel.append(f"{forward} forward and {backward} backward on problems of {shape} queries × keys")
    matmul = f"The matmul ran at {about['matmul_rate'] / 1e9:.0f} GFLOP/s; of that PyTorch's kernel alone reaches"
    return with_condition(f"{markdown(lines, headers)}\n\n{matmul} {kernel[0]}, and {kernel[-1]}.", document)


def _deviation(point: Figures) -> float:
    return point["predicted_bytes"] / point["measured_bytes"] - 1


def _worst_predictions(document: Document) -> list[tuple[str, int, Figures]]:
    """For each kind of step the number of points, and the one whose prediction is farthest off."""
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
    _worst_predictions,
)
against_dense = of_rows(
    {
        "forward + backward": before(", forward"),
        "peak": detail("peak_bytes", bytes_text),
        "dense SDPA's": detail("dense_peak_bytes", bytes_text),
        "ratio": _FIGURE,
    }
)

# docs/howto/compiling.md, docs/howto/choosing.md, docs/howto/slide_encoder.md

_OTHER = "torch's own attention"


def first_steps(document: Document) -> str:
    """Seconds of each first step; the other rows in lines below."""
    compared = [row for row in document["rows"] if _OTHER in row["detail"]]
    columns = {
        "": lambda row: row["measure"].removesuffix(f", over that with {_OTHER}"),
        "flexdilated": lambda row: seconds(row["detail"]["flexdilated"]["first_s"]),
        f"with {_OTHER}": lambda row: seconds(row["detail"][_OTHER]["first_s"]),
        "a later step": lambda row: seconds(row["detail"]["flexdilated"]["later_s"]),
    }
    others = [f"* {row['measure']}: {row['measured_text']}" for row in document["rows"] if row not in compared]
    return with_condition("\n".join((table(compared, columns), "", *others)), document)


def flex_cases(document: Document) -> str:
    """A line for each group of cases: how many are equal in each way; below them what is refused, by its error."""
    about = document["rows"][0]["detail"]

    def equal(way: str) -> Callable[[Any], str]:
        def cell(each: Any) -> str:
            counts = each[1][way]
            if not each[1]["backward"]:  # of calls that torch refuses
                return "—"
            found, of = counts.get("equal", 0), sum(counts.values())
            return f"{found}" if found == sum(each[1]["forward"].values()) else f"{found} of {of}"

        return cell

    ways = {"forward": "forward", "backward": "backward", "compiled": "compiled", "one graph, inference": "one graph"}
    columns: Columns = {"": itemgetter(0), "cases": lambda each: sum(each[1]["forward"].values())}
    columns |= {header: equal(way) for header, way in ways.items()}
    columns |= {"refused": lambda each: each[1]["forward"].get("refused", 0) or ""}
    errors: dict[str, list[str]] = {}
    for name, answers in about["other"].items():
        for text in dict.fromkeys(answers[way] for way in ("forward", "backward", "compiled") if way in answers):
            errors.setdefault(text, []).append(name)
    lines = [f"* {'; '.join(names)}: {text}" for text, names in errors.items()]
    return with_condition("\n".join((table(about["groups"].items(), columns), "", *lines)), document)


_SAME = "that_nowhere_compile"


def lengths(document: Document) -> str:
    found = document["rows"][0]["detail"]
    headers = {
        f"all {len(found['lengths'])} steps": "seconds_of_all_steps",
        f"the {found[f'steps_{_SAME}']} steps that nowhere compile": f"seconds_of_steps_{_SAME}",
        "these again": "seconds_of_these_again",
    }
    columns = {"lengths": itemgetter(0), "graphs": lambda each: each[1]["compilations"]}
    columns |= {header: lambda each, key=key: seconds(each[1][key]) for header, key in headers.items()}
    name = before(":")(document["rows"][0])
    return f"{table(found['ways'].items(), columns)}\n\n{name}: {condition(document)}"


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


def quality(document: Document) -> str:
    """A line for each attention: keys of a query, bits per byte at equal steps and at equal time, and steps in it."""
    found: dict[str, dict[str, Figures]] = {}
    for row in document["rows"]:
        equal = row["measure"].partition("equal ")[2].partition(":")[0]
        found.setdefault(before(",")(row), {"dense": row["detail"]["dense"]})[equal] = row["detail"]
    dense = next(iter(found.values()))["dense"]
    lines = [("dense", f"{dense['keys_a_query']:,.0f}", _bits(dense), str(dense["steps"]), _bits(dense))]
    for name, each in found.items():
        steps, time = each["steps"], each["time"]
        lines.append((name, f"{steps['keys_a_query']:,.0f}", _bits(steps), str(time["steps"]), _bits(time)))
    headers = ("attention", "keys a query", f"after {dense['steps']} steps", "steps in equal time", "after equal time")
    return with_condition(markdown(lines, headers), document)


def _bits(figures: Figures) -> str:
    """The mean over seeds, and the range."""
    bits = figures["bits"]
    return f"{mean(bits):.2f} ({min(bits):.2f} to {max(bits):.2f})"


def longest(device: str) -> Render:
    def render(document: Document) -> str:
        found = document["rows"][0]["detail"]["longest"][device]
        names = list(found["bytes_a_token"])
        lines = [("bytes a token", *map(bytes_text, found["bytes_a_token"].values()))]
        for each in found["longest"]:
            if each["budget_bytes"] >> 30 in (8, 24, 80, 141):
                lines.append((bytes_text(each["budget_bytes"]), *(tokens_text(each[name]) for name in names)))
        return with_condition(markdown(lines, ("", *names)), document)

    return render


_MIB = 1 << 20
# Of the rows of times, whose detail holds the peaks too.
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

# docs/howto/ranks.md

# Of rows that were counted without processes: an exchange's bytes beside an all-gather's, if no heads share keys.
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
# Most over mean work of a rank in either order, at the most ranks.
balance = of_rows(
    {
        "": before(", zigzag"),
        **{name: detail(name, lambda each: f"{each['max_over_mean']:.3f}") for name in ("contiguous", "zigzag")},
    },
    lambda document: [row for row in document["rows"] if ", 64 ranks," in row["measure"]],
)
single_buffers = of_rows(
    {
        "size": lambda each: bytes_text(each["bytes"]),
        "leased": lambda each: f"{1e6 * each['leased_s']:,.0f} µs",
        "made by torch": lambda each: f"{1e6 * each['made_s']:,.0f} µs",
        "time saved": lambda each: f"{100 * (1 - each['leased_s'] / each['made_s']):+.0f} %",
    },
    lambda document: next(row["detail"]["sizes"] for row in document["rows"] if "sizes" in row["detail"])[::2],
)


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

# docs/contributing/kernels.md and docs/contributing/tests.md


def interpreted(document: Document) -> str:
    """Each result's largest share of its budget, by dtype."""

    def order(name: str) -> tuple[bool, bool, str]:
        return name not in ("out", "lse"), name not in ("out", "lse", "dq", "dk", "dv"), name

    cases = document["cases"].values()
    names = sorted({name for case in cases for name in case["shares"]}, key=order)
    lines = []
    for dtype in sorted({case["dtype"] for case in cases}):
        mine = [case for case in cases if case["dtype"] == dtype]
        dims = ", ".join(map(str, sorted({case["head_dim"] for case in mine})))
        largest = (f"{max(case['shares'].get(name, 0.0) for case in mine):.2f}" for name in names)
        lines.append((dtype, str(len(mine)), dims, *largest))
    return with_condition(markdown(lines, ("dtype", "cases", "head dims", *names)), document)


def counted(document: Document) -> str:
    """A line for the cases of one figure and target: the parts that their names share, and the range found."""
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


def code(document: Document) -> str:
    """For each device and head dim the bytes that the patterns' kernels spill: the median, and the most."""
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


def versions(document: Document) -> str:
    """A line for each torch that the suite was run with."""
    columns = {
        "torch": itemgetter(0),
        "build": lambda each: f"CUDA {each[1]['cuda']}" if each[1]["cuda"] else "CPU",
        "transformers": lambda each: each[1]["packages"]["transformers"] or "—",
        "Python": lambda each: each[1]["versions"]["python"],
        "commit": lambda each: _short(each[1]["commit"]),
        "run": lambda each: each[1]["date"][:10],
        "passed": lambda each: f"{each[1]['passed']:,}",
        "failed": lambda each: len(each[1]["failed"]),
        "left out": lambda each: sum(each[1]["left_out"].values()),
    }
    return table(document["cases"].items(), columns)


def _short(commit: str | None) -> str:
    """The first 8 digits of a commit, with "+changes" if files differed from it."""
    head, plus, changes = (commit or "—").partition("+")
    return head[:8] + plus + changes


def left_out(document: Document) -> str:
    """The reasons why tests were left out, and their number with each torch."""
    counts = {torch_version: case["left_out"] for torch_version, case in document["cases"].items()}
    reasons = dict.fromkeys(reason for reasons in counts.values() for reason in reasons)
    lines = [(reason, *(str(own.get(reason, "")) for own in counts.values())) for reason in reasons]
    return markdown(lines, ("left out", *counts))


# docs/integrations/diffusers.md

_PLACES = {"": "keys and values of its own", "first": "before", "last": "behind"}


def _models(document: Document) -> list[Figures]:
    return sorted((row for row in document["rows"] if "far" in row["detail"]), key=itemgetter("measure"))


converted_models = of_rows(
    {
        "model": _MEASURE,
        "class": detail("class", "`{}`".format),
        "the text's tokens": detail("text", _PLACES.__getitem__),
        "processor": detail("processors", lambda names: ", ".join(map("`{}`".format, names))),
        "farthest from dense": _FIGURE,
    },
    _models,
)


def refused_models(document: Document) -> str:
    """Each class, and why convert takes none of its modules: mostly for their processors."""
    refused = document["rows"][-1]["detail"]["refused"]
    lines = []
    for name, reasons in refused.items():
        short = [reason.partition("; ")[0].partition(": the page")[0] for reason in reasons]
        lines.append((f"`{name}`", "; ".join(each.removeprefix("its processor is ") for each in dict.fromkeys(short))))
    return markdown(lines, ("class", "processors, or modules, and why"))
