"""Draw selection.png beside this file: which blocks of a text the heads of a small model chose to read.

A model of bytes whose attention follows MoBA's choice trains for some minutes on the pages of this documentation,
without the one that it is shown then. Run from a checkout with the extra `plot` installed:
python -m docs.images.make_selection_picture
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import flexdilated as fd
from bench._byte_models import Setting, trained
from flexdilated import masks

BLOCK, TOP = 64, 3
SETTING = Setting(block=BLOCK, keys=TOP * BLOCK, steps=300)
DOCS, SHOWN = Path(__file__).parents[1], 30  # blocks
PAGE = DOCS / "concepts" / "orders.md"


def attention() -> fd.SelectedAttention:
    return fd.SelectedAttention(fd.selection.recipes.moba(block=BLOCK, top=TOP))


def read_by(blocks: Tensor) -> masks.Pattern:
    """What is read, by a table."""
    table = masks.selected_blocks(blocks, block=(1, BLOCK), most=TOP - 1)
    return (table | masks.chunked(BLOCK)) & masks.causal()


def as_bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw(text: bytes, blocks: Tensor, path: Path) -> None:
    """The blocks of the text as lines; beside them, by head, how many of a block's queries chose each block."""
    widths = [1.95] + [1] * SETTING.heads
    figure, axes = plt.subplots(1, len(widths), figsize=(19, 6.2), sharey=True, width_ratios=widths)
    lines = [text[at : at + BLOCK].decode(errors="replace") for at in range(0, len(text), BLOCK)]
    for row, line in enumerate(lines):
        shown = f"{row:2d}  " + line.replace("\n", "\N{DOWNWARDS ARROW WITH TIP LEFTWARDS}")
        axes[0].text(0, row, shown, family="monospace", fontsize=7.2, va="center", parse_math=False)
    axes[0].set_xlim(0, 1)
    axes[0].axis("off")
    axes[0].set_title("the text, a block of 64 bytes a line", fontsize=9)
    numbers = torch.arange(len(lines))
    for head, axis in enumerate(axes[1:]):
        chose = (blocks[0, head].unflatten(0, (-1, BLOCK))[..., None] == numbers).any(2).float().mean(1)
        own = numbers[:, None] == numbers
        axis.imshow(chose.masked_fill(own, torch.nan), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.plot(numbers, numbers, "s", color="tab:orange", markersize=3.5)
        axis.set_title(f"head {head}", fontsize=9)
        axis.set_xlabel("block that is read", fontsize=8)
        axis.tick_params(labelsize=7, left=False)
    figure.colorbar(
        axes[-1].images[0], ax=axes, fraction=0.012, pad=0.01, label="share of a block's queries that chose it"
    )
    figure.savefig(path, dpi=80, bbox_inches="tight")


if __name__ == "__main__":
    pages = [page.read_bytes() for page in sorted(DOCS.rglob("*.md")) if page != PAGE]
    model = trained(attention, as_bytes(b"\n".join(pages)), SETTING, seed=0)
    last, operands = model.layers[-1].attention, []
    last.register_forward_pre_hook(lambda _, given: operands.extend(given[:2]))
    size = SHOWN * BLOCK
    shown = PAGE.read_bytes()[: size + 1]
    with torch.no_grad():
        print(f"{model.bits(as_bytes(shown)[None].long()).mean():.2f} bits a byte of the text shown")
        chosen = last.selector(*operands).blocks
    print(masks.show(read_by(chosen), size, num_heads=SETTING.heads, head=0))
    draw(shown[:size], chosen, Path(__file__).with_name("selection.png"))
