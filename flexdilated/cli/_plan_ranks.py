"""plan --ranks: what many ranks would send, compute and hold, and how long a step should take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..distributed._simulation import Simulation, simulate
from ._command_parser import UsageError
from ._output import replace
from ._ranks_report import ranks_data
from ._ranks_settings import RanksSettings
from ._ranks_text import ranks_text
from ._sizes import tokens_text


def plan_ranks(settings: RanksSettings) -> int:
    """Print the simulation, and draw who gets what from whom. Raises UsageError where the pattern has no meaning."""
    plan = settings.plan
    size, how = plan.attention(plan.num_tokens), {"codec": settings.codec, "links": settings.links}
    try:
        found = simulate(plan.pattern, settings.sharding, size, device=plan.device, **how)
    except ValueError as error:
        raise UsageError(str(error)) from None
    data = ranks_data(settings, found)
    print(json.dumps(data, indent=1, ensure_ascii=False) if settings.as_json else ranks_text(data))
    if settings.picture is not None:
        _draw(settings.picture, found, data)
    return 0


def _draw(path: Path, found: Simulation, data: dict[str, Any]) -> None:
    from ._traffic_picture import save_traffic_picture

    shown = {name: found.ways[name].keys for name in ("exchange", "all-gather")}
    size = f"{tokens_text(data['num_tokens'])} tokens, head dim {data['head_dim']}, {data['dtype']}"
    title = f"{data['pattern']:.90}\nkeys and values between {data['num_ranks']:,} ranks: {size}"
    replace(path, lambda partial: save_traffic_picture(partial, shown, title=title))
