"""The sweep as a picture: time and memory over tokens, both axes logarithmic."""

from pathlib import Path
from typing import Any

from ._problem import tokens_text

_PANELS = (
    ("forward", "s", lambda point: point["forward"]["median_s"]),
    ("backward", "s", lambda point: point["backward"]["median_s"]),
    ("peak memory, forward + backward", "MiB", lambda point: point["peak_bytes"] / 2**20),
)


def plot_sweep(document: dict[str, Any], path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib, which the extra `plot` brings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    points = document["points"]
    tokens = sorted({point["num_tokens"] for point in points})
    for axes, (title, unit, value) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for name in dict.fromkeys(point["attention"] for point in points):
            own = [point for point in points if point["attention"] == name]
            axes.loglog([point["num_tokens"] for point in own], [value(point) for point in own], "o-", label=name)
        axes.set(title=title, xlabel="tokens", ylabel=unit)
        axes.set_xticks(tokens, [tokens_text(count) for count in tokens])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
