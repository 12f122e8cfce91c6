"""The flex engine's kernels as machine code for devices that are not here: they fit, and spill no more than before."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

import flexdilated as fd
from bench._catalogue import ENTRIES, Entry
from tests.interpreted.conftest import recorded
from tests.interpreted.emulated_cuda import A100, B200, CALLED, H200, RTX_5090, describe, is_template, require, triton

require(interpreted=False)
_gathered_keys = import_module("flexdilated.engines.kernels._gathered_keys")  # needs Triton


NAME = "kernel_code"
QUICK = ("H200", "causal", 128)


def _cases() -> list:
    found = []
    for device, head_dims in ((H200, (64, 128)), (A100, (128,)), (B200, (64, 128)), (RTX_5090, (128,))):
        for entry in ENTRIES:
            for head_dim in head_dims:
                key = (device.name.split()[-1], entry.name, head_dim)
                marks = () if key == QUICK else pytest.mark.thorough
                found.append(pytest.param(device, entry, head_dim, marks=marks, id="-".join(map(str, key))))
    return found


@pytest.mark.parametrize(("device", "entry", "head_dim"), _cases())
def test_kernels_compile_and_fit(device: SimpleNamespace, entry: Entry, head_dim: int, request, record_property):
    describe(device)
    key = f"sm_{device.major}{device.minor}, {entry.name}, {head_dim}"
    before = recorded(NAME).get(key, {})
    assert before or request.config.getoption("--all"), "recorded by make test-kernels ARGS=--all"
    found = code_of(entry, head_dim)
    for way, code in found.items():
        assert code.shared <= device.shared_memory_per_block_optin
        assert not before or code.spill_stores <= before[way]["spill_stores"], f"{way}: more spills than recorded"
    record_property(f"{NAME}: {key}", {way: code.to_data() for way, code in found.items()})


TOKENS, HEADS = 8192, 2


@dataclass(frozen=True)
class Code:
    """What a kernel takes: bytes spilled to memory and read back, and bytes of shared memory."""

    spill_stores: int
    spill_loads: int
    shared: int

    def to_data(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def worst(cls, found: Iterable[Code]) -> Code:
        """The most of each among some kernels."""
        parts = zip(*((each.spill_stores, each.spill_loads, each.shared) for each in found), strict=True)
        return cls(*map(max, parts))


def code_of(entry: Entry, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Code]:
    """The worst of a pattern's forward and of its backward kernels, on the device as described."""
    CALLED.clear()
    torch.compiler.reset()
    fd.masks.cache().clear()
    shape = (1, max(HEADS, entry.num_heads), TOKENS, head_dim)
    q, k, v = (torch.zeros(shape, dtype=dtype).to("cuda").requires_grad_() for _ in range(3))
    # What is kept on disk may have been made for another device: its name there is that of this one.
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        out = fd.attend(q, k, v, entry.pattern(TOKENS))
        out.backward(torch.zeros_like(out))
    kernels = [kernel for kernel in CALLED if is_template(kernel)]
    backward = [kernel for kernel in kernels if "backward" in kernel.fn.__name__]
    forward = [kernel for kernel in kernels if "backward" not in kernel.fn.__name__]
    assert forward
    assert backward
    return {
        name: Code.worst(_compiled(kernel) for kernel in some)
        for name, some in (("forward", forward), ("backward", backward))
    }


def _compiled(kernel: Any) -> Code:
    (config,) = kernel.configs
    meta = kernel._create_compile_meta(config)
    known = (kernel.fn.cache_key, str(meta), str(config))
    if known not in _CODE:
        _CODE[known] = _compile(kernel, config, meta)
    return _CODE[known]


_CODE: dict[tuple[str, ...], Code] = {}


def _compile(kernel: Any, config: Any, meta: dict[str, Any]) -> Code:
    """By Triton's compiler and the assembler that comes with it, whose log has the spills."""
    source = triton("compiler").ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    target = triton("backends.compiler").GPUTarget("cuda", meta["cc"], 32)
    options = kernel._create_compile_options(config, meta)
    return _logged(lambda: triton("compiler").compile(source, target=target, options=options))


def _logged(compile_kernel: Callable[[], Any]) -> Code:
    knobs = triton("knobs")
    with redirect_stdout(io.StringIO()) as log, knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        binary = compile_kernel()
    (spills,) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    return Code(*map(int, spills), binary.metadata.shared)


LISTED = "listed_keys_code"
SIZES = [
    (1, 8, 64, 64, torch.bfloat16),
    (8, 8, 128, 128, torch.bfloat16),
    (64, 1, 128, 128, torch.float16),
    (128, 1, 576, 512, torch.bfloat16),
    (1, 16, 192, 128, torch.bfloat16),
    (4, 1, 32, 32, torch.float32),
    (4, 1, 128, 128, torch.float32),
]


def _listed_cases() -> list:
    found = []
    for device in (H200, A100, B200, RTX_5090):
        for sizes in SIZES:
            marks = () if device is H200 and sizes in SIZES[:2] else pytest.mark.thorough
            found.append(pytest.param(device, *sizes, marks=marks, id=f"{device.name.split()[-1]}-{sizes}"))
    return found


@pytest.mark.parametrize(("device", "group", "groups", "dim", "v_dim", "dtype"), _listed_cases())
def test_kernels_of_single_keys_compile_and_fit(
    device: SimpleNamespace, group, groups, dim, v_dim, dtype, request, record_property, monkeypatch
) -> None:
    describe(device)
    _gathered_keys._shared_bytes.cache_clear()
    key = f"sm_{device.major}{device.minor}, {group} heads over one in {str(dtype).removeprefix('torch.')}, {dim}"
    before = recorded(LISTED).get(key, {})
    assert before or request.config.getoption("--all"), "recorded by make test-kernels ARGS=--all"
    found: dict[str, Code] = {}
    for way in ("forward", "backward"):
        monkeypatch.setattr(_gathered_keys, f"_{way}", _Compiled(getattr(_gathered_keys, f"_{way}"), way, found))
    shapes = (1, group * groups, 64, dim), (1, groups, 256, dim), (1, groups, 256, v_dim)
    q, k, v = (torch.zeros(shape, dtype=dtype).to("cuda").requires_grad_() for shape in shapes)
    table = torch.zeros(1, 1, 64, 64, dtype=torch.int64).to("cuda")
    pattern = fd.masks.selected_keys("table", most=64)
    out = fd.attend(q, k, v, pattern, bindings={"table": table}, q_offset=192, enable_gqa=True)
    out.backward(torch.zeros_like(out))
    assert len(found) == 2
    for way, code in found.items():
        assert code.shared <= device.shared_memory_per_block_optin
        assert not before or code.spill_stores <= before[way]["spill_stores"], f"{way}: more spills than recorded"
    record_property(f"{LISTED}: {key}", {way: code.to_data() for way, code in found.items()})


@dataclass(frozen=True)
class _Compiled:
    """A kernel that is compiled where it would be launched; `found` has its code."""

    kernel: Any
    way: str
    found: dict[str, Code]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **sizes: Any) -> None:
            self.kernel.device_caches.clear()  # of another device
            self.found[self.way] = _logged(lambda: self.kernel.warmup(*arguments, grid=grid, **sizes))

        return launch
