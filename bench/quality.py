"""What a model learns with a sparse pattern: the model and the text of `make demo`."""

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from statistics import mean
from time import process_time

import torch
from torch import Tensor

import flexdilated as fd
from docs.examples.train_longnet import bits_per_byte, configs, held_out_bits, library_text, train, windows
from flexdilated import masks

from ._jobs import Job, interleave, say, tokens_text
from ._measures import Row, at_most, measure

_NO_WORSE = at_most(0, "bits")


@measure(tokens=64, steps=2, seeds=1, repeats=1)
def quality(tokens: int = 8192, steps: int = 80, seeds: int = 2, repeats: int = 5) -> Iterator[Row]:
    """What does sparsity cost a language model at equal steps, and what does it gain at equal time?

    Bits per held-out byte less those of the dense model. The window reads as many keys a query as the LongNet. Equal
    time is that of `steps` steps of the dense model, by the processor time of steps that take turns.
    """
    models = configs(tokens)
    width = max(1, round(_keys_a_query(models["LongNet"], tokens)))
    window = masks.local_window(left=width - 1, right=0)
    models["window"] = replace(models["LongNet"], segment_lengths=None, dilation_rates=None, pattern=window)
    text, held_out = library_text()
    sequence = windows(text, torch.tensor([0]), tokens)
    jobs = [Job(name, partial(_step, fd.LongNet(config), sequence)) for name, config in models.items()]
    for job in jobs:
        job.run(None)  # once without the clock: the first call plans
    times = interleave(jobs, repeats=repeats, seconds=partial(Job.seconds, clock=process_time))
    of_step = {each.name: each for each in times}

    def bits(name: str, count: int) -> list[float]:
        """Of a model with this name, trained for `count` steps from each seed."""
        found = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = fd.LongNet(models[name])
            with redirect_stdout(sys.stderr):
                train(model, text, steps=count, tokens=tokens, seed=seed)
            found.append(held_out_bits(model, held_out, tokens))
            say(f"{name}, {count} steps, seed {seed}: {found[-1]:.3f} bits per byte")
        return found

    dense = {"steps": steps, "bits": bits("dense", steps), "keys_a_query": _keys_a_query(models["dense"], tokens)}
    for name in ("window", "LongNet"):
        in_equal_time = max(1, round(steps * of_step["dense"].median_s / of_step[name].median_s))
        for equal, count in (("steps", steps), ("time", in_equal_time)):
            found = bits(name, count)
            what = f"{name}, {tokens_text(tokens)}, equal {equal}: bits per held-out byte over the dense model's"
            detail = {"steps": count, "bits": found, "keys_a_query": _keys_a_query(models[name], tokens)}
            timings = of_step[name], of_step["dense"]
            yield Row(what, _NO_WORSE, mean(found) - mean(dense["bits"]), timings, detail | {"dense": dense})


def _keys_a_query(config: fd.LongNetConfig, tokens: int) -> float:
    heads = config.num_heads
    return masks.describe(config.attention_pattern, tokens, num_heads=heads).useful_pairs / (tokens * heads)


def _step(model: fd.LongNet, sequence: Tensor, _: None) -> None:
    """Forward and backward."""
    bits_per_byte(model, sequence).backward()
