"""What a pattern is: equality, JSON and printed expression tell the same patterns apart; how deep patterns nest."""

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.core import PerHead
from flexdilated.masks.core._algebra import And, Not, Or
from flexdilated.masks.patterns import table_split
from flexdilated.masks.planning._planner import plan, recommended_layout
from flexdilated.masks.text import read_text
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import written_expressions

NAMED = st.sampled_from(
    [
        masks.causal().per_document("ids"),
        masks.documents("ids", longest=7) & masks.dilated(8, 2),
        masks.longnet([8, 16], [1, 2]).per_document(masks.lengths("n", padding="left")) & masks.visible_keys("seen"),
        masks.random_blocks(64, block=8, head=1),
    ]
)
PATTERNS = st.integers(1, 3).flatmap(written_expressions).map(lambda twin: twin.pattern) | NAMED


def nodes(data: Any) -> Iterator[dict[str, Any]]:
    """Every pattern in a pattern's data, itself first."""
    yield data
    for part in [*data.get("parts", ()), *(data[name] for name in ("part", "spans") if name in data)]:
        yield from nodes(part)


@st.composite
def changed(draw: st.DrawFn, text: str) -> str:
    """JSON in which one thing is another: a value, the order or the number of parts, what a part is wrapped in."""
    data = json.loads(text)
    node = draw(st.sampled_from(list(nodes(data))))
    kind = draw(st.sampled_from(["value", "value", "order", "twice", "fewer", "wrapped", "another kind"]))
    parts = node.get("parts", [])
    values = [name for name in node if name not in ("kind", "parts", "part", "spans")]
    if kind == "value" and values:
        name = draw(st.sampled_from(values))
        node[name] = draw(changed_value(node[name]))
    elif kind == "order" and parts:
        node["parts"] = draw(st.permutations(parts))
    elif kind == "twice" and parts:
        parts.insert(draw(st.integers(0, len(parts))), copy.deepcopy(draw(st.sampled_from(parts))))
    elif kind == "fewer" and parts:
        del parts[draw(st.integers(0, len(parts) - 1))]
    elif kind == "another kind" and parts:
        node["kind"] = draw(st.sampled_from(["and", "or", "per_head", "head_groups", "mixture"]))
    else:
        inner, around = dict(node), draw(st.sampled_from(["and", "or", "not", "per_head", "head_groups", "mixture"]))
        node.clear()
        node |= {"kind": around} | ({"part": inner} if around == "not" else {"parts": [inner]})
    return json.dumps(data)


def changed_value(value: Any) -> st.SearchStrategy:
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int):
        return st.sampled_from([value + 1, value - 1, 2 * value, None])
    if isinstance(value, list):
        return st.permutations(value) | st.just(value[:-1]) | st.just(value + value[-1:]) | st.just([value])
    if isinstance(value, str):
        return st.sampled_from(["interleaved", "contiguous", "left", "right", "ids", "n", 0, 1])
    return st.sampled_from([0, 1, 3])


@given(st.data())
def test_texts_are_equal_where_patterns_are(data) -> None:
    """For two drawn patterns, and for one and a change of it, as far as that is a pattern."""
    one = data.draw(PATTERNS)
    other = data.draw(PATTERNS)
    if data.draw(st.integers(0, 3)):
        other = one
        for _ in range(data.draw(st.integers(1, 2))):
            try:
                other = masks.from_json(data.draw(changed(masks.to_json(other))))
            except ValueError:
                return
    assert masks.from_json(masks.to_json(other)) == masks.parse(repr(other)) == other
    equal = one == other
    assert (masks.to_json(one) == masks.to_json(other)) == equal
    assert (repr(one) == repr(other)) == equal


C, W = masks.causal(), masks.local_window(left=3, right=0)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (masks.Mixture, ((C,),)),
        (masks.Mixture, ([C, W],)),
        (masks.Mixture, ((C, C + W),)),
        (And, ((C,),)),
        (And, ((C, C),)),
        (And, ((C & W, masks.strided(4)),)),
        (And, ([C, W],)),
        (Or, ((C,),)),
        (Or, ((C | W, masks.strided(4)),)),
        (Not, (~C,)),
        (PerHead, ([C, W],)),
        (PerHead, ((),)),
        (masks.dilated, (8, 2, np.str_("interleaved"))),
        (masks.documents, (np.str_("ids"),)),
    ],
)
def test_what_would_not_read_back_is_refused(make, arguments) -> None:
    """One way to build each value: what an operator writes otherwise, and numbers and names of other classes."""
    with pytest.raises((TypeError, ValueError), match=r"takes|must|needs|complement"):
        make(*arguments)


def test_operators_build_what_they_write() -> None:
    """A sum of one is that one, a part that comes again does not count again, and two complements are none."""
    assert masks.longnet([8], [2]) == masks.dilated(8, 2, "interleaved") == masks.Mixture.of(masks.longnet([8], [2]))
    assert C & C == C == ~~C == C | C
    assert (C & W) & (W & masks.strided(4)) == And((C, W, masks.strided(4)))
    assert masks.parse("causal() & (causal() & ~~~strided(4))") == C & ~masks.strided(4)


@settings(max_examples=10)
@given(packed_cases(max_heads=2, largest=14))
def test_what_a_pattern_carries_is_no_part_of_its_text(packed: Packed) -> None:
    """Equal texts: the same pattern, whatever tensors either carries; equal patterns carry the same ones."""
    pattern = packed.pattern
    twin, named = copy.deepcopy(pattern), read_text(pattern.text)
    assert pattern == copy.copy(pattern)
    assert pattern.text == twin.text == named.text
    assert len({pattern, twin, named}) == 3
    assert not named.given_tensors()


def build(packed: Packed, call: str) -> None:
    pattern = packed.pattern
    sizes = {"num_heads": packed.num_heads, **packed.offsets}
    tokens = {"num_queries": packed.num_queries, "num_keys": packed.num_keys}
    if call.startswith("attend"):
        x = [torch.randn(packed.counts.shape[0], packed.num_heads, n, 4) for n in (packed.num_queries, packed.num_keys)]
        tensors = pattern.given_tensors() if call == "attend named" else {}
        named = read_text(pattern.text) if tensors else pattern
        fd.attend(x[0], x[1], x[1], named, bindings=tensors or None, **packed.offsets)
    elif call == "block_mask":
        masks.block_mask(pattern, **tokens, **sizes)
    elif call == "describe":
        masks.describe(pattern, **tokens, **sizes)
    elif call == "layout":
        recommended_layout(pattern, max(packed.num_queries, packed.num_keys), num_heads=packed.num_heads)
    else:
        plan(packed.bind())


@settings(max_examples=10)
@given(
    packed_cases(max_heads=2, largest=14),
    st.sampled_from(["attend", "block_mask", "layout", "describe", "plan", "attend named"]),
    st.data(),
)
def test_what_is_forgotten_is_gone(packed: Packed, call: str, data) -> None:
    """All that one pattern had built goes with it, run-time tensors or none; a part takes its wholes along.

    A table of keys leaves the plans of the pairs beside it, which do not read it.
    """
    pattern, cache = packed.pattern, masks.cache()
    split = table_split(pattern)
    others = None if split is None or split.others is None else split.others
    for forgotten in (pattern, data.draw(st.sampled_from(pattern.leaves()))):
        cache.clear()
        with suppress(ValueError):  # not every call takes every tensor; what it had built goes as well
            build(packed, call)
        cache.forget(forgotten)
        beside = others is not None and forgotten in set(pattern.leaves()) - set(others.leaves())
        assert {entry.pattern.strip() for entry in cache._entries.values()} <= ({others.text} if beside else set())


MOST = 32


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
    "earlier": lambda pattern, index: pattern.before(3),
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
