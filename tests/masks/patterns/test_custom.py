"""Custom patterns: any mask_mod, exactly; known by code and captured values; refused where they are no rule."""

import copy
import functools
import gc
import pickle
import sys
import types
import weakref

import numpy
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.blocks._blocks import build_blocks
from flexdilated.masks.planning.lowering._layouts import shared_terms
from flexdilated.testing._drawn_patterns import classify_window, same_kind, window_by_head
from tests.support import custom_rules
from tests.support.custom_rules import TABLE, WIDTH, by_global, diagonal, window
from tests.support.ranks import on_ranks


def test_classify_prunes():
    calls = []
    function, inner = window_by_head(torch.tensor([64])), classify_window(torch.tensor([64]))

    def asked(pattern: masks.Pattern) -> int:
        calls.clear()
        sizes = {"num_heads": 1, "num_queries": 8192, "num_keys": 8192}
        (term,) = shared_terms(pattern, 1, pattern.bind(**sizes), 1)
        rule = term.table_rule()
        evaluated = type(rule).allowed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(rule), "allowed", lambda self, t, q, k: calls.append(len(q)) or evaluated(self, t, q, k))
            build_blocks(rule, q_block=64, k_block=64)
        return sum(calls)

    assert asked(masks.custom(function)) == 128**2
    assert asked(masks.custom(function, classify=inner)) < 3 * 128
    assert asked(masks.custom(function) & masks.local_window(left=64, right=0)) < 3 * 128


def test_what_it_captured_follows_the_device():
    pattern = masks.custom(same_kind(TABLE)) | masks.custom(lambda b, h, q, k: TABLE[q % 6] > 1)
    pattern |= masks.custom(lambda b, h, q, k: (q - k).to(h.device) > torch.full((), 3, device=q.device))
    meta = torch.empty(3, dtype=torch.int64, device="meta")
    mod = pattern.mask_mod(num_heads=1, device=torch.device("meta"))
    assert mod(meta[0], meta[0], meta[:, None], meta).device.type == "meta"


def shifted(b, h, q, k):
    shift = torch.zeros_like(h)
    shift += h
    return q - k == shift


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda b, h, q, k: (h < 6) | (q == k), True),  # though not on the heads that the checks look at
        (shifted, True),
        (lambda b, h, q, k: q.new_tensor(h) + 0 * q >= k, True),
        (lambda b, h, q, k: h.new_tensor(3) + 0 * q >= k, False),
        (lambda b, h, q, k: (torch.zeros_like(h) + q == k) & (h.dtype == torch.int64), False),
        (diagonal, False),
    ],
)
def test_heads_have_rules_of_their_own_where_the_head_is_read(function, reads: bool) -> None:
    pattern = masks.custom(function)
    assert (pattern.for_head(7, 8) != pattern.for_head(6, 8)) == reads
    assert (pattern.for_head(3, 8) is pattern) == (not reads)


LIST = [1, 2]


class Unlike:
    def __call__(self, b, h, q):
        return q < 3


class Twice(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def captures(value):
    return lambda b, h, q, k: q < k + value


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (Unlike(), TypeError, r"must take \(b, h, q, k\); got 'Unlike' with \(b, h, q\)"),
        (lambda b, h, q, k, *, w: q < 3, TypeError, r"with \(b, h, q, k, \*, w\)"),
        (lambda b, h, q, k: True, TypeError, "must return a tensor; got bool"),
        (lambda b, h, q, k: torch.ones(5, dtype=torch.bool), ValueError, r"broadcast shape .*; got \(5,\)"),
        (lambda b, h, q, k: q * 2654435761 % 7 < k, ValueError, "for int32 positions"),
        (lambda b, h, q, k: torch.tensor(q.tolist()) < k, ValueError, "called Tensor.tolist"),
        (lambda b, h, q, k: q < LIST[k], ValueError, "called Tensor.__index__"),
        (lambda b, h, q, k: TABLE.add_(1)[q % 6] < k, ValueError, "must not write to tensors that .* called add_"),
        (lambda b, h, q, k: Twice.apply(q) < k, TypeError, "by functions of torch, which"),
        (captures(object()), ValueError, "failed: TypeError"),
        (captures(torch.empty(3, device="meta")), TypeError, "plain dense tensors"),
    ],
)
def test_what_is_no_rule_is_refused(function, error, says):
    before = torch.get_rng_state(), TABLE.clone()
    with pytest.raises(error, match=says) as caught:
        masks.custom(function)
    assert isinstance(caught.value.__cause__, Exception) == ("Error" in says)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(TABLE, before[1])


@pytest.mark.parametrize(
    ("classify", "error", "says"),
    [
        (lambda h, a, b, c, d: torch.tensor([masks.PARTIAL]), ValueError, r"got shape \(1,\) for 16 boxes"),
        (lambda h, a, b, c, d: a * 0 + 3, ValueError, r"masks.EMPTY \(0\), .*; got \[3\]"),
        (lambda h, a, b, c, d: a * 0 - 1, ValueError, r"got \[-1\]"),
        (lambda h, a, b, c, d: 1 + (a == a.max()).long(), ValueError, "each box independently"),
    ],
)
def test_classify_of_the_wrong_form(classify, error, says):
    with pytest.raises(error, match=says):
        masks.custom(by_global, classify=classify)


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


def choosing(choose):
    return lambda b, h, q, k: choose(q > k, q, k) > 3


def turned(value):
    return lambda b, h, q, k: torch.full_like(q, value, dtype=torch.complex64).angle() * k > q


DIFFERENT = [
    *(window(width) for width in (5, 6, 5.0, True)),
    *(same_kind(table) for table in (TABLE, TABLE + 1, TABLE[:3], TABLE.int(), torch.ones(4), torch.ones(2, 2)[0])),
    *(lambda b, h, q, k: q < 3 * k, lambda b, h, q, k: q < 4 * k),
    *(lambda b, h, q, k: q < k, lambda b, h, q, k: q <= k),
    *(lambda b, h, q, k: torch.gt(q, k), lambda b, h, q, k: torch.ge(q, k)),
    *(lambda b, h, q, k: q - k < WIDTH + 9, lambda b, h, q, k: q - k < LIST[1]),
    *(lambda b, h, q, k: (q - k) % 4 == masks.FULL, lambda b, h, q, k: (q - k) % 4 == masks.PARTIAL),
    *(choosing(torch.where), choosing(torch.clamp)),
    *(turned(value) for value in (-1 + 0j, complex(-1, -0.0))),
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


def loaded_and_digest(path):
    return repr(torch.load(path)), masks.custom(composed(same_kind(TABLE))).text


def test_another_process_makes_the_same_digest_and_loads_what_torch_saved(tmp_path):
    torch.save([masks.causal(), masks.documents([0, 0, 1])], path := tmp_path / "patterns.pt")
    (found,) = on_ranks(1, loaded_and_digest, path)
    assert found == ("[causal(), documents('documents')]", masks.custom(composed(same_kind(TABLE))).text)


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
