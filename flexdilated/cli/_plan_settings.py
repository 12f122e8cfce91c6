"""What `plan` is asked: a pattern and sizes, checked once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from ..masks.core._check import LARGEST
from ..masks.core._pattern import Expression
from ..memory._memory import AttentionSize
from ..nn._model_memory import ModelSize
from ._asked_pattern import one_rule
from ._fixed_sizes import MOST_HEADS
from ._pattern_arguments import asked_from
from ._sizes import parse_bytes
from ._usage import UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TABLE = "table"
_LAYERS = 12
_MIN_FLEX_HEAD_DIM = 16
_MOST = {"kv_heads": MOST_HEADS, "head_dim": 1 << 16, "batch": 1 << 16}
# Memories of accelerators and of small machines.
BUDGETS = tuple(size << 30 for size in (8, 16, 24, 40, 48, 80, 96, 141))


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """`budgets` are in bytes, and empty where none was asked for; `layers` and `embed_dim` are a LongNet's.

    `pattern` holds the values of its run-time tensors as part of its rule.
    """

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
    require_sizes(options, "kv_heads", "head_dim", "batch", "layers", "embed_dim")
    asked = asked_from(options)
    if options.budget is not None and asked.pattern.varies:
        raise UsageError("--budget needs a pattern of any number of tokens; got one with run-time tensors")
    head_dim, embed_dim = _widths(options, asked.num_heads)
    kv_heads = asked.num_heads if options.kv_heads is None else options.kv_heads
    if asked.num_heads % kv_heads:
        raise UsageError(f"--kv-heads must divide --heads; got {kv_heads} and {asked.num_heads}")
    if options.device != "cpu" and head_dim < _MIN_FLEX_HEAD_DIM:
        raise UsageError(f"flex needs a head dim of at least {_MIN_FLEX_HEAD_DIM} on {options.device}; got {head_dim}")
    return PlanSettings(
        pattern=one_rule(asked),
        num_tokens=asked.num_tokens,
        num_heads=asked.num_heads,
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


def require_sizes(options: argparse.Namespace, *names: str) -> None:
    """Raises UsageError for one that is given and that no tensor has."""
    for name in names:
        value, most = getattr(options, name), _MOST.get(name, LARGEST)
        if value is not None and not 1 <= value <= most:
            rule = "at least 1" if value < 1 else f"at most {most}"
            raise UsageError(f"--{name.replace('_', '-')} must be {rule}; got {value}")


def _widths(options: argparse.Namespace, num_heads: int) -> tuple[int, int]:
    """(head dim, embed dim), of which one gives the other."""
    head_dim, embed_dim = options.head_dim, options.embed_dim
    if embed_dim is None:
        head_dim = 64 if head_dim is None else head_dim
        return head_dim, num_heads * head_dim
    if embed_dim % num_heads:
        raise UsageError(f"--embed-dim must be a multiple of --heads; got {embed_dim} and {num_heads}")
    return embed_dim // num_heads, embed_dim


def _budgets(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    return BUDGETS if text == _TABLE else (parse_bytes(text),)
