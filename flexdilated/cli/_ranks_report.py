"""A simulation of many ranks as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from ..distributed._simulation import Simulation, Way
from ..distributed._volumes import in_groups
from ..masks.planning.machine._machine_in_use import machine_of
from ._ranks_settings import RanksSettings

# W ranks

MOST_ROWS = 16  # of a table for a terminal; more ranks are shown in groups


def ranks_data(settings: RanksSettings, found: Simulation) -> dict[str, Any]:
    """All of it; sizes are bytes, times seconds."""
    plan, sharding = settings.plan, settings.sharding
    exchange = found.ways["exchange"].keys
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
        "codec": settings.codec,
        "auto": asdict(found.choice),
        "work": {"pairs": int(found.work.sum()), "most_over_mean": dict(found.balance)},
        "ways": {name: _way(found, name) for name in found.ways},
        "links": settings.links and asdict(settings.links),
        "machine": machine_of(plan.device).source,
        "matrix": _matrix(exchange),
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
        "predicted_s": _seconds(way),
    }


def _seconds(way: Way) -> dict[str, float] | None:
    return None if way.step is None else {**asdict(way.step), "step": way.step.step}


def _spread(each: Int64[Tensor, " W"]) -> dict[str, float]:
    return {"least": int(each.min()), "mean": float(each.double().mean()), "most": int(each.max())}


def _matrix(received: Int64[Tensor, "W W"]) -> dict[str, Any]:
    """Rows get from columns. Of many ranks, sums over consecutive ones."""
    each, sums = in_groups(received, MOST_ROWS)
    return {"ranks_in_a_group": each, "bytes": sums.tolist()}
