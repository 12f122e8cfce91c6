"""demo: train a small LongNet on source text, measure it, leave a table, pictures, a report and a sample."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from .. import __version__, masks
from .._attend import attend
from ..nn import LongNetConfig
from ._command_parser import CommandParser, UsageError
from ._demo_data import bigram_bits, load_corpus, unigram_bits, validation_windows
from ._demo_model import ByteModel, draw_sample, model_config, sample_text
from ._demo_slide import demo_slide
from ._demo_training import CHECKPOINT, Interrupt, Run, load_checkpoint, mean_bits, train
from ._machine import available_devices, find, missing_line, num_devices
from ._output import prepare, replace
from ._pattern import refusals

_VALIDATION_WINDOWS = 12
_REPETITIONS = 3
_LONGEST_DENSE = 65536  # dense attention's time grows with its square: beyond, it alone would take minutes
# The picture's pattern is the default one, scaled down 32 times.
_PICTURE_TOKENS, _PICTURE_BLOCK, _PICTURE_SHORTEST = 512, 8, 8


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Train a byte-level LongNet language model on the source text of Python's own standard library, and "
        "measure it. Ctrl-C ends the training early, with all results so far; --resume goes on."
    )
    add = parser.argument
    of_text = ("context", "steps", "minutes", "device", "data", "resume", "sample")
    slide = "look at a slide instead: train an encoder of its tiles, and draw where it looks (one minute)"
    add("slide", nargs="?", metavar="slide", excludes=of_text, help=slide)
    context = "bytes the model sees at once (%(default)s)"
    add("--context", type=int, default=16384, least=2, metavar="BYTES", help=context)
    add("--steps", type=int, default=200, least=0, help="training steps, one window of text each (%(default)s)")
    add("--minutes", type=float, default=3.5, help="most time to train in this run (%(default)s)")
    seed = "draws the parameters and the order of the text (%(default)s)"
    add("--seed", type=int, default=0, least=0, most=2**63 - 1, help=seed)
    add("--device", default="cpu", help="cpu, or an accelerator such as cuda (%(default)s)")
    add("--out", type=Path, default=Path("demo-out"), metavar="FOLDER", help="where results go (%(default)s)")
    add("--data", type=Path, metavar="PATH", help="a file or folder to train on instead")
    add("--resume", action="store_true", help="go on from the checkpoint in --out; --steps may be raised")
    sample = "let the model continue a held-out text by this many bytes (%(const)s if no number is given)"
    add("--sample", type=int, nargs="?", const=400, default=0, least=0, metavar="BYTES", help=sample)
    parser.set_defaults(command=demo)


def demo(options: argparse.Namespace) -> int:
    """Check the settings, then run."""
    _check(options)
    with refusals():
        masks.cache()  # the environment sets its limits
    if options.slide:
        return demo_slide(options)
    run_demo(options)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.slide not in (None, "slide"):
        raise UsageError(f"demo takes the word slide, or none; got {options.slide!r}")
    if not (isfinite(options.minutes) and options.minutes > 0):
        raise UsageError(f"--minutes must be a positive number; got {options.minutes}")
    choices = ", ".join(available_devices())
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise UsageError(f"--device must be one of {choices}; got {options.device!r}") from None
    if device.type not in available_devices() or (device.index or 0) >= num_devices(device.type):
        raise UsageError(f"--device must be one of {choices}, as this machine has no other; got {options.device!r}")


def run_demo(options: argparse.Namespace) -> None:
    """Train and measure, and leave what was found."""
    context, seed, out = options.context, options.seed, options.out
    prepare(out)
    corpus = load_corpus(options.data, context=context)
    config = model_config(context)
    identity = {"context": context, "seed": seed, "corpus": corpus.fingerprint, "model": asdict(config)}
    run = Run(ByteModel(config, seed=seed).to(options.device), identity)
    if options.resume:
        run.load(load_checkpoint(out, identity=identity))
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"text      {corpus}")
    print(f"model     causal LongNet, {parameters:,} parameters, {_branches(config)}")
    if run.step:
        print(f"resumed   at step {run.step}")
    windows = validation_windows(corpus.validation, context=context, limit=_VALIDATION_WINDOWS)
    with Interrupt() as interrupt:
        if run.step == 0:
            run.before = mean_bits(run.model, windows)
        how = {"context": context, "seed": seed, "steps": options.steps, "minutes": options.minutes}
        ended_by = train(run, corpus.train, interrupt, **how, save=lambda: run.save(out))
        if interrupt.requested:
            print("stopping early; a second Ctrl-C ends at once, without results")
        stats = masks.cache().stats()  # before the timing, which looks up plans of its own
        facts = masks.describe(config.pattern, context, num_heads=config.num_heads, head_dim=config.head_dim)
        results = {
            "before": run.before,
            "after": mean_bits(run.model, windows) if run.step else run.before,
            "unigram": unigram_bits(corpus.train, windows),
            "bigram": bigram_bits(corpus.train, windows),
            **{"parameters": parameters, "steps": run.step, "seconds": run.seconds, "context": context},
            "time": None if interrupt.requested else _attention_time(config, context, options.device),
            **{"density": facts.density, "block_density": facts.block_density, "waste": facts.waste},
            **{"ended_by": ended_by, "cache": asdict(stats)},
        }
        print(f"\n{_table(results)}\n")
        if options.sample:
            _sample(run, windows[0], options)
        _leave(results, run, options)


def _branches(config: LongNetConfig) -> str:
    segments, rates = (", ".join(map(str, x)) for x in (config.segment_lengths, config.dilation_rates))
    return f"segments {segments} at rates {rates}"


def _attention_time(config: LongNetConfig, context: int, device: str) -> dict[str, float] | None:
    """Milliseconds of one layer's attention beside causal dense SDPA, forward and backward, medians after a warm-up.

    They take turns, so that a busy machine slows both.

    None above _LONGEST_DENSE tokens.
    """
    if context > _LONGEST_DENSE:
        return None
    shape, generator = (1, config.num_heads, context, config.head_dim), torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, *shape, generator=generator).to(device)
    given = {"leaves": [x.requires_grad_() for x in (q, k, v)], "grad": grad, "gradients": torch.autograd.grad}
    ways = (partial(attend, pattern=config.pattern), partial(scaled_dot_product_attention, is_causal=True))
    timers = [
        Timer(
            "gradients(attention(*leaves), leaves, grad)",
            globals=given | {"attention": way},
            num_threads=torch.get_num_threads(),
        )
        for way in ways
    ]
    times = [[1e3 * timer.timeit(1).median for timer in timers] for _ in range(_REPETITIONS)]  # each warms up
    longnet, dense = (median(column) for column in zip(*times, strict=True))
    return {"longnet_ms": longnet, "dense_ms": dense, "repetitions": _REPETITIONS}


def _table(found: dict[str, Any]) -> str:
    """Every result with its name, for people."""
    time, cache = found["time"], found["cache"]
    what = f"attention forward + backward at {found['context']:,} tokens"
    times = [(what, f"not timed (interrupted, or above {_LONGEST_DENSE:,} tokens)")]
    if time is not None:
        times = [
            (f"{what}, LongNet", f"{time['longnet_ms']:.1f} ms"),
            (f"{what}, dense SDPA", f"{time['dense_ms']:.1f} ms"),
            ("LongNet faster by", f"{time['dense_ms'] / time['longnet_ms']:.1f}x"),
        ]
    rows = [
        ("validation bits per byte, before", f"{found['before']:.3f}"),
        ("validation bits per byte, after", f"{found['after']:.3f}"),
        ("byte unigram", f"{found['unigram']:.3f}"),
        ("byte bigram", f"{found['bigram']:.3f}"),
        ("better than the unigram by", f"{found['unigram'] - found['after']:.3f}"),
        ("better than the bigram by", f"{found['bigram'] - found['after']:.3f}"),
        ("parameters", f"{found['parameters']:,}"),
        ("training steps", f"{found['steps']:,}"),
        ("training bytes", f"{found['steps'] * found['context']:,}"),
        ("training seconds", f"{found['seconds']:.0f}"),
        ("training ended by", found["ended_by"]),
        *times,
        ("density, pairs of all pairs", f"{found['density']:.3%}"),
        ("density, computed in blocks", f"{found['block_density']:.3%}"),
        ("computed / useful pairs", f"{found['waste']:.3f}"),
        ("plan cache, hits and misses", f"{cache['hits']:,} and {cache['misses']:,}"),
    ]
    return tabulate(rows, headers=["measure", "value"], disable_numparse=True, colalign=("left", "right"))


def _sample(run: Run, window: Tensor, options: argparse.Namespace) -> None:
    """Continue the first half of a validation window."""
    prompt = window[: max(1, options.context // 2)]
    began = perf_counter()
    continuation = draw_sample(run.model, prompt, num_bytes=options.sample, seed=options.seed)
    rate = len(continuation) / (perf_counter() - began)
    text = sample_text(bytes(prompt.tolist()), continuation)
    print(
        f"sample    {len(continuation):,} bytes after {len(prompt):,} of a held-out text: "
        f"{rate:,.0f} bytes a second, the prompt included\n\n{text}"
    )
    replace(options.out / "sample.txt", lambda path: path.write_text(text, encoding="utf-8"))


def _leave(results: dict[str, Any], run: Run, options: argparse.Namespace) -> None:
    """Write report and pictures, and say where they are."""
    config = {**run.identity, "steps": options.steps, "minutes": options.minutes, "device": options.device}
    versions = {"flexdilated": __version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {"machine": platform.machine(), "threads": str(torch.get_num_threads())}
    report = {"config": config, "versions": versions, "results": results, "history": run.losses}
    text = json.dumps(report, indent=2) + "\n"
    replace(options.out / "report.json", lambda path: path.write_text(text, encoding="utf-8"))
    written = ["report.json", CHECKPOINT, *(["sample.txt"] if options.sample else [])]
    if find("matplotlib") is None:
        print(missing_line("matplotlib"))
    else:
        replace(options.out / "mask.png", _save_mask)
        replace(options.out / "loss.png", lambda path: _save_losses(path, run.losses, results))
        written += ["mask.png", "loss.png"]
    print("written   " + ", ".join(str(options.out / name) for name in written))


def _save_mask(path: Path) -> None:
    small = model_config(_PICTURE_TOKENS, shortest=_PICTURE_SHORTEST)
    how = {"order": ("natural", "residue"), "title": f"Causal LongNet, {_branches(small)}"}
    sizes = {"num_heads": small.num_heads, "block_size": _PICTURE_BLOCK}
    masks.plot(small.pattern, _PICTURE_TOKENS, **sizes, **how).savefig(path, format="png")


def _save_losses(path: Path, losses: list[float], results: dict[str, Any]) -> None:
    """The loss of each step, its running mean, the validation's two and the two baselines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained", dpi=140)
    axes, steps = figure.subplots(), range(1, len(losses) + 1)
    before, after = results["before"], results["after"]
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.9, label="training, each step")
    means = [fmean(losses[max(0, last - 10) : last]) for last in steps]
    axes.plot(steps, means, color="#08519c", linewidth=2, label="training, mean of 10")
    axes.plot([0, len(losses)], [before, after], "o", color="#d94801", zorder=3, label="validation, before and after")
    axes.annotate(f"{after:.2f}", (len(losses), after), xytext=(7, -3), textcoords="offset points", color="#d94801")
    for name, style in (("unigram", "--"), ("bigram", ":")):
        label = f"byte {name}, {results[name]:.2f}"
        axes.axhline(results[name], color="#555555", linestyle=style, linewidth=1.2, label=label)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set(ylim=(0, max([before, *losses]) * 1.05), xlim=(0, max(1, len(losses)) * 1.06))
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, format="png")
