"""Models of bytes that differ in the keys that a query reads, their training, and their text: Python's own library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import inf, log, sqrt
from os import fsencode
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import flexdilated as fd
from flexdilated import masks

# B batch, H heads, N tokens, D head dim

_BITS = log(2)
_RATE = 3e-3


@dataclass(frozen=True)
class Setting:
    """A model of bytes, what a query of it may read, and how it is trained.

    keys: those that a query reads, half of them the latest where the others are blocks. copied: the second half of
    each text repeats the first.
    """

    tokens: int = 2048
    keys: int = 128
    block: int = 16
    heads: int = 4
    head_dim: int = 32
    layers: int = 2
    batch: int = 2
    steps: int = 300
    windows: int = 32
    copied: bool = False

    @property
    def near(self) -> masks.Pattern:
        return masks.local_window(left=self.keys // 2 - 1, right=0)

    @property
    def most(self) -> int:
        return self.keys // 2 // self.block


Make = Callable[[], nn.Module]  # an attention (q, k, v) -> out without parameters, one for each layer


def static(pattern: masks.Pattern | masks.Mixture) -> Make:
    return partial(fd.BlockSparseAttention, pattern)


def chosen(setting: Setting, *, block: int = 0, gradient: str = "none", **options: Any) -> Make:
    block = block or setting.block
    budget = fd.TopK(setting.keys // 2 // block)

    def make() -> nn.Module:
        selector = fd.BlockSelector(**{"block": block, "choose": budget, "always": setting.near} | options)
        return fd.SelectedAttention(selector, gradient)

    return make


def coarse_to_fine(setting: Setting, coarse: int, fine: int) -> Make:
    first = fd.BlockSelector(block=coarse, choose=fd.TopK(setting.most), always=setting.near)
    return chosen(setting, block=fine, coarse=first)


class Narrowing(nn.Module):
    """Blocks chosen by their mean keys, first many and then `most`, as a schedule says."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.schedule = fd.schedules.cubic(8 * setting.most, setting.most, setting.steps // 2, widths=4)
        makes = {width: chosen(setting, choose=fd.TopK(width)) for width in self.schedule.values}
        self.by_width = nn.ModuleDict({str(width): make() for width, make in makes.items()})
        self.step = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = self.schedule(self.step) if self.training else self.schedule.end
        self.step += self.training
        return self.by_width[str(width)](q, k, v)


class Listed(nn.Module):
    """Blocks drawn for each head and row of queries, and the latest keys; `refined`: exchanged in training.

    Every `every` steps each head exchanges its blocks of least mass for those whose mean keys agree most.
    """

    def __init__(self, setting: Setting, *, refined: bool, every: int = 10) -> None:
        super().__init__()
        self.setting, self.every, self.step = setting, every, 0
        self.beyond, self.moves = masks.causal() & ~setting.near, None
        rows = -(-setting.tokens // setting.block)
        generator = torch.Generator().manual_seed(7)
        self.listed = masks.block_list(
            [[self._drawn(row, generator) for row in range(rows)] for _ in range(setting.heads)], block=setting.block
        )
        if refined:
            last = setting.steps * 3 // 4
            self.moves = fd.schedules.cosine(rows * setting.most // 3, 0, last)
            self.tracker = fd.ImportanceTracker(setting.heads, rows, rows, decay=0.5)

    def _drawn(self, row: int, generator: torch.Generator) -> list[int]:
        before = max(0, row + 1 - self.setting.keys // 2 // self.setting.block)
        return torch.randperm(before, generator=generator)[: self.setting.most].sort().values.tolist()

    @property
    def pattern(self) -> masks.Pattern:
        return (self.listed | self.setting.near) & masks.causal()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.training or self.moves is None:
            return fd.attend(q, k, v, self.pattern)
        out, lse = fd.attend(q, k, v, self.pattern, return_lse=True)
        self.step += 1
        if self.step % self.every == 0 and (moves := self.moves(self.step)):
            self._refine(q.detach(), k.detach(), lse.detach(), moves)
        return out

    def _refine(self, q: Tensor, k: Tensor, lse: Tensor, moves: int) -> None:
        block = self.setting.block
        self.tracker.update(fd.block_mass(q, k, lse, self.pattern, block=block))
        scores = fd.pooled_scores(q, k, block=block, lse=lse)
        options = {"scores": scores, "moves": moves, "within": self.beyond}
        self.listed, _, grown = fd.refine(self.listed, self.tracker.importance(), **options)
        self.tracker.restart(grown)


# The model


class Layer(nn.Module):
    """Attention and an MLP. A key knows the bytes before its own, whose value it brings; half of it is rotated."""

    def __init__(self, setting: Setting, attention: nn.Module) -> None:
        super().__init__()
        width, self.heads = setting.heads * setting.head_dim, setting.heads
        self.norm, self.inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        # Queries and keys have equal initial weights, so that a query soon finds earlier places of the bytes before it.
        self.qkv.weight.data[width : 2 * width] = self.qkv.weight.data[:width]
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.attention = attention

    def forward(self, x: Float[Tensor, "B N E"], angles: Float[Tensor, "N A"]) -> Float[Tensor, "B N E"]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = _rotated(q, angles), _rotated(pad(k, (0, 0, 1, -1)), angles)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.inner(x))


def _rotated(x: Float[Tensor, "B H N D"], angles: Float[Tensor, "N A"]) -> Float[Tensor, "B H N D"]:
    real, imaginary, rest = x.split([angles.shape[1], angles.shape[1], x.shape[-1] - 2 * angles.shape[1]], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos, rest], -1)


class ByteModel(nn.Module):
    """The next byte's logits. A convolution tells each position of the bytes just before it."""

    def __init__(self, setting: Setting, make: Make) -> None:
        super().__init__()
        width = setting.heads * setting.head_dim
        self.embed, self.near = nn.Embedding(256, width), nn.Conv1d(width, width, 6)
        self.layers = nn.ModuleList(Layer(setting, make()) for _ in range(setting.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        pairs = setting.head_dim // 4
        self.speeds = 10_000.0 ** (-torch.arange(pairs) / pairs)

    def forward(self, text: Int64[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        x = self.embed(text)
        x = x + self.near(pad(x.mT, (5, 0))).mT
        angles = torch.arange(text.shape[1])[:, None] * self.speeds
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))

    def reading(self, make: Make) -> ByteModel:
        """The same model, which reads in another way from now on."""
        for layer in self.layers:
            layer.attention = make().train(self.training)
        return self

    def bits(self, windows: Int64[Tensor, "B M"]) -> Float[Tensor, "B N"]:
        """Of each byte but the first, by those before it."""
        logits = self(windows[:, :-1])
        return cross_entropy(logits.mT, windows[:, 1:], reduction="none") / _BITS


def laid_out(window: Tensor, setting: Setting) -> Int64[Tensor, "B M"]:
    """Windows of tokens + 1 bytes as the model gets them."""
    if setting.copied:
        half = window[:, : setting.tokens // 2]
        window = torch.cat([half, half, half[:, :1]], 1)
    return window.long()


def trained(make: Make, text: UInt8[Tensor, " bytes"], setting: Setting, seed: int) -> ByteModel:
    """A model after its steps over windows of the text, drawn from the seed."""
    torch.manual_seed(seed)
    model, generator = ByteModel(setting, make), torch.Generator().manual_seed(1000 + seed)

    def loss() -> Tensor:
        begins = torch.randint(len(text) - setting.tokens, (setting.batch, 1), generator=generator)
        window = text[begins + torch.arange(setting.tokens + 1)]
        return model.bits(laid_out(window, setting)).mean() * _BITS

    fit(model, loss, setting.steps, weight_decay=0.01, clip=1.0)
    return model.eval()


def fit(
    model: nn.Module, loss: Callable[[], Tensor], steps: int, *, weight_decay: float = 0.0, clip: float = inf
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()


# The text

# Installed packages are not the standard library, and its test suites are mostly data.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# A sixteenth of the bytes is held out; files of more than a 64th are held out last.
_HELD_OUT_SHARE, _LONG_FILE_SHARE = 16, 64
_END_OF_FILE = b"\0"  # source text does not hold it


class LibraryText(NamedTuple):
    """Bytes of disjoint files."""

    train: UInt8[Tensor, " bytes"]
    validation: UInt8[Tensor, " bytes"]


def library_text() -> LibraryText:
    """Files joined in the order of their names.

    Held out are files in the order of a digest of their names, very long ones last, until they hold a sixteenth of the
    bytes.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & {*path.relative_to(root).parts})
    texts = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    names, total = sorted(name for name in texts if texts[name]), sum(map(len, texts.values()))

    def late_and_drawn(name: str) -> tuple[bool, bytes]:
        """A very long file would be most of the held-out text."""
        return len(texts[name]) > total // _LONG_FILE_SHARE, sha256(fsencode(name)).digest()

    held_out, needed = set(), total // _HELD_OUT_SHARE
    for name in sorted(names, key=late_and_drawn):
        if needed <= 0:
            break
        held_out.add(name)
        needed -= len(texts[name])
    sides = ([name for name in names if (name in held_out) == out] for out in (False, True))
    joined = (b"".join(texts[name] + _END_OF_FILE for name in side) for side in sides)
    return LibraryText(*(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in joined))


def validation_windows(text: UInt8[Tensor, " n"], *, context: int, limit: int) -> UInt8[Tensor, "w m"]:
    """At most `limit` windows, spread evenly over the text, none overlapping another."""
    size = context + 1
    available = len(text) // size
    chosen = torch.linspace(0, available - 1, min(limit, available)).round().long()
    return torch.stack([text[int(i) * size : (int(i) + 1) * size] for i in chosen])


# Differences over seeds

_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # 97.5 % quantile, by seeds


def beyond(these: Sequence[float], those: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean difference of paired seeds, by Student's distribution; infinite for one seed."""
    differences = [a - b for a, b in zip(these, those, strict=True)]
    if len(differences) < 2:
        return float("-inf"), float("inf")
    half = _STUDENT[len(differences)] * stdev(differences) / sqrt(len(differences))
    return mean(differences) - half, mean(differences) + half
