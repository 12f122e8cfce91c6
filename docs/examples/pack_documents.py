"""Train a byte language model on documents of all lengths, packed into full sequences; none sees another.

python docs/examples/pack_documents.py                          # the modules of Python's standard library
python docs/examples/pack_documents.py --documents 'notes/*.md' --tokens 65536
"""

import argparse
import math
import sysconfig
from collections.abc import Sequence
from glob import glob
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flexdilated as fd

# Each document gets what it would get alone: segments are counted from its first byte.
CAUSAL = fd.masks.longnet(segment_lengths=(128, 512, 2048), dilation_rates=(1, 4, 16)) & fd.masks.causal()
PATTERN = CAUSAL.per_document("documents")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on packed documents")
    library = Path(sysconfig.get_path("stdlib"), "*.py")
    parser.add_argument("--documents", default=str(library), help="files, such as 'notes/**/*.md'")
    parser.add_argument("--tokens", type=int, default=16384, help="bytes in a sequence; longer documents are cut")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--embed-dim", type=int, default=64, help="a multiple of the four heads")
    return parser.parse_args(arguments)


def packed(documents: Sequence[bytes], tokens: int) -> tuple[Tensor, Tensor]:
    """Bytes (sequences, tokens), and the number of the document that each belongs to, -1 for padding."""
    rows: list[list[bytes]] = []
    for document in sorted((each[:tokens] for each in documents), key=len, reverse=True):
        row = next((row for row in rows if sum(map(len, row)) + len(document) <= tokens), None)
        if row is None:
            rows.append(row := [])
        row.append(document)
    text, numbers = torch.zeros(len(rows), tokens, dtype=torch.long), torch.full((len(rows), tokens), -1)
    for at, row in enumerate(rows):
        joined, sizes = bytearray(b"".join(row)), torch.tensor([len(document) for document in row])
        text[at, : len(joined)] = torch.frombuffer(joined, dtype=torch.uint8)
        numbers[at, : len(joined)] = torch.arange(len(row)).repeat_interleave(sizes)
    return text, numbers


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        out = fd.attend(q, k, v, PATTERN, bindings={"documents": numbers})
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.inner(x))


def bits_per_byte(model: nn.ModuleDict, text: Tensor, numbers: Tensor) -> Tensor:
    """Mean over the bytes that have one before them in their document."""
    x = model["embed"](text)
    for layer in model["layers"].children():
        x = layer(x, numbers)
    follows = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)
    return F.cross_entropy(model["head"](x[:, :-1][follows]), text[:, 1:][follows]) / math.log(2)


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Bits per byte of the last sequence, before and after training on the others."""
    given = options(arguments)
    torch.manual_seed(0)
    paths = sorted(glob(given.documents, recursive=True))
    documents = [data for path in paths if len(data := Path(path).read_bytes()) > 1]
    if sum(len(each[: given.tokens]) for each in documents) <= given.tokens:
        raise SystemExit(f"the documents must fill two sequences; {given.documents} are {len(documents)}")
    text, numbers = packed(documents, given.tokens)
    print(f"{len(documents):,} documents in {len(text):,} sequences, {(numbers < 0).float().mean():.1%} padding")
    ends = {"embed": nn.Embedding(256, given.embed_dim), "head": nn.Linear(given.embed_dim, 256)}
    model = nn.ModuleDict({**ends, "layers": nn.ModuleList([Layer(given.embed_dim), Layer(given.embed_dim)])})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = float(bits_per_byte(model, text[-1:], numbers[-1:]).detach())
    for at in torch.randint(len(text) - 1, (given.steps, 1)):
        loss = bits_per_byte(model, text[at], numbers[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = float(bits_per_byte(model, text[-1:], numbers[-1:]).detach())
    print(f"held out: {before:.2f} bits per byte before, {after:.2f} after")
    return before, after


if __name__ == "__main__":
    main()
