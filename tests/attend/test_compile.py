"""attend under torch.compile: one graph, few compilations, the same numbers; and the op's own contract."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Call
from tests.support.ranks import on_ranks

# B batch, H heads, N tokens, D head dim

PATTERN = masks.longnet([16, 48], [1, 3]) & masks.causal()


class SelfAttention(torch.nn.Module):
    """A projection, attend with sinks and its lse, and a scalar; q, k and v have memory layouts of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(12, 3 * 4 * 8)
        self.sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.project.weight @ x.mT).view(-1, 3, 4, 8, x.shape[1]).mT.unbind(1)
        k = torch.stack([k, q], -1)[..., 0]
        out, lse = fd.attend(q, k, v, PATTERN, sinks=self.sinks, return_lse=True)
        return (out.transpose(1, 3) * out.transpose(1, 3)).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()


def gradient(module, x: Tensor) -> tuple[Tensor, ...]:
    loss = module(x)
    return loss.detach(), *torch.autograd.grad(loss, (module.project.weight, module.sinks))


@pytest.fixture
def graphs() -> Iterator[CompileCounterWithBackend]:
    """A backend that runs its graphs as they are, and counts them."""
    torch.compiler.reset()
    yield CompileCounterWithBackend("eager")
    torch.compiler.reset()


def assert_trains_as_eager(lengths: tuple[int, ...], **options) -> None:
    eager = SelfAttention()
    compiled = torch.compile(eager, fullgraph=True, **options)
    for N in lengths:
        x = torch.randn(2, N, 12)
        assert_close(gradient(compiled, x), gradient(eager, x))


@pytest.mark.slow
def test_training_in_one_graph_at_any_length(graphs):
    """One graph for the first length and one for all others, with nothing recomputed eagerly."""
    assert_trains_as_eager((60, 97, 1, 200), backend=graphs)
    # A length of 1 is a specialisation of torch's own, beside the static and the dynamic graph.
    assert graphs.frame_count <= 3


@pytest.mark.slow
def test_inductor_trains_as_eager_does():
    """Through the whole compiler: functionalised, with the op's strides and dtypes taken at their word.

    What was compiled once is not compiled again: the operator can be part of what torch keeps on disk.
    """
    hits = []
    for _ in range(2):
        torch.compiler.reset()
        assert_trains_as_eager((60,), dynamic=True)
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits[1] == hits[0] + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "rate", "dtype", "tokens_outside"),
    [(PATTERN, 3, torch.float32, True), (masks.longnet([5], [4]), 1, torch.bfloat16, False)],
    ids=["float32, tokens outside, sinks", "bfloat16, heads outside, rows without keys"],
)
def test_the_custom_op_keeps_its_contract(pattern, rate, dtype, tokens_outside):
    """Schema, shape rule, autograd and AOT dispatch, as torch checks them, in two orders."""

    def tensor(heads: int) -> Tensor:
        x = torch.randn(2, 20, heads, 4, dtype=dtype).transpose(1, 2)
        return (x if tokens_outside else x.contiguous()).requires_grad_()

    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True) if tokens_outside else None
    constants, *offsets = Call(pattern.text, 4, 2, 20, 20, 0, 0, 0, 4, rate, (8, 16)).arguments
    assert len(constants.splitlines()) == 1, "inductor writes them in comments of its code"
    torch.library.opcheck(
        torch.ops.flexdilated.aten.default,
        (tensor(4), tensor(2), tensor(2), sinks, [], constants, *offsets, 0.5),
        atol=1e-2 if dtype == torch.bfloat16 else 1e-5,
        rtol=1e-2,
    )


@pytest.mark.slow
def test_patterns_are_built_in_a_graph_from_a_size_that_varies(graphs):
    """The size becomes a constant of the graph, as the patterns are."""

    def attend(x: Tensor) -> Tensor:
        n = x.shape[2]
        pattern = masks.local_window(left=n // 2, right=0) + masks.longnet([n // 4, n // 2], [1, 2])
        return fd.attend(x, x, x, pattern + (masks.prefix_lm(n // 4) | masks.dilated(segment=n // 2, rate=2)))

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=graphs)
    for N in (8, 12):
        x = torch.randn(1, 2, N, 4)
        assert_close(compiled(x), attend(x))
    assert graphs.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_step_takes_an_offset_from_its_sizes(strict):
    """Sizes that vary in a graph are integers, in either way to trace it."""

    class Step(torch.nn.Module):
        def forward(self, q, k):
            return fd.attend(q, k, k, masks.causal(), q_offset=k.shape[2] - q.shape[2])

    def drawn(N, M):
        return torch.randn(1, 2, N, 4), torch.randn(1, 2, M, 4)

    sizes = {2: torch.export.Dim("n", min=2, max=99)}, {2: torch.export.Dim("m", min=100, max=900)}
    step = torch.export.export(Step(), drawn(9, 200), strict=strict, dynamic_shapes=sizes).module()
    given = drawn(20, 300)
    assert torch.equal(step(*given), Step()(*given))


class Packed(torch.nn.Module):
    """A mixture without run-time tensors, and documents with one."""

    def forward(self, q, k, v, ids):
        found = fd.attend(q, k, v, masks.longnet([64, 128], [1, 2]) & masks.causal())
        return found, fd.attend(q, k, v, masks.causal() & masks.documents("ids"), bindings={"ids": ids})


def packed(batch: int, tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    return *torch.randn(3, batch, 2, tokens, 16, generator=generator), torch.arange(tokens).expand(batch, -1) // 50


def run_package(package: str, given: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    with warnings.catch_warnings(action="ignore"):  # of torch's own names
        run = torch._inductor.aoti_load_package(package)
        return [run(*each) for each in given]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own
def test_what_one_process_compiles_runs_in_another(tmp_path):
    """A package of AOTInductor serves any batch and length, where flexdilated is imported."""
    batch, tokens = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=2, max=1 << 20)
    sizes = (*[{0: batch, 2: tokens}] * 3, {0: batch, 1: tokens})
    with torch.no_grad():
        exported = torch.export.export(Packed(), packed(2, 256), dynamic_shapes=sizes)
        # What the C++ compiler makes of it is not tested, and headers for two files take longer than these files.
        options = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
        path = str(tmp_path / "packed.pt2")
        package = torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=options)
    given = [packed(2, 256), packed(3, 301), packed(1, 77)]
    (found,) = on_ranks(1, run_package, package, given)
    for one, each in zip(found, given, strict=True):
        assert_close(one, Packed()(*each))
