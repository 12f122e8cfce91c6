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
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

import flexdilated as fd
from bench._catalogue import ENTRIES
from bench._machine import conditions
from tests.interpreted.cases import Case
from tests.interpreted.emulated_cuda import H200, describe, require

RECORD = Path(__file__).resolve().parents[2] / "bench/results/flash_code.json"
PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
DEVICES = {"sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200"}
TOKENS = 1000


def cases() -> Iterator[Case]:
    """The catalogue, and what a call may bring beside its pattern."""
    for entry in ENTRIES:
        yield Case(entry.name, entry.text, 8192, max(2, entry.num_heads))
    grid = "masks.neighborhood((2, 500), kernel_size=(2, 298), stride=(1, 45), causal=(True, False))"
    line = "masks.neighborhood((1000,), kernel_size=280, rate=2, stride=31, causal=True)"
    rows, queries = (
        f"masks.selected_blocks(chosen(num_tokens, {block}, 2), block={block}, most=2) & masks.causal()"
        for block in ((128, 128), (1, 128))
    )
    documents = "masks.documents('documents') & masks.causal()"
    yield Case("a grid in groups of queries, of which one axis is causal", grid, TOKENS, 2)
    yield Case("a grid with rates, in groups of queries, causal", line, TOKENS, 2)
    yield Case("one block", "masks.causal()", 100, 2)
    yield Case("whole blocks", "masks.causal()", 1024, 2)
    yield Case("grouped heads", "masks.causal()", TOKENS, 4, 2)
    yield Case("sinks", "masks.local_window(left=300, right=0)", TOKENS, 2, has_sinks=True)
    yield Case("score_mod", "masks.causal()", TOKENS, 2, has_score_mod=True)
    yield Case("documents of a call", documents, TOKENS, 2, run_time=("documents",))
    every = {"has_score_mod": True, "has_sinks": True}
    mixture = "masks.longnet([350, 700], [1, 2]) & masks.causal()"
    yield Case("mixture, grouped, score_mod, sinks", mixture, TOKENS, 4, 2, **every)
    yield Case("selected rows", rows, TOKENS, 2)
    yield Case("selected queries", queries, TOKENS, 2)


class Compiled(list[str]):
    """The kernels that were compiled; what is called in place of FlashAttention's two functions."""

    def install(self) -> None:
        interface: Any = importlib.import_module("flash_attn.cute.interface")
        # What kernels for Blackwell ask of a device, of which there is none.
        importlib.import_module("cutlass.utils").HardwareInfo = _Hardware
        interface._flash_attn_fwd = self._instead_of(interface._flash_attn_fwd, "forward")
        interface._flash_attn_bwd = self._instead_of(interface._flash_attn_bwd, "backward")

    def _instead_of(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
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
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(_fake, x))
    return type(x)(map(_fake, x)) if isinstance(x, list | tuple) else x


def compile_case(case: Case, head_dim: int, compiled: Compiled) -> dict[str, Any]:
    """What became of a call: its kernels compiled, refused by name, or failed."""
    fd.masks.cache().clear()
    compiled.clear()
    case, begin = replace(case, head_dim=head_dim, dtype="bfloat16"), time.monotonic()
    leaves = {name: leaf.to("cuda") for name, leaf in case.leaves().items()}
    for name in leaves.keys() - {"slopes", "bias"}:  # flash takes no score_mod that learns
        leaves[name].requires_grad_()
    try:
        with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            out, lse = case.attention(engine="flash")(leaves)
            (out.float().sum() + lse.sum()).backward()
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and ("flash takes" in text or "flash has" in text):
            return {"found": "refused", "why": text}
        return {"found": "failed", "why": f"{type(error).__name__}: {text[:300]}", "before": list(compiled)}
    kernels = {what: compiled.count(what) for what in ("forward", "backward")}
    assert all(kernels.values()), kernels
    return {"found": "compiled", "kernels": kernels, "seconds": round(time.monotonic() - begin)}


def _run(arch: str, head_dim: int, chosen: list[Case], again: bool) -> int:
    """One device and head dim, in a process whose variables name the device; the number of cases that failed."""
    require(interpreted=False)
    describe(SimpleNamespace(**{**vars(H200), "name": DEVICES[arch], "major": int(arch.removeprefix("sm_")) // 10}))
    compiled, failed = Compiled(), 0
    compiled.install()
    for case in chosen:
        key = f"{arch}, head dim {head_dim}: {case.name}"
        if not again and _recorded().get(key, {}).get("found") in ("compiled", "refused"):
            continue
        found = compile_case(case, head_dim, compiled)
        failed += found["found"] == "failed"
        print(f"{key}: {found}", flush=True)
        _record(key, found)
    return failed


def _recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))["cases"] if RECORD.exists() else {}


def _record(key: str, found: dict[str, Any]) -> None:
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
    return min(1, sum(_run(arch, dim, chosen, given.again) for dim in dims))


if __name__ == "__main__":
    sys.exit(main())
