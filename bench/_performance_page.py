"""The performance page: its tables, from the roofline's file of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._markdown import markdown
from ._table import condition

Figures = Mapping[str, Any]

PERFORMANCE = Path("docs/performance.md")
_SHARES = ("useful", "beyond", "below", "moves", "sums", "merges", "masks", "fills", "rest")
_RATES = ("pattern", "GFLOP/s", "of matmul", "of dense", "computed / useful")


def performance_parts(results: Path) -> dict[str, str]:
    """The tables of both directions, and what they were measured with."""
    document = json.loads((results / "roofline.json").read_text())
    detail = document["rows"][0]["detail"]
    parts = {direction: f"\n{_table(figures)}\n" for direction, figures in detail["patterns"].items()}
    parts["kernel"] = f"\n{_kernel_table(detail['kernel_rates'], detail['matmul_rate'])}\n"
    rate = detail["matmul_rate"] / 1e9
    return {**parts, "machine": f"\nThe matmul ran at {rate:.0f} GFLOP/s. {condition(document)}\n"}


def _kernel_table(rates: Mapping[str, Figures], matmul_rate: float) -> str:
    lines = [(shape, *(_percent(rate / matmul_rate) for rate in both.values())) for shape, both in rates.items()]
    headers = ("queries × keys", "forward, of matmul", "backward, of matmul")
    return markdown(lines, headers)


def _table(figures: Mapping[str, Figures]) -> str:
    dense = figures["dense"]["rate"]
    lines = [_line(name, figure, dense) for name, figure in figures.items()]
    return markdown(lines, (*_RATES, *_SHARES))


def _line(name: str, figure: Figures, dense: float) -> tuple[str, ...]:
    rates = (f"{figure['rate'] / 1e9:.0f}", _percent(figure["of_matmul"]), _percent(figure["rate"] / dense))
    shares = (_percent(figure["shares"][kind]) for kind in _SHARES)
    return (name, *rates, f"{figure['waste']:.2f}", *shares)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
