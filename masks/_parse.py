"""Patterns from text: the names that an expression may use, and what they call."""

from collections.abc import Callable

from . import recipes
from ._algebra import every
from ._block_list import block_list
from ._blockwise import blockwise
from ._causal import causal
from ._chunked import chunked
from ._dilated import dilated
from ._dilated_window import dilated_window
from ._documents import documents
from ._fixed import fixed
from ._global_tokens import first_tokens, global_tokens
from ._landmark_tokens import landmark_tokens
from ._lengths import lengths
from ._local_window import local_window
from ._longnet import longnet
from ._neighborhood import neighborhood
from ._pattern import Mixture, Pattern
from ._per_head import head_groups, per_head
from ._prefix_lm import prefix_lm
from ._random_blocks import random_blocks
from ._reader import Reader
from ._spelling import LONGEST
from ._strided import strided
from ._visible_keys import visible_keys

CONSTRUCTORS: dict[str, Callable[..., Pattern | Mixture]] = {
    "block_list": block_list,
    "blockwise": blockwise,
    "causal": causal,
    "chunked": chunked,
    "dilated": dilated,
    "dilated_window": dilated_window,
    "documents": documents,
    "every": every,
    "first_tokens": first_tokens,
    "fixed": fixed,
    "global_tokens": global_tokens,
    "head_groups": head_groups,
    "landmark_tokens": landmark_tokens,
    "lengths": lengths,
    "local_window": local_window,
    "longnet": longnet,
    "neighborhood": neighborhood,
    "per_head": per_head,
    "prefix_lm": prefix_lm,
    "random_blocks": random_blocks,
    "strided": strided,
    "visible_keys": visible_keys,
    **{f"recipes.{name}": getattr(recipes, name) for name in recipes.__all__},
}


def parse(text: str) -> Pattern | Mixture:
    """The pattern or mixture that an expression such as `longnet([2048, 4096], [1, 2]) & causal()` names.

    An expression calls the constructors of this package, with arguments by place or by name, and joins patterns
    by `~`, `+`, `&` and `|` in Python's order of precedence. It is read, never run. Raises ValueError for anything
    else, with a caret at the place; an expression has at most 4096 characters and nests at most 68 brackets,
    more than any pattern is printed with.
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression must be a string; got {type(text).__name__}")
    if len(text) > LONGEST:
        raise ValueError(f"an expression must have at most {LONGEST} characters; got {len(text)}")
    value = Reader(text, CONSTRUCTORS).whole()
    if not isinstance(value, Pattern | Mixture):
        raise ValueError(f"an expression must give a pattern; {text[:80]!r} gives {value!r:.80}")
    return value
