"""Patterns as text: JSON that gives an equal value back, and errors that name the fault."""

import copy
import io
import json
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.engines import multiplicity
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
        ('{"kind":"global_tokens","tokens":1,"rows":1,"columns":true}', "rows must be True or False; got rows=1"),
        ('{"kind":"neighborhood","grid":[14],"radius":[3],"rate":[1],"sizes":[7]}', "must have the fields"),
        ('{"kind":"neighborhood","grid":[14],"radius":[3],"rate":[1],"kernel_size":[7]}', "one of radius and kernel"),
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
