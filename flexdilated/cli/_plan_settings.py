"""What `plan` is asked: a pattern and sizes, checked once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from .._memory import AttentionSize
from ..masks._check import LARGEST
from ..masks._pattern import Expression
from ..masks._run_time import names
from ..nn._model_memory import ModelSize
from ._asked_pattern import MOST_HEADS, read_expression
from ._sizes import parse_bytes, parse_tokens
from ._usage import UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TABLE = "table"
_LAYERS = 12
_MIN_FLEX_HEAD_DIM = 16
_MOST = {"heads": MOST_HEADS, "kv_heads": MOST_HEADS, "head_dim": 1 << 16, "batch": 1 << 16}
# Memories of accelerators and of small machines.
BUDGETS = tuple(size << 30 for size in (8, 16, 24, 40, 48, 80, 96, 141))


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """`budgets` are in bytes, and empty where none was asked for; `layers` and `embed_dim` are a LongNet's."""

    pattern: Expression
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    device: str
    batch: int
    layers: int
    embed_dim: int
    budgets: tuple[int, ...]
    measure: bool
    as_json: bool

    def attention(self, num_tokens: int) -> AttentionSize:
        """A call of `attend` of these sizes."""
        heads = self.num_heads, self.head_dim
        return AttentionSize(num_tokens, *heads, DTYPES[self.dtype], self.batch, self.num_kv_heads)

    @property
    def model(self) -> ModelSize:
        """A LongNet around it."""
        kv_heads = None if self.num_kv_heads == self.num_heads else self.num_kv_heads
        return ModelSize(self.embed_dim, self.layers, self.num_heads, DTYPES[self.dtype], self.batch, kv_heads)


def settings_from(options: argparse.Namespace) -> PlanSettings:
    """Raises UsageError for a pattern that does not read and for sizes that do not fit together."""
    for name in ("heads", "kv_heads", "head_dim", "batch", "layers", "embed_dim"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
        if value is not None and value > _MOST.get(name, LARGEST):
            most = _MOST.get(name, LARGEST)
            raise UsageError(f"--{name.replace('_', '-')} must be at most {most}; got {value}")
    head_dim, embed_dim = _widths(options)
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    if options.heads % kv_heads:
        raise UsageError(f"--kv-heads must divide --heads; got {kv_heads} and {options.heads}")
    if options.device != "cpu" and head_dim < _MIN_FLEX_HEAD_DIM:
        raise UsageError(f"flex needs a head dim of at least {_MIN_FLEX_HEAD_DIM} on {options.device}; got {head_dim}")
    if options.measure and options.device != "cpu":
        raise UsageError(f"--measure times this machine's CPU; got it with --device {options.device}")
    return PlanSettings(
        pattern=read_pattern(options.pattern),
        num_tokens=parse_tokens(options.tokens),
        num_heads=options.heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=options.dtype,
        device=options.device,
        batch=options.batch,
        layers=_LAYERS if options.layers is None else options.layers,
        embed_dim=embed_dim,
        budgets=_budgets(options.budget),
        measure=options.measure,
        as_json=options.json,
    )


def read_pattern(text: str) -> Expression:
    """The pattern of an expression, or of a JSON file. Raises UsageError where it is neither."""
    pattern = read_expression(text)
    missing = names(pattern)
    if missing:
        raise UsageError(
            f"a pattern is planned without a batch; got one that needs {', '.join(missing)} with each call"
        )
    return pattern


def _widths(options: argparse.Namespace) -> tuple[int, int]:
    """(head dim, embed dim), of which one gives the other."""
    heads, head_dim, embed_dim = options.heads, options.head_dim, options.embed_dim
    if embed_dim is None:
        head_dim = 64 if head_dim is None else head_dim
        return head_dim, heads * head_dim
    if embed_dim % heads or head_dim not in (None, embed_dim // heads):
        given = f"--embed-dim {embed_dim}, --heads {heads}" + ("" if head_dim is None else f", --head-dim {head_dim}")
        raise UsageError(f"--embed-dim must be --heads times --head-dim; got {given}")
    return embed_dim // heads, embed_dim


def _budgets(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    return BUDGETS if text == _TABLE else (parse_bytes(text),)
