"""What a custom pattern is: its code and all that it captured or reads, at the moment when it was made."""

from __future__ import annotations

import copy
import functools
import gc
import math
import operator
import pickle
import subprocess
import sys
import types
import weakref

import numpy
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing._drawn_patterns import classify_window, same_kind, window_by_head
from tests.support import custom_rules
from tests.support.custom_rules import TABLE, WIDTH, by_global, diagonal, window


def test_equal_operations_and_values_are_an_equal_pattern():
    a, b, other = masks.custom(window(5)), masks.custom(window(5)), masks.custom(window(6))
    assert a == b
    assert hash(a) == hash(b)
    assert a.text == b.text
    assert a != other
    assert a.text != other.text
    assert a | b == a
    assert masks.custom(lambda batch, head, i, j: i < 3 * j) == masks.custom(lambda b, h, q, k: q < 3 * k)
    assert len((a + b).branches()) == 2


LIST = [1, 2]


def choosing(choose):
    return lambda b, h, q, k: choose(q > k, q, k) > 3


DIFFERENT = [
    *(window(width) for width in (5, 6, 5.0, True)),
    *(same_kind(table) for table in (TABLE, TABLE + 1, TABLE[:3], TABLE.int(), torch.ones(4), torch.ones(2, 2)[0])),
    *(lambda b, h, q, k: q < 3 * k, lambda b, h, q, k: q < 4 * k),
    *(lambda b, h, q, k: q < k, lambda b, h, q, k: q <= k),
    *(lambda b, h, q, k: torch.gt(q, k), lambda b, h, q, k: torch.ge(q, k)),
    *(lambda b, h, q, k: q - k < WIDTH + 9, lambda b, h, q, k: q - k < LIST[1]),
    *(lambda b, h, q, k: (q - k) % 4 == masks.FULL, lambda b, h, q, k: (q - k) % 4 == masks.PARTIAL),
    *(choosing(torch.where), choosing(torch.clamp)),
]


def composed(inner):
    return lambda b, h, q, k: inner(b, h, q, k) & (q >= k)


def test_different_rules_are_different_patterns():
    """By what they capture, its dtype and shape, by constants, operators, functions, globals and attributes."""
    for functions in (DIFFERENT, [composed(function) for function in DIFFERENT]):
        texts = [masks.custom(function).text for function in functions]
        assert len(set(texts)) == len(functions)
    assert masks.custom(choosing(torch.where)) == masks.custom(choosing(torch.where))


def test_functions_that_torch_composes():
    composed = [and_masks(window(4), by_global), and_masks(window(5), by_global), or_masks(window(4), diagonal)]
    assert len({masks.custom(function).text for function in composed}) == 3
    assert masks.custom(and_masks(window(4), by_global)) == masks.custom(composed[0])
    slow = create_block_mask(composed[0], 1, 1, 50, 50, device="cpu", BLOCK_SIZE=8)
    fast = masks.block_mask(masks.custom(composed[0]), 50, num_heads=1, block_size=8)
    assert torch.equal(fast.to_dense(), slow.to_dense())


def test_classify_and_period_take_part():
    function, widths = window_by_head(torch.tensor([5])), torch.tensor([5])
    patterns = [
        masks.custom(function),
        masks.custom(function, period=1),
        masks.custom(function, classify=classify_window(widths)),
        masks.custom(function, classify=classify_window(widths), period=1),
        masks.custom(function, classify=classify_window(widths - 1)),
    ]
    assert len({pattern.text for pattern in patterns}) == 5


def test_another_process_makes_the_same_digest_and_loads_what_torch_saved(tmp_path):
    torch.save([masks.causal(), masks.documents([0, 0, 1])], tmp_path / "patterns.pt")
    code = f"import torch, flexdilated; print(torch.load({str(tmp_path / 'patterns.pt')!r}));"
    code += f"from {__name__} import *; print(masks.custom(composed(same_kind(TABLE))).text, end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = masks.custom(composed(same_kind(TABLE))).text
    assert done.stdout == f"[causal(), documents('documents')]\n{expected}"


def test_later_changes_have_no_effect(monkeypatch):
    """Captured and global tensors, numbers and lists, changed in place or bound anew, with and without caches."""
    table, some, width = TABLE.clone(), [1, 2], 4

    def function(b, h, q, k):
        return (table[q % 6] == table[k % 6]) | (q - k == some[0]) | (q - k == width) | (TABLE[q % 6] == LIST[0])

    monkeypatch.setitem(globals(), "TABLE", TABLE.clone())
    monkeypatch.setitem(globals(), "LIST", [1, 2])
    pattern = masks.custom(function)
    q, k, v = torch.randn(3, 1, 1, 40, 4)
    before = fd.attend(q, k, v, pattern)
    table.zero_()
    TABLE.zero_()
    some[0] = LIST[0] = width = 7
    for _ in range(2):
        assert torch.equal(fd.attend(q, k, v, pattern), before)
        assert torch.equal(fd.attend(q, k, v, pattern, engine="reference").argmax(-1), before.argmax(-1))
        masks.cache().clear()
    again = masks.custom(function)
    assert again != pattern
    assert not torch.allclose(fd.attend(q, k, v, again), before)


class Below:
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, b, h, q, k):
        return q - k < self.width


def test_every_callable_is_a_rule():
    def below(b, h, q, k, width=5):
        return q - k < width

    held = Below(5)
    rules = {"below": below, "Below": held, "__call__": held.__call__}
    rules |= {"narrow": functools.partial(below, width=5)}
    patterns = {name: masks.custom(rule) for name, rule in rules.items()}
    held.width = 7
    assert len(set(patterns.values())) == 1
    assert masks.custom(window(5)) == patterns["below"] != masks.custom(held)
    assert repr(masks.custom(functools.partial(below, width=9))) == "custom(below)"


def test_the_copy_is_the_function():
    """What it captured is copied, nothing is left behind, and it is let go with the pattern."""
    table = torch.arange(100)
    pattern = masks.custom(lambda b, h, q, k: table[q] > k)
    rule = weakref.ref(pattern.rule)
    text = pattern.text
    assert fd.attend(*torch.randn(3, 1, 1, 40, 4), pattern).shape == (1, 1, 40, 4)
    del pattern
    masks.cache().clear()
    gc.collect()
    assert rule() is None
    with pytest.raises(ValueError, match="keep the pattern for as long as calls and their gradients use the text"):
        masks.from_json(text)


def test_copies_and_pickles():
    pattern = masks.custom(by_global) & masks.causal()
    assert copy.copy(pattern) == copy.deepcopy(pattern) == pattern
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    local = masks.custom(window(3))
    assert copy.deepcopy(local) is local
    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(local)
    module = copy.deepcopy(torch.nn.ModuleDict())
    module.pattern = local
    assert copy.deepcopy(module).pattern == local


def test_a_pickle_does_not_outlive_its_function(monkeypatch):
    stored = pickle.dumps(masks.custom(by_global))
    monkeypatch.setattr(custom_rules, "WIDTH", 6)
    with pytest.raises(ValueError, match="'by_global' or what it reads has changed"):
        pickle.loads(stored)


# Where a width may stand, and how a function comes to read it there.
_SOURCES = [
    *("WIDTH", "conf.WIDTH", "getattr(conf, 'WIDTH')", "eval('WIDTH')", "box.width", "table['WIDTH']", "array[0]"),
    *("tensor[0]", "tensor.WIDTH", "long.start[1000]", "helper.WIDTH", "imported()", "with_default()"),
]
_WAYS = [
    "def rule(b, h, q, k): return q - k < {0}",
    "def rule(b, h, q, k): return sum([q - k == i for i in range(-40, {0})]) > 0",
    "def below(x): return x < {0}\ndef rule(b, h, q, k): return below(q - k)",
    "def make():\n    width = {0}\n    return lambda b, h, q, k: q - k < width\nrule = make()",
]
_HELPERS = """
def helper(x): return x
def imported():
    from drawn_conf import WIDTH
    return WIDTH
def with_default(width=WIDTH): return width
class Box:
    width = property(lambda self: conf.WIDTH)
box = Box()
"""


@pytest.mark.parametrize("source", _SOURCES)
def test_a_rule_that_reads_a_changed_value_is_another_pattern(source, monkeypatch):

    def made(way, width):
        conf, long = types.ModuleType("drawn_conf"), torch.arange(2000)
        conf.WIDTH, long[1000] = width, width
        monkeypatch.setitem(sys.modules, "drawn_conf", conf)
        scope = {"conf": conf, "WIDTH": width, "table": {"WIDTH": width}, "array": numpy.array([width])}
        scope |= {"tensor": torch.tensor([width]), "long": slice(long, None)}
        exec(_HELPERS, scope)
        scope["helper"].WIDTH = scope["tensor"].WIDTH = width
        exec(way.format(source), scope)
        return masks.custom(scope["rule"])

    q, k = torch.arange(40)[:, None], torch.arange(40)
    for way in _WAYS:
        before, after = made(way, 3), made(way, 5)
        assert before != after
        for pattern, width in ((before, 3), (after, 5)):
            assert torch.equal(pattern.rule.recorded(0, 0, q, k), q - k < width)


def test_what_a_rule_may_read_is_taken():
    """Functions, methods and types of torch, and Python that chooses among them."""
    table = {"WIDTH": 3}
    rules = [
        lambda b, h, q, k: q - k < table["WIDTH"],
        lambda b, h, q, k: torch.where(q - k < 3, True, False),
        lambda b, h, q, k: torch.nn.functional.relu(q - k - 2) == 0,
        lambda b, h, q, k: torch.Tensor.clamp(q - k, min=2) == 2,
        lambda b, h, q, k: torch.ops.aten.lt.Scalar(q - k, 3),
        lambda b, h, q, k: (2 ** (q - k).clamp(min=0) < 5 + (q - k).clamp(max=0) ** 2) & (q - k + 1 < 1 << 2),
        lambda b, h, q, k: torch.special.expm1((q - k - 3).double()) < 0,
        lambda b, h, q, k: operator.lt(q - k, math.floor(math.pi)),
        lambda b, h, q, k: (q - k).to(torch.int64).clamp(max=torch.iinfo(torch.int32).max) < 3,
        lambda b, h, q, k: sum([q - k == i for i in range(-40, 3)]) > 0,
        lambda b, h, q, k: (q - k < 3) if torch.is_tensor(q) else q > k,
    ]
    expected = masks.block_mask(masks.local_window(left=2, right=40), 40, num_heads=1, block_size=1).to_dense()
    for rule in rules:
        pattern = masks.custom(rule)
        assert torch.equal(masks.block_mask(pattern, 40, num_heads=1, block_size=1).to_dense(), expected)
