"""Train a byte language model with LongNet's attention, by accelerate; on many devices by `accelerate launch`.

python docs/examples/train_longnet.py                            # the source text of Python's standard library
python docs/examples/train_longnet.py --text book.txt --tokens 8192 --steps 2000 --write 500
"""

import argparse
import math
import sysconfig
from collections.abc import Sequence
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import flexdilated as fd


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="A byte language model with LongNet's attention")
    parser.add_argument("--text", type=Path, help="a file; without one, Python's standard library")
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="how much of the text is read")
    parser.add_argument("--tokens", type=int, default=2048, help="bytes in a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step and process")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--embed-dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--segments", type=int, nargs="+", default=[128, 512, 2048], help="segment lengths, in tokens")
    parser.add_argument("--rates", type=int, nargs="+", default=[1, 4, 16], help="dilation rates")
    parser.add_argument("--write", type=int, default=0, help="bytes to write in the end")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def sequences(given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(sequences, tokens + 1) bytes to train on, and the last twentieth of them, held out."""
    paths = [given.text] if given.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = bytearray()
    for path in paths:
        data += path.read_bytes()
    length = given.tokens + 1
    count = min(len(data), given.max_bytes) // length
    if count < 2:
        raise SystemExit(f"the text must hold two sequences of {length} bytes; it has {len(data)} bytes")
    rows = torch.frombuffer(data, dtype=torch.uint8)[: count * length].view(count, length).long()
    held_out = max(count // 20, 1)
    return rows[:-held_out], rows[-held_out:]


def bits_per_byte(model: torch.nn.Module, rows: Tensor) -> Tensor:
    """Mean over all bytes but the first of each row."""
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    return loss / math.log(2)


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Bits per byte on text that was held out, before and after training."""
    given = options(arguments)
    accelerator = Accelerator()
    set_seed(given.seed)
    train, held_out = sequences(given)
    branches = {"segment_lengths": given.segments, "dilation_rates": given.rates}
    sizes = {"embed_dim": given.embed_dim, "depth": given.depth, "num_heads": given.heads}
    model = fd.LongNet(fd.LongNetConfig(vocab_size=256, **sizes, **branches))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    loader = DataLoader(TensorDataset(train), batch_size=given.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    held_out = held_out[: given.batch].to(accelerator.device)
    with torch.no_grad():
        before = float(bits_per_byte(model, held_out))
    epochs = chain.from_iterable(repeat(loader))
    for step, (batch,) in enumerate(islice(epochs, given.steps), 1):
        loss = bits_per_byte(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            accelerator.print(f"step {step}: {loss.item():.2f} bits per byte")
    with torch.no_grad():
        after = float(bits_per_byte(model, held_out))
    accelerator.print(f"held out: {before:.2f} bits per byte before, {after:.2f} after")
    if given.write:
        written = accelerator.unwrap_model(model).generate(held_out[:1, :100], max_new_tokens=given.write)
        accelerator.print(bytes(written[0].tolist()).decode(errors="replace"))
    return before, after


if __name__ == "__main__":
    main()
