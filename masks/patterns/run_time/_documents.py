"""Documents: several sequences packed into one, each seeing only itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import Extent, Pattern, constructor, pattern_kind, require_int
from ._run_time import RunTime, of_tensor
from ._run_time_checks import integers
from ._spans import PADDING, Spans


@pattern_kind("documents")
class Documents(RunTime):
    """Allowed iff query and key belong to one document, by the document id of each position.

    A document is one run of positions; ids grow from one to the next. A negative id marks padding, which sees
    nothing and is not seen.
    """

    longest: int | None = None

    def __post_init__(self) -> None:
        if self.longest is not None:
            require_int("longest", self.longest, minimum=1)
        super().__post_init__()

    def table(self, tensor: Tensor, extent: Extent) -> Spans:
        num_positions = extent.tokens
        ids = torch.atleast_2d(integers("document ids", tensor, (1, 2)))
        if ids.shape[1] != num_positions:
            raise ValueError(
                f"document ids must be one for each of the {num_positions} positions; got {tuple(tensor.shape)}"
            )
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        _check_sorted(ids, begins)
        positions = torch.arange(num_positions).expand_as(ids)
        starts = torch.where(begins, positions, 0).cummax(1).values
        starts = starts.masked_fill(ids < 0, PADDING)
        if self.longest is None:
            return Spans.of(starts)
        _check_longest(starts, self.longest)
        return Spans.of(starts, reach=self.longest - 1)

    def most(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        """Documents as long as may be."""
        position = torch.ones(shape, dtype=torch.int64).cumsum(-1) - 1
        return position // (self.longest or extent.tokens)


def _check_sorted(ids: Tensor, begins: Tensor) -> None:
    """The ids of documents grow, whatever padding lies between them."""
    real = ids >= 0
    highest = torch.where(real, ids, -1).cummax(1).values
    before = torch.nn.functional.pad(highest[:, :-1], (1, 0), value=-1)
    wrong = (real & begins & (ids <= before)).nonzero()
    if len(wrong):
        batch, position = wrong[0].tolist()
        raise ValueError(
            "document ids must grow from one document to the next, and a document must be one run; got "
            f"{int(ids[batch, position])} at position {position} after {int(before[batch, position])}, "
            f"in batch entry {batch}"
        )


def _check_longest(starts: Tensor, longest: int) -> None:
    length = (torch.arange(starts.shape[1]) - starts + 1).masked_fill(starts == PADDING, 0)
    if int(length.max()) > longest:
        batch, position = divmod(int(length.argmax()), starts.shape[1])
        raise ValueError(
            f"documents must have at most longest={longest} tokens; got one of {int(length.max())} or more that begins "
            f"at position {int(starts[batch, position])}, in batch entry {batch}"
        )


@constructor
def documents(ids: Any, *, longest: int | None = None, name: str = "documents") -> Pattern:
    """Each token sees the tokens of its own document.

    ids: integers of shape (tokens,) or (batch, tokens), a document's id for each position, growing from one
    document to the next; negative for padding. Or a string, the name under which `attend(bindings=)` passes them.
    Other values need no new compilation. `p & documents(ids)` cuts p at the borders; `p.per_document(ids)`
    starts it anew in each document. longest: a bound on the tokens of a document, which keeps the block tables
    of compiled graphs narrow; a longer one raises.
    """
    return of_tensor(Documents, ids, name, longest=longest)
