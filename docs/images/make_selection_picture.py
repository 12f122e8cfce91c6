"""Draw selection.png beside this file: which blocks of a text the heads of a small model chose to read.

A model of bytes whose attention follows MoBA's choice trains for two or three minutes on the pages of this
documentation, without the one that it is shown then. Run from a checkout with the extra `plot` installed:
python docs/images/make_selection_picture.py
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import flexdilated as fd
from flexdilated import masks

BLOCK, TOP, HEADS, DIM, LAYERS = 64, 3, 4, 128, 2
CONTEXT, BATCH, STEPS = 2048, 2, 360
PAGE, SHOWN = Path(__file__).parents[1] / "custom.md", 30  # blocks


class Layer(nn.Module):
    """Attention to the chosen blocks, then an MLP. A key knows the bytes before its own, whose value it brings."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.selector = fd.selection.recipes.moba(block=BLOCK, top=TOP)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(x after this layer, the blocks that were chosen)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        k = pad(k, (0, 0, 1, -1))
        with torch.no_grad():
            blocks = self.selector(q, k).blocks
        out = fd.attend(q, k, v, read_by("chosen"), bindings={"chosen": blocks})
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.inner(x)), blocks


def read_by(blocks: str | Tensor) -> masks.Pattern:
    """What is read, by a table or by the name of one."""
    table = masks.selected_blocks(blocks, block=(1, BLOCK), most=TOP - 1)
    return (table | masks.chunked(BLOCK)) & masks.causal()


class ByteModel(nn.Module):
    """A convolution tells each position of the bytes just before it; no other positions are known."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.near = nn.Embedding(256, DIM), nn.Conv1d(DIM, DIM, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 256)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """(logits of the next byte, the blocks that the last layer chose)."""
        x = self.embed(text)
        x, chosen = x + self.near(pad(x.mT, (5, 0))).mT, text
        for layer in self.layers:
            x, chosen = layer(x)
        return self.head(self.norm(x)), chosen


def as_bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(model: ByteModel, text: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        begins = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        window = text[begins + torch.arange(CONTEXT + 1)]
        logits, _ = model(window[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 60 == 0 or step == STEPS - 1:
            print(f"step {step}: {loss.item() / 0.6931:.2f} bits a byte", flush=True)


def draw(text: bytes, blocks: Tensor, path: Path) -> None:
    """The blocks of the text as lines; beside them, by head, how many of a block's queries chose each block."""
    figure, axes = plt.subplots(1, HEADS + 1, figsize=(19, 6.2), sharey=True, width_ratios=[1.95] + [1] * HEADS)
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
    torch.manual_seed(0)
    model = ByteModel()
    pages = [page.read_bytes() for page in sorted(PAGE.parent.glob("*.md")) if page != PAGE]
    train(model, as_bytes(b"\n".join(pages)))
    shown = PAGE.read_bytes()[: SHOWN * BLOCK]
    with torch.no_grad():
        logits, chosen = model(as_bytes(shown)[None])
    print(f"{cross_entropy(logits[0, :-1], as_bytes(shown)[1:]).item() / 0.6931:.2f} bits a byte of the text shown")
    print(masks.show(read_by(chosen), len(shown), num_heads=HEADS, head=0))
    draw(shown, chosen, Path(__file__).with_name("selection.png"))
