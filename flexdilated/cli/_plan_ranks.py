"""plan --ranks: what many ranks would send, compute and hold, and how long a step should take."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxtyping import Int64
from tabulate import tabulate
from torch import Tensor

from .._plan import PlanSize
from ..distributed.group import Sharding
from ..distributed.wire import CodecName
from ..masks.planning.machine import machine_of
from ._output import replace, require_file
from ._pattern import refusals
from ._simulation import Links, Simulation, in_groups, simulate
from ._sizes import bytes_text, seconds_text, tokens_text
from ._traffic_picture import save_traffic_picture

# W ranks

MOST_RANKS = 4096
CODECS: dict[str, CodecName | None] = {"none": None, "bf16": "bf16", "int8": "int8"}
MOST_ROWS = 16  # of a table for a terminal; more ranks are shown in groups


def plan_ranks(options: argparse.Namespace, plan: PlanSize) -> int:
    """Print the simulation, and draw who gets what from whom. Raises UsageError where the pattern has no meaning."""
    require_file("--picture", options.picture, (".png",))
    sharding = Sharding(plan.num_tokens, options.ranks, options.sharding or "contiguous")
    codec, links = CODECS[options.codec or "none"], None
    if options.link is not None:
        links = Links(options.link, options.link_between, options.ranks_per_node, options.latency)
    with refusals():
        size = plan.attention(plan.num_tokens)
        found = simulate(plan.pattern, sharding, size, device=plan.device, codec=codec, links=links)
    data = ranks_data(plan, sharding, codec, links, found)
    print(json.dumps(data, indent=1, ensure_ascii=False) if options.json else ranks_text(data))
    if options.picture is not None:
        _draw(options.picture, found, data)
    return 0


def _draw(path: Path, found: Simulation, data: dict[str, Any]) -> None:
    shown = {name: found.ways[name].keys for name in ("exchange", "all-gather")}
    size = f"{tokens_text(data['num_tokens'])} tokens, head dim {data['head_dim']}, {data['dtype']}"
    title = f"{data['pattern']:.90}\nkeys and values between {data['num_ranks']:,} ranks: {size}"
    replace(path, lambda partial: save_traffic_picture(partial, shown, title=title))


def ranks_data(
    plan: PlanSize, sharding: Sharding, codec: CodecName | None, links: Links | None, found: Simulation
) -> dict[str, Any]:
    """All of it; sizes are bytes, times seconds."""
    exchange = found.ways["exchange"].keys
    each, sums = in_groups(exchange, MOST_ROWS)
    return {
        "pattern": repr(plan.pattern),
        "num_tokens": plan.num_tokens,
        "num_heads": plan.num_heads,
        "num_kv_heads": plan.num_kv_heads,
        "head_dim": plan.head_dim,
        "batch": plan.batch,
        "dtype": plan.dtype_name,
        "device": plan.device,
        "num_ranks": sharding.num_ranks,
        "sharding": sharding.order,
        "codec": codec,
        "auto": asdict(found.choice),
        "work": {"pairs": int(found.work.sum()), "most_over_mean": dict(found.balance)},
        "ways": {name: _way(found, name) for name in found.ways},
        "links": links and asdict(links),
        "machine": machine_of(plan.device).source,
        "matrix": {"ranks_in_a_group": each, "bytes": sums.tolist()},  # of many ranks, sums over consecutive ones
        "ranks": {
            "tokens": list(sharding.lengths),
            "pairs": found.work.tolist(),
            "received": exchange.sum(1).tolist(),
            "sent": exchange.sum(0).tolist(),
        },
        "shard": {"inputs": found.call.inputs, "inference_peak": found.call.inference_peak,
                  "training_peak": found.call.training_peak},
    }  # fmt: skip


def _way(found: Simulation, name: str) -> dict[str, Any]:
    way = found.ways[name]
    return {
        "received": _spread(way.tokens.sum(1) * way.key_bytes),
        "sent": _spread(way.tokens.sum(0) * way.key_bytes),
        "gradients_sent": _spread(way.tokens.sum(1) * way.gradient_bytes),
        "messages": _spread((way.tokens > 0).sum(1)),
        "held": int(way.held.max()),
        "inference_peak": found.inference_peak(name),
        "training_peak": found.training_peak(name),
        "predicted_s": way.seconds,
    }


def _spread(each: Int64[Tensor, " W"]) -> dict[str, float]:
    return {"least": int(each.min()), "mean": float(each.double().mean()), "most": int(each.max())}


def ranks_text(data: dict[str, Any]) -> str:
    """Facts, the matrix, the ranks or what they have at most, the ways beside each other, and what is predicted."""
    each = data["matrix"]["ranks_in_a_group"]
    who = "rank" if each == 1 else f"group of {each} ranks"
    parts = [
        tabulate(_facts(data), tablefmt="plain", disable_numparse=True),
        f"Keys and values that the {who} of a row receives from the {who} of a column, in an exchange",
        _matrix_table(data["matrix"]),
        "What each rank has",
        _ranks_table(data),
        "Ways to bring keys and values to queries",
        _ways_table(data),
        _note(data),
    ]
    return "\n\n".join(parts)


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
        ("work", f"{data['work']['pairs']:,} pairs; load imbalance (max / mean): {work}"),
        ("schedule", f"{data['auto']['name']}: {data['auto']['reason']}"),
    ]  # fmt: skip


def _matrix_table(matrix: dict[str, Any]) -> str:
    each, rows = matrix["ranks_in_a_group"], matrix["bytes"]
    names = [str(index) if each == 1 else f"{each * index}-" for index in range(len(rows))]
    lines = [
        [name, *(bytes_text(size) if size else "." for size in row)] for name, row in zip(names, rows, strict=True)
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
    shown = []
    for name, tokens, pairs, got, gave in lines:
        over = f"{pairs / mean:.4f}" if mean else ""
        shown.append((name, f"{tokens:,.0f}", f"{pairs:,.0f}", over, bytes_text(got), bytes_text(gave)))
    headers = ("", "tokens", "pairs", "over the mean", "receives", "sends")
    return tabulate(shown, headers, colalign=("left", *["right"] * 5), disable_numparse=True)


_TIMES = {
    "keys": "predicted: keys and values on their way",
    "gradients": "predicted: gradients on their way",
    "computing": "predicted: computing, both directions",
    "forward": "predicted: forward",
    "backward": "predicted: backward",
    "step": "predicted: forward and backward",
}


def _ways_table(data: dict[str, Any]) -> str:
    ways = data["ways"].values()
    lines = [
        ("received by a rank, mean", [bytes_text(way["received"]["mean"]) for way in ways]),
        ("received by a rank, most", [bytes_text(way["received"]["most"]) for way in ways]),
        ("from so many others, most", [f"{way['messages']['most']:,}" for way in ways]),
        ("gradients it sends back, most", [bytes_text(way["gradients_sent"]["most"]) for way in ways]),
        ("held of others' at one time, most", [bytes_text(way["held"]) for way in ways]),
        ("attend: inference, peak", [bytes_text(way["inference_peak"]) for way in ways]),
        ("attend: training, peak", [bytes_text(way["training_peak"]) for way in ways]),
    ]
    if data["links"] is not None:
        lines += [(title, [seconds_text(way["predicted_s"][name]) for way in ways]) for name, title in _TIMES.items()]
    rows = [(name, *each) for name, each in lines]
    return tabulate(rows, ("", *data["ways"]), colalign=("left", *["right"] * 3), disable_numparse=True)


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
