"""How many pairs does the planner's choice compute for each useful one?"""

from dataclasses import dataclass

from flexdilated import masks

from ._longnets import GIGAPATH_5, LONGNET_4, LONGNET_5, PAPER_5, LongNet
from ._problem import tokens_text
from ._result import Result, Row, at_most
from ._timing import say


@dataclass(frozen=True)
class Config:
    """Each LongNet, full and causal, at each number of tokens."""

    specs: tuple[LongNet, ...]
    num_tokens: tuple[int, ...]
    num_heads: int


FULL = Config((LONGNET_4, LONGNET_5, PAPER_5, GIGAPATH_5), (16384, 32768, 65536, 131072, 262144), num_heads=16)
SMALL = Config((LONGNET_4, PAPER_5, GIGAPATH_5), (4096, 16384), num_heads=4)


def run(config: Config) -> Result:
    """C12: pairs in the plan's listed blocks of 128 over useful pairs; the worst size of each LongNet."""
    specs = [each for spec in config.specs for each in (spec, spec.as_causal())]
    return Result(tuple(_measure(spec, config) for spec in specs))


def _measure(spec: LongNet, config: Config) -> Row:
    ratios = {tokens_text(num_tokens): _waste(spec, num_tokens, config.num_heads) for num_tokens in config.num_tokens}
    say(f"{spec.label}: {', '.join(f'{size} {value:.3f}' for size, value in ratios.items())}")
    name = f"{spec.label}, {tokens_text(config.num_tokens[0])} to {tokens_text(config.num_tokens[-1])}"
    return Row(f"{name}: computed over useful pairs, worst size", at_most(1.15), max(ratios.values()), detail=ratios)


def _waste(spec: LongNet, num_tokens: int, num_heads: int) -> float:
    """As `describe` counts it, with its useful pairs held against the closed form written here."""
    described = masks.describe(spec.pattern(), num_tokens, num_heads=num_heads)
    useful = spec.pairs(num_tokens=num_tokens, num_heads=num_heads)
    assert described.useful_pairs == useful, (
        f"{spec.label}, {num_tokens} tokens: {useful} useful pairs; describe counts {described.useful_pairs}"
    )
    return described.computed_pairs / useful
