"""A simulation of many ranks as tables, in lines of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from ._ranks_report import MOST_ROWS
from ._sizes import bytes_text, seconds_text, tokens_text


def ranks_text(data: dict[str, Any]) -> str:
    """Facts, the matrix, the ranks or what they have at most, the ways beside each other, and what is predicted."""
    parts = [
        tabulate(_facts(data), tablefmt="plain", disable_numparse=True),
        _matrix_title(data),
        _matrix(data["matrix"]),
    ]
    parts += ["What each rank has", _ranks_table(data), "Ways to bring keys and values to queries", _ways_table(data)]
    return "\n\n".join([*parts, _note(data)])


def _facts(data: dict[str, Any]) -> list[tuple[str, str]]:
    heads = f"{data['num_heads']} heads"
    if data["num_kv_heads"] != data["num_heads"]:
        heads += f" over {data['num_kv_heads']}"
    kind = data["dtype"] + (f", batch {data['batch']}" if data["batch"] > 1 else "")
    kind += f", sent as {data['codec']}" if data["codec"] else ""
    tokens, balance = data["ranks"]["tokens"], data["work"]["most_over_mean"]
    held = tokens_text(max(tokens)) if min(tokens) == max(tokens) else f"{min(tokens):,} to {max(tokens):,}"
    work = ", ".join(f"{most:.4f} {order}" for order, most in balance.items())
    return [
        ("pattern", data["pattern"]),
        ("size", f"{tokens_text(data['num_tokens'])} tokens, {heads}, head dim {data['head_dim']}, {kind}"),
        ("ranks", f"{data['num_ranks']:,} on {data['device']}, {held} tokens each, {data['sharding']}"),
        ("work", f"{data['work']['pairs']:,} pairs; most of a rank over the mean: {work}"),
        ("schedule", f"{data['auto']['name']}: {data['auto']['reason']}"),
    ]  # fmt: skip


def _matrix_title(data: dict[str, Any]) -> str:
    each = data["matrix"]["ranks_in_a_group"]
    who = "rank" if each == 1 else f"group of {each} ranks"
    return f"Keys and values that the {who} of a row receives from the {who} of a column, in an exchange"


def _matrix(matrix: dict[str, Any]) -> str:
    each, rows = matrix["ranks_in_a_group"], matrix["bytes"]
    names = [str(index) if each == 1 else f"{each * index}-" for index in range(len(rows))]
    lines = [
        (name, *(bytes_text(size) if size else "." for size in row)) for name, row in zip(names, rows, strict=True)
    ]
    return tabulate(lines, ("", *names), colalign=["right"] * (len(rows) + 1), disable_numparse=True)


def _ranks_table(data: dict[str, Any]) -> str:
    ranks = data["ranks"]
    columns = [ranks[name] for name in ("tokens", "pairs", "received", "sent")]
    if data["num_ranks"] <= MOST_ROWS:
        lines = [(f"rank {rank}", *each) for rank, each in enumerate(zip(*columns, strict=True))]
    else:
        kinds = (("least", min), ("mean", lambda each: sum(each) / len(each)), ("most", max))
        lines = [(name, *(of(each) for each in columns)) for name, of in kinds]
    mean = sum(ranks["pairs"]) / len(ranks["pairs"])
    shown = [
        (
            name,
            f"{tokens:,.0f}",
            f"{pairs:,.0f}",
            f"{pairs / mean:.4f}" if mean else "",
            bytes_text(got),
            bytes_text(gave),
        )
        for name, tokens, pairs, got, gave in lines
    ]
    headers = ("", "tokens", "pairs", "over the mean", "receives", "sends")
    return tabulate(shown, headers, colalign=("left", *["right"] * 5), disable_numparse=True)


def _ways_table(data: dict[str, Any]) -> str:
    ways = data["ways"]
    lines = [
        ("received by a rank, mean", [bytes_text(way["received"]["mean"]) for way in ways.values()]),
        ("received by a rank, most", [bytes_text(way["received"]["most"]) for way in ways.values()]),
        ("from so many others, most", [f"{way['messages']['most']:,}" for way in ways.values()]),
        ("gradients it sends back, most", [bytes_text(way["gradients_sent"]["most"]) for way in ways.values()]),
        ("held of others' at one time, most", [bytes_text(way["held"]) for way in ways.values()]),
        ("attend: inference, peak", [bytes_text(way["inference_peak"]) for way in ways.values()]),
        ("attend: training, peak", [bytes_text(way["training_peak"]) for way in ways.values()]),
        *_times([way["predicted_s"] for way in ways.values()]),
    ]
    return tabulate(
        [(name, *each) for name, each in lines], ("", *ways), colalign=("left", *["right"] * 3), disable_numparse=True
    )


def _times(seconds: Sequence[dict[str, float] | None]) -> list[tuple[str, list[str]]]:
    names = {
        "keys": "predicted: keys and values on their way",
        "gradients": "predicted: gradients on their way",
        "computing": "predicted: computing, both directions",
        "forward": "predicted: forward",
        "backward": "predicted: backward",
        "step": "predicted: forward and backward",
    }
    known = [each for each in seconds if each is not None]
    return [(title, [seconds_text(each[name]) for each in known]) for name, title in names.items() if known]


def _note(data: dict[str, Any]) -> str:
    """What is predicted, and how."""
    lines = [
        "Bytes, tokens and pairs are counted from the pattern. Memory is a model: attention over the largest shard",
        "alone, with q, k, v and in training all gradients, and beside it the others' keys and values that are held.",
    ]
    if data["links"] is None:
        return "\n".join([*lines, "With --link, the speed of links, times are predicted too."])
    lines += [
        f"Times are predicted, not measured. Computing: the cost model's time for one {data['device']} with all tokens",
        f"({data['machine']} constants), given to the ranks in proportion to their pairs. Sending: a rank's bytes in",
        "its busier direction over the speed of its links, without contention. In a ring both go on at once, in the",
        "others one after the other. Each line is of the rank that takes longest in it.",
    ]
    return "\n".join(lines)
