"""Forward mode, torch.func and second derivatives: the right derivative, or an error that names engine='reference'."""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import distributed, masks
from tests.support.ranks import one_rank

# What torch's own rules use.
pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")

H, N, D = 2, 5, 3
IDS = torch.tensor([0, 0, 0, 1, 1])  # whose values are read, whatever traces the call
PATTERN = (masks.local_window(left=2, right=0) | masks.first_tokens(1)) & masks.documents(IDS)
REMEDY = r"engine=\\*'reference\\*'"  # Dynamo may quote an error within its own

Function = Callable[[Tensor], Tensor]


@cache
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(1, H, N, D, generator=generator, dtype=torch.float64) for name in "qkv"}
    shapes = {"sinks": (H,), "bias": (H,)}
    return drawn | {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}


def of_argument(name: str, attend: Callable[..., Tensor], *, sinks: bool = True) -> Function:
    """The attention as a function of one tensor: q, k, v, sinks, or what a score_mod captured."""
    others = tensors()

    def function(x: Tensor) -> Tensor:
        given = {key: other.to(x.dtype) for key, other in others.items()} | {name: x}

        def score_mod(score, b, h, q_idx, k_idx):
            return score + given["bias"][h] * (q_idx - k_idx)

        options = {"sinks": given["sinks"], "score_mod": score_mod}
        if name != "bias":
            del options["score_mod"]
        if name == "bias" or not sinks:
            del options["sinks"]
        return attend(given["q"], given["k"], given["v"], PATTERN, **options)

    return function


def dense(
    q: Tensor, k: Tensor, v: Tensor, pattern: Any, *, sinks: Tensor | None = None, score_mod: Any = None
) -> Tensor:
    """Attention as one formula, which torch differentiates and maps as it likes."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    scores = q @ k.mT * D**-0.5
    if score_mod is not None:
        scores = score_mod(scores, 0, torch.arange(H)[:, None, None], i, j)
    scores = scores.masked_fill(~(((i - j >= 0) & (i - j <= 2)) | (j < 1)) | (IDS[:, None] != IDS), -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def by_dual(function: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.cos()))).tangent
    return torch.zeros_like(x) if tangent is None else tangent


def by_double_backward(function: Function, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf).sin().sum(), leaf, create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaf)[0]


WAYS: dict[str, Callable[[Function, Tensor], Any]] = {
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "dual": by_dual,
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "linearize": lambda f, x: linearize(f, x)[1](x.cos()),
    "grad": lambda f, x: grad(lambda x: f(x).sin().sum())(x),
    "vjp": lambda f, x: vjp(f, x)[1](f(x)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).sin().sum())(x),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, x.cos()])),
    "double backward": by_double_backward,
    "batched grads": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
}
ARGUMENTS = ["q", "k", "v", "sinks", "bias"]
# Inside a graph; torch itself refuses these of a compiled function from outside.
COMPILED = ["jvp", "dual", "grad", "jacrev", "vmap"]


@pytest.mark.parametrize("way", WAYS)
def test_the_reference_has_them_all(way: str) -> None:
    """What the other engines' errors name as the remedy is one, for every tensor that takes part."""
    for name in ARGUMENTS if way != "linearize" else ARGUMENTS[:1]:  # jvp after a plain call, which is traced
        x = tensors()[name]
        found = WAYS[way](of_argument(name, partial(fd.attend, engine="reference")), x)
        assert_close(found, WAYS[way](of_argument(name, dense), x))


@pytest.mark.parametrize("way", WAYS)
def test_tiles_refuses_them(way: str) -> None:
    for name in ARGUMENTS[:4]:
        x, function = tensors()[name], of_argument(name, partial(fd.attend, engine="aten"))
        if (name, way) == ("sinks", "double backward"):  # their gradient is plain arithmetic
            assert_close(WAYS[way](function, x), WAYS[way](of_argument(name, dense), x))
            continue
        with pytest.raises((ValueError, RuntimeError), match=REMEDY):
            WAYS[way](function, x)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("double backward", "batched grads", "linearize")])
def test_flex_refuses_what_it_has_not(way: str) -> None:
    """Before it compiles anything; on CPU it has no backward at all. linearize is jvp after a plain call."""
    attend = partial(fd.attend, engine="flex")
    for name in ARGUMENTS:
        with pytest.raises(ValueError, match=REMEDY):
            WAYS[way](of_argument(name, attend), tensors()[name].float())


@pytest.mark.slow
@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_graph_drops_no_derivative(way: str) -> None:
    """In every way in both engines; each argument in one way at least of forward mode, of gradients and of vmap."""
    index = COMPILED.index(way)
    cases = [(ARGUMENTS[index % 3], "aten"), ("bias", "flex"), ("sinks", "aten"), (ARGUMENTS[index % 3], "flex")]
    for name, engine in cases if way == "vmap" else cases[index % 2 * 2 :][:2]:
        torch.compiler.reset()
        kind = torch.float32 if engine == "flex" else torch.float64
        function = of_argument(name, partial(fd.attend, engine=engine), sinks=engine != "flex")
        compiled = torch.compile(lambda x, f=function: WAYS[way](f, x), fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=REMEDY):
            compiled(tensors()[name].to(kind))


@given(names=st.sets(st.sampled_from(ARGUMENTS[:4]), min_size=1), way=st.sampled_from(["jvp", "dual", "vmap"]))
def test_a_cache_refuses_them(names: set[str], way: str) -> None:
    def attend(q, k, v, pattern, *, sinks):
        return fd.KVCache(masks.local_window(left=2, right=0), num_heads=H).attend(q, k, v, sinks=sinks)

    for name in names:
        with torch.no_grad(), pytest.raises(ValueError, match=REMEDY):
            WAYS[way](of_argument(name, attend), tensors()[name])


def test_levels_that_reach_no_input_change_nothing() -> None:
    """An attention beside a transform, and not in it, is what it is without."""
    attended = of_argument("q", fd.attend)(tensors()["q"])
    x = torch.ones(3, dtype=torch.float64)
    tangent = jvp(lambda x: x.sum() * of_argument("q", fd.attend)(tensors()["q"]), (x,), (x,))[1]
    assert_close(tangent, 3 * attended)
    assert_close(vmap(lambda x: x + of_argument("q", fd.attend)(tensors()["q"]))(x)[1], 1 + attended)


def test_attention_over_ranks_refuses_them() -> None:
    with one_rank() as mesh:
        for schedule, way in product(("exchange", "ring"), ("jvp", "dual", "vmap", "grad", "double backward")):
            attend = partial(distributed.attend, mesh=mesh, schedule=schedule)
            # Second derivatives by sinks are there, as on one rank.
            for name in ("q", "k", "sinks")[: 2 if way == "double backward" else 3]:
                with pytest.raises((ValueError, RuntimeError), match=REMEDY):
                    WAYS[way](of_argument(name, attend), tensors()[name])
