"""Models that read equally many keys in different ways: retrieval, bits of bytes, the time of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import flexdilated as fd
from flexdilated import masks

from ._byte_models import (
    ByteModel,
    LibraryText,
    Listed,
    Make,
    Narrowing,
    Setting,
    beyond,
    chosen,
    coarse_to_fine,
    fit,
    laid_out,
    library_text,
    static,
    trained,
    validation_windows,
)
from ._jobs import Job, interleave, ratio, say
from ._measures import Row, at_least, at_most, measure
from .peers import dense_attention

# B batch, H heads, N tokens, D head dim, M tokens and one more, W windows, Q queries, n needles

_VALUES = 32  # that a key may carry


@dataclass(frozen=True)
class Task:
    """Each of `queries` asks for the values that its key carries, at `needles` places of a context of `tokens`."""

    name: str
    needles: int
    tokens: int = 1024
    queries: int = 64
    vocabulary: int = 4096

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(key of each place, its value, key of each query, places that hold it (size, queries, needles))."""
        asked = self.queries * self.needles
        ids = torch.rand(size, self.vocabulary, generator=generator).argsort(1)[:, : self.tokens]
        values = torch.randint(_VALUES, (size, self.tokens), generator=generator)
        places = torch.rand(size, self.tokens, generator=generator).argsort(1)[:, :asked].view(size, self.queries, -1)
        key = ids.gather(1, places[:, :, 0])
        ids = ids.scatter(1, places.flatten(1), key.repeat_interleave(self.needles, 1))
        # The values of one key differ, so that each can be told.
        first = torch.randint(_VALUES, (size, self.queries, 1), generator=generator)
        steps = torch.arange(self.needles) * (_VALUES // self.needles)
        values = values.scatter(1, places.flatten(1), ((first + steps) % _VALUES).flatten(1))
        return ids, values, key, places


Reading = Callable[[Tensor, Tensor, Tensor], Tensor]
_dense = dense_attention(causal=False)


class Retriever(nn.Module):
    """One layer of attention from queries to a context of keys that carry values; one projection makes q and k."""

    def __init__(self, task: Task, heads: int, head_dim: int) -> None:
        super().__init__()
        self.task, self.heads, width = task, heads, heads * head_dim
        self.keys, self.values = nn.Embedding(task.vocabulary, width), nn.Embedding(_VALUES, width)
        self.to_key, self.to_value = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.to_values = nn.Linear(width, _VALUES)

    def forward(self, read: Reading, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Logits of the values of each query of a drawn batch, and 1 for those that are wanted, each (B, Q, V)."""
        ids, values, key, places = self.task.batch(batch, generator)
        named = values.gather(1, places.flatten(1)).view(places.shape)
        wanted = torch.zeros(*places.shape[:2], _VALUES).scatter(2, named, 1.0)
        context, asked = self.keys(ids) + self.values(values), self.keys(key)
        projected = self.to_key(asked), self.to_key(context), self.to_value(context)
        q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in projected)
        return self.to_values(read(q, k, v).transpose(1, 2).flatten(2)), wanted


def _static(tokens: int, keys: int) -> Reading:
    """The last keys before the queries, as a window."""
    return lambda q, k, v: _dense(q, k[:, :, tokens - keys :], v[:, :, tokens - keys :])


def _of_blocks(block: int, keys: int, choose: Callable[[Tensor, Tensor], Tensor]) -> Reading:
    rule = masks.selected_blocks("chosen", block=(1, block), most=keys // block)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bindings = {"chosen": choose(q.detach(), k.detach())}
        return fd.attend(q, k, v, rule, bindings=bindings, q_offset=k.shape[2])

    return read


def _random(block: int, keys: int, generator: torch.Generator) -> Reading:
    """Blocks drawn for each query and head."""

    def choose(q: Tensor, k: Tensor) -> Tensor:
        drawn = torch.rand(*q.shape[:3], k.shape[2] // block, generator=generator)
        return drawn.argsort(3)[..., : keys // block]

    return _of_blocks(block, keys, choose)


def _chosen_by(scorer: str, block: int, keys: int) -> Reading:
    selector = fd.BlockSelector(block=block, scorer=scorer, choose=fd.TopK(keys // block))
    return _of_blocks(block, keys, lambda q, k: selector(q, k, q_offset=k.shape[2]).blocks)


def _trained_retriever(task: Task, read: Reading, seed: int, steps: int, sizes: tuple[int, int, int]) -> Retriever:
    torch.manual_seed(seed)
    batch, heads, head_dim = sizes
    model, generator = Retriever(task, heads, head_dim), torch.Generator().manual_seed(1000 + seed)
    fit(model, lambda: binary_cross_entropy_with_logits(*model(read, batch, generator)) * _VALUES, steps)
    return model


@torch.no_grad()
def _score(model: Retriever, read: Reading, seed: int, batches: int) -> float:
    """The mean share of the wanted values that are among the best."""
    generator, scores = torch.Generator().manual_seed(5000 + seed), []
    for _ in range(batches):
        logits, wanted = model(read, 16, generator)
        best = torch.zeros_like(wanted).scatter(2, logits.topk(model.task.needles, dim=2).indices, 1.0)
        scores.append(float((best * wanted).sum() / wanted.sum()))
    return mean(scores)


@measure(tasks=(Task("one needle", 1, 64, 4, 128),), keys=16, blocks=(8,), seeds=2, steps=3, sizes=(2, 2, 8), batches=1)
def needles(
    tasks: tuple[Task, ...] = (Task("one needle", 1), Task("four needles", 4)),
    keys: int = 128,
    blocks: tuple[int, ...] = (64, 16, 8),
    seeds: int = 3,
    steps: int = 600,
    sizes: tuple[int, int, int] = (16, 4, 32),
    batches: int = 8,
) -> Iterator[Row]:
    """Do chosen blocks find what a window of as many keys does not, and how far are they below the exact choice?

    One layer is trained with dense attention, and with blocks chosen by their mean keys; the first is then read in each
    way, all with `keys` keys a query but dense. The share of wanted values found, mean over seeds, and paired
    differences with 95 % confidence. The row is the lower end of the difference to the window, of mean keys of 16.
    """
    middle = blocks[len(blocks) // 2]
    own = _chosen_by("mean", middle, keys)
    for task in tasks:
        ways, scores = _readings(task, keys, blocks), {}
        for seed in range(seeds):
            dense = _trained_retriever(task, _dense, seed, steps, sizes)
            found = {name: _score(dense, read, seed, batches) for name, read in ways.items()}
            chooser = _trained_retriever(task, own, seed, steps, sizes)
            found[f"trained with mean keys of {middle}"] = _score(chooser, own, seed, batches)
            for name, score in found.items():
                scores.setdefault(name, []).append(score)
            say(f"{task.name}, seed {seed}: " + ", ".join(f"{name} {score:.3f}" for name, score in found.items()))
        yield _found_row(task, keys, middle, scores)


def _readings(task: Task, keys: int, blocks: tuple[int, ...]) -> dict[str, Reading]:
    ways: dict[str, Reading] = {"dense": _dense, "window": _static(task.tokens, keys)}
    ways["random blocks"] = _random(blocks[0], keys, torch.Generator().manual_seed(7))
    for name, scorer in (("exact mass", "mass"), ("mean keys", "mean"), ("bounds", "minmax")):
        ways |= {f"{name} of {block}": _chosen_by(scorer, block, keys) for block in blocks}
    return ways


def _found_row(task: Task, keys: int, block: int, scores: dict[str, list[float]]) -> Row:
    ways: dict[str, Any] = {}
    for name, each in scores.items():
        exact = scores.get(f"exact mass of {name.rpartition(' of ')[2]}")
        ways[name] = {"found": mean(each), "by_seed": each, "over_window": beyond(each, scores["window"])}
        if exact is not None:
            ways[name]["over_exact"] = beyond(each, exact)
    low, _ = ways[f"mean keys of {block}"]["over_window"]
    what = f"{task.name} in {task.tokens} keys, {keys} read: found by mean keys of {block} beyond a window, at least"
    return Row(what, at_least(0.0), low, detail={"ways": ways, "seeds": len(scores["dense"])})


# Models of bytes

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
            for other, again in {name: make, **then}.items() if then and name == next(iter(ways)) else ():
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
        text, jobs = torch.randint(256, (setting.batch, setting.tokens + 1)), []
        for name, make in ways.items():
            torch.manual_seed(0)
            model = ByteModel(setting, make)
            step = lambda _, model=model, text=text: model.bits(text).mean().backward()  # noqa: E731
            jobs.append(Job(name, step, model.zero_grad))
            jobs[-1].seconds()
        timings = interleave(jobs, repeats=repeats)
        times = {timing.name: ratio(timing, timings[0]) for timing in timings}
        what = f"{setting.tokens} bytes, batch {setting.batch}, {setting.keys} keys read: a training step's time"
        yield Row(f"{what} with mean keys over dense", at_most(1.0, "×"), times["mean keys"], timings, {"times": times})
