"""Train a small LongNet on the source text of Python's standard library, next to the same model with dense attention.

python docs/examples/train_longnet.py                                         # make demo
python docs/examples/train_longnet.py --tokens 2048 --steps 200 --out small   # shorter sequences, more steps

Prints a table of both models and a text that the LongNet writes; leaves mask.png, loss.png and results.json in --out.
Needs matplotlib, as the extra `demo` has.
"""

import argparse
import json
import math
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional as F

import flexdilated as fd
from flexdilated import masks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEARNING_RATE = 4e-3
PROMPT, WRITTEN = 200, 200  # bytes


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small LongNet and the same model with dense attention")
    parser.add_argument("--steps", type=int, default=80, help="training steps of each model (%(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of the results (%(default)s)")
    given = parser.parse_args(arguments)
    if given.steps < 1 or given.tokens < 32:
        parser.error(f"--steps must be at least 1 and --tokens at least 32; got {given.steps} and {given.tokens}")
    return given


# 1. The data: a token is a byte. Every sixteenth file is held out, to measure what the model learned.


def library_text() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out, each of shape (bytes,)."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = paths[::16]
    train = [path for path in paths if path not in held_out]
    texts = (b"".join(path.read_bytes() for path in side) for side in (train, held_out))
    train_bytes, held_out_bytes = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return train_bytes, held_out_bytes


def windows(text: Tensor, starts: Tensor, tokens: int) -> Tensor:
    """Sequences of tokens + 1 bytes: the model reads all but the last and is asked for all but the first."""
    return text[starts[:, None] + torch.arange(tokens + 1)].long().to(DEVICE)


# 2. The models. Their attention is the only difference, so their parameters begin with the same values.


def configs(tokens: int) -> dict[str, fd.LongNetConfig]:
    """The two models by the name of their attention."""
    longnet = fd.LongNetConfig(
        vocab_size=256, embed_dim=128, depth=2, num_heads=4,
        # Near keys all, farther keys every second or fourth: a longer segment has a higher dilation rate.
        segment_lengths=(tokens // 32, tokens // 8, tokens), dilation_rates=(1, 2, 4),
    )  # fmt: skip
    # One segment of all tokens at rate 1: every query sees every key before it.
    return {"LongNet": longnet, "dense": replace(longnet, segment_lengths=(tokens,), dilation_rates=(1,))}


def bits_per_byte(model: fd.LongNet, sequences: Tensor) -> Tensor:
    """The mean cross-entropy of the next byte."""
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten()) / math.log(2)


@torch.no_grad()
def held_out_bits(model: fd.LongNet, text: Tensor, tokens: int) -> float:
    """Bits per byte over at most 8 sequences of a text."""
    starts = torch.arange(0, len(text) - tokens, tokens)[:8]
    return fmean(float(bits_per_byte(model, windows(text, start[None], tokens))) for start in starts)


# 3. The training loop.


def train(
    model: fd.LongNet, text: Tensor, *, steps: int, tokens: int, seed: int = 0
) -> tuple[list[float], list[float]]:
    """(bits per byte, seconds) of each step; models of one seed see the same sequences in the same order."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.1, anneal_strategy="linear", cycle_momentum=False
    )
    losses, seconds = [], []
    for step in range(1, steps + 1):
        began = perf_counter()
        start = torch.randint(len(text) - tokens, (1,), generator=draw)
        loss = bits_per_byte(model, windows(text, start, tokens))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(perf_counter() - began)
        if step % 10 == 0:
            print(
                f"  step {step} of {steps}: {loss.item():.2f} bits per byte, {median(seconds):.2f} s a step", flush=True
            )
    return losses, seconds


# 4. Pictures.


def draw_mask(tokens: int, path: Path) -> None:
    """The pairs of one head, in the order of the text and in the order in which whole blocks of them are computed.

    A pattern of the same shape over at most 512 tokens, of which every pair is visible.
    """
    tokens = min(tokens, 512)
    config = configs(tokens)["LongNet"]
    masks.plot(config.attention_pattern, tokens, num_heads=config.num_heads, order=("natural", "residue")).savefig(path)


def draw_losses(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    for (name, result), color, line in zip(results.items(), ("#08519c", "#d94801"), ("-", "--"), strict=True):
        steps = range(1, len(result["losses"]) + 1)
        axes.plot(steps, result["losses"], line, color=color, label=f"{name}, training")
        axes.plot([0, len(steps)], [result["before"], result["after"]], "o", color=color, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.grid(axis="y", color="#eeeeee")
    axes.legend(frameon=False)
    figure.savefig(path)


# 5. All of it.


def report(results: dict[str, Any]) -> str:
    """A row for each model."""
    headers = ("attention", "pairs of all pairs", "held out, before", "held out, after", "seconds a step")
    rows = [
        (name, f"{each['density']:.1%}", f"{each['before']:.2f}", f"{each['after']:.2f}", f"{each['seconds']:.3f}")
        for name, each in results.items()
    ]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 4))


def write(model: fd.LongNet, prompt: Tensor) -> str:
    """The prompt and what the model writes after it; what a terminal cannot show is replaced."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    tokens = prompt[None].long().to(DEVICE)
    written = model.generate(tokens, max_new_tokens=WRITTEN, temperature=0.7, generator=draw)
    text = bytes(written[0].tolist()).decode(errors="replace")
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The numbers of each model, by the name of its attention."""
    given = options(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    text, held_out = library_text()
    print(f"{len(text):,} bytes to train on, {len(held_out):,} held out")
    models, results = {}, {}
    for name, config in configs(given.tokens).items():
        torch.manual_seed(0)
        models[name] = model = fd.LongNet(config).to(DEVICE)
        print(f"{name} attention, {sum(each.numel() for each in model.parameters()):,} parameters: {model.pattern}")
        before = held_out_bits(model, held_out, given.tokens)
        losses, seconds = train(model, text, steps=given.steps, tokens=given.tokens)
        results[name] = {
            "density": masks.describe(model.pattern, given.tokens, num_heads=config.num_heads).density,
            "before": before,
            "after": held_out_bits(model, held_out, given.tokens),
            "seconds": median(seconds),
            "losses": losses,
        }
    print(f"\n{report(results)}\n\nThe LongNet writes on, after {PROMPT} bytes of a text that was held out:\n")
    print(write(models["LongNet"], held_out[:PROMPT]))
    draw_mask(given.tokens, given.out / "mask.png")
    draw_losses(results, given.out / "loss.png")
    (given.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"\nIn {given.out}: mask.png, loss.png, results.json")
    return results


if __name__ == "__main__":
    main()
