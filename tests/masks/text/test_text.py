"""Patterns as text: JSON and expressions give equal values back; errors name the fault and its place."""

import copy
import inspect
import io
import json
import pickle
import re
from dataclasses import replace
from time import process_time

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.engines import multiplicity
from flexdilated.masks.core._expression import CONSTRUCTORS
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import written_expressions

NAMESPACE = {name: getattr(masks, name) for name in masks.__all__} | {"masks": masks}


def saved_and_loaded(value):
    """By torch, with its default weights_only=True."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@given(st.integers(1, 4).flatmap(written_expressions))
def test_round_trips(twin):
    """By JSON, by pickle and copy, by what is printed, and by that run as Python."""
    pattern = twin.pattern
    text, printed = masks.to_json(pattern), repr(pattern)
    assert text == json.dumps(pattern.to_data(), separators=(",", ":"), sort_keys=True)
    others = masks.from_json(text), masks.parse(printed), eval(printed, dict(NAMESPACE)), copy.deepcopy(pattern)
    for again in (*others, pickle.loads(pickle.dumps(pattern)), saved_and_loaded(pattern)):
        assert again == pattern
        assert type(again) is type(pattern)
        assert hash(again) == hash(pattern)
        assert masks.to_json(again) == again.text == text
        assert repr(again) == printed


@given(packed_cases())
def test_torch_loads_patterns_with_their_tensors_also_once_they_were_used(packed):
    """What a pattern or its tables have cached is not saved."""
    assume(not any(isinstance(leaf, type(masks.custom(near))) for leaf in packed.pattern.leaves()))
    bound = packed.bind()
    expected = multiplicity(bound, torch.device("cpu"))
    again = saved_and_loaded({"pattern": packed.pattern})["pattern"]
    assert (again.text, type(again)) == (packed.pattern.text, type(packed.pattern))
    for other in (replace(packed, pattern=again).bind(), replace(bound, pattern=saved_and_loaded(bound.pattern))):
        assert torch.equal(multiplicity(other, torch.device("cpu")), expected)


def near(b, h, q, k):
    return (q - k).abs() < 3


def test_torch_names_the_function_of_a_custom_pattern_and_loads_it_once_it_is_safe():
    pattern = masks.custom(near) & masks.causal()
    with pytest.raises(pickle.UnpicklingError, match=rf"add_safe_globals\(\[near\]\)|GLOBAL {__name__}.near"):
        saved_and_loaded(pattern)
    with torch.serialization.safe_globals([near]):
        assert saved_and_loaded(pattern) == pattern
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        saved_and_loaded(masks.custom(lambda b, h, q, k: q > k))


def test_a_file_cannot_make_a_pattern_that_construction_refuses():
    for cls, values, error, says in (
        (type(masks.dilated(8, 2)), {"segment": 0, "rate": 1, "offset": 0}, ValueError, "segment must be at least 1"),
        (torch.nn.Parameter, {"data": torch.zeros(1)}, TypeError, "must have the class of a pattern; got Parameter"),
    ):
        with pytest.raises((error, pickle.UnpicklingError), match=says):
            saved_and_loaded(Forged(cls, values))


class Forged:
    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return masks.causal().__reduce__()[0], self.args


def nested(depth: int) -> str:
    return '{"kind":"not","part":' * depth + '{"kind":"causal"}' + "}" * depth


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kind":["causal"]}', "an object whose kind"),
        ('{"kind":"causal","left":3}', r"fields \[\]; got \['kind', 'left'\]"),
        ('{"kind":"and","parts":{}}', "list of patterns"),
        ('{"kind":"and","parts":[]}', "at least 2"),
        ('{"kind":"or","parts":[{"kind":"mixture","parts":[{"kind":"causal"}]}]}', "needs at least 2 patterns"),
        ('{"kind":"not","part":{"kind":"mixture","parts":[{"kind":"causal"}]}}', "needs at least 2 patterns"),
        ('{"kind":"block_list","rows":[[1],[],[2,1]],"block":2}', "in ascending order"),
        ('{"kind":"dilated_window","left":1,"right":1,"rate":1}', "rate must be at least 2; got rate=1"),
        ('{"kind":"neighborhood","grid":[14],"radius":[3],"rate":[1],"sizes":[7]}', "must have the fields"),
        ('{"kind":"neighborhood","grid":[14],"radius":[3],"rate":[1],"causal":[1]}', r"causal\[0\] must be True or"),
        (nested(33), "at most 32 levels"),
        (nested(5000), "pattern must"),
    ],
)
def test_bad_text(text, says):
    with pytest.raises(ValueError, match=says):
        masks.from_json(text)


def test_only_text_is_read_in_any_spacing_and_order():
    text = json.dumps(json.loads(masks.to_json(masks.dilated(8, 2, 1))), indent=4, sort_keys=False)
    assert masks.from_json(text) == masks.dilated(8, 2, 1)
    for other in (None, 3, masks.causal()):
        with pytest.raises(TypeError):
            masks.from_json(other)


numbers = st.integers(-1, 9).map(str)
sequences = st.lists(numbers, min_size=1, max_size=3).map(lambda each: f"[{', '.join(each)}]")
atoms = st.one_of(
    st.sampled_from(["causal()", "every()", "masks.causal( )", "strided(2)", "dilated(8, 2, offset='contiguous')"]),
    st.sampled_from(["longnet((4, 8,), [1, 2])", 'longnet([4], [2], heads="grouped")', "recipes.streaming_llm(5)"]),
    st.tuples(numbers, numbers).map(lambda each: f"dilated({each[0]}, rate={each[1]})"),
    st.tuples(numbers, numbers).map(lambda each: f"local_window(left={each[0]},\n  right={each[1]})"),
    st.tuples(sequences, sequences).map(lambda each: f"longnet({each[0]}, {each[1]})"),
    st.booleans().map(lambda rows: f"global_tokens(1_0, rows={rows})"),
)


def joined(inner):
    spaces = st.sampled_from(["", " "])
    operators = st.tuples(spaces, st.sampled_from("&|+"), spaces).map("".join)
    return st.one_of(
        st.tuples(inner, operators, inner).map("".join),
        inner.map(lambda text: f"~{text}"),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"({text}).per_document('ids')"),
        inner.map(lambda text: f"({text}).after(3)"),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: f"per_head([{', '.join(parts)}])"),
    )


@given(st.recursive(atoms, joined, max_leaves=8))
def test_text_gives_what_python_gives(text):
    """Precedence, arguments, values and refusals are those of the same text run as Python."""
    try:
        expected = eval(f"({text})", dict(NAMESPACE))
    except (TypeError, ValueError):
        with pytest.raises(ValueError, match="at column"):
            masks.parse(text)
    else:
        assert masks.parse(text) == expected


C, W, S = masks.causal(), masks.local_window(left=3, right=0), masks.strided(4)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (masks.dilated(8, 2, "contiguous"), "dilated(8, 2, offset='contiguous')"),
        (masks.global_tokens(4, columns=False), "global_tokens(4, columns=False)"),
        (masks.prefix_lm(4), "causal() | first_tokens(4)"),
        (masks.blockwise(C | S, 64), "blockwise(causal() | strided(4), 64)"),
        (masks.head_groups([C, S]), "head_groups((causal(), strided(4)))"),
        (masks.longnet([8], [2]), "dilated(8, 2, offset='interleaved')"),
        (masks.longnet([8, 16], [1, 2], heads="grouped"), "longnet((8, 16), (1, 2), heads='grouped')"),
        (
            masks.longnet([8, 16], [1, 2]) & C & ~W,
            "longnet((8, 16), (1, 2)) & causal() & ~local_window(left=3, right=0)",
        ),
        (
            masks.longnet([8], [2]) + (masks.longnet([4], [1]) & C),
            "longnet((8,), (2,)) + (longnet((4,), (1,)) & causal())",
        ),
        (C + ~S + (C & S) + (C | S), "causal() + ~strided(4) + (causal() & strided(4)) + (causal() | strided(4))"),
        ((masks.longnet([8, 16], [1, 2]) & C).after(3).after(2), "(longnet((8, 16), (1, 2)) & causal()).after(5)"),
        (
            (C | W).per_document("ids") & S,
            "(causal() | local_window(left=3, right=0)).per_document(documents('ids')) & strided(4)",
        ),
        (masks.lengths("len", padding="left"), "lengths('len', padding='left')"),
    ],
)
def test_prints(pattern, text):
    assert repr(pattern) == str(pattern) == text
    assert masks.parse(text) == pattern


def test_knows_every_constructor():
    """The one table keeps up with the package: what returns a pattern is in it, unless it takes no plain values."""
    made_otherwise = {"custom", "from_json", "parse"}
    functions = {
        name: value for name, value in vars(masks).items() if inspect.isfunction(value) and name in masks.__all__
    }
    returns = {name: str(inspect.signature(function).return_annotation) for name, function in functions.items()}
    constructors = {name for name, kind in returns.items() if "Pattern" in kind or "Mixture" in kind}
    recipes = {f"recipes.{name}" for name in masks.recipes.__all__}
    own = {name for name, made in CONSTRUCTORS.items() if made.__module__.startswith("flexdilated.")}
    assert constructors - made_otherwise | recipes == own
    assert all(CONSTRUCTORS[name] is functions[name] for name in constructors - made_otherwise)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.block_list([[block % 7] for block in range(5_000)], block=128),
        lambda: masks.per_head([masks.dilated(8, 4, 1)] * 2000),
        lambda: masks.longnet([8] * 3000, [2] * 3000),
    ],
)
def test_large_patterns_are_cut(make):
    pattern = make()
    text = repr(pattern)
    assert len(text) == 4097
    assert text.endswith("…")
    with pytest.raises(ValueError, match="at most 4096 characters"):
        masks.parse(text)
    with pytest.raises(ValueError, match="was cut at …: to_json gives a large pattern whole"):
        masks.parse(text[-100:])
    assert masks.from_json(masks.to_json(pattern)) == pattern


# tests/project/errors.md has more.
BAD = [
    ("causal())", 9, "unmatched ')'"),
    ("__import__('os')", 1, "no pattern is called '__import__': There are "),
    ("causal(left=3)", 1, "causal(): got an unexpected keyword argument 'left'"),
    ("local_window(3, 0)", 1, "local_window(*, left, right): too many positional arguments"),
    ("local_window(left=1, left=2)", 22, "an argument is given once; got 'left' again"),
    ("causal() | dilated(8, 2, offset=2)", 12, "dilated: offset must be below the rate; got offset=2, rate=2"),
    ("per_head(3)", 1, "per_head: patterns must be a sequence, with one pattern for each head or group; got 3"),
    (f"dilated({'9' * 4000}, 1)", 9, "got one of 4000 characters"),
    ("documents('\ud800')", 11, "no backslash or surrogate"),
    ("documents('a' 'b')", 11, "a string needs two quotes"),
    ("[each for each in causal()]", 1, "an expression has calls, numbers"),
    ("causal() …", 10, "the expression was cut"),
    ("causal()\n\n& ?", 13, "an expression must not contain '?'"),
]


@pytest.mark.parametrize(("text", "column", "says"), BAD)
def test_errors_say_what_and_where(text, column, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        masks.parse(text)
    if says.startswith("dilated: "):  # refused by the constructor
        assert isinstance(caught.value.__cause__, ValueError | TypeError)
    what, shown, caret = str(caught.value).split("\n")
    assert what.endswith(f"; at column {column}:")
    place = caret.index("^")
    assert set(caret[:place]) == {" "}
    if column <= len(text) and text[column - 1].isprintable():
        assert shown[place] == text[column - 1]
    else:
        assert place == len(shown)


HOSTILE = {
    "parentheses": "(" * 4096,
    "long string": "'" + "a" * 4000,
    "inverted again and again": "~" * 4080 + "causal()",
    "sum": " + ".join(["causal()"] * 370),
    "distinct union": "|".join(f"strided({n})" for n in range(1, 320)),
    "mixture of many and sets": f"longnet({[8] * 500}, {[2] * 500})&" + "&".join(f"strided({n})" for n in range(1, 80)),
    "alternating": "causal()&strided(2)|" * 200 + "causal()",
    "large window": f"local_window(left={2**63 - 1}, right={2**63 - 1})",
    "large grid": f"neighborhood(({2**62}, {2**62}, {2**62}), {2**60})",
    "large levels": f"recipes.darcstar_hierarchical([({2**62}, {2**62})] , block_size={2**62})",
    "many documents": f"documents({[0] * 1000})",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_answered(text):
    """A pattern, or a ValueError that fits on a screen; soon."""
    assert len(text) <= 4096
    begin = process_time()
    answer: object
    try:
        answer = masks.parse(text)
    except ValueError as error:
        answer = error
    assert process_time() - begin < 5.0
    assert isinstance(answer, masks.Pattern | masks.Mixture) or (type(answer) is ValueError and len(str(answer)) < 1300)
