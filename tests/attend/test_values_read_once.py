"""A score_mod is read when `attend` is called: what it holds may then change, before the backward or between parts."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support.agreement import TIGHT
from tests.support.dense_flex import flex_on_cpu

# Every rule is score * scale + table[h, distance % DISTANCES], with both read from somewhere else.

DISTANCES = 5
HEADS = 2


class Held(NamedTuple):
    """A rule whose values are held somewhere, and the function that puts others there."""

    score_mod: Callable[..., Tensor]
    change: Callable[[], Any]


def rule(scale: Any, table: Tensor, score: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score * scale + table[h, (q - k) % DISTANCES]


def plain(scale: float, table: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: rule(scale, table, score, h, q, k)


def in_cells(scale: float, table: Tensor, other: Tensor) -> Held:
    def score_mod(score, b, h, q, k):
        return rule(scale, table, score, h, q, k)

    def change():
        nonlocal scale, table
        scale, table = 5.0, other

    return Held(score_mod, change)


def by_the_number_of_calls(scale: float, table: Tensor, other: Tensor) -> Held:
    calls = count()

    def score_mod(score, b, h, q, k):
        return rule(*((5.0, other) if next(calls) else (scale, table)), score, h, q, k)

    return Held(score_mod, lambda: None)


def as_a_number(scale: float, table: Tensor, other: Tensor) -> Held:
    """Read by float(), which is one number for the whole call, as in every other function."""
    held, tables = torch.tensor(scale, dtype=torch.float64), [table]

    def change():
        held.fill_(5.0)
        tables[0] = other

    return Held(lambda s, b, h, q, k: rule(float(held), tables[0], s, h, q, k), change)


WAYS = (in_cells, by_the_number_of_calls, as_a_number)
PATTERNS = (
    masks.causal(),
    masks.local_window(left=5, right=2),
    masks.longnet([4, 16], [1, 2]) & masks.causal(),
    masks.dilated(8, 3),
)


def by_flex(*tensors: Tensor, **how: Any) -> Tensor:
    with flex_on_cpu():
        return fd.attend(*tensors, engine="flex", **how)


ENGINES = {
    "portable": partial(fd.attend, engine="portable"),
    "reference": partial(fd.attend, engine="reference"),
    "by default": fd.attend,
    "flex": by_flex,
}


def drawn_tensors(seed: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, HEADS, tokens, 4)] * 3 + [(HEADS, DISTANCES)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@given(
    st.sampled_from(WAYS),
    st.sampled_from(sorted(ENGINES)),
    st.sampled_from(PATTERNS),
    st.sampled_from(["backward", "second backward", "second derivative of a changed one"]),
    st.sampled_from([0.0, 0.4]),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_gradients_are_those_of_the_values_at_the_call(way, engine, pattern, moment, dropout_p, tokens, seed):
    dropout_p = 0.0 if engine == "flex" else dropout_p
    *tensors, table = leaves = drawn_tensors(seed, tokens)
    other = torch.full_like(table, 7.0).requires_grad_()

    def derivatives(attend: Callable[..., Tensor], held: Held) -> list[Tensor]:
        torch.manual_seed(0)
        out = attend(*tensors, pattern=pattern, score_mod=held.score_mod, dropout_p=dropout_p)
        if moment != "second derivative of a changed one":
            held.change()
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        held.change()
        if moment == "backward":
            return [out, *first]
        total = sum(x.square().sum() for x in first)
        return [out, *first, *torch.autograd.grad(total, leaves, materialize_grads=True)]

    found = derivatives(ENGINES[engine], way(0.5, table, other))
    exact = derivatives(ENGINES["reference"], Held(plain(0.5, table), lambda: None))
    assert_close(found, exact, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_tensors_written_in_place_raise_as_saved_tensors_do(learns, second):
    *tensors, table = drawn_tensors(0, 20)
    buffer = torch.full((1,), 0.5, dtype=torch.float64)
    out = fd.attend(*tensors, masks.causal(), score_mod=plain(buffer[0], table), engine="portable")
    loss = out.square().sum()
    if second:
        loss = torch.autograd.grad(loss, tensors, create_graph=True)[0].square().sum()
    with torch.no_grad():
        (table if learns else buffer).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_reads_them_once_a_call(way):
    """A call of many pieces: entries at different positions, each in chunks."""
    *tensors, table = (x.detach() for x in drawn_tensors(0, 160))
    exact = fd.attend(*tensors, masks.causal(), score_mod=plain(0.5, table), engine="reference")
    cache, firsts = fd.KVCache(masks.causal(), num_heads=HEADS), (3, 11)
    cache.append(*(x[:, :, :11] for x in tensors[1:]), lengths=torch.tensor(firsts))
    for number in (1, 140):
        new = (torch.stack([row[:, at : at + number] for row, at in zip(x, firsts, strict=True)]) for x in tensors)
        held = way(0.5, table, table + 1)
        out = cache.attend(*new, score_mod=held.score_mod)
        for row, true, at in zip(out, exact, firsts, strict=True):
            assert_close(row, true[:, at : at + number], **TIGHT)
        firsts = tuple(at + number for at in firsts)


UNDER_CUT = complex(-1, -0.0)  # equal to -1 + 0j, at another angle


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity: what it records is not what its forward computes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class Doubled(Straight):
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Unmapped(Straight):
    generate_vmap_rule = False


def operations(table: Tensor) -> dict[str, Callable[..., Tensor]]:
    """What functions do with tensors, in ways that a record must keep."""

    def near(h, q, k):
        return table[h, (q - k) % DISTANCES]

    number = torch.tensor([1.5, 0.5], dtype=torch.float64)
    made, one = table.exp() * 2, table[0, 0]  # no leaves
    held = {"tables": [made, (table,)]}

    def without_gradient(score, b, h, q, k):
        with torch.no_grad():
            shift = near(h, q, k) * 2
        return score + shift + near(h, k, q)

    def in_place(score, b, h, q, k):
        before = score
        score += near(h, q, k)
        score *= 2
        return before

    def several_results(score, b, h, q, k):
        largest = torch.stack([score, near(h, q, k) + 0 * score]).max(0)
        return largest.values + largest[1] * near(h, k, q)

    def writing_to_its_own(score, b, h, q, k):
        both = torch.stack([score, score])
        both[0] = 3 * score
        return both.sum() + near(h, q, k)

    return {
        "a leaf and functions of it": lambda s, b, h, q, k: s * made[h, 0] + held["tables"][1][0][h, k % 5] + one,
        "without the score": lambda s, b, h, q, k: held["tables"][0][h, k % DISTANCES] * table[h, 0],
        "in place on a copy": lambda s, b, h, q, k: s + near(h, q, k).clone().mul_(2) + near(h, q, k),
        "nothing": lambda s, b, h, q, k: s.tanh(),
        "two custom gradients": lambda s, b, h, q, k: Straight.apply(3 * near(h, q, k)) + Doubled.apply(s),
        "no gradient": without_gradient,
        "detached": lambda s, b, h, q, k: s.detach() * near(h, q, k) + s,
        "in place": in_place,
        "several results": several_results,
        "writing to a tensor of its own": writing_to_its_own,
        "a number out of a tensor": lambda s, b, h, q, k: s * float(number[0]) + number.tolist()[1],
        "numbers first": lambda s, b, h, q, k: 2 - s / (1 + (5 - q) % 3) - 3 // (k + 1) + 2 ** -s.sigmoid(),
        "infinite": lambda s, b, h, q, k: torch.where((q - k) % 3 == 1, -float("inf"), torch.nan_to_num(s)),
        "by other indices": lambda s, b, h, q, k: (
            s + table.flatten()[h * DISTANCES + k % 5] + nn.functional.embedding(h, table)[1]
        ),
        "slices": lambda s, b, h, q, k: s + table[h, 1:3][..., -1] + table[None, h, ..., 0].squeeze(0),
        "properties": lambda s, b, h, q, k: s.real + near(h, q, k).to(s.dtype) * s.dim() + (1 if s.is_cpu else 0),
        "on its device": lambda s, b, h, q, k: s + torch.arange(4, device=s.device)[k % 4].to(s) + s.new_ones(()),
        "types of numbers": lambda s, b, h, q, k: s * np.float64(0.5) + np.int64(2) + True,
        "a complex number": lambda s, b, h, q, k: s * torch.full_like(s, -1 + 0j, dtype=torch.complex128).angle(),
        "its conjugate": lambda s, b, h, q, k: s * torch.full_like(s, UNDER_CUT, dtype=torch.complex128).angle(),
        "keywords": lambda s, b, h, q, k: torch.add(s, near(h, q, k), alpha=2).clamp(min=-3.0, max=3.0),
    }


@pytest.mark.parametrize("name", operations(torch.zeros(HEADS, DISTANCES)))
def test_what_a_function_does_is_kept(name):
    """Against the function itself, called for one pair after another by vmap."""
    *tensors, table = leaves = drawn_tensors(0, 12)
    every = operations(table)[name]
    for place in (4, 3, 2, 1):
        every = torch.vmap(every, in_dims=tuple(0 if index in (0, place) else None for index in range(5)))
    q, k, v = tensors
    scores = every((q @ k.mT) * 0.5, *map(torch.arange, scores_shape := (2, HEADS, 12, 12)))
    allowed = torch.ones(scores_shape[2:], dtype=torch.bool).tril()
    exact = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num() @ v
    true_grads = torch.autograd.grad(exact.square().sum(), leaves, materialize_grads=True, allow_unused=True)
    for engine in ("portable", "reference"):
        out = fd.attend(q, k, v, masks.causal(), score_mod=operations(table)[name], engine=engine)
        grads = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True, allow_unused=True)
        assert_close((out, *grads), (exact, *true_grads), **TIGHT)


def test_what_does_not_depend_on_the_pair_need_not_be_mapped():
    *tensors, table = leaves = drawn_tensors(0, 12)

    def gradients(of: type[torch.autograd.Function]) -> tuple[Tensor, ...]:
        def score_mod(s, b, h, q, k):
            return s + of.apply(3 * table)[h, (q - k) % DISTANCES]

        out = fd.attend(*tensors, masks.causal(), score_mod=score_mod, engine="portable")
        return torch.autograd.grad(out.square().sum(), leaves)

    assert_close(gradients(Unmapped), gradients(Straight), **TIGHT)


def test_in_a_graph_the_compiler_reads_them():
    """A changed value is a new graph in the next call, and no other gradient of the last one."""
    torch.compiler.reset()
    *tensors, table = leaves = drawn_tensors(0, 20)
    other = drawn_tensors(1, 1)[-1]

    def call(score_mod, *tensors):
        return fd.attend(*tensors, masks.causal(), score_mod=score_mod, engine="portable")

    compiled, held = torch.compile(call, fullgraph=True, backend="eager"), in_cells(0.5, table, other)
    for scale, read in ((0.5, table), (5.0, other)):
        out, exact = compiled(held.score_mod, *tensors), call(plain(scale, read), *tensors)
        held.change()
        inputs = [*leaves[:3], read]
        found, true = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, exact))
        assert_close((out, *found), (exact, *true), **TIGHT)


def test_a_size_in_a_graph_of_any_size():
    torch.compiler.reset()
    x = torch.randn(3, 2, 20, 8, dtype=torch.float64)

    def call(x, y):
        n, m = x.shape[0], y.shape[0]

        def score_mod(score, b, h, q_idx, k_idx):
            return (n - score) * m**-0.5 + torch.where(q_idx > m, score / m, 2 * n)

        return fd.attend(x, x, x, masks.causal(), score_mod=score_mod)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for number in (7, 5):
        y = torch.zeros(number)
        assert_close(compiled(x, y), call(x, y), **TIGHT)


def test_a_table_made_in_inference_mode_in_training():
    """Autograd saves no such tensor; dense attention needs not save it."""
    *tensors, table = drawn_tensors(0, 12)
    with torch.inference_mode():
        made = table.detach() * 1.0
    outs = [
        fd.attend(*tensors, masks.causal(), score_mod=plain(0.5, read), engine="portable")
        for read in (made, table.detach())
    ]
    found, exact = (torch.autograd.grad(out.square().sum(), tensors) for out in outs)
    assert_close(found, exact, **TIGHT)
