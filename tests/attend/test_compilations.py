"""Compilations: how many there are, and what happens past torch's limit of them: never dense attention."""

import math
import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import ScoreMod
from flexdilated.engines._score_mod import function_key
from flexdilated.engines.aten import Program
from flexdilated.engines.flex import _flex
from tests.support.compilers import as_it_is, without_inductor

# B batch, H heads, N tokens, D head dim

PATTERN = masks.longnet([16, 48], [1, 3]) & masks.causal()
WINDOWS = tuple(masks.local_window(left=left, right=1) for left in range(4, 6))
LIMIT = 1  # of compilations of one function, for these tests; torch's own is 8


def draw(N: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(N)
    return torch.randn(1, 2, N, 16, dtype=dtype)


@pytest.fixture(autouse=True)
def clean():
    """Counts start at 0, and no function compiled here is used elsewhere."""

    def reset() -> None:
        torch.compiler.reset()
        counters.clear()

    reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield
    reset()


@pytest.fixture
def traced_only():
    """Of functions that flex has compiled: enough to count them."""
    with without_inductor():
        yield


@pytest.fixture
def runs_of_tiles(monkeypatch) -> list[int]:
    """The number of tokens of each run of the aten engine, from inside a graph or not."""
    runs: list[int] = []
    forward = Program.forward

    def noted(program, q, *rest):
        runs.append(q.shape[2])
        return forward(program, q, *rest)

    monkeypatch.setattr(Program, "forward", noted)
    return runs


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def left_to_eager() -> int:
    """Number of functions that torch gave up compiling."""
    return counters["frames"]["total"] - counters["frames"]["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("varied", ["length", "pattern"])
def test_past_the_limit_tiles_run_eagerly(varied: str, runs_of_tiles) -> None:
    """Each length and pattern gets a graph until torch gives up: the op then runs by itself, as sparse as before."""

    def doubled(q: Tensor, pattern: masks.Pattern) -> Tensor:
        return 2 * fd.attend(q, q, q, pattern)

    compiled = torch.compile(doubled, backend=as_it_is, dynamic=False)
    inputs = [(draw(20 + extra if varied == "length" else 20), pattern) for extra, pattern in enumerate(WINDOWS)]
    if varied == "length":
        inputs = [(q, WINDOWS[0]) for q, _ in inputs]
    found = [compiled(*each) for each in inputs]
    assert runs_of_tiles == [q.shape[2] for q, _ in inputs]
    for each, out in zip(inputs, found, strict=True):
        assert_close(out, doubled(*each))
    assert (graphs(), left_to_eager()) == (LIMIT, 1)


@pytest.mark.slow
def test_modes_and_dtypes_share_one_function(runs_of_tiles) -> None:
    """More variants than torch's limit: gradients or not, autocast or not, four dtypes."""

    def attend(q: Tensor) -> Tensor:
        return fd.attend(q, q, q, PATTERN)

    compiled = torch.compile(attend, backend=as_it_is)
    with torch._dynamo.config.patch(recompile_limit=8):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for grad in (True, False):
                for autocast in (True, False):
                    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        assert_close(compiled(draw(20, dtype=dtype)), attend(draw(20, dtype=dtype)))
    assert len(runs_of_tiles) == 2 * 16
    assert graphs() <= 8


@pytest.mark.slow
def test_flex_has_a_function_for_each_use(traced_only) -> None:
    """Each more than the limit for one function; a function that gives up would raise.

    Patterns that differ in numbers alone share one, as their numbers are in tensors; so do functions around tensors.
    """

    def slanted(slope: float) -> ScoreMod:
        return lambda score, b, h, q_idx, k_idx: score + slope * (q_idx - k_idx)

    def alibi(slopes: Tensor) -> ScoreMod:
        return lambda score, b, h, q_idx, k_idx: score - slopes[h] * (q_idx - k_idx).abs()

    def functions() -> int:
        return _flex._num_compiled.total()

    uses: dict[str, tuple[Tensor, dict[str, object]]] = {
        "first": (draw(20), {}),
        "pattern": (draw(20), {"pattern": WINDOWS[1]}),
        "length": (draw(21), {}),
        "scale": (draw(20), {"scale": 1.1}),
        "score_mod": (draw(20), {"score_mod": slanted(0.1)}),
        "another score_mod": (draw(20), {"score_mod": slanted(1.1)}),
        "score_mod made again": (draw(20), {"score_mod": slanted(0.1)}),
        "tensor": (draw(20), {"score_mod": alibi(torch.tensor([0.5, 0.25]))}),
        "another tensor": (draw(20), {"score_mod": alibi(torch.tensor([0.25, 0.5]))}),
    }
    known = ("pattern", "score_mod made again", "another tensor")
    for made in (lambda name: name not in known, lambda name: False):
        for name, (q, options) in uses.items():
            before, options = functions(), {"pattern": WINDOWS[0]} | options
            found = fd.attend(q, q, q, engine="flex", **options)
            assert functions() - before == made(name), name
            assert_close(found, fd.attend(q, q, q, engine="reference", **options))
    assert (graphs(), left_to_eager()) == (len(uses) - len(known), 0)


@pytest.mark.slow
def test_flex_in_a_graph_past_the_limit_is_compiled_by_itself(traced_only) -> None:
    """A graph belongs to its length; when torch gives the caller up, attend has each length compiled on its own."""

    def doubled(q: Tensor, engine: str = "flex") -> Tensor:
        return 2 * fd.attend(q, q, q, WINDOWS[0], engine=engine)

    compiled = torch.compile(doubled)
    before = _flex._num_compiled.total()
    many = LIMIT + 1
    for N in range(20, 20 + many):
        assert_close(compiled(draw(N)), doubled(draw(N), "reference"))
    assert (graphs(), left_to_eager(), _flex._num_compiled.total() - before) == (many, 1, many - LIMIT)


def test_flex_does_not_run_uncompiled(traced_only) -> None:
    """Switched off, torch.compile would run flex_attention as it is written: dense."""
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="forms all pairs") as error:
        fd.attend(draw(20), draw(20), draw(20), WINDOWS[0], engine="flex")
    assert "engine='aten'" in str(error.value)


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2)
def test_blocks_compiled_one_by_one_share_their_graphs() -> None:
    """The time to compile does not grow with depth: two graphs, one for the first length and one for all others."""
    branches = {"segment_lengths": (16, 48), "dilation_rates": (1, 3), "causal": True}
    model = fd.LongNet(fd.LongNetConfig(vocab_size=11, embed_dim=16, num_heads=2, depth=2, **branches))
    tokens = torch.arange(60)[None] % 11
    with torch.no_grad():
        expected = [model(tokens[:, :N]) for N in (40, 41, 60)]
        for block in model.blocks:
            block.compile(backend=as_it_is, fullgraph=True)
        for N, out in zip((40, 41, 60), expected, strict=True):
            assert_close(model(tokens[:, :N]), out)
    assert graphs() == 2


@pytest.mark.slow
@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_a_length_marked_dynamic_is_one_graph(mark) -> None:
    compiled = torch.compile(lambda q: fd.attend(q, q, q, PATTERN), backend=as_it_is, fullgraph=True)
    for N in (60, 61, 97):
        q = draw(N)
        mark(q, 2)
        assert_close(compiled(q), fd.attend(q, q, q, PATTERN))
    assert graphs() == 1


@pytest.mark.parametrize(("engine", "dynamic"), [("aten", None), ("aten", True), ("flex", None)])
def test_a_pattern_that_does_not_fit_is_refused_while_tracing(engine: str, dynamic: bool | None) -> None:
    """The check that is not traced is made all the same, with the same words."""
    pattern = masks.per_head([masks.causal()] * 3)

    def attend(q: Tensor) -> Tensor:
        return fd.attend(q, q, q, pattern, engine=engine)

    with pytest.raises(RuntimeError, match="per_head needs one pattern for each head; got 3 for 2 heads"):
        torch.compile(attend, backend=as_it_is, fullgraph=True, dynamic=dynamic)(draw(20))


@pytest.mark.slow
@pytest.mark.parametrize("copy", [lambda cache: cache, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_cache_stays_out_of_graphs(copy) -> None:
    cache = copy(fd.KVCache(WINDOWS[0] & masks.causal(), num_heads=2))

    def step(q: Tensor) -> Tensor:
        return 2 * cache.attend(q, q, q)

    with torch.no_grad():
        torch.compile(step, backend=as_it_is)(draw(1))
    ((reason, times),) = counters["graph_break"].items()
    assert (times, cache.num_tokens) == (1, 1)
    assert "a cache changes with every call" in reason


@pytest.mark.slow
def test_a_score_mod_that_could_learn_serves_without_gradients(traced_only) -> None:
    slopes, q = torch.tensor([0.5, 0.25], requires_grad=True), draw(32)
    how = {"score_mod": lambda score, b, h, q_idx, k_idx: score - slopes[h] * (q_idx - k_idx)}
    with torch.no_grad():
        found = fd.attend(q, q, q, WINDOWS[0], engine="flex", **how)
        assert_close(found, fd.attend(q, q, q, WINDOWS[0], engine="reference", **how))


HOLDERS: dict[str, Callable[[object], Callable[[Tensor], object]]] = {
    "closure": lambda value: lambda score: value,
    "default": lambda value: lambda score, x=value: x,
    "keyword-only default": lambda value: lambda score, *, x=value: x,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    "values",
    [
        *([1, 2], [(1,), (2,)], [{"a": 1}, {"a": 2}, {"b": 1}], [{1}, {1, 2}], [{"a": [1]}, {"a": [2]}]),
        *([1, True, 1.0, 1 + 0j], [0.0, -0.0], [0j, -0j], [math.nan, math.inf], [(0.0,), (-0.0,)]),
        *([torch.int32, torch.int64], [masks.strided(2), masks.strided(3)], [range(2), range(3)], [b"a", b"b"]),
    ],
)
def test_what_functions_captured_tells_them_apart(values, holder: str) -> None:
    """Those that are told apart are compiled each for itself; torch gives up after eight of the others."""
    assert len({function_key(HOLDERS[holder](value)) for value in values}) == len(values)
    assert len({function_key(HOLDERS[holder](deepcopy(value))) for value in (values[0], values[0])}) == 1
