"""A "cuda" device without a GPU: the memory is the host's, the kernels that Inductor makes for it are real.

It needs Triton; torch may be a build for CPUs or for CUDA. In a process that has it, tensors can be on "cuda": torch's
own operators copy them to the CPU and back, and torch.compile lowers for an H200. Triton's kernels run in Triton's
interpreter where TRITON_INTERPRET=1 was set before Triton was imported; otherwise they are made and not run. `CALLED`
holds them.
Nothing of the library is replaced. What is replaced of torch is private: the versions are pinned in constraints.txt.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import device_interface
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties

CODE = Path(__file__).with_suffix(".cpp")
BUILDS = Path(__file__).resolve().parents[2] / "build" / "emulated_cuda"

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    gcnArchName="",
    is_integrated=0,
    multi_processor_count=132,
    total_memory=150_000_000_000,
    warp_size=32,
    L2_cache_size=62_914_560,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65_536,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
)


def _unlike_h200(name: str, major: int, sms: int, gigabytes: int, l2_mib: int, shared: int) -> SimpleNamespace:
    """Another NVIDIA device; shared: bytes of shared memory that a block may have."""
    other = {"name": f"NVIDIA {name}", "major": major, "multi_processor_count": sms, "L2_cache_size": l2_mib << 20}
    other |= {"total_memory": gigabytes * 10**9, "shared_memory_per_block_optin": shared}
    return SimpleNamespace(**{**vars(H200), **other, "shared_memory_per_multiprocessor": shared + 1024})


A100 = _unlike_h200("A100", 8, 108, 80, 40, 166_912)
B200 = _unlike_h200("B200", 10, 148, 180, 126, 232_448)
RTX_5090 = _unlike_h200("GeForce RTX 5090", 12, 170, 32, 96, 101_376)

_ANSWERS: dict[str, Any] = {
    "_exchange_device": 0,
    "_lazy_init": None,
    "_maybe_exchange_device": 0,
    "current_device": 0,
    "device_count": 1,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "is_available": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "is_initialized": True,
    "set_device": None,
    "set_rng_state": None,
    "synchronize": None,
}

# Who is shown each buffer that a compiled program makes.
WATCHERS: list[Callable[[torch.Tensor], None]] = []

# The kernels that were called, in order, since someone cleared the list.
CALLED: list[triton_heuristics.CachingAutotuner] = []


def require(*, interpreted: bool) -> None:
    """Install the device, once, where kernels are to be interpreted or just made; or skip the module and say why."""
    compiler = os.environ.get("CXX", "g++")
    why = {
        "runs in a process of its own: make test-kernels": os.environ.get("TRITON_INTERPRET") != str(int(interpreted)),
        "Triton is not installed": importlib.util.find_spec("triton") is None,
        "there is a CUDA device": torch.cuda.is_available() and not _installed,
        f"no C++ compiler {compiler}": shutil.which(compiler) is None,
    }
    for reason, applies in why.items():
        if applies:
            pytest.skip(reason, allow_module_level=True)
    if not _installed:
        _install()


_installed: list[ctypes.CDLL] = []


def host_reads() -> int:
    """How often something that lies on the device was read by the host so far."""
    return _installed[0].host_reads()


def is_template(kernel: triton_heuristics.CachingAutotuner) -> bool:
    """Whether it is one of FlexAttention's; the name also holds what was fused with it."""
    return kernel.fn.__name__.startswith("triton_tem_fused") and "flex_attention" in kernel.fn.__name__


def describe(device: SimpleNamespace) -> None:
    """Which device it is to be from now on."""
    _answer("get_device_capability", (device.major, device.minor))
    _answer("get_device_name", device.name)
    _answer("get_device_properties", device)
    device_interface.caching_worker_device_properties.pop("cuda", None)
    DeviceProperties.create.cache_clear()
    triton("runtime").driver.set_active(_driver(device))


def _install() -> None:
    _installed.append(ctypes.CDLL(str(_built())))
    _installed[0].install_device()
    for name, answer in _ANSWERS.items():
        _answer(name, answer)
    describe(H200)
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch._C._dynamo.guards._empty_strided_cuda = _empty_strided
    triton_helpers.set_driver_to_gpu = lambda: None
    run, interpreted = triton_heuristics.CachingAutotuner.run, os.environ.get("TRITON_INTERPRET") == "1"

    def noted(self, *args, **kwargs):
        CALLED.append(self)
        return run(self, *args, **kwargs) if interpreted else None

    triton_heuristics.CachingAutotuner.run = noted
    if interpreted:
        triton_helpers.libdevice = _Libdevice()  # type: ignore[reportPrivateImportUsage]
        _quicken()
    else:
        triton_heuristics.CachingAutotuner.precompile = lambda self, *args, **kwargs: None
    # One thread: a graph's backward is then called where its forward was, and shows up in profiles.
    torch.autograd.set_multithreading_enabled(False)


def _built() -> Path:
    """The device's operators, built once for each version of torch and of the code."""
    version = f"{torch.__version__} {CODE.read_text(encoding='utf-8')}"
    library = BUILDS / f"{sha256(version.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        root, made = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
        include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
        options = ["-O1", "-fPIC", "-shared", "-std=c++20", *include, f"-L{root}/lib"]
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *options, str(CODE), "-lc10", "-ltorch_cpu", "-ltorch", "-o", str(made)], check=True)
        made.replace(library)  # another process may have built it meanwhile
    return library


def _answer(name: str, answer: Any) -> None:
    def give(*args: Any, **kwargs: Any) -> Any:
        return answer

    setattr(torch.cuda, name, give)
    if name in vars(device_interface.CudaInterface):
        setattr(device_interface.CudaInterface, name, staticmethod(give))


def _quicken() -> None:
    """Without checks that compiled code has none of, or patches of what is patched; rows of reductions side by side."""
    interpreter, language = triton("runtime.interpreter"), triton("language")
    builder, patch_language = interpreter.interpreter_builder, interpreter._patch_lang
    builder.options = replace(builder.options, sanitize_overflow=False)
    every_module = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    patched = []

    def patch_once(fn: Any) -> Any:
        """At a kernel's call, for all functions that it calls."""
        if patched:
            return None
        patched.append(patch_language(every_module))
        return SimpleNamespace(restore=lambda: patched.pop().restore())

    interpreter._patch_lang = patch_once
    autotuned = triton_heuristics.cached_autotune

    def autotuned_in_rows(size_hints: Any, configs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """A GPU has a program for each row, or for a few."""
        for blocks in (config.kwargs for config in configs if size_hints):
            if "XBLOCK" in blocks and "RSPLIT_SIZE" not in blocks:
                blocks["XBLOCK"] = max(blocks["XBLOCK"], min(size_hints["x"], 4096))
        return autotuned(size_hints, configs, *args, **kwargs)

    triton_heuristics.cached_autotune = autotuned_in_rows


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype, device="cuda")
    for watch in WATCHERS:
        watch(made)
    return made


def triton(module: str) -> Any:
    """A module of Triton, by a name that type checkers do not look for."""
    return importlib.import_module(f"triton.{module}")


def _driver(device: SimpleNamespace) -> Any:
    """What Triton asks of a device."""
    target = triton("backends.compiler").GPUTarget("cuda", 10 * device.major + device.minor, device.warp_size)
    sizes = {
        "max_shared_mem": device.shared_memory_per_block_optin,
        "multiprocessor_count": device.multi_processor_count,
    }
    return SimpleNamespace(
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_current_target=lambda: target,
        is_active=lambda: True,
        utils=SimpleNamespace(get_device_properties=lambda device: sizes),
    )


class _Libdevice:
    """CUDA's mathematical functions, by NumPy's of the same name: the interpreter has none of them."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(importlib.import_module("numpy"), name)
        language, handle = triton("language"), triton("runtime.interpreter").TensorHandle

        def computed(*operands: Any) -> Any:
            found = function(*(x.handle.data for x in operands))
            return language.tensor(handle(found, operands[0].dtype.scalar), operands[0].type)

        return computed
