"""The ways in which the library's attention, and dense attention beside it, can be computed on a device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import flexdilated as fd
from flexdilated import masks
from flexdilated.cli._flash import is_flash_backend_importable
from flexdilated.engines._call_key import CallKey
from flexdilated.engines.flex._flex import run_flex
from flexdilated.engines.flex._flex_program import static_program

from .._longnets import LongNet
from .._problem import Attention
from ..peer_dense import dense_attention
from ._where import Where

Expression = masks.Pattern | masks.Mixture

_NO_FLASH = "flash_attn.cute (FlashAttention 4) is not importable"


@dataclass(frozen=True)
class Way:
    """An engine of the library and, for `flex`, the kernels behind FlexAttention; why not, if it cannot run here."""

    name: str
    engine: str | None
    backend: str | None = None
    missing: str | None = None

    def attention(self, pattern: Expression) -> Attention:
        """(q, k, v) -> out."""
        if self.backend is None:
            return lambda q, k, v: fd.attend(q, k, v, pattern, engine=self.engine)
        return lambda q, k, v: attend_on(self.backend, q, k, v, pattern)[0]


def ways(where: Where) -> tuple[Way, ...]:
    """Every way to train, the default first."""
    if not where.is_cuda:
        return (Way("tiles on CPU", "tiles"),)
    flash = Way("FLASH", "flex", "FLASH", None if is_flash_backend_importable() else _NO_FLASH)
    return (Way("Triton", "flex"), flash, *_tiles(where))


def inference(where: Where) -> Way:
    """FlexAttention, which on CPU serves set patterns, without gradients."""
    return Way("Triton" if where.is_cuda else "FlexAttention on CPU", "flex")


def attend_on(
    backend: str | None, q: Tensor, k: Tensor, v: Tensor, pattern: Expression, *, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(out, lse if asked for) of `attend`'s flex engine, with other kernels behind FlexAttention."""
    heads, kv_heads = q.shape[1], k.shape[1]
    key = CallKey(pattern.text, heads, kv_heads, q.shape[2], k.shape[2], 0, 0, 0, heads, 1, ())
    program = static_program(key, q.device)
    options = {"kernel_options": {"BACKEND": backend}}
    steps = tuple(replace(step, call=partial(step.call, **options)) for step in program.steps)
    scale = q.shape[-1] ** -0.5
    return run_flex(replace(program, steps=steps), q, k, v, scale=scale, return_lse=return_lse, direct=False)


def dense_flex(spec: LongNet, way: Way, where: Where, *, training: bool) -> tuple[str, Attention]:
    """Dense attention on the kernels of a way, by its name; `spec` is dense, causal or full."""
    if not where.is_cuda and training:
        # FlexAttention has no backward on CPU.
        return "dense SDPA", dense_attention(causal=spec.causal)
    if way.engine == "tiles" and where.is_cuda:
        return "dense flash SDPA", sdpa("FLASH_ATTENTION", causal=spec.causal)
    return "dense FlexAttention", natural(masks.causal() if spec.causal else None, way.backend)


def natural(pattern: Expression | None, backend: str | None = None) -> Attention:
    """Compiled FlexAttention in the order of the tokens, with the pattern's block mask or without any."""
    options = {} if backend is None else {"kernel_options": {"BACKEND": backend}}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = _compiled()(q, k, v, block_mask=_block_mask(pattern, q, k), **options)
        assert isinstance(out, Tensor)
        return out

    return attend


def sdpa(kernel: str, *, causal: bool) -> Attention:
    """PyTorch's dense attention on one of its kernels alone: a name of SDPBackend."""
    only = getattr(torch.nn.attention.SDPBackend, kernel)
    dense = dense_attention(causal=causal)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(only):
            return dense(q, k, v)

    return attend


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _block_mask(pattern: Expression | None, q: Tensor, k: Tensor):
    if pattern is None:
        return None
    return masks.block_mask(pattern, q.shape[2], k.shape[2], num_heads=q.shape[1], device=q.device)


def _tiles(where: Where) -> tuple[Way, ...]:
    """ATen's own flash kernels, if the library runs them on this device."""
    tiny = torch.zeros(1, 1, 128, 64, dtype=where.dtype, device=where.device)
    try:
        fd.attend(tiny, tiny, tiny, masks.chunked(64), engine="tiles")
    except ValueError:
        return ()
    return (Way("tiles", "tiles"),)
