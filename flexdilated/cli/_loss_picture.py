"""The loss curve as a picture, with the baselines beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_SMOOTHING_STEPS = 10


def save_loss_picture(
    path: Path, losses: Sequence[float], *, before: float, after: float, baselines: dict[str, float]
) -> None:
    """Draw the loss of each step, its running mean, the validation's two and the two baselines. PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained", dpi=140)
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.9, label="training, each step")
    axes.plot(
        steps,
        running_mean(losses),
        color="#08519c",
        linewidth=2,
        label=f"training, mean of {_SMOOTHING_STEPS}",
    )
    validation = {"color": "#d94801", "marker": "o", "zorder": 3}
    axes.plot(
        [0, len(losses)],
        [before, after],
        linestyle="none",
        label="validation, before and after",
        **validation,
    )
    axes.annotate(f"{after:.2f}", (len(losses), after), xytext=(7, -3), textcoords="offset points", color="#d94801")
    for (name, bits), style in zip(baselines.items(), ("--", ":"), strict=True):
        axes.axhline(bits, color="#555555", linestyle=style, linewidth=1.2, label=f"{name}, {bits:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(0, max([before, *losses]) * 1.05)
    axes.set_xlim(0, max(1, len(losses)) * 1.06)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, format="png")


def running_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and those just before it, ten in all where there are as many."""
    means = []
    for end in range(1, len(values) + 1):
        last = values[max(0, end - _SMOOTHING_STEPS) : end]
        means.append(sum(last) / len(last))
    return means
