"""What `plan --ranks` is asked besides: how many ranks, which tokens they hold, and what links join them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ..distributed._codec import CodecName
from ..distributed._links import Links
from ..distributed._sharding import Order, Sharding
from ._command_parser import UsageError
from ._machine import find, missing_line
from ._plan import PlanSize, size_from
from ._sizes import parse_seconds, parse_speed

MOST_RANKS = 4096
_CODECS: dict[str, CodecName | None] = {"none": None, "bf16": "bf16", "int8": "int8"}


@dataclass(frozen=True, kw_only=True)
class RanksSettings:
    """`links` are None where no times are asked for."""

    plan: PlanSize
    sharding: Sharding
    codec: CodecName | None
    links: Links | None
    picture: Path | None
    as_json: bool


def ranks_settings_from(options: argparse.Namespace) -> RanksSettings:
    """Raises UsageError for sizes and files that do not fit."""
    if not 1 <= options.ranks <= MOST_RANKS:
        raise UsageError(f"--ranks must be at least 1 and at most {MOST_RANKS}; got {options.ranks}")
    plan = size_from(options)
    return RanksSettings(
        plan=plan,
        sharding=_sharding(plan.num_tokens, options.ranks, options.sharding or "contiguous"),
        codec=_CODECS[options.codec or "none"],
        links=_links(options),
        picture=_picture(options.picture),
        as_json=options.json,
    )


def _sharding(num_tokens: int, num_ranks: int, order: Order) -> Sharding:
    try:
        return Sharding(num_tokens, num_ranks, order)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _links(options: argparse.Namespace) -> Links | None:
    if options.link is None:
        return None
    if options.ranks_per_node is not None and options.ranks_per_node < 1:
        raise UsageError(f"--ranks-per-node must be at least 1; got {options.ranks_per_node}")
    return Links(
        bytes_per_s=parse_speed(options.link),
        between_bytes_per_s=None if options.link_between is None else parse_speed(options.link_between),
        ranks_per_node=options.ranks_per_node,
        latency_s=0.0 if options.latency is None else parse_seconds(options.latency),
    )


def _picture(path: Path | None) -> Path | None:
    """The path, if a picture can be drawn there."""
    if path is None:
        return None
    if path.suffix.lower() != ".png":
        raise UsageError(f"--picture must name a .png file; got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"--picture must lie in a folder that exists; got {path}")
    if find("matplotlib") is None:
        raise UsageError(missing_line("matplotlib"))
    return path
