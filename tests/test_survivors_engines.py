"""Changes of the engines' code that every other test let pass: each is seen by one here (docs/planted_bugs.md)."""

import pytest
import torch

import flexdilated as fd
from flexdilated import _kernel_cuda, _tiles, masks
from flexdilated._placed_call import PlacedCall, WholeRows
from flexdilated.masks._placement import Placement


def test_a_cache_of_fixed_capacity_keeps_its_size() -> None:
    """After a large chunk of which little stays visible, too."""
    tokens = torch.randn(3, 1, 2, 900, 8)
    kept = fd.KVCache(masks.local_window(left=3, right=0), num_heads=2, capacity=1000)
    kept.attend(*(x[:, :, :600] for x in tokens))
    assert kept.nbytes == 2 * 2 * 1000 * 8 * 4
    kept.attend(*(x[:, :, 600:] for x in tokens))
    assert kept.nbytes == 2 * 2 * 1000 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_half_precision_are_added_up_in_float32(dtype) -> None:
    """Over 512 queries, dk and dv are off by little more than one rounding; added up in `dtype` by twice that."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 512, 32, generator=generator).to(dtype) for _ in range(4))
    halves, wide = ([x.to(kind).requires_grad_() for x in (q, k, v)] for kind in (dtype, torch.float64))
    out = fd.attend(*halves, masks.causal(), engine="tiles")
    truth = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    found, expected = torch.autograd.grad(out, halves, grad), torch.autograd.grad(truth, wide, grad.double())
    for name, part, right in zip(("dq", "dk", "dv"), found, expected, strict=True):
        error = float((part.double() - right).norm() / right.norm())
        assert error < 0.4 * torch.finfo(dtype).eps, f"{name} is off by {error:.2e}"


def test_rows_that_a_device_can_load_are_not_copied() -> None:
    """It loads 16 bytes at once: rows of 8 numbers that begin at multiples of that, and no others."""
    x = torch.randn(100)
    assert _kernel_cuda._loadable(rows := x[:96].view(4, 3, 8)) is rows
    for begin, loaded in ((1, False), (2, False), (4, True)):
        rows = x[begin : begin + 96].view(4, 3, 8)
        found = _kernel_cuda._loadable(rows)
        assert (found is rows) == loaded
        assert torch.equal(found, rows)


def test_where_nobody_sees_anything_all_gradients_are_zero() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 4, 8))
    out, lse = fd.attend(q, k, v, masks.dilated(8, 6, offset=5), return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (grad == 0).all()


def test_a_kernel_serves_all_that_it_can_be_padded_to() -> None:
    options = {"dtypes": (torch.float16,), "least_keys": 2, "most_dim": lambda capability: 128, "switch": lambda: True}
    kernel = _kernel_cuda.Kernel("none", forward=print, backward=print, **options)
    served = [dim for dim in range(1, 140) if kernel.serves(torch.float16, dim, 2, (9, 0))]
    assert served == list(range(1, 129))
    assert not kernel.serves(torch.float16, 64, 1, (9, 0))
    assert not kernel.serves(torch.float32, 64, 2, (9, 0))


def test_dropout_is_refused() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(ValueError, match="dropout_p"):
        fd.attend(q, k, v, masks.causal(), dropout_p=0.1)


def test_gradients_of_a_part_of_the_keys_come_as_they_are_summed() -> None:
    """In float32 for tokens in bfloat16: those of the other parts are to be added."""
    q, k, v, grad = torch.randn(4, 1, 2, 4, 8).bfloat16()
    call = PlacedCall(masks.causal().text, Placement((range(4),), ((range(4),),), complete=True), 0.5, 0, 2, "tiles")
    out, lse = call.forward(q, k, v, None, [])
    assert lse is not None
    assert {x.dtype for x in call.backward(q, k, v, [], WholeRows(out, lse, grad, None))} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_of_one_and_of_several_parts_have_the_dtype_of_q(dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8).to(dtype)
    for pattern in (masks.causal(), masks.longnet([8, 16], [1, 2]), masks.dilated(8, 6, offset=5)):
        out, lse = fd.attend(q, k, v, pattern, engine="tiles", return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_sums_over_parts_are_kept_in_float32() -> None:
    """Room that several parts fill is as wide as the room that the first of them takes."""
    x = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    for out, lse in (_tiles._empty(x), _tiles._nothing(x)):
        assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
        assert (out.shape, lse.shape) == (x.shape, x.shape[:3])
