"""Run-time tensors that change between calls, in whatever way: every call sees the values of its moment."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import multiplicity
from flexdilated.masks.planning._planner import plan
from tests.support import oracle
from tests.support.dense_flex import flex_on_cpu

N = 9
POSITIONS = torch.arange(N)


class Elsewhere(Tensor):
    """A tensor that says it is on an accelerator; there is none here, so its values are not."""

    # What is made of it is here.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def to(self, *args: Any, **options: Any) -> Tensor:
        return self.as_subclass(Tensor).to(*args, **options)

    def cpu(self, *args: Any, **options: Any) -> Tensor:
        return self.as_subclass(Tensor)


def replaced(array: np.ndarray, x: Tensor, values: Tensor) -> None:
    x.data = torch.tensor(array)
    x.data.copy_(values)


# Ways to write other values of the same shape into a tensor, which shares memory with an array at first.
WRITES: dict[str, Callable[[np.ndarray, Tensor, Tensor], object]] = {
    "in place": lambda array, x, values: x.copy_(values),
    "through a view": lambda array, x, values: x[:].copy_(values),
    "out=": lambda array, x, values: torch.where(torch.ones_like(values, dtype=torch.bool), values, values, out=x),
    "data": lambda array, x, values: x.data.copy_(values),
    "another data": replaced,
    "set_": lambda array, x, values: x.set_(values.clone()),
    "storage": lambda array, x, values: x.untyped_storage().copy_(values.clone().untyped_storage()),
    "NumPy": lambda array, x, values: np.copyto(x.as_subclass(Tensor).numpy(), values.numpy()),
    "detached": lambda array, x, values: x.detach().copy_(values),
}

DOCUMENTS = st.lists(st.booleans(), min_size=N, max_size=N).map(lambda each: torch.tensor(each).cumsum(0))
VISIBLE = st.lists(st.booleans(), min_size=N, max_size=N).map(torch.tensor)
LENGTHS = st.integers(0, N).map(lambda each: torch.tensor([each]))
KINDS: dict[str, tuple[Callable[[Any], Any], st.SearchStrategy[Tensor], Callable[[Tensor], oracle.Rule]]] = {
    "documents": (masks.documents, DOCUMENTS, oracle.documents),
    "visible_keys": (masks.visible_keys, VISIBLE, oracle.visible_keys),
    "lengths": (masks.lengths, LENGTHS, lambda n: oracle.documents(torch.where(n > POSITIONS, 0, -1))),
}


def dense(counts: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).masked_fill(counts == 0, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def by_mask(pattern: Any, x: Tensor) -> Tensor:
    mask = masks.block_mask(pattern, N, num_heads=1, block_size=4)
    zero = torch.zeros((), dtype=torch.int64)
    return dense(mask.mask_mod(zero, zero, POSITIONS[:, None], POSITIONS).long(), x, x, x)


def by_rule(pattern: Any, x: Tensor) -> Tensor:
    bound = pattern.bind(num_heads=1, num_queries=N, num_keys=N)
    plan(bound)
    return dense(multiplicity(bound, torch.device("cpu")), x, x, x)


def by_name(pattern: Any, x: Tensor) -> Tensor:
    (name,) = masks.patterns.names(pattern)
    (leaf,) = (leaf for leaf in pattern.leaves() if hasattr(leaf, "given"))
    named = masks.from_json(masks.to_json(pattern))
    return fd.attend(x, x, x, named, scale=1.0, bindings={name: leaf.given.tensor})


# Outputs for the pattern with the tensor that it carries; "few" queries go without a plan.
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "aten": lambda pattern, x: fd.attend(x, x, x, pattern, scale=1.0, engine="aten"),
    "reference": lambda pattern, x: fd.attend(x, x, x, pattern, scale=1.0, engine="reference"),
    "flex": lambda pattern, x: fd.attend(x, x, x, pattern, scale=1.0, engine="flex", block_size=4),
    "few": lambda pattern, x: fd.attend(x[:, :, 1:], x, x, pattern, scale=1.0, q_offset=1),
    "named": by_name,
    "block_mask": by_mask,
    "bind": by_rule,
}


@pytest.fixture
def flex_is_served():
    with flex_on_cpu(trains=False):  # with tables as wide as on a CPU
        yield


@pytest.mark.usefixtures("flex_is_served")
@settings(max_examples=20)
@given(st.data(), st.sampled_from([*KINDS]), st.booleans(), st.booleans())
def test_every_call_sees_the_values_of_its_moment(data, name: str, elsewhere: bool, restarted: bool) -> None:
    make, values, rule = KINDS[name]
    array = data.draw(values).numpy().copy()
    tensor = torch.from_numpy(array)
    tensor = tensor.as_subclass(Elsewhere) if elsewhere else tensor
    pattern = masks.causal() & make(tensor)
    outer = oracle.causal()
    if restarted and name != "visible_keys":
        pattern, outer = masks.strided(3).per_document(make(tensor)), None
    x = torch.randn(1, 1, N, 4, dtype=torch.float64)
    for _ in range(data.draw(st.integers(2, 4))):
        current = data.draw(values)
        WRITES[data.draw(st.sampled_from([*WRITES]))](array, tensor, current)
        ids = current if name == "documents" else torch.where(current > POSITIONS, 0, -1)
        dense_rule = oracle.per_document(oracle.strided(3), ids) if outer is None else oracle.both(outer, rule(current))
        counts = oracle.counts(dense_rule, range(1), 1, POSITIONS, POSITIONS)[0].long()
        exact = dense(counts, x, x, x)
        for call in data.draw(st.lists(st.sampled_from([*CALLS]), min_size=1, max_size=3)):
            found = CALLS[call](pattern, x)
            assert_close(found, exact[:, :, -found.shape[2] :], rtol=1e-9, atol=1e-9)
        assert masks.describe(pattern, N).useful_pairs == counts.sum()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_a_backward_belongs_to_its_forward(write: str, elsewhere: bool) -> None:
    """Values that are written in between, seen by torch or not, are those of the next call."""
    array = np.arange(N) // 4
    tensor = torch.from_numpy(array)
    tensor = tensor.as_subclass(Elsewhere) if elsewhere else tensor
    pattern = masks.causal() & masks.documents(tensor)
    x = torch.randn(3, 1, 1, N, 4, dtype=torch.float64).unbind()
    q, k, v = (each.requires_grad_() for each in x)
    rule = oracle.both(oracle.causal(), oracle.documents(torch.tensor(array)))
    counts = oracle.counts(rule, range(1), 1, POSITIONS, POSITIONS)[0]
    expected = torch.autograd.grad(dense(counts, q, k, v).square().sum(), (q, k, v))
    out = fd.attend(q, k, v, pattern, scale=1.0)
    WRITES[write](array, tensor, POSITIONS // 2)
    assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, rtol=1e-9, atol=1e-9)


def test_other_shapes_are_checked_at_each_call() -> None:
    """A tensor that became shorter is refused, also where the same one fitted before; and taken again as it was."""
    for make in (lambda x: x, lambda x: x.as_subclass(Elsewhere)):
        ids = make(torch.arange(N) // 4)
        pattern, x = masks.causal() & masks.documents(ids), torch.randn(1, 1, N, 4)
        before = fd.attend(x, x, x, pattern)
        ids.resize_(N - 1)
        with pytest.raises(ValueError, match="one id for each of the 9 positions"):
            fd.attend(x, x, x, pattern)
        ids.set_(torch.arange(N) // 4)
        assert torch.equal(fd.attend(x, x, x, pattern), before)


def packed(q: Tensor, ids: Tensor, engine: str) -> Tensor:
    return fd.attend(q, q, q, masks.causal() & masks.documents("ids"), bindings={"ids": ids}, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["flex", "aten"])
def test_a_graph_sees_the_values_of_its_moment(engine: str) -> None:
    torch.compiler.reset()
    attend = partial(packed, engine=engine)
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    array = np.arange(64) * 3 // 64
    ids, q = torch.from_numpy(array), torch.randn(1, 2, 64, 16)
    with torch.no_grad():
        for write in ("in place", "NumPy", "data", "storage"):
            compiled(q, ids)
            WRITES[write](array, ids, torch.randint(0, 5, (64,)).sort().values)
            exact = packed(q, ids.clone(), "reference")
            assert_close(compiled(q, ids), exact, rtol=1e-4, atol=1e-5)


def test_layers_of_several_patterns_are_one_graph():
    """As in a model whose layers alternate, at a length, another, and the first again, with and without documents."""
    window = masks.local_window(left=9, right=0)

    def stacked(x, ids, engine):
        for pattern in (window, window & masks.documents(ids), window):
            x = fd.attend(x, x, x, pattern, engine=engine)
        return x

    torch.compiler.reset()
    compiled = torch.compile(stacked, fullgraph=True, backend="eager")
    with torch.no_grad():
        for num_tokens in (70, 90, 70):
            x, ids = torch.randn(1, 2, num_tokens, 24), torch.arange(num_tokens) // 40
            assert_close(compiled(x, ids, "flex"), stacked(x, ids, "reference"), rtol=1e-4, atol=1e-5)
