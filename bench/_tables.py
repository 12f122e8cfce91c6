"""Tables of the pages about a subject: each function renders the file of one result."""

import json
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from flexdilated.cli._sizes import bytes_text, tokens_text

from ._report import Document, condition, markdown, with_condition

Figures = Mapping[str, Any]
_OTHER = "torch's own attention"
_MIB = 1 << 20


def every_row(document: Document) -> str:
    lines = [(row["measure"], row["target"], row["measured_text"]) for row in document["rows"]]
    return with_condition(lines, ("", "target", "measured"), document)


def reached(row: Figures) -> str:
    return "yes" if row["met"] else "**no**"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# docs/performance.md


def directions(direction: str) -> Callable[[Document], str]:
    def render(document: Document) -> str:
        figures = document["rows"][0]["detail"]["patterns"][direction]
        headers = ("pattern", "GFLOP/s", "of matmul", "of dense", "computed / useful", *_SHARES)
        return markdown([_rate_line(name, each, figures["dense"]["rate"]) for name, each in figures.items()], headers)

    return render


_SHARES = ("useful", "beyond", "below", "moves", "sums", "merges", "masks", "fills", "rest")


def _rate_line(name: str, figure: Figures, dense: float) -> tuple[str, ...]:
    rates = (f"{figure['rate'] / 1e9:.0f}", percent(figure["of_matmul"]), percent(figure["rate"] / dense))
    shares = (percent(figure["shares"][kind]) for kind in _SHARES)
    return (name, *rates, f"{figure['waste']:.2f}", *shares)


def kernel(document: Document) -> str:
    detail = document["rows"][0]["detail"]
    lines = [
        (shape, *(percent(rate / detail["matmul_rate"]) for rate in both.values()))
        for shape, both in detail["kernel_rates"].items()
    ]
    return markdown(lines, ("queries × keys", "forward, of matmul", "backward, of matmul"))


def matmul(document: Document) -> str:
    rate = document["rows"][0]["detail"]["matmul_rate"] / 1e9
    return f"The matmul ran at {rate:.0f} GFLOP/s. {condition(document)}"


# docs/howto/compiling.md


def first_steps(document: Document) -> str:
    """Seconds of each first step, and what is measured beside them in a line below."""
    lines, others = [], []
    for row in document["rows"]:
        if _OTHER not in row["detail"]:
            others.append(f"* {row['measure']}: {row['measured_text']}")
            continue
        ours, theirs = row["detail"]["flexdilated"], row["detail"][_OTHER]
        name = row["measure"].removesuffix(f", over that with {_OTHER}")
        lines.append((name, *(f"{each:.3g} s" for each in (ours["first_s"], theirs["first_s"], ours["later_s"]))))
    table = markdown(lines, ("", "flexdilated", f"with {_OTHER}", "a later step"))
    return "\n".join((table, "", *others, "", condition(document)))


def lengths(document: Document) -> str:
    detail = document["rows"][0]["detail"]
    names = ("seconds_of_all_steps", "seconds_of_steps_that_nowhere_compile")
    lines = [
        (way, found["compilations"], *(f"{found[name]:.3g} s" for name in names))
        for way, found in detail["ways"].items()
    ]
    number = detail["steps_that_nowhere_compile"]
    headers = ("lengths", "graphs", f"all {len(detail['lengths'])} steps", f"the {number} steps that nowhere compile")
    name = document["rows"][0]["measure"].partition(":")[0]
    return f"{markdown(lines, headers)}\n\n{name}: {condition(document)}"


# docs/howto/choosing.md and docs/performance.md


def against_dense(document: Document) -> str:
    lines = [
        (
            row["measure"].partition(", forward")[0],
            bytes_text(row["detail"]["peak_bytes"]),
            bytes_text(row["detail"]["dense_peak_bytes"]),
            row["measured_text"],
        )
        for row in document["rows"]
    ]
    return with_condition(lines, ("forward + backward", "peak", "dense SDPA's", "ratio"), document)


def peaks(document: Document) -> str:
    lines = [
        (
            _what(point),
            point["pattern"],
            point["dtype"],
            bytes_text(point["predicted_bytes"]),
            bytes_text(point["measured_bytes"]),
            f"{100 * (point['predicted_bytes'] / point['measured_bytes'] - 1):+.1f} %",
        )
        for row in document["rows"]
        for point in row["detail"]["peaks"]
    ]
    return with_condition(lines, ("", "pattern", "dtype", "predicted", "measured", "deviation"), document)


def _what(point: Mapping[str, Any]) -> str:
    if point["checkpoint"] is None:
        return "`attend`"
    return "LongNet, checkpointed" if point["checkpoint"] else "LongNet"


def checkpointing(document: Document) -> str:
    memory, time = document["rows"]
    detail, timings = memory["detail"], {timing["name"]: timing["median_s"] for timing in time["timings"]}
    lines = [
        ("plain", bytes_text(detail["peak_bytes"]), bytes_text(detail["predicted_bytes"]), f"{timings['plain']:.3g} s"),
        (
            "with checkpointing",
            bytes_text(detail["checkpointed_peak_bytes"]),
            bytes_text(detail["predicted_checkpointed_bytes"]),
            f"{timings['checkpointed']:.3g} s",
        ),
        ("ratio", memory["measured_text"], "", time["measured_text"]),
    ]
    name = memory["measure"].partition(", forward")[0]
    return with_condition(lines, (name, "peak memory", "predicted", "a step"), document)


def longest(document: Document, device: str) -> str:
    found = document["rows"][0]["detail"]["longest"][device]
    names = list(found["bytes_a_token"])
    lines = [("bytes a token", *(bytes_text(each) for each in found["bytes_a_token"].values()))]
    for each in found["longest"]:
        lines.append((bytes_text(each["budget_bytes"]), *(tokens_text(each[name]) for name in names)))
    return with_condition(lines, ("", *names), document)


# docs/howto/ranks.md


def keys_received(document: Document) -> str:
    """Of the rows that were counted without processes: what an exchange receives beside an all-gather."""
    lines = [
        (
            row["measure"].partition(", counted")[0],
            case,
            f"{mean(figures['tokens_a_kv_head']):,.0f}",
            f"{figures['all_gather_tokens_a_kv_head']:,.0f}",
            f"{figures['all_gather_ratio']:.0f} ×",
        )
        for row in document["rows"]
        for case, figures in row["detail"].items()
        if "all_gather_ratio" in figures
    ]
    headers = ("", "order and heads", "needed, mean of ranks", "all-gather", "ratio")
    return with_condition(lines, headers, document)


def balance(document: Document) -> str:
    """Most over mean work of a rank in either order."""
    lines = [
        (
            row["measure"].partition(", zigzag")[0],
            *(f"{row['detail'][order]['max_over_mean']:.3f}" for order in ("contiguous", "zigzag")),
        )
        for row in document["rows"]
    ]
    return with_condition(lines, ("", "contiguous", "zigzag"), document)


# docs/howto/ranks.md and docs/performance.md


def reuse(document: Document) -> str:
    lines = [
        (row["measure"], row["target"], row["measured_text"])
        for row in document["rows"]
        if "leases_a_step" in row["detail"]
    ]
    details = {json.dumps(row["detail"]): row for row in document["rows"] if "leases_a_step" in row["detail"]}
    notes = [
        f"{row['measure'].split(', forward')[0].split(', ')[-1]}: {detail['leases_a_step']:.0f} leases a step, "
        f"{bytes_text(detail['peak_bytes'])} held at the peak, {detail['held_over_leased_at_peak']:.2f} times what "
        "was leased then"
        for row in details.values()
        for detail in (row["detail"],)
    ]
    return f"{markdown(lines, ('', 'target', 'measured'))}\n\n{'; '.join(notes)}.\n\n{condition(document)}"


def single_buffers(document: Document) -> str:
    (detail,) = (row["detail"] for row in document["rows"] if "sizes" in row["detail"])
    lines = [
        (
            bytes_text(each["bytes"]),
            f"{1e6 * each['leased_s']:,.0f} µs",
            f"{1e6 * each['made_s']:,.0f} µs",
            f"{100 * (1 - each['leased_s'] / each['made_s']):+.0f} %",
        )
        for each in detail["sizes"]
    ]
    from_there = detail["break_even_bytes"]
    pays = f"from {bytes_text(from_there)}" if from_there <= 1 << 26 else "at no size up to 64 MiB"
    table = markdown(lines, ("size", "leased", "made by torch", "time saved"))
    return f'{table}\n\nBy its own, quicker measurement there, "auto" leased {pays}.\n\n{condition(document)}'


def pool_claims(document: Document) -> str:
    claimed = [row for row in document["rows"] if "claimed" in row["detail"]]
    lines = [(row["measure"], row["detail"]["claimed"], row["measured_text"], reached(row)) for row in claimed]
    sources = "\n".join(f"* {source}" for source in dict.fromkeys(row["detail"]["source"] for row in claimed))
    table = markdown(lines, ("claim", "claimed", "here", "reached"))
    return f"{table}\n\nSources:\n\n{sources}\n\n{condition(document)}"


def codec_bytes(document: Document) -> str:
    rows = [row for row in document["rows"] if "claimed" in row["detail"]]
    lines = [
        (
            f"`{row['detail']['codec']}`",
            row["measured_text"],
            f"{row['detail']['percent_saved_of_bfloat16']:.3g} %",
            row["detail"]["claimed"],
            f"{bytes_text(row['detail']['pays_below_bytes_a_second'])}/s",
        )
        for row in rows
    ]
    headers = ("codec", "saved of float32", "saved of bfloat16", "claimed", "pays on links below")
    source = f"The claim: {rows[0]['detail']['source']}."
    return f"{markdown(lines, headers)}\n\n{source}\n\n{condition(document)}"


_ERRORS = ("mean_row_error", "largest_row_error", "proven_bound", "output_error")


def codec_errors(document: Document) -> str:
    lines = [
        (f"`{row['measure'].partition(':')[0]}`", kind, *(f"{100 * figures[name]:.2g} %" for name in _ERRORS))
        for row in document["rows"]
        if "normal" in row["detail"]
        for kind, figures in row["detail"].items()
    ]
    return with_condition(lines, ("codec", "rows", *(name.replace("_", " ") for name in _ERRORS)), document)


def codec_choice(document: Document) -> str:
    lines = [
        (row["measure"], f"`{row['detail']['codec']}`", f"{row['detail']['percent_saved']:.3g} %", row["measured_text"])
        for row in document["rows"]
        if row["measure"].startswith('"auto"')
    ]
    return with_condition(lines, ("", "takes", "saved", "measured"), document)


# docs/howto/slide_encoder.md


def received(document: Document) -> str:
    """Of the rows of times, whose detail holds the peaks too."""
    lines = []
    for row in document["rows"][::2]:
        forward, received = (f"{timing['median_s']:.3g} s" for timing in row["timings"])
        peaks = " and ".join(f"{row['detail']['peak_bytes'][name] / _MIB:.0f} MiB" for name in ("forward", "received"))
        matrix = f"{row['detail']['matrix_bytes'] / _MIB:,.0f} MiB"
        lines.append((row["measure"].partition(": attention_received")[0], forward, received, peaks, matrix))
    headers = ("", "forward", "attention received", "peak memory of the two", "an N x M matrix")
    return with_condition(lines, headers, document)
