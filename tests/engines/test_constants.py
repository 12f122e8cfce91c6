"""A call's constants as text: what is written is read again, of any values, and long texts are not parsed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.engines import Call, read_written, written
from flexdilated.engines._ops import _values

TEXTS = st.lists(st.text(st.characters(exclude_characters="\n"), max_size=9), max_size=3)
PLAIN = st.one_of(
    st.integers(), st.booleans(), st.none(), st.text(max_size=9), st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.lists(PLAIN | st.lists(st.integers(), max_size=3).map(tuple), max_size=5)


@given(TEXTS, VALUES)
def test_what_is_written_is_read(texts, values):
    found = read_written(written(texts, values))
    assert found == (*texts, *values)
    assert [type(each) for each in found] == [type(each) for each in (*texts, *values)]


@pytest.mark.parametrize("placement", ["", "[[[0,7]],[[[0,9,1]]],0,9]"])
def test_a_call_is_what_it_was(placement):
    call = Call(masks.longnet([4], [2]).text, 4, 2, 7, 9, 3, 1, 2, 8, 2, (16, 32), placement)
    q, k = torch.empty(1, 4, 7, 8), torch.empty(1, 2, 9, 8)
    assert Call.of(q, k, *call.arguments) == call


def test_patterns_are_not_kept():
    """The text of a pattern that changes at every step would fill a cache of texts."""
    before = _values.cache_info().currsize
    for number in range(50):
        read_written(written([f"pattern {number}" * 1000], [1, 2.0, ()]))
    assert _values.cache_info().currsize <= before + 1
