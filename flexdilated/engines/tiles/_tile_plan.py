"""What the tiles engine runs on a kind of device: the planner's choice on CPU, dense and causal terms on CUDA."""

from __future__ import annotations

from dataclasses import replace

from ...masks import Layout
from ...masks.core import Bound
from ...masks.planning import Allowed, Choice, Option, Plan, plan

_CUDA_SLOTS_AT_ONCE = 1 << 18  # copies that fill the machine, and are small beside its memory


def portions_on(kind: str) -> dict[str, int]:
    """How a program's copies are portioned there, where it is not as on CPU."""
    return {} if kind == "cpu" else {"slots_at_once": _CUDA_SLOTS_AT_ONCE}


def plan_tiles(bound: Bound, layout: Layout, kind: str, choice: Choice | None = None) -> Plan:
    """The plan for tokens that come in this layout; on CPU it follows a choice.

    On CUDA the cheapest of those ways whose terms are all dense or causal: there are no kernels for lists of blocks.
    Raises ValueError where a branch has no such way.
    """
    if kind == "cpu":
        return plan(bound, layout=layout, choice=choice)
    best = plan(bound, device=kind, allowed=Allowed(any_windows=True, key_weights=False))
    chosen = tuple(_plain_first(options, kind) for options in best.options)
    return replace(best, terms=tuple(term for options in chosen for term in options[0].terms), options=chosen)


def _plain_first(options: tuple[Option, ...], kind: str) -> tuple[Option, ...]:
    """The options with the cheapest one in front that lists no blocks."""
    for index, option in enumerate(options):
        if all(term.shape in ("dense", "causal") for term in option.terms):
            return (option, *options[:index], *options[index + 1 :])
    raise ValueError(
        f"tiles on {kind} runs ATen's kernels, which take branches that are dense or causal in some order of their "
        f"tokens; {options[0].branch} needs lists of blocks. engine='flex' serves it"
    )
