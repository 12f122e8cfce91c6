"""How many bytes do the wire codecs save, what does that do to rows and to what attention makes of them?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed.wire._codec import Codec, CodecName, codec_named
from flexdilated.distributed.wire._codec_choice import choose_codec, row_peak

from ._buffer_claims import MESSAGES
from ._oracle import relative_error
from ._problem import Problem, Size
from ._result import Result, Row, at_most
from ._timing import Job, interleave
from ._wire_report import wire_report

# N tokens, G key/value heads, D head dim

_CODECS: tuple[CodecName, ...] = ("bf16", "int8")
_ERROR_BOUND = 0.02
_ROUNDING = 0.50001 / 127  # of int8: half a level, and what float32 rounds

Draw = Callable[[Float[Tensor, "1 G N D"]], Float[Tensor, "1 G N D"]]


def _heavy_tailed(x: Float[Tensor, "1 G N D"]) -> Float[Tensor, "1 G N D"]:
    """Student's t with 3 degrees of freedom: the normal numbers over the root of a mean of three squares."""
    generator = torch.Generator().manual_seed(1)
    squares = torch.randn((3, *x.shape), generator=generator).square().mean(0)
    return x / squares.sqrt()


def _outlier_channels(x: Float[Tensor, "1 G N D"]) -> Float[Tensor, "1 G N D"]:
    """Two channels of each head 20 times as large, as keys of language models have them."""
    scales = torch.ones(x.shape[-1])
    scales[[3, x.shape[-1] // 2]] = 20
    return x * scales


KINDS: dict[str, Draw] = {
    "normal": lambda x: x,
    "heavy-tailed": _heavy_tailed,
    "outlier channels": _outlier_channels,
}


@dataclass(frozen=True)
class Config:
    """Keys and values of this size, under causal attention to a window; the kinds are in `KINDS`."""

    size: Size
    window: int


FULL = Config(Size(4096, num_heads=8, repeats=5), window=1024)
SMALL = Config(Size(128, num_heads=2, head_dim=16, repeats=1), window=32)


def run(config: Config) -> Result:
    """Errors are relative, in the Euclidean norm: of each row, and of the whole output against undamaged keys."""
    found = {name: _measure(name, config) for name in _CODECS}
    rows = [row for name in _CODECS for row in _rows(name, config, found[name])]
    return Result((*rows, *_auto_rows(config)))


def _drawn(config: Config, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem.draw(config.size)
    k, v = (KINDS[kind](x).to(dtype) for x in (problem.k, problem.v))
    return problem.q.to(dtype), k, v


def _measure(name: CodecName, config: Config) -> dict[str, dict[str, float]]:
    """For each kind: errors of rows, the bound that is proven for them, and the error of attention's output."""
    codec, found = codec_named(name), {}
    for kind in KINDS:
        q, k, v = _drawn(config, kind)
        report = wire_report(k, v, codec)
        bound = 2.0**-8 if name == "bf16" else _ROUNDING * max(row_peak(k), row_peak(v))
        found[kind] = {
            "largest_row_error": report.largest_error,
            "mean_row_error": report.mean_error,
            "proven_bound": bound,
            "output_error": _output_error(q, k, v, codec, config.window),
        }
    return found


def _output_error(q: Tensor, k: Tensor, v: Tensor, codec: Codec, window: int) -> float:
    pattern = masks.causal() & masks.local_window(left=window - 1, right=0)
    keys, values = (codec.decode(codec.encode(x), x.shape[-1], x.dtype) for x in (k, v))
    return relative_error(fd.attend(q, keys, values, pattern), fd.attend(q, k, v, pattern))


def _rows(name: CodecName, config: Config, found: dict[str, dict[str, float]]) -> list[Row]:
    worst = max(each["largest_row_error"] / each["proven_bound"] for each in found.values())
    return [
        _saved_row(name, config),
        Row(
            f"{name}: largest error of a row over the bound that is proven for it", at_most(1, "×"), worst, detail=found
        ),
    ]


def _saved_row(name: CodecName, config: Config) -> Row:
    """Of float32, which decides, and of bfloat16; and how fast rows are written and read."""
    codec = codec_named(name)
    _, k, v = _drawn(config, "normal")
    report, halves = wire_report(k, v, codec), wire_report(k.bfloat16(), v.bfloat16(), codec)
    wire = codec.encode(k)
    jobs = (
        Job("encode", lambda _: codec.encode(k)),
        Job("decode", lambda _: codec.decode(wire, k.shape[-1], k.dtype, out=v)),
    )
    timings = interleave(jobs, repeats=config.size.repeats)
    seconds = sum(timing.median_s for timing in timings)
    detail: dict[str, Any] = {
        "codec": name,
        "bytes": report.num_bytes,
        "plain_bytes": report.plain_bytes,
        "percent_saved_of_bfloat16": 100 * halves.saved,
        "pays_below_bytes_a_second": (k.nbytes - wire.nbytes) / seconds,
    }
    row = MESSAGES.row(100 * report.saved, timings, **detail)
    return Row(f"{name}: {row.measure}", row.target, row.measured, row.timings, row.detail)


def _auto_rows(config: Config) -> list[Row]:
    """What "auto" takes for each kind, and whether every row is within what was asked for."""
    rows = []
    for kind in KINDS:
        _, k, v = _drawn(config, kind)
        codec = choose_codec(k, v, _ERROR_BOUND)
        report = wire_report(k, v, codec)
        detail = {"codec": str(codec.name), "percent_saved": 100 * report.saved, "peak": max(row_peak(k), row_peak(v))}
        name = f'"auto" within {100 * _ERROR_BOUND:.0f} %, {kind} rows: largest error of a row'
        rows.append(Row(name, at_most(100 * _ERROR_BOUND, "%"), 100 * report.largest_error, detail=detail))
    return rows
