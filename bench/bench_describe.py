"""How long does `describe` take to tell all it knows of a pattern at a million tokens?"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from flexdilated import masks
from flexdilated.cli._machine import one_thread
from flexdilated.masks.inspection._describe import Description
from flexdilated.masks.inspection._receptive_field import ReceptiveField

from ._catalogue import ENTRIES, MILLION, PICTURED, Entry
from ._catalogue_check import dense
from ._problem import tokens_text
from ._result import Result, Row, Timing, at_most
from ._timing import say

# H heads, N tokens

_GIGAPATH = "masks.longnet([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])"
_GIGAPATH_SMALL = "masks.longnet([4, 9, 16, 30, 64], [1, 2, 3, 4, 8])"
_OWN = (
    Entry("GigaPath-5", _GIGAPATH, _GIGAPATH_SMALL, num_heads=16),
    Entry("GigaPath-5, causal", f"{_GIGAPATH} & masks.causal()", f"{_GIGAPATH_SMALL} & masks.causal()", num_heads=16),
)
_OF_CATALOGUE = (
    *("local_window", "longnet", "longnet, full", "strided", "blockwise", "neighborhood, 2-D", "documents"),
    *("per_document", "longformer", "bigbird", "bigbird, block 128", "sparse_transformer_strided", "streaming_llm"),
    *("random_blocks", "block_list", "visible_keys"),
)
_ENTRIES = (*_OWN, *(entry for entry in ENTRIES if entry.name in _OF_CATALOGUE))


@dataclass(frozen=True)
class Config:
    """The patterns, and their tokens; each is checked pair by pair at the size of the catalogue's pictures first."""

    entries: tuple[Entry, ...]
    num_tokens: int


FULL = Config(_ENTRIES, MILLION)
SMALL = Config(_ENTRIES[:4], 4096)


def run(config: Config) -> Result:
    """The slowest of the patterns on one thread, with the parts of each as detail."""
    with one_thread():
        figures = {entry.name: _measure(entry, config.num_tokens) for entry in config.entries}
    slowest = max(figures, key=lambda name: figures[name]["seconds"])
    measure = f"{tokens_text(config.num_tokens)}: time to describe, one thread, slowest of {len(figures)} patterns"
    timings = tuple(Timing(name, (figure["seconds"],)) for name, figure in figures.items())
    detail = {"slowest": slowest, "patterns": figures}
    return Result((Row(measure, at_most(10, "s"), figures[slowest]["seconds"], timings, detail),))


def _measure(entry: Entry, num_tokens: int) -> dict[str, Any]:
    check(entry)
    pattern = entry.pattern(num_tokens)
    masks.cache().clear()
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = perf_counter()
        found = work()
        seconds[name] = perf_counter() - start
        return found

    told = timed("plan", lambda: masks.describe(pattern, num_tokens, num_heads=entry.num_heads))
    timed("pairs", lambda: (told.heads, told.multiplicity, told.gaps))
    field = timed("field", told.receptive_field)
    assert isinstance(field, ReceptiveField), f"{entry.name}: the receptive field is not known for all tokens"
    say(f"{entry.name}: {', '.join(f'{name} {took:.2f} s' for name, took in seconds.items())}; {field.layers} layers")
    facts = {"heads": entry.num_heads, "layers": field.layers, "reached": field.pairs / num_tokens**2}
    return {**facts, "seconds": sum(seconds.values()), "parts": seconds}


def check(entry: Entry) -> None:
    """AssertionError unless describe tells what the masks of all pairs do, over few tokens."""
    pattern, heads = entry.pictured(), entry.num_heads
    told = masks.describe(pattern, PICTURED, num_heads=heads)
    branches = [[dense(branch, head, heads, PICTURED).long() for head in range(heads)] for branch in pattern.branches()]
    counts = torch.stack([torch.stack(each) for each in branches]).sum(0)
    numbers = Counter(counts.flatten().tolist())
    assert told.multiplicity == {0: 0} | dict(numbers), f"{entry.name}: {told.multiplicity} for {numbers}"
    per_head = {head: share.pairs for share in told.heads for head in share.heads}
    assert per_head == dict(enumerate(counts.sum((1, 2)).tolist())), f"{entry.name}: {per_head}"
    _check_field(entry, told, (counts > 0).any(0))


def _check_field(entry: Entry, told: Description, once: Bool[Tensor, "N N"]) -> None:
    field = told.receptive_field()
    assert isinstance(field, ReceptiveField), f"{entry.name}: not known for all tokens"
    step = (once | torch.eye(PICTURED, dtype=torch.bool)).float()
    known, grown = torch.eye(PICTURED), [PICTURED]
    while not torch.equal(known, further := (known @ step > 0).float()):
        known = further
        grown.append(int(known.sum()))
    wanted = [(layers, grown[layers]) for layers, _ in field.growth]
    assert (field.layers, list(field.growth)) == (len(grown) - 1, wanted), f"{entry.name}: {field} for {grown}"
