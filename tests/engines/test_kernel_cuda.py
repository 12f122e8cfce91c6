"""The aten engine on CUDA, as far as no device is needed: kernels by definition, and the operators' own shapes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexdilated as fd
from flexdilated import masks
from flexdilated._validate import run_time_tensors
from flexdilated.engines import Call, WholeRows
from flexdilated.engines._rows import row_program_of_call
from flexdilated.engines.aten._aten_op import plan_aten
from flexdilated.engines.aten._program import Program, make_program
from flexdilated.engines.kernels import _kernel, _kernel_cuda
from flexdilated.engines.kernels._kernel_cuda import KERNELS, CudaKernel, choose
from flexdilated.masks import Layout
from flexdilated.masks.core._bound import Extent
from flexdilated.masks.core._pattern import Expression
from tests.engines.test_aten import RunPlan
from tests.support import oracle
from tests.support.agreement import assert_agrees
from tests.support.cuda_kernels import StandIns

NAMES = [kernel.name for kernel in KERNELS]
SWITCHES = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
half, brain, single = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(params=KERNELS, ids=NAMES)
def kernel(request, monkeypatch) -> Iterator[CudaKernel]:
    """Every call goes to the stand-in of one CUDA kernel."""
    monkeypatch.setattr(_kernel, "_device_kernels", lambda x: _kernel_cuda)
    monkeypatch.setattr(_kernel_cuda, "choose", lambda *_: request.param)
    monkeypatch.setattr(_kernel_cuda, "_torch_private", StandIns())
    yield request.param
    (forward,) = [name for name in _kernel_cuda._torch_private.calls if not name.endswith("backward")]
    assert {"flash": "flash", "cuDNN": "cudnn", "memory-efficient": "efficient"}[request.param.name] in forward


def program_of(pattern: Expression, q: Tensor, k: Tensor, given: Layout | None = None, **portions: int) -> Program:
    """The program on CUDA of these sizes."""
    H, G, N, M = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    layout = Layout(N) if given is None else given
    names = dict(zip(masks.patterns.names(pattern), run_time_tensors(pattern, None), strict=True))
    rule = pattern.resolve(names, Extent(N, M))
    plan = plan_aten(rule.bind(num_heads=H, num_queries=N, num_keys=M), layout, "cuda")
    return make_program(plan, layout, num_kv_heads=G, block_size=(128, 128), **portions)


def drawn(B: int, H: int, G: int, N: int, M: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(N)
    shapes = ((B, H, N, D), (B, G, M, D), (B, G, M, D))
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v


LADDER = ([16, 64], [1, 4])
IDS = torch.tensor([0] * 15 + [1] * 39 + [-1] * 2 + [3] * 34)
CASES = {
    "longnet": (masks.longnet(*LADDER), oracle.longnet(*LADDER)),
    "causal longnet": (masks.longnet(*LADDER) & masks.causal(), oracle.both(oracle.longnet(*LADDER), oracle.causal())),
    "twice": (masks.causal() + masks.causal(), lambda *x: 2 * oracle.causal()(*x)),
    "documents": (masks.causal() & masks.documents(IDS), oracle.both(oracle.causal(), oracle.documents(IDS))),
}


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_engine_around_the_kernels_is_the_oracle(kernel, name, rate):
    """Grouped heads, a head dim that is no multiple of 8, a tail, a layout; through the lse as well."""
    pattern, rule = CASES[name]
    q, k, v = drawn(2, 4, 2, 90, 90, 5)
    layout = Layout(90, rate)
    counts = oracle.counts(rule, range(4), 4, layout.positions(), layout.positions())
    program = program_of(pattern, q, k, layout)
    assert_agrees(lambda q, k, v: RunPlan.apply(program, q, k, v), (q, k, v), counts, scale=0.5)


@pytest.mark.parametrize(("N", "M"), [(9, 4), (4, 9), (1, 6), (6, 1)])
def test_causal_need_not_be_square(kernel, N, M):
    """Query and key 0 stand at one position; later queries see all keys."""
    q, k, v = drawn(1, 2, 1, N, M, 8)
    counts = oracle.counts(oracle.causal(), range(2), 2, torch.arange(N), torch.arange(M))
    program = program_of(masks.causal(), q, k)
    assert_agrees(lambda q, k, v: RunPlan.apply(program, q, k, v), (q, k, v), counts, scale=0.5)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-300])
@pytest.mark.parametrize("pattern", [masks.causal(), masks.every()], ids=["causal", "dense"])
def test_a_scale_need_not_be_positive(kernel, pattern, scale):
    """The kernels take a greatest score before they scale it."""
    q, k, v = (x.detach() for x in drawn(1, 2, 2, 9, 9, 8))
    allowed = torch.ones(9, 9).tril().bool() if pattern == masks.causal() else torch.ones(9, 9).bool()
    out, lse = program_of(pattern, q, k).forward(q, k, v, scale)
    truth, true_lse = oracle.attention(q, k, v, allowed.long().expand(2, -1, -1), scale)
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(lse, true_lse)


def test_a_launch_counts_only_so_many_problems(kernel, monkeypatch):
    """The batch goes in portions, which change nothing."""
    monkeypatch.setattr(_kernel_cuda, "_PROBLEMS_AT_ONCE", 7)
    monkeypatch.setattr("tests.support.cuda_kernels.MOST_PROBLEMS", 7)
    q, k, v = drawn(3, 2, 2, 40, 40, 8)
    pattern, rule = masks.longnet([8], [1]), oracle.longnet([8], [1])
    counts = oracle.counts(rule, range(2), 2, torch.arange(40), torch.arange(40))
    program = program_of(pattern, q, k, slots_at_once=12)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return RunPlan.apply(program, q, k, v)

    assert_agrees(attend, (q, k, v), counts, scale=0.5)
    # Heads stay beside the batch where tokens lie outermost, and are problems all the same.
    outermost = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    assert_agrees(attend, tuple(outermost), counts, scale=0.5)


def test_rows_begin_where_a_kernel_can_load(kernel):
    """Views that begin anywhere, and transposed ones, are copied; the stand-ins check what reaches them."""
    wide = torch.randn(3, 1, 2, 9, 11, dtype=torch.float64)
    last = torch.randn(3, 1, 2, 8, 9, dtype=torch.float64).mT
    pattern = masks.every()
    for q, k, v in (wide[..., 1:9], wide[..., 3:].mT.contiguous().mT, last):
        out, _ = program_of(pattern, q, k).forward(q, k, v, 0.3)
        truth, _ = oracle.attention(q, k, v, torch.ones(2, 9, 9, dtype=torch.long), 0.3)
        torch.testing.assert_close(out, truth)


# With rows without keys, and without any pair.
ON_META = (CASES["causal longnet"][0], masks.dilated(8, 2), masks.dilated(64, 40, 35))


@pytest.mark.parametrize("chosen", KERNELS, ids=NAMES)
@pytest.mark.parametrize("pattern", ON_META, ids=str)
def test_shapes_types_and_devices_are_those_of_the_operators(monkeypatch, chosen, pattern):
    """The whole path on meta tensors, in the types that the kernel takes: the operators themselves, but for values."""
    monkeypatch.setattr(_kernel_cuda, "choose", lambda *_: chosen)
    for dtype in chosen.dtypes:
        q = torch.empty(2, 4, 90, 63, dtype=dtype, device="meta")
        k, v = (torch.empty(2, 2, 90, 63, dtype=dtype, device="meta") for _ in range(2))
        program = program_of(pattern, q, k)
        out, lse = program.forward(q, k, v, 0.5)
        assert (out.shape, out.dtype, out.device) == (q.shape, torch.float32, q.device)
        assert (lse.shape, lse.dtype, lse.device) == (q.shape[:3], torch.float32, q.device)
        for grad_lse in (None, torch.empty_like(lse)):
            grads = program.backward(q, k, v, WholeRows(q, lse, torch.empty_like(q), grad_lse), 0.5)
            assert [(grad.shape, grad.dtype) for grad in grads] == [(x.shape, torch.float32) for x in (q, k, v)]
            assert {grad.device for grad in grads} == {q.device}


@pytest.mark.parametrize("pattern", ON_META, ids=str)
def test_results_of_few_rows_lie_on_the_device(pattern):
    q, k = torch.empty(1, 2, 3, 8, device="meta"), torch.empty(1, 2, 32, 8, device="meta")
    program = row_program_of_call(Call(pattern.text, 2, 2, 3, 32, 1, 0, 0, 2, 1, ()), None, q.device)
    found = program.forward(q, k, k, 1.0)
    found += program.backward(q, k, k, WholeRows(q, q[..., 0], q, None), 1.0)
    assert [each.device for each in found] == [q.device] * 5


@pytest.fixture
def name(monkeypatch):
    """The kernel chosen on a device of some capability, with some version of cuDNN."""

    def name(
        dtype: torch.dtype, dim: int, keys: int = 64, *, on: tuple[int, int] = (8, 0), cudnn: int | None = 91900
    ) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: on)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        return choose(dtype, dim, keys, torch.device("cuda")).name

    return name


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_which_kernel(name):
    """By type, head dim, keys and device, of those that torch's own switches leave on."""
    assert name(brain, 128) == name(half, 250) == name(half, 200) == "flash"
    assert name(half, 192, on=(8, 9)) == "flash"
    assert name(half, 193, on=(8, 9)) == name(single, 64) == name(half, 257) == "memory-efficient"
    assert name(half, 64, on=(7, 5)) == "memory-efficient"
    with pytest.raises(ValueError, match=r"torch.bfloat16 at head dim 64 with 64 keys"):
        name(brain, 64, on=(7, 5))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert name(half, 121, 2) == "cuDNN"
        with pytest.raises(ValueError, match=r"cuDNN.*sdpa_kernel.*torch.bfloat16 at head dim 129.*engine='flex'"):
            name(brain, 129)
        with pytest.raises(ValueError, match="with 1 keys"):
            name(brain, 64, 1)
        with deterministic(), pytest.raises(ValueError, match="switched on"):
            name(half, 64)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        assert name(brain, 129) == name(brain, 64, 1) == "memory-efficient"


@pytest.mark.parametrize("on", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cudnn_comes_first_from_hopper_on(name, on):
    """And flash before, then the other; where neither serves, the memory-efficient kernels do."""
    preferred, other = ("cuDNN", "flash") if on >= (9, 0) else ("flash", "cuDNN")
    assert name(half, 64, on=on) == name(brain, 128, 2, on=on) == preferred
    with sdpa_kernel([SWITCHES[NAMES.index(other)], SDPBackend.EFFICIENT_ATTENTION]):
        assert name(half, 64, on=on) == other
    assert name(half, 136, on=on) == name(half, 64, 1, on=on) == "flash"
    assert name(single, 64, on=on) == "memory-efficient"


@pytest.mark.parametrize("cudnn", [None, 91002, 91500])
def test_cudnn_is_not_preferred_in_versions_that_fail_on_some_lengths(name, cudnn):
    assert name(half, 64, on=(9, 0), cudnn=cudnn) == "flash"
    assert name(half, 64, on=(9, 0), cudnn=91501) == "cuDNN"


def test_cudnn_stays_out_where_algorithms_must_be_deterministic(name):
    with deterministic():
        assert name(half, 64, on=(9, 0)) == "flash"
    with deterministic(warn_only=True):
        assert name(half, 64, on=(9, 0)) == "cuDNN"


def test_a_kernel_is_asked_for_the_fewest_keys_it_will_see(monkeypatch):
    """A causal problem of few queries sees as few keys."""
    asked: list[int] = []

    def ask(dtype: torch.dtype, head_dim: int, num_keys: int, device: torch.device) -> CudaKernel:
        asked.append(num_keys)
        return KERNELS[0]

    monkeypatch.setattr(_kernel_cuda, "choose", ask)
    monkeypatch.setattr(_kernel_cuda, "_torch_private", StandIns())
    for queries, keys, is_causal in ((1, 6, True), (6, 1, True), (1, 6, False), (4, 4, True)):
        q, k = torch.randn(1, 1, queries, 8), torch.randn(1, 1, keys, 8)
        _kernel_cuda.forward(q, k, k, scale=1.0, is_causal=is_causal)
    assert asked == [1, 1, 6, 4]


@pytest.mark.parametrize(
    "pattern",
    [masks.local_window(left=3, right=0), masks.causal() + masks.local_window(left=3, right=0), masks.global_tokens(9)],
    ids=["window", "mixture", "global"],
)
def test_lists_of_blocks_are_refused(pattern):
    """Before any work, with the branch and the engine that serves it."""
    bound = pattern.bind(num_heads=2, num_queries=600, num_keys=600)
    with pytest.raises(ValueError, match=r"aten on cuda.* needs lists of blocks\. engine='flex' serves it"):
        plan_aten(bound, Layout(600), "cuda")


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", [None, *SWITCHES], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name != "documents"])
def test_on_a_device(name, backend, dtype):
    """The kernels themselves, with gradients through output and lse, against the oracle on the host."""
    if backend in SWITCHES[:2] and dtype == torch.float32:
        pytest.skip("flash and cuDNN have no float32 kernels")
    pattern, rule = CASES[name]
    host = tuple(x.detach().to(dtype).double().requires_grad_() for x in drawn(2, 4, 2, 300, 300, 40))
    q, k, v = (x.detach().to("cuda", dtype).requires_grad_() for x in host)
    with sdpa_kernel(list(SDPBackend.__members__.values()) if backend is None else backend):
        out, lse = fd.attend(q, k, v, pattern, engine="aten", enable_gqa=True, return_lse=True)
        grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))
    counts = oracle.counts(rule, range(4), 4, torch.arange(300), torch.arange(300))
    truth, true_lse = oracle.attention(*host, counts, None)
    true_grads = torch.autograd.grad(truth.square().sum() + true_lse.sum(), host)
    bound = 1e-3 if dtype == torch.float32 else 3e-2
    for found, exact in zip((out, lse, *grads), (truth, true_lse, *true_grads), strict=True):
        error = (found.detach().cpu().double() - exact.detach()).norm() / exact.norm()
        assert error < bound
