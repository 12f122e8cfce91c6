"""The longest sequence that fits into a budget of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from ..masks.core._pattern import Expression
from ..memory._memory import LARGEST_RUN, AttentionMemory, attention_memory
from ..nn._model_memory import ModelMemory, attention_size, model_memory
from ._fixed_sizes import most_tokens
from ._plan_settings import PlanSettings

Peak = Callable[[int], int]

# Between two of these, and beyond the last, memory is taken to grow in proportion to the tokens.
_RUNGS = tuple(1 << power for power in (10, 12, 14, 16, 18, 20, 22, 24))
_FIRST = 1 << 16
_MOST = 1 << 30
_LINE = LARGEST_RUN // 2, LARGEST_RUN


class Memories:
    """Memory of a pattern's attention and of a LongNet around it, at any number of tokens; each is found once."""

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self.attention = cache(self._attention)
        self.model = cache(self._model)
        self._call = cache(self._measured_call)

    def _attention(self, num_tokens: int) -> AttentionMemory:
        return self._on_line(num_tokens, in_model=False)

    def _model(self, num_tokens: int, checkpoint: bool) -> ModelMemory:
        call = self._on_line(num_tokens, in_model=True)
        return model_memory(self._settings.model, num_tokens, call, checkpoint=checkpoint)

    def _on_line(self, num_tokens: int, *, in_model: bool) -> AttentionMemory:
        """A call at its size, or, where that takes long to run dry, on the line through two that are smaller."""
        if num_tokens < _LINE[0] or longest_bound(self._settings.pattern) < _LINE[1]:
            return self._call(num_tokens, in_model)
        smaller, larger = (self._call(number, in_model) for number in _LINE)
        return smaller.at(num_tokens, larger, _LINE)

    def _measured_call(self, num_tokens: int, in_model: bool) -> AttentionMemory:
        settings = self._settings
        size = attention_size(settings.model, num_tokens) if in_model else settings.attention(num_tokens)
        return attention_memory(settings.pattern, size, device=settings.device)


def longest(peak: Peak, budget: int, *, most: int = _MOST) -> int:
    """The largest number of tokens, with at most five leading binary digits, whose peak is within the budget; or 0."""
    rungs = [*(rung for rung in _RUNGS if rung < most), *([most] if most < _MOST else [])]
    place = next((index for index, rung in enumerate(rungs) if rung >= _FIRST), len(rungs) - 1)
    while place >= 0 and peak(rungs[place]) > budget:
        place -= 1
    while place + 1 < len(rungs) and peak(rungs[place + 1]) <= budget:
        place += 1
    if place < 0:
        return 0
    if rungs[place] == most:
        return most
    below, above = rungs[place : place + 2] if place + 1 < len(rungs) else rungs[place - 1 : place + 1]
    each = slope(peak, (below, above))
    return rounded(min(rungs[place] + int((budget - peak(rungs[place])) / each), _MOST))


def slope(peak: Peak, tokens: Sequence[int]) -> float:
    """Bytes that one token more takes, between these two numbers of them."""
    below, above = tokens
    return (peak(above) - peak(below)) / (above - below)


def rounded(num_tokens: int) -> int:
    """Down to five leading binary digits: numbers that whole segments add up to, and that are easily read."""
    unit = 1 << max(0, num_tokens.bit_length() - 5)
    return num_tokens // unit * unit


def longest_bound(pattern: Expression) -> int:
    """The most tokens that are tried: those of its grid, if it has one."""
    return min(most_tokens(pattern) or _MOST, _MOST)
