"""Patterns as text: JSON that gives an equal value back, and errors that name the fault."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from tests.support.strategies import written_expressions


@given(st.integers(1, 4).flatmap(written_expressions))
def test_round_trips(twin):
    pattern = twin.pattern
    text = masks.to_json(pattern)
    again = masks.from_json(text)
    assert again == pattern
    assert type(again) is type(pattern)
    assert hash(again) == hash(pattern)
    assert masks.to_json(again) == text
    assert pickle.loads(pickle.dumps(pattern)) == copy.deepcopy(pattern) == pattern
    assert pickle.loads(pickle.dumps(pattern)).text == text


@given(st.data())
def test_texts_tell_patterns_apart(data):
    a, b = (data.draw(written_expressions(3)).pattern for _ in range(2))
    assert (a == b) == (masks.to_json(a) == masks.to_json(b))


def test_reads_any_spacing_and_order():
    text = json.dumps(json.loads(masks.to_json(masks.dilated(8, 2, 1))), indent=4, sort_keys=False)
    assert masks.from_json(text) == masks.dilated(8, 2, 1)


def nested(depth: int) -> str:
    return '{"kind":"not","part":' * depth + '{"kind":"causal"}' + "}" * depth


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be JSON"),
        ("causal", "must be JSON"),
        ("[]", "an object whose kind is one of after, and, block_list"),
        ('"causal"', "an object whose kind"),
        ("{}", "an object whose kind"),
        ('{"kind":"sliding"}', "sliding"),
        ('{"kind":["causal"]}', "an object whose kind"),
        ('{"kind":"causal","left":3}', r"fields \[\]; got \['kind', 'left'\]"),
        ('{"kind":"dilated","segment":4}', "'segment', 'rate', 'offset'"),
        ('{"kind":"dilated","segment":0,"rate":1,"offset":0}', "segment must be at least 1; got segment=0"),
        ('{"kind":"dilated","segment":4,"rate":1.5,"offset":0}', "rate=1.5"),
        ('{"kind":"dilated","segment":4,"rate":2,"offset":2}', "below the rate"),
        ('{"kind":"dilated","segment":4,"rate":2,"offset":"odd"}', "'interleaved', 'contiguous'"),
        ('{"kind":"dilated","segment":4,"rate":2,"offset":null}', "offset"),
        ('{"kind":"local_window","left":-1,"right":0}', "left=-1"),
        ('{"kind":"and","parts":{}}', "list of patterns"),
        ('{"kind":"and","parts":[]}', "at least 2"),
        ('{"kind":"mixture","parts":[]}', "at least 2"),
        ('{"kind":"or","parts":[{"kind":"mixture","parts":[{"kind":"causal"}]}]}', "set pattern"),
        ('{"kind":"not","part":{"kind":"mixture","parts":[{"kind":"causal"}]}}', "set pattern"),
        ('{"kind":"block_list","rows":[[1],[],[2,1]],"block":2}', "in ascending order"),
        ('{"kind":"block_list","rows":[[[1]],[[2,1]]],"block":2}', "in ascending order"),
        (nested(33), "at most 32 levels"),
        (nested(5000), "pattern must"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_text(text, says):
    with pytest.raises(ValueError, match=says):
        masks.from_json(text)


@pytest.mark.parametrize(
    "value", [None, 3, "causal", {"kind": "causal"}, masks.causal], ids=["none", "number", "name", "object", "function"]
)
def test_only_patterns_have_a_text(value):
    with pytest.raises(TypeError, match="pattern or mixture"):
        masks.to_json(value)


@pytest.mark.parametrize("text", [None, 3, masks.causal()], ids=str)
def test_only_text_is_read(text):
    with pytest.raises(TypeError):
        masks.from_json(text)
