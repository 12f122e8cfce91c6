"""How deep patterns nest: what can be made can be stored, copied, printed, read back and attended to."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks

MOST = 32
C = masks.causal()


def levels(data: dict[str, Any]) -> int:
    """Patterns around the innermost leaf, counted in the pattern's JSON."""
    parts = [*data.get("parts", ()), *(data[name] for name in ("part", "spans") if name in data)]
    return 1 + max(map(levels, parts)) if parts else 0


WRAPPERS: dict[str, Callable[[Any, int], Any]] = {
    "complement": lambda pattern, index: ~pattern,
    "union": lambda pattern, index: pattern | masks.strided(index + 2),
    "intersection": lambda pattern, index: pattern & masks.strided(index + 2),
    "blocks": lambda pattern, index: masks.blockwise(pattern, 1),
    "heads": lambda pattern, index: masks.per_head([pattern]),
    "groups of heads": lambda pattern, index: masks.head_groups([pattern]),
}
LAST: dict[str, Callable[[Any, int], Any]] = {
    "documents": lambda pattern, index: pattern.per_document("ids"),
    "sum": lambda pattern, index: pattern + masks.strided(3),
    "sum of intersections": lambda pattern, index: (pattern + masks.local_window(left=2, right=2)) & masks.strided(2),
    "later": lambda pattern, index: pattern.after(3),
    "nothing": lambda pattern, index: pattern,
}


@st.composite
def towers(draw: st.DrawFn) -> Any:
    """A pattern of up to so many levels, made until a wrapper is refused."""
    pattern: Any = draw(st.sampled_from([C, masks.block_list([[[0], [0, 1], [2]]], block=3)]))
    kinds = st.just(list(WRAPPERS)) | st.lists(st.sampled_from(list(WRAPPERS)), min_size=2, max_size=3, unique=True)
    chosen = draw(kinds.filter(lambda names: names != ["complement"]))
    wrappers = [WRAPPERS[name] for name in draw(st.lists(st.sampled_from(chosen), min_size=20, max_size=70))]
    for index, wrap in enumerate([*wrappers, LAST[draw(st.sampled_from(list(LAST)))]]):
        try:
            pattern = wrap(pattern, index)
        except ValueError as error:
            assert "must nest at most 32 levels" in str(error)  # noqa: PT017
            assert levels(json.loads(masks.to_json(pattern))) >= MOST - 1  # the last may add two
    return pattern


@settings(max_examples=12, deadline=None)
@given(towers())
def test_what_can_be_made_can_be_stored_copied_printed_and_attended_to(pattern) -> None:
    text = masks.to_json(pattern)
    assert levels(json.loads(text)) == pattern.depth <= MOST
    for again in (masks.from_json(text), masks.parse(repr(pattern)), copy.deepcopy(pattern)):
        assert again == pattern
        assert hash(again) == hash(pattern)
    assert pickle.loads(pickle.dumps(pattern)).depth == pattern.depth
    bindings = {"ids": torch.tensor([0] * 5 + [1] * 4)} if "ids" in text else None
    x = torch.randn(1, 1, 9, 4)
    expected = fd.attend(x, x, x, pattern, engine="reference", bindings=bindings)
    torch.testing.assert_close(fd.attend(x, x, x, pattern, bindings=bindings), expected)


@pytest.mark.parametrize("wrap", [name for name in WRAPPERS if name not in ("complement", "union", "intersection")])
def test_one_level_more_is_refused(wrap) -> None:
    """By the constructor itself, and in JSON and in an expression alike."""
    pattern: Any = C
    for index in range(MOST):
        pattern = WRAPPERS[wrap](pattern, index)
    refused = r"must nest at most 32 levels"
    with pytest.raises(ValueError, match=refused):
        WRAPPERS[wrap](pattern, 0)
    text = {"kind": "not", "part": json.loads(masks.to_json(pattern))}
    with pytest.raises(ValueError, match=refused):
        masks.from_json(json.dumps(text))
    with pytest.raises(ValueError, match=refused):
        masks.parse(f"~{pattern!r}")
