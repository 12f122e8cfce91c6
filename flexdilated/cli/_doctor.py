"""The doctor: what works on this machine, and what is missing; `--verify` checks every engine and module."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from textwrap import fill
from time import perf_counter
from typing import Any

import torch
import torch.nn.attention
from tabulate import tabulate
from torch import Tensor

from .. import masks
from .._attend import attend
from ..decoding import KVCache
from ..engines import missing_compiler
from ..masks import Mixture, Pattern
from ..masks.core import seconds_text
from ..masks.plan_cache import BYTES_VARIABLE, ENTRIES_VARIABLE, bytes_from_environment, entries_from_environment
from ..masks.planning import VARIABLE as MACHINE_VARIABLE
from ..masks.planning import machine_from_environment
from ..nn import (
    BlockSparseAttention,
    DilatedAttention,
    HeadParallelDilatedAttention,
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from ..observe import VARIABLE as PROFILE_VARIABLE
from ..observe import compilations, folder_from_environment
from ..testing import Calls, examine_attention_module, identity_projections
from . import _machine
from ._command_parser import CommandParser
from ._machine import EXTRAS, available_devices
from ._output import progress

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


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Say what works on this machine, and what is missing. The exit status is 0 where attention works, else 1."
    )
    add = parser.argument
    add("--verify", action="store_true", help="check each engine and module on fixed cases, against float64")
    add("--json", action="store_true", needs=("verify",), help="with --verify: print what came out as JSON")
    parser.set_defaults(command=lambda options: verify(as_json=options.json) if options.verify else doctor())


def doctor() -> int:
    """Print what was found; 0 where attention runs on a device of this machine, 1 where it runs on none."""
    findings = [*_versions(), *_installed()]
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


def _installed() -> list[Finding]:
    """Compiler, engines, packages."""
    flex, compiler = ", flex (by name; inference, one set pattern)", "found: engine 'flex' and torch.compile can build"
    if missing := missing_compiler():
        flex, compiler = (
            "",
            (
                f"{missing}: engine 'flex' and torch.compile do not work on the CPU, engine 'tiles' needs none. "
                "Install g++ or clang++, or name one in CXX"
            ),
        )
    accelerators = (device for device in available_devices() if device != "cpu")
    extras = {package: "found" if _machine.find(package) else _machine.missing_line(package) for package in EXTRAS}
    return [
        ("C++ compiler", compiler),
        ("engines on cpu", f"tiles (default){flex}, reference (dense)"),
        *((f"engines on {device}", "flex (default), reference (dense)") for device in accelerators),
        *_flash_attention(),
        *extras.items(),
    ]


def _flash_attention() -> list[Finding]:
    """What is active is named, never changed: it holds for the process. Older torch has FA2 alone."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    others = ", ".join(getattr(torch.nn.attention, "list_flash_attention_impls", list)())
    known = f"; torch.nn.attention.activate_flash_attention_impl knows {others}" if others else ""
    try:
        is_there = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    except ImportError:  # what was built for another torch fails as it is looked into
        is_there = None
    importable = "flash_attn.cute is importable" if is_there else "no flash_attn.cute"
    return [
        ("flash attention on cuda", f"{current() or 'FA2'} is active{known}"),
        ("FLASH backend of flex", f"{importable}; engine='flash' asks for it, on CUDA only"),
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


_LADDER = ((64, 256), (1, 4))  # segment lengths, dilation rates
_MIXTURE = masks.longnet(*_LADDER) & masks.causal()
_SIZES = {"num_heads": 4, "head_dim": 32, "lengths": (1, 65, 300)}  # the last segments of both rates end early
_BOTH = ("agreement", "gradients")
_LARGEST_ERROR = 1e-4  # of a whole model in float32: farther from the float64 one is wrong, not rounded


@dataclass(frozen=True)
class Case:
    """What is checked on a device, by which checks; `failures` says what is wrong, `skipped` why it cannot be tried."""

    name: str
    device: str
    checks: Sequence[str]
    failures: Callable[[], list[str]]
    skipped: str | None = None


def cases(device: str) -> Iterator[Case]:
    """All that runs on this kind of device, engines first."""

    def case(name: str, module: Callable[[], Any], pattern: Pattern | Mixture, *checks: str, **options: Any) -> Case:
        skipped, where, chosen = options.pop("skipped", None), options.pop("where", device), checks or _BOTH
        return Case(name, where, chosen, lambda: _failures(module, pattern, chosen, device, **options), skipped)

    def engine(name: str) -> Callable[[], Any]:
        return lambda: partial(attend, pattern=_MIXTURE, engine=name)

    if device == "cpu":
        yield case("engine tiles", engine("tiles"), _MIXTURE, *_BOTH, "half precision")
        one_set, options = masks.longnet([256], [4]), {"lengths": (300,), "skipped": missing_compiler()}
        flex = partial(attend, pattern=one_set, engine="flex")
        yield case("engine flex, inference", lambda: flex, one_set, "agreement", **options)
        yield case("engine reference", engine("reference"), _MIXTURE)
    else:
        yield case("engine flex", engine("flex"), _MIXTURE, *_BOTH, "half precision")
    yield case("attend, causal", lambda: partial(attend, pattern=masks.causal()), masks.causal())
    yield case("attend, documents at run time", lambda: _by_documents, masks.custom(_same_document) & masks.causal())
    grouped = partial(attend, pattern=_MIXTURE, enable_gqa=True)
    yield case("attend, grouped heads", lambda: grouped, _MIXTURE, num_kv_heads=2)
    window = masks.local_window(left=99, right=0)
    yield case("BlockSparseAttention", lambda: BlockSparseAttention(window), window)
    yield case("DilatedAttention", _dilated, _MIXTURE)
    yield case("DilatedAttention, compiled", _dilated, _MIXTURE, "compile", "recompilation")
    yield case("MultiheadDilatedAttention", _multihead, _MIXTURE, calls=Calls(layout="BNE"))
    yield Case("LongNet", device, _BOTH, lambda: _failures_of_a_model(device))
    decoding = {"calls": Calls(decoded=_one_by_one), "lengths": (1, 130)}
    yield case("KVCache, decode as prefill", _dilated, _MIXTURE, "decoding", **decoding)
    if device == "cpu":
        has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        over = {"lengths": (300,), "where": "2 ranks", "skipped": None if has_gloo else "this torch has no gloo"}
        for name, made in OVER_RANKS.items():
            yield case(name, _dilated, _MIXTURE, "ranks", calls=Calls(over_ranks=made), **over)


def _failures(
    module: Callable[[], Any], pattern: Pattern | Mixture, checks: Sequence[str], device: str, **options: Any
) -> list[str]:
    """What the checks of modules find, each in its first line."""
    report = examine_attention_module(module, pattern, checks=checks, device=device, **{**_SIZES, **options})
    return [f"{result.name}: {_first_line(result.detail)}" for result in report.failures]


def _dilated() -> DilatedAttention:
    return DilatedAttention(*_LADDER, causal=True)


def _multihead() -> torch.nn.Module:
    return identity_projections(MultiheadDilatedAttention(4 * 32, 4, *_LADDER, causal=True, batch_first=True))


def _document(position: Tensor) -> Tensor:
    return (position >= 50).long() + (position >= 170)


def _same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return _document(q) == _document(k)


def _by_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ids = _document(torch.arange(q.shape[2], device=q.device))
    return attend(q, k, v, masks.documents("ids") & masks.causal(), bindings={"ids": ids})


def _one_by_one(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By a KVCache, instead of the module."""
    cache = KVCache(_MIXTURE, num_heads=q.shape[1])
    return torch.cat([cache.attend(*token) for token in zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True)], 2)


def _failures_of_a_model(device: str) -> list[str]:
    """LongNet in float32, against itself in float64 with the reference engine: they differ by rounding alone."""
    sizes = {"vocab_size": None, "embed_dim": 128, "depth": 2, "num_heads": 4}
    config = LongNetConfig(**sizes, segment_lengths=_LADDER[0], dilation_rates=_LADDER[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, exact = LongNet(config), LongNet(replace(config, engine="reference"), dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    x, sent = torch.randn(2, 1, 300, 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for each, given in ((model.to(device), x.to(device, torch.float32)), (exact, x.clone())):
        out = each(given.requires_grad_())
        results.append([y.detach().cpu().double() for y in (out, *torch.autograd.grad(out, given, sent.to(given)))])
    errors = {name: float((a - b).abs().amax() / b.abs().amax()) for name, a, b in zip(_BOTH, *results, strict=True)}
    return [
        f"{name}: {error:.1e} away from the float64 result, and {_LARGEST_ERROR:.0e} is the most"
        for name, error in errors.items()
        if not error < _LARGEST_ERROR
    ]


def _ring(schedule: str, mesh: Any) -> torch.nn.Module:
    return RingDilatedAttention(*_LADDER, causal=True, mesh=mesh, schedule=schedule)


def _by_heads(mesh: Any) -> torch.nn.Module:
    return HeadParallelDilatedAttention(*_LADDER, causal=True, mesh=mesh)


OVER_RANKS: dict[str, Callable[[Any], Any]] = {
    "RingDilatedAttention, exchange": partial(_ring, "exchange"),
    "RingDilatedAttention, ring": partial(_ring, "ring"),
    "HeadParallelDilatedAttention": _by_heads,
}


def verify(*, as_json: bool) -> int:
    """Check all cases and print what came out; 0 where all that could be tried is right, else 1."""
    begin, verdicts = perf_counter(), []
    tried = list(chain.from_iterable(map(cases, available_devices())))
    with progress("checking", unit="case", done=0, total=len(tried), lines=sys.stderr) as bar:
        for number, case in enumerate(tried, start=1):
            verdicts.append(_verdict(case))
            bar.step(number, len(tried), case.name)
    works = all(each["verdict"] != "failed" for each in verdicts)
    data = {"works": works, "jobs": verdicts}
    print(json.dumps(data, indent=1) if as_json else _report(verdicts, perf_counter() - begin))
    return 0 if works else 1


def _verdict(case: Case) -> dict[str, Any]:
    """As plain data."""
    found: list[str] = []
    if case.skipped is None:
        try:
            found = case.failures()
        except Exception as error:  # whatever it is: to say what does not work is what a doctor is for
            found = [f"raises {_raised(error)}"]
    verdict = "skipped" if case.skipped is not None else "failed" if found else "passed"
    told = {"name": case.name, "device": case.device, "checks": list(case.checks)}
    return told | {"verdict": verdict, "cause": case.skipped or "; ".join(found) or None}


def _report(verdicts: list[dict[str, Any]], seconds: float) -> str:
    """The table, below it what failed and what was skipped with the cause."""
    rows = [
        (each["name"], each["device"], ", ".join(each["checks"]), each["verdict"].replace("failed", "FAILED"))
        for each in verdicts
    ]
    layout = {"width": shutil.get_terminal_size().columns, "initial_indent": "* ", "subsequent_indent": "  "}
    told = sorted((each for each in verdicts if each["cause"]), key=lambda each: each["verdict"])
    causes = [
        fill(f"{each['name']} on {each['device']} {each['verdict']}: {each['cause']}", break_long_words=False, **layout)
        for each in told
    ]
    wrong = sum(each["verdict"] == "failed" for each in verdicts)
    tried = len(verdicts) - len(told) + wrong
    end = f"All {tried} that were tried are right" if not wrong else f"{wrong} of {tried} are not right"
    table = tabulate(rows, headers=("what", "where", "checks", "verdict"), disable_numparse=True)
    return "\n\n".join([table, *(["\n".join(causes)] if causes else []), f"{end}, in {seconds_text(seconds)}."])


def _trial(device: str) -> str | None:
    """What goes wrong in a small forward and backward on the device, or None."""
    try:
        failures = _failures(_dilated, _MIXTURE, _BOTH, device, num_heads=2, head_dim=16, lengths=[64])
    except (RuntimeError, ImportError, OSError) as error:
        return f"fails: {_raised(error)}"
    return f"is wrong: {'; '.join(failures)}" if failures else None


def _compiled_trial() -> str | None:
    """What goes wrong where torch.compile traces a small forward and backward on the CPU, or None.

    No kernel is built: that takes a compiler, and many seconds.
    """
    before = compilations().graphs
    failures = _failures(_dilated, _MIXTURE, ["compile"], "cpu", num_heads=2, head_dim=16, lengths=[64])
    if compilations().graphs == before and not failures:
        return "is switched off: everything runs eagerly, and engine 'flex' not at all"
    return f"fails: {'; '.join(failures)}" if failures else None


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(str(error))}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


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
