"""`make test-flash`: FlashAttention's kernels of engine "flash" compiled for devices that are not there, not run.

It needs torch built for CUDA, 2.14 or later, and flash-attn-4 with its packages. Calls are lowered on the emulated
device; FlashAttention is called with fake tensors, for which its compiler makes the kernels all the same. What is
found is recorded at once, case by case; cases of the record are left out the next time, unless they failed or --again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORD = Path(__file__).resolve().parents[2] / "bench/results/flash_code.json"
PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
DEVICES = {"sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200"}
TOKENS = 1000


@dataclass(frozen=True)
class Case:
    """A call: its pattern, as an expression, and what comes beside it. Run-time tensors are those that it names."""

    name: str
    text: str
    heads: int = 2
    kv_heads: int = 2
    tokens: int = TOKENS
    has_sinks: bool = False
    has_score_mod: bool = False
    bindings: dict[str, Callable[[int], Any]] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    """The catalogue, and what a call may bring beside its pattern."""
    from bench._catalogue import ENTRIES

    for entry in ENTRIES:
        heads = max(2, entry.num_heads)
        yield Case(entry.name, entry.text, heads, heads, tokens=8192)
    grid = "masks.neighborhood((2, 500), kernel_size=(2, 298), stride=(1, 45), causal=(True, False))"
    yield Case("a grid in groups of queries, of which one axis is causal", grid)
    grid = "masks.neighborhood((1000,), kernel_size=280, rate=2, stride=31, causal=True)"
    yield Case("a grid with rates, in groups of queries, causal", grid)
    documents = {"documents": lambda tokens: _documents(tokens)}
    window = "masks.local_window(left=300, right=0)"
    yield Case("one block", "masks.causal()", tokens=100)
    yield Case("whole blocks", "masks.causal()", tokens=1024)
    yield Case("grouped heads", "masks.causal()", heads=4)
    yield Case("sinks", window, has_sinks=True)
    yield Case("score_mod", "masks.causal()", has_score_mod=True)
    yield Case("documents of a call", "masks.documents('documents') & masks.causal()", bindings=documents)
    yield Case(
        "mixture, grouped, score_mod, sinks",
        "masks.longnet([350, 700], [1, 2]) & masks.causal()",
        heads=4,
        has_score_mod=True,
        has_sinks=True,
    )
    yield Case("selected rows", _selected("(128, 128)"), bindings={"chosen": lambda n: _chosen(n, (128, 128))})
    yield Case("selected queries", _selected("(1, 128)"), bindings={"chosen": lambda n: _chosen(n, (1, 128))})


def _selected(block: str) -> str:
    return f"masks.selected_blocks('chosen', block={block}, most=2) & masks.causal()"


def _documents(tokens: int) -> Any:
    import torch

    return torch.arange(tokens) // 300


def _chosen(tokens: int, block: tuple[int, int]) -> Any:
    import torch

    rows = torch.arange(-(-tokens // block[0])) * block[0] // block[1]
    return torch.stack([rows, torch.where(rows > 0, rows - 1, -1)], -1)[None]


class Compiled(list[str]):
    """The kernels that were compiled; what is called in place of FlashAttention's two functions."""

    def install(self) -> None:
        interface: Any = importlib.import_module("flash_attn.cute.interface")
        # What kernels for Blackwell ask of a device, of which there is none.
        importlib.import_module("cutlass.utils").HardwareInfo = _Hardware
        interface._flash_attn_fwd = self._instead_of(interface._flash_attn_fwd, "forward")
        interface._flash_attn_bwd = self._instead_of(interface._flash_attn_bwd, "backward")

    def _instead_of(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        @functools.wraps(function)
        def call(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
            assert options["mask_mod"] is not None, "block lists are ignored where every pair is allowed"
            assert options["block_sparse_tensors"] is not None
            with FakeTensorMode():
                function(*(_fake(x) for x in (q, k, v, *rest)), **{name: _fake(x) for name, x in options.items()})
            self.append(what)
            return None if what == "forward" else tuple(torch.empty_like(x) for x in (q, k, v))

        return call


class _Hardware:
    """A B200's numbers of multiprocessors and of clusters at once."""

    def get_device_multiprocessor_count(self) -> int:
        return 148

    def get_max_active_clusters(self, cluster_size: int) -> int:
        return 148 // cluster_size


def _fake(x: Any) -> Any:
    import torch

    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(_fake, x))
    return type(x)(map(_fake, x)) if isinstance(x, list | tuple) else x


def compile_case(case: Case, head_dim: int, compiled: Compiled) -> dict[str, Any]:
    """What became of a call: its kernels compiled, refused by name, or failed."""
    import torch
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    import flexdilated as fd
    from bench._catalogue import names_for

    torch.compiler.reset()
    fd.masks.cache().clear()
    compiled.clear()

    def tensor(heads: int) -> Any:
        x = torch.zeros(1, heads, case.tokens, head_dim, dtype=torch.bfloat16)
        return x.to("cuda").requires_grad_()

    q, k, v = (tensor(heads) for heads in (case.heads, case.kv_heads, case.kv_heads))
    options: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads}
    slopes, begin = torch.zeros(case.heads).to("cuda"), time.monotonic()
    if case.has_score_mod:
        options["score_mod"] = lambda score, b, h, q_idx, k_idx: score + slopes[h] * (q_idx - k_idx)
    if case.has_sinks:
        options["sinks"] = torch.zeros(case.heads).to("cuda").requires_grad_()
    options["bindings"] = {name: make(case.tokens).to("cuda") for name, make in case.bindings.items()}
    pattern = eval(case.text, names_for(case.tokens))  # an expression of this file or of the catalogue
    try:
        with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            out, lse = fd.attend(q, k, v, pattern, engine="flash", return_lse=True, **options)
            (out.float().sum() + lse.sum()).backward()
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and ("flash takes" in text or "flash has" in text):
            return {"found": "refused", "why": text}
        return {"found": "failed", "why": f"{type(error).__name__}: {text[:300]}", "before": list(compiled)}
    kernels = {what: compiled.count(what) for what in ("forward", "backward")}
    assert all(kernels.values()), kernels
    return {"found": "compiled", "kernels": kernels, "seconds": round(time.monotonic() - begin)}


def _run(arch: str, head_dim: int, chosen: list[Case], again: bool, lower: bool) -> int:
    """One device and head dim, in a process whose variables name the device; the number of cases that failed."""
    from tests.interpreted.emulated_cuda import H200, describe, require

    require(interpreted=False)
    describe(SimpleNamespace(**{**vars(H200), "name": DEVICES[arch], "major": int(arch.removeprefix("sm_")) // 10}))
    compiled, failed = Compiled(), 0
    compiled.install()
    if lower:
        _lower_only()
    for case in chosen:
        key = f"{arch}, head dim {head_dim}: {case.name}"
        if not again and _recorded().get(key, {}).get("found") in ("compiled", "refused"):
            continue
        found = compile_case(case, head_dim, compiled)
        failed += found["found"] == "failed"
        print(f"{key}: {found}", flush=True)
        if not lower:
            _record(key, found)
    return failed


def _lower_only() -> None:
    """Leave FlashAttention's functions out: torch's part alone, in seconds."""
    interface: Any = importlib.import_module("flash_attn.cute.interface")
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        instead = getattr(interface, name)
        cell = next(each for each in instead.__closure__ if each.cell_contents is instead.__wrapped__)
        cell.cell_contents = lambda *_, **__: None


def _recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))["cases"] if RECORD.exists() else {}


def _record(key: str, found: dict[str, Any]) -> None:
    from importlib import metadata

    from bench._machine import conditions

    measured = conditions()
    measured["versions"] |= {name: metadata.version(name) for name in PACKAGES}
    cases = _recorded() | {key: {**found, "commit": (measured["commit"] or "")[:10]}}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(cases.items()))
    head = json.dumps({"name": "flash_code", "small": False, **measured}, indent=1).removesuffix("\n}")
    RECORD.write_text(f'{head},\n "cases": {{\n{lines}\n }}\n}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="names of cases; all where none is given")
    parser.add_argument("--device", action="append", choices=DEVICES, help="all where none is given")
    parser.add_argument("--head-dim", action="append", type=int, help="64 and 128 where none is given")
    parser.add_argument("--again", action="store_true", help="also what is recorded")
    parser.add_argument("--lower", action="store_true", help="compile no kernel, record nothing: torch's part alone")
    given = parser.parse_args()
    if importlib.util.find_spec("flash_attn") is None:
        print("flash-attn-4 is not installed: nothing is compiled")
        return 0
    arch = os.environ.get("FLASH_ATTENTION_ARCH")
    if arch is None:  # a process for each device
        failed = 0
        for arch in given.device or DEVICES:
            device = {"FLASH_ATTENTION_ARCH": arch, "CUTE_DSL_ARCH": f"{arch}a", "FLASH_ATTENTION_NUM_SMS": "132"}
            own = {**os.environ, **device, "TRITON_INTERPRET": "0"}
            failed += subprocess.run(
                [sys.executable, "-m", "tests.interpreted.flash_code", *sys.argv[1:]], env=own
            ).returncode
        return min(failed, 1)
    chosen = [case for case in cases() if not given.cases or case.name in given.cases]
    dims = given.head_dim or (64, 128)
    return min(1, sum(_run(arch, dim, chosen, given.again, given.lower) for dim in dims))


if __name__ == "__main__":
    sys.exit(main())
