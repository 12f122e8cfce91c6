"""What models of bytes learn that read as many keys in other ways, and what a training step of each costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from flexdilated import masks

from ._byte_models import (
    ByteModel,
    Listed,
    Make,
    Narrowing,
    Setting,
    chosen,
    coarse_to_fine,
    laid_out,
    static,
    trained,
)
from ._jobs import Job, interleave, ratio, say
from ._library_text import LibraryText, library_text, validation_windows
from ._measures import Row, at_least, at_most, measure
from ._seeds import beyond

# N tokens, M tokens and one more, W windows

_LIKE = 8  # bytes that must stand earlier for a place to be a copy
_FAR = "copies from afar"


@dataclass(frozen=True)
class Examination:
    """Texts that no model was trained on, and places in them over which bits are averaged."""

    texts: Int64[Tensor, "W M"]
    places: Mapping[str, Bool[Tensor, "W N"]]

    @classmethod
    def of(cls, corpus: LibraryText, setting: Setting) -> Examination:
        windows = validation_windows(corpus.validation, context=setting.tokens, limit=setting.windows)
        texts = laid_out(windows, setting)
        every = torch.ones(len(texts), setting.tokens, dtype=torch.bool)
        quarter = torch.arange(setting.tokens) * 4 // setting.tokens
        places = {"all bytes": every}
        places |= {f"quarter {part + 1}": every & (quarter == part) for part in range(4)}
        places[_FAR] = torch.stack([_far_copies(text, setting.keys) for text in texts])
        return cls(texts, places)

    @torch.no_grad()
    def bits(self, model: ByteModel) -> dict[str, float]:
        """Mean bits a byte at each of the places."""
        found = torch.cat([model.bits(part) for part in self.texts.split(4)])
        return {name: found[where].sum().item() / max(1, int(where.sum())) for name, where in self.places.items()}

    def at(self, where: Bool[Tensor, " N"]) -> Examination:
        """At some of the positions alone."""
        return replace(self, places={name: each & where for name, each in self.places.items()})


def _far_copies(text: Int64[Tensor, " M"], reach: int) -> Bool[Tensor, " N"]:
    """Where the bytes just before stand earlier too, but not within reach."""
    content = bytes(text.tolist())
    found, last = torch.zeros(len(content) - 1, dtype=torch.bool), {}
    for place in range(_LIKE, len(content)):
        before = content[place - _LIKE : place]
        found[place - 1] = before in last and place - last[before] > reach
        last[before] = place
    return found


Scores = dict[str, dict[str, list[float]]]  # of a way, at some places, by seed


def _learned(
    ways: Mapping[str, Make], corpus: LibraryText, setting: Setting, seeds: int, then: Mapping[str, Make]
) -> tuple[Scores, Scores]:
    """Bits of models trained in each way; and of the first of them read in others, where a row of queries ends.

    There a choice by all queries of a row knows of no later byte.
    """
    whole = Examination.of(corpus, setting)
    ends = whole.at(torch.arange(setting.tokens) % setting.block == setting.block - 1)
    learned: Scores = {}
    read: Scores = {}
    for seed in range(seeds):
        for name, make in ways.items():
            model = trained(make, corpus.train, setting, seed)
            _note(learned, name, whole.bits(model))
            say(f"seed {seed}, {name}: " + ", ".join(f"{at} {each[-1]:.3f}" for at, each in learned[name].items()))
            if name == next(iter(ways)):
                for other, again in ({name: make} | dict(then)).items() if then else ():
                    _note(read, other, ends.bits(model.reading(again)))
                    say(f"seed {seed}, {name} read by {other}: {read[other][_FAR][-1]:.3f}")
    return learned, read


def _note(scores: Scores, name: str, bits: dict[str, float]) -> None:
    for where, number in bits.items():
        scores.setdefault(name, {}).setdefault(where, []).append(number)


def _row(what: str, scores: Scores, better: str, than: str, references: Sequence[str]) -> Row:
    """The lower end of the bits that one way saves over another, of copies from afar; all ways in the detail."""
    ways: dict[str, Any] = {}
    for name, by_place in scores.items():
        ways[name] = {"bits": {at: mean(each) for at, each in by_place.items()}, "by_seed": by_place}
        ways[name]["over"] = {
            other: {at: beyond(each, scores[other][at]) for at, each in by_place.items()}
            for other in references
            if other != name
        }
    low, _ = beyond(scores[than][_FAR], scores[better][_FAR])
    return Row(what, at_least(0.0, "bits"), low, detail={"ways": ways})


_SMALL = Setting(tokens=64, keys=16, block=4, heads=2, head_dim=8, layers=1, batch=1, steps=2, windows=2)


def _ways(setting: Setting) -> dict[str, Make]:
    keys = setting.keys
    segments = (keys, keys * 4, keys * 16)
    dilated = masks.longnet(segment_lengths=segments, dilation_rates=(1, 4, 16)) & masks.causal()
    rows = {"query_block": setting.block, "query_summary": "first"}
    return {
        "dense": static(masks.causal()),
        "window": static(masks.local_window(left=keys - 1, right=0)),
        "dilated": static(dilated),
        "drawn blocks": partial(Listed, setting, refined=False),
        "exact mass": chosen(setting, scorer="mass"),
        "mean keys": chosen(setting),
        "mean keys, bias": chosen(setting, gradient="bias"),
        "bounds": chosen(setting, scorer="minmax"),
        f"mean keys, rows of {setting.block}": chosen(setting, **rows),
    }


@measure(setting=_SMALL, seeds=2)
def byte_model(setting: Setting = Setting(), seeds: int = 3) -> Iterator[Row]:
    """What do models of bytes learn that read chosen blocks, against a window of as many keys, dense and exact choice?

    Equal parameters, texts and steps. Bits of texts held out: of all bytes, by their position, and of those whose eight
    bytes before stand earlier too, but beyond the window. Then the dense model read in other ways. The row is the lower
    end, with 95 % confidence over paired seeds, of the bits that blocks chosen by mean keys save over the window.
    """
    corpus = library_text()
    ahead = {"query_block": setting.block, "future_in_choice": True}
    then = {
        "window": static(masks.local_window(left=setting.keys - 1, right=0)),
        "exact mass": chosen(setting, scorer="mass"),
        "mean keys": chosen(setting),
        "bounds": chosen(setting, scorer="minmax"),
        "exact mass of rows": chosen(setting, scorer="mass", **ahead),
        "antidiagonals of rows": chosen(setting, scorer="antidiagonal", stride=setting.block // 2, **ahead),
        "mean keys of rows": chosen(setting, **ahead),
    }
    learned, read = _learned(_ways(setting), corpus, setting, seeds, then)
    what = f"bits a byte of copies from afar, {setting.tokens} bytes, {setting.keys} keys read"
    compared = "mean keys", "window", ("dense", "window", "exact mass")
    yield _row(f"{what}, trained so: saved by mean keys over the window, at least", learned, *compared)
    yield _row(f"{what}, of a dense model: saved by mean keys over the window, at least", read, *compared)


@measure(setting=_SMALL, seeds=2, coarse=8, fine=2)
def byte_training(setting: Setting = Setting(), seeds: int = 3, coarse: int = 64, fine: int = 8) -> Iterator[Row]:
    """Do refined blocks beat drawn ones, a narrowing schedule a fixed width, a choice from coarse to fine a flat one?

    As in `byte_model`, each two of equal keys. Drawn and refined blocks also where the second half of each text repeats
    the first, so that where to look is a matter of position. Rows are lower ends of the bits saved.
    """
    corpus = library_text()
    drawn, refined = (partial(Listed, setting, refined=each) for each in (False, True))
    fixed, narrowed, flat = "mean keys", "mean keys, narrowing", f"mean keys of {fine}"
    from_coarse = f"mean keys of {coarse}, then of {fine}"
    ways: dict[str, Make] = {
        "drawn blocks": drawn,
        "refined blocks": refined,
        fixed: chosen(setting),
        narrowed: partial(Narrowing, setting),
        flat: chosen(setting, block=fine),
        from_coarse: coarse_to_fine(setting, coarse, fine),
    }
    plain, _ = _learned(ways, corpus, setting, seeds, {})
    for better, than in (("refined blocks", "drawn blocks"), (narrowed, fixed), (from_coarse, flat)):
        few = {name: plain[name] for name in (than, better)}
        yield _row(f"source text: bits of copies from afar saved by {better} over {than}", few, better, than, (than,))
    twice = replace(setting, copied=True)
    kept = {name: ways[name] for name in ("drawn blocks", "refined blocks", fixed)}
    copied, _ = _learned(kept, corpus, twice, seeds, {})
    what = "texts said twice: bits of copies from afar saved by refined blocks over drawn blocks"
    yield _row(what, copied, "refined blocks", "drawn blocks", ("drawn blocks",))


@measure(settings=(_SMALL,), repeats=1)
def byte_step(
    settings: tuple[Setting, ...] = (Setting(), Setting(tokens=8192, batch=1)), repeats: int = 5
) -> Iterator[Row]:
    """What does a training step of these models cost, against the dense one?"""
    for setting in settings:
        ways = _ways(setting) | {"refined blocks": partial(Listed, setting, refined=True)}
        jobs = [_step_job(name, make, setting) for name, make in ways.items()]
        for job in jobs:
            job.seconds()
        timings = interleave(jobs, repeats=repeats)
        times = {timing.name: ratio(timing, timings[0]) for timing in timings}
        what = f"{setting.tokens} bytes, batch {setting.batch}, {setting.keys} keys read: a training step's time"
        yield Row(f"{what} with mean keys over dense", at_most(1.0, "×"), times["mean keys"], timings, {"times": times})


def _step_job(name: str, make: Make, setting: Setting) -> Job:
    torch.manual_seed(0)
    model = ByteModel(setting, make)
    text = torch.randint(256, (setting.batch, setting.tokens + 1))

    def step(_: None) -> None:
        model.zero_grad()
        model.bits(text).mean().backward()

    return Job(name, step)
