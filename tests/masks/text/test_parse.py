"""Expressions: patterns print as what builds them, text gives what Python would, and any text is answered."""

import inspect
import re
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._expression import CONSTRUCTORS, constructor, pattern_kind
from tests.masks.text.test_json import NAMESPACE

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


def test_kinds_and_constructors_are_not_replaced():
    with pytest.raises(ValueError, match=r"'causal' is taken by flexdilated.masks.patterns._band.Causal"):
        pattern_kind("causal")(type("Mine", (masks.Pattern,), {}))

    def dilated():
        return C

    with pytest.raises(ValueError, match=r"'dilated' is taken by flexdilated.masks.patterns._dilated.dilated"):
        constructor(dilated)
    assert masks.parse("causal() & dilated(8, 2)") == C & masks.dilated(8, 2)


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
    ("causal().__class__()", 10, "a dot must follow a pattern, and be followed by one of its methods after"),
    ("causal(left=3)", 1, "causal(): got an unexpected keyword argument 'left'"),
    ("local_window(3, 0)", 1, "local_window(*, left, right): too many positional arguments"),
    ("local_window(left=1, left=2)", 22, "an argument is given once; got 'left' again"),
    ("causal() | dilated(8, 2, offset=2)", 12, "dilated: offset must be below the rate; got offset=2, rate=2"),
    ("per_head(3)", 1, "per_head: patterns must be a sequence, with one pattern for each head or group; got 3"),
    ("causal() | longnet([8, 4], [1, 1])", 10, "a mixture such as longnet or p + q can only be added"),
    (f"dilated({'9' * 4000}, 1)", 9, "got one of 4000 characters"),
    ("documents('\ud800')", 11, "no backslash or surrogate"),
    ("documents('a' 'b')", 11, "a string needs two quotes"),
    ("1if causal() else 2", 1, "a number must be an integer"),
    ("[each for each in causal()]", 1, "an expression has calls, numbers"),
    ("causal() …", 10, "the expression was cut"),
    ("causal()\n\n& ?", 13, "an expression must not contain '?'"),
    ("dilated(٣, 1)", 9, "an expression must not contain '٣'"),
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
    "long name": "a" * 4096,
    "long number": "1" * 4096,
    "long string": "'" + "a" * 4000,
    "inverted again and again": "~" * 4080 + "causal()",
    "spaces": " " * 4096,
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
