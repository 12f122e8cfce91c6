"""A choice of strategies in which some weigh more than others."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


@st.composite
def any_of(draw: st.DrawFn, *strategies: st.SearchStrategy) -> Any:
    """From one of them; one that is named twice is drawn from twice as often, where `one_of` drops the second.

    The simplest comes first: hypothesis shrinks towards it.
    """
    return draw(draw(st.sampled_from(strategies)))
