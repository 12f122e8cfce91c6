"""The doctor: versions, devices, optional packages, and one trial of each engine on each device."""

from __future__ import annotations

import os
import platform

import torch
from tabulate import tabulate
from torch import Tensor

from .. import __version__, masks
from .._attend import attend
from .._engines import ENGINES
from ..engines import missing_compiler
from ..masks import Mixture, Pattern
from ..masks.core import device_kind
from ..masks.plan_cache import BYTES_VARIABLE, ENTRIES_VARIABLE, bytes_from_environment, entries_from_environment
from ..masks.planning import VARIABLE as MACHINE_VARIABLE
from ..masks.planning import machine_from_environment
from ..observe import VARIABLE as PROFILE_VARIABLE
from ..observe import folder_from_environment
from . import _machine
from ._command_parser import CommandParser
from ._machine import EXTRAS, available_devices

Finding = tuple[str, str]

_OLDEST_TORCH, _NEWEST_TRIED_TORCH = "2.11", "2.15"
_PREFIX = "FLEXDILATED_"
# Environment variable -> its reader, which raises ValueError for a value that does not parse.
_VARIABLES = {
    BYTES_VARIABLE: bytes_from_environment,
    ENTRIES_VARIABLE: entries_from_environment,
    MACHINE_VARIABLE: machine_from_environment,
    PROFILE_VARIABLE: folder_from_environment,
}

# An engine is tried in training, and in inference with one set pattern where it refuses to train.
_USES: dict[str, Pattern | Mixture] = {
    "training": masks.longnet((64, 256), (1, 4)) & masks.causal(),
    "inference": masks.local_window(left=99, right=0),
}
_SHAPE = (1, 4, 300, 64)  # B, H, N, D; no segment length divides N
_LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Print versions, devices and optional packages, and try each engine on each device against the reference. "
        "The exit status is 0 if the default engine of every device works, else 1."
    )
    parser.set_defaults(command=lambda options: doctor())


def doctor() -> int:
    """Print the findings; 0 if the default engine of every device works and the environment parses, else 1."""
    trials: list[Finding] = []
    variables, works = _variables()
    for device in available_devices():
        default = device_kind(device).engine
        for engine in ENGINES:
            is_sound, verdict = _trial(engine, device)
            works = works and (is_sound or engine != default)
            trials.append((f"{engine} on {device}{', the default' * (engine == default)}", verdict))
    findings = [*_versions(), *_installed(), *variables, *trials]
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
        ("flexdilated", __version__),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__}, {support}"),
        ("devices", f"{', '.join(available_devices())}; {torch.get_num_threads()} CPU threads"),
    ]


def _installed() -> list[Finding]:
    extras = {package: "found" if _machine.find(package) else _machine.missing_line(package) for package in EXTRAS}
    return [("C++ compiler", missing_compiler() or "found"), *extras.items()]


def _variables() -> tuple[list[Finding], bool]:
    """(a finding for each variable that is set, whether all that attention reads parse)."""
    findings, all_parse = [], True
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        try:
            verdict = f"is read as {_VARIABLES[name]()}" if name in _VARIABLES else "is unknown, and has no effect"
        except ValueError as error:
            verdict, all_parse = f"does not parse: {error}", all_parse and name == PROFILE_VARIABLE
        findings.append((name, verdict))
    return findings or [("environment", f"no {_PREFIX}* variable is set ({', '.join(_VARIABLES)} may be)")], all_parse


def _trial(engine: str, device: str) -> tuple[bool, str]:
    """(whether the results are right, the use that is served with its error, or the reason why none is)."""
    dtype, refusal = torch.bfloat16 if engine == "flash" else torch.float32, ""
    for use in _USES:
        try:
            error = _error(engine, device, dtype, use)
        except ValueError as refused:
            refusal = _first_line(refused)
        except Exception as failure:  # of any kind: it is the finding
            return False, f"fails in {use}: {type(failure).__name__}: {_first_line(failure)}"
        else:
            is_sound = error <= _LARGEST_ERROR[dtype]
            wrong = "" if is_sound else f", and must be at most {_LARGEST_ERROR[dtype]:.0e}"
            return is_sound, f"{'serves' if is_sound else 'is wrong in'} {use}, error {error:.0e}{wrong}"
    return False, f"does not serve: {refusal}"


def _error(engine: str, device: str, dtype: torch.dtype, use: str) -> float:
    """The largest distance from the reference in float64, as a share of the reference's largest number."""
    pairs = zip(_results(engine, device, dtype, use), _results("reference", "cpu", torch.float64, use), strict=True)
    return float(torch.stack([(found - exact).abs().amax() / exact.abs().amax() for found, exact in pairs]).amax())


def _results(engine: str, device: str, dtype: torch.dtype, use: str) -> list[Tensor]:
    """The output and, in training, the gradients of q, k and v: float64 tensors on the CPU."""
    numbers = torch.randn(4, *_SHAPE, generator=torch.Generator().manual_seed(0))
    q, k, v, grad = numbers.bfloat16().to(device, dtype)  # the same numbers in every dtype
    leaves = [x.requires_grad_(use == "training") for x in (q, k, v)]
    out = attend(q, k, v, _USES[use], engine=engine)
    gradients = torch.autograd.grad(out, leaves, grad) if use == "training" else ()
    return [x.detach().cpu().double() for x in (out, *gradients)]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
