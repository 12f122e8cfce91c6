"""How small is a cached block list, and how much sooner is it there again than built anew?"""

from dataclasses import dataclass

import torch

from flexdilated import masks
from flexdilated.masks.blocks._blocks import Blocks
from flexdilated.masks.blocks._packed_blocks import PackedBlocks
from flexdilated.masks.planning.lowering._lower import shared_terms

from ._longnets import LONGNET_5
from ._problem import tokens_text
from ._result import Result, Row, at_least
from ._timing import Job, interleave, ratio


@dataclass(frozen=True)
class Case:
    """A pattern, as `masks.to_json` writes it, in the order of a dilation rate, with blocks of 128."""

    name: str
    pattern: str
    num_tokens: int
    num_heads: int = 1
    rate: int = 1

    def __str__(self) -> str:
        order = "" if self.rate == 1 else f" in residue order {self.rate}"
        heads = "1 head" if self.num_heads == 1 else f"{self.num_heads} heads"
        return f"{self.name}{order}, {tokens_text(self.num_tokens)}, {heads}"


@dataclass(frozen=True)
class Config:
    """The cases; each list is built and unpacked in turn."""

    cases: tuple[Case, ...]
    repeats: int


def _window(num_tokens: int) -> Case:
    pattern = masks.causal() & masks.local_window(left=1023, right=0)
    return Case("window of 1024, causal", masks.to_json(pattern), num_tokens)


def _longnet(num_tokens: int, *, num_heads: int, shrunk: int = 1, rate: int = 1) -> Case:
    spec = LONGNET_5.shrunk(shrunk).as_causal() if shrunk > 1 else LONGNET_5.as_causal()
    return Case(spec.label, masks.to_json(spec.pattern()), num_tokens, num_heads, rate)


def _random(num_tokens: int) -> Case:
    """The parts of BigBird: a window, global tokens, random blocks. Nothing repeats in the last."""
    drawn = masks.random_blocks(num_tokens, block=128, count=3)
    pattern = masks.local_window(left=192, right=192) | masks.global_tokens(128) | drawn
    return Case("window, global tokens, random blocks", masks.to_json(pattern), num_tokens)


FULL = Config(
    (
        _window(1 << 20),
        _longnet(65536, num_heads=16),
        _longnet(65536, num_heads=16, rate=16),
        _longnet(1 << 20, num_heads=1),
        _random(65536),
        _random(1 << 20),
    ),
    repeats=5,
)
SMALL = Config((_window(2048), _longnet(2048, num_heads=4, shrunk=32, rate=16), _random(2048)), repeats=1)


def run(config: Config) -> Result:
    """Lists are compared after a round trip. Bytes are those of the tensors, and of what the cache keeps."""
    return Result(tuple(_measure(case, config.repeats) for case in config.cases))


def _measure(case: Case, repeats: int) -> Row:
    bound = masks.from_json(case.pattern).bind(
        num_heads=case.num_heads, num_queries=case.num_tokens, num_keys=case.num_tokens
    )
    (term,) = shared_terms(bound.union, 1, bound, case.rate)
    blocks = term.blocks(128, 128)
    packed = PackedBlocks.pack(blocks)
    _check(packed.unpack(), blocks)
    jobs = (Job("build", lambda _: term.blocks(128, 128)), Job("unpack", lambda _: packed.unpack()))
    timings = interleave(jobs, repeats=repeats)
    detail = {
        "listed_blocks": len(blocks.row),
        "list_bytes": blocks.nbytes,
        "kept_bytes": packed.nbytes,
        "times_as_fast_as_building": ratio(*timings),
    }
    measure = f"{case}: bytes of block lists over bytes kept"
    return Row(measure, at_least(8, "×"), blocks.nbytes / packed.nbytes, timings, detail)


def _check(found: Blocks, wanted: Blocks) -> None:
    for name in ("table", "row", "column", "full", "pairs"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), f"lists must come back; {name} differs"
