"""Draw selection.png beside this file: which blocks of a text the heads of a small model chose to read.

A model of bytes whose attention follows MoBA's choice trains for some minutes on the pages of this documentation,
without the one that it is shown then. Run from a checkout with the extra `plot` installed:
python -m docs.images.make_selection_picture
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import flexdilated as fd
from flexdilated import masks

BLOCK, TOP = 64, 3
HEADS, HEAD_DIM, LAYERS = 4, 32, 2
WIDTH = HEADS * HEAD_DIM
STEPS, BATCH, TOKENS, RATE = 300, 2, 2048, 3e-3  # of training
DOCS, SHOWN = Path(__file__).parents[1], 30  # blocks
PAGE = DOCS / "concepts" / "orders.md"


class Layer(nn.Module):
    """Attention and an MLP. The key of a byte holds the bytes before it; half of each head is rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        # Queries and keys have equal initial weights, so that a query soon finds earlier places of the bytes before it.
        self.qkv.weight.data[WIDTH : 2 * WIDTH] = self.qkv.weight.data[:WIDTH]
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.attention = fd.SelectedAttention(fd.selection.recipes.moba(block=BLOCK, top=TOP))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, angles), rotated(pad(k, (0, 0, 1, -1)), angles)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.inner(x))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    real, imaginary, rest = x.split([HEAD_DIM // 4, HEAD_DIM // 4, HEAD_DIM // 2], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos, rest], -1)


class ByteModel(nn.Module):
    """Bits of each byte of (B, N + 1) texts but the first; a convolution shows each position the bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.near = nn.Embedding(256, WIDTH), nn.Conv1d(WIDTH, WIDTH, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, texts: Tensor) -> Tensor:
        x = self.embed(texts[:, :-1])
        x = x + self.near(pad(x.mT, (5, 0))).mT
        pairs = HEAD_DIM // 4
        angles = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(pairs) / pairs)
        for layer in self.layers:
            x = layer(x, angles)
        return cross_entropy(self.head(self.norm(x)).mT, texts[:, 1:], reduction="none") / torch.tensor(2.0).log()


def trained(text: Tensor) -> ByteModel:
    torch.manual_seed(0)
    model, generator = ByteModel(), torch.Generator().manual_seed(1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for _ in range(STEPS):
        begins = torch.randint(len(text) - TOKENS, (BATCH, 1), generator=generator)
        optimizer.zero_grad()
        (model(text[begins + torch.arange(TOKENS + 1)].long()).mean() * torch.tensor(2.0).log()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def read_by(blocks: Tensor) -> masks.Pattern:
    """What is read, by a table."""
    table = masks.selected_blocks(blocks, block=(1, BLOCK), most=TOP - 1)
    return (table | masks.chunked(BLOCK)) & masks.causal()


def as_bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw(text: bytes, blocks: Tensor, path: Path) -> None:
    """The blocks of the text as lines; beside them, by head, how many of a block's queries chose each block."""
    widths = [1.95] + [1] * HEADS
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
    model = trained(as_bytes(b"\n".join(pages)))
    last, operands = model.layers[-1].attention, []
    last.register_forward_pre_hook(lambda _, given: operands.extend(given[:2]))
    size = SHOWN * BLOCK
    shown = PAGE.read_bytes()[: size + 1]
    with torch.no_grad():
        print(f"{model(as_bytes(shown)[None].long()).mean():.2f} bits a byte of the text shown")
        chosen = last.selector(*operands).blocks
    print(masks.show(read_by(chosen), size, num_heads=HEADS, head=0))
    draw(shown[:size], chosen, Path(__file__).with_name("selection.png"))
