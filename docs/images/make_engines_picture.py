"""Draw engines.png beside this file: what a call goes through. Run from a checkout with the extra `plot` installed."""

from pathlib import Path

import matplotlib.pyplot as plt

STEPS = (
    ("pattern", "who attends to whom,\na value without sizes"),
    ("orders", "which tokens\nstand side by side"),
    ("blocks", "what to compute,\nby formula"),
    ("plan", "the cheapest way,\nkept in the cache"),
    ("engine", "aten, flex or reference:\nforward and backward"),
)


def draw(path: Path) -> None:
    """Five boxes in a row, and the sizes that come in with the call."""
    figure, axes = plt.subplots(figsize=(11, 2.3))
    axes.set(xlim=(-0.02, 5), ylim=(0, 1.15))
    axes.axis("off")
    for place, (name, said) in enumerate(STEPS):
        color = "#cfe0f3" if place < 4 else "#f6dcc0"
        axes.add_patch(plt.Rectangle((place + 0.04, 0.3), 0.84, 0.6, facecolor=color, edgecolor="#456"))
        axes.text(place + 0.46, 0.75, name, ha="center", va="center", fontsize=12, weight="bold")
        axes.text(place + 0.46, 0.5, said, ha="center", va="center", fontsize=8)
        if place:
            axes.annotate("", (place + 0.04, 0.6), (place - 0.12, 0.6), arrowprops={"arrowstyle": "->"})
    arrow = {"arrowstyle": "->", "color": "#888"}
    for text, place in (("tokens, heads, offsets, dtype", 1.46), ("q, k, v, sinks, run-time tensors", 4.46)):
        axes.annotate(text, (place, 0.3), (place, 0.05), ha="center", fontsize=8, color="#555", arrowprops=arrow)
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("engines.png"))
