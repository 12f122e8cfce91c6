"""The doctor: what works on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

import torch
from jaxtyping import Float
from tabulate import tabulate
from torch import Tensor

from .. import masks
from ..engines.flex._flex import missing_compiler
from ..masks.plan_cache._cache_limits import (
    BYTES_VARIABLE,
    ENTRIES_VARIABLE,
    bytes_from_environment,
    entries_from_environment,
)
from ..masks.planning.machine._machine_in_use import VARIABLE as MACHINE_VARIABLE
from ..masks.planning.machine._machine_in_use import machine_from_environment
from ..nn import DilatedAttention
from ..observe._compilations import compilations
from ..observe._profile import VARIABLE as PROFILE_VARIABLE
from ..observe._profile import folder_from_environment
from . import _machine
from ._flash import active_implementation, is_flash_backend_importable, other_implementations
from ._machine import available_devices

Finding = tuple[str, str]

_OLDEST_TORCH, _NEWEST_TRIED_TORCH = "2.11", "2.15"
_PREFIX = "FLEXDILATED_"
# Every variable that the library reads, and what reads it: a ValueError says that it does not parse.
_VARIABLES = {
    BYTES_VARIABLE: bytes_from_environment,
    ENTRIES_VARIABLE: entries_from_environment,
    MACHINE_VARIABLE: machine_from_environment,
    PROFILE_VARIABLE: folder_from_environment,
}
# A float32 result this far from the float64 one is wrong, not rounded.
_LARGEST_ERROR = 1e-4


def doctor() -> int:
    """Print what was found; 0 where attention runs on a device of this machine, 1 where it runs on none."""
    findings = [*_versions(), *_compiler(), *_engines(), *_flash(), *_extra_packages()]
    variables, parse = _variables()
    trials = {device: _trial(device) for device in available_devices()} if parse else {}
    findings += variables
    findings += [(f"attention on {device}", failure or "works") for device, failure in trials.items()]
    if parse:
        findings += [("torch.compile", _compiled_trial() or "works, traced in one graph"), _cache(), _compilations()]
        findings.append(("plans on the CPU", f"by constants {masks.machine().source}"))
    works = None in trials.values()
    print(tabulate(findings, tablefmt="plain", disable_numparse=True))
    print("\nAttention works on this machine." if works else "\nAttention does not work on this machine.")
    return 0 if works else 1


def _versions() -> list[Finding]:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    oldest, newest = (tuple(map(int, text.split("."))) for text in (_OLDEST_TORCH, _NEWEST_TRIED_TORCH))
    if (major, minor) < oldest:
        support = f"too old: {_OLDEST_TORCH} or newer is needed"
    elif (major, minor) > newest:
        support = f"newer than {_NEWEST_TRIED_TORCH}, the newest tried"
    else:
        support = "supported"
    return [
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__}, {support}"),
        ("devices", f"{', '.join(available_devices())}; {torch.get_num_threads()} CPU threads"),
    ]


def _compiler() -> list[Finding]:
    missing = missing_compiler()
    if missing is None:
        return [("C++ compiler", "found: engine 'flex' and torch.compile can build for the CPU")]
    return [
        (
            "C++ compiler",
            f"{missing}: engine 'flex' and torch.compile do not work on the CPU, engine 'tiles' needs none. "
            "Install g++ or clang++, or name one in CXX",
        )
    ]


def _engines() -> list[Finding]:
    flex = "" if missing_compiler() else ", flex (by name; inference, one set pattern)"
    findings = [("engines on cpu", f"tiles (default){flex}, reference (dense)")]
    findings += [
        (f"engines on {device}", "flex (default), reference (dense)")
        for device in available_devices()
        if device != "cpu"
    ]
    return findings


def _flash() -> list[Finding]:
    """What is active is named, never changed: it holds for the whole process."""
    active, others = active_implementation(), ", ".join(other_implementations())
    known = f"; torch.nn.attention.activate_flash_attention_impl knows {others}" if others else ""
    importable = "flash_attn.cute is importable" if is_flash_backend_importable() else "no flash_attn.cute"
    return [
        ("flash attention on cuda", f"{active} is active{known}"),
        ("FLASH backend of flex", f"{importable}; it serves CUDA only, where kernel_options ask for it"),
    ]


def _extra_packages() -> list[Finding]:
    return [
        (package, "found" if _machine.find(package) else _machine.missing_line(package)) for package in _machine.EXTRAS
    ]


def _variables() -> tuple[list[Finding], bool]:
    """What the environment sets, and whether all that the library reads can be read."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIX))
    findings, all_parse = [], True
    for name in names:
        try:
            verdict = f"is read as {_VARIABLES[name]()}" if name in _VARIABLES else "is unknown, and has no effect"
        except ValueError as error:
            # Attention itself asks for no profile.
            verdict, all_parse = f"does not parse: {error}", all_parse and name == PROFILE_VARIABLE
        findings.append((name, verdict))
    return findings or [("environment", f"no {_PREFIX}* variable is set ({', '.join(_VARIABLES)} may be)")], all_parse


def _trial(device: str) -> str | None:
    """What goes wrong in a small forward and backward on the device, or None."""
    inputs = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    try:
        ours = _forward_backward(inputs.to(device), engine=None)
    except (RuntimeError, ImportError, OSError) as failure:
        return f"fails: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    exact = _forward_backward(inputs, engine="reference")
    error = max(float((x.cpu() - y).abs().max()) for x, y in zip(ours, exact, strict=True))
    return None if error < _LARGEST_ERROR else f"is wrong: {error:.1e} away from the float64 result"


def _forward_backward(inputs: Float[Tensor, "3 B H N D"], *, engine: str | None) -> tuple[Tensor, Tensor]:
    """The output for q, k and v, and the gradient of the sum of its squares."""
    inputs = inputs.clone().requires_grad_()
    q, k, v = inputs
    out = DilatedAttention((16, 64), (1, 4), causal=True, engine=engine)(q, k, v)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs)
    return out.detach(), grad


def _compiled_trial() -> str | None:
    """What goes wrong where torch.compile traces a small forward and backward on the CPU, or None.

    No kernel is built: that takes a compiler, and many seconds.
    """
    attention = DilatedAttention((16, 64), (1, 4), causal=True)
    before = compilations().graphs
    inputs = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    try:
        found = _gradient(torch.compile(attention, fullgraph=True, backend="aot_eager"), inputs)
    except (RuntimeError, ImportError, OSError) as failure:
        return f"fails: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    if compilations().graphs == before:
        return "is switched off: everything runs eagerly, and engine 'flex' not at all"
    error = float((found - _gradient(attention, inputs)).abs().max())
    return None if error < _LARGEST_ERROR else f"is wrong: {error:.1e} away from the eager result"


def _gradient(attention: Callable[..., Tensor], inputs: Float[Tensor, "3 B H N D"]) -> Float[Tensor, "3 B H N D"]:
    q, k, v = (each.clone().requires_grad_() for each in inputs)
    return torch.stack(torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v)))


def _compilations() -> Finding:
    found = compilations()
    return (
        "compilations",
        f"{found.graphs} in {found.seconds:.1f} s, {len(found.recompilations)} of them again; "
        f"{found.num_graph_breaks} graph breaks, {found.left_to_eager} left to eager",
    )


def _cache() -> Finding:
    stats = masks.cache().stats()
    budget = masks.cache().budget_bytes
    return (
        "plan cache",
        f"{stats.entries} entries, {stats.bytes:,} of {budget:,} bytes; "
        f"{stats.hits} hits, {stats.misses} misses; {1e3 * stats.build_seconds:.1f} ms to build",
    )
