"""PlanSize: the pattern and sizes for which `plan` reports, and the memory of a call and of a model of these sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ._engine_choice import planned_engine
from ._validate import check_score_mod, check_zero_keys
from .engines import ScoreMod
from .masks.core import Bound, Expression, require_choice, require_int, require_probability
from .masks.planning import Plan, reads_table
from .memory import AttentionMemory, AttentionSize, attention_memory
from .nn import ModelSize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PlanSize:
    """A pattern and the sizes of attention, and of a LongNet with this attention, for which `plan` makes a report.

    pattern: with values for its run-time tensors.
    num_kv_heads: a divisor of num_heads.
    head_dim: of queries and keys.
    value_dim: of values.
    dtype: of tensors and weights.
    device: "cpu" or "cuda".
    layers: depth of the LongNet, whose width is num_heads * head_dim; None for no LongNet.
    dropout_p: of training, as in `attend`.
    score_mod: as in `attend`.
    named_engine: argument `engine` of `plan`: the device's default, "portable", or None.

    Raises ValueError or TypeError for sizes that do not fit together, and for an engine that cannot serve them.
    """

    pattern: Expression
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    batch: int
    layers: int | None
    dropout_p: float = 0.0
    score_mod: ScoreMod | None = None
    named_engine: str | None = None

    def __post_init__(self) -> None:
        sizes = "num_tokens", "num_heads", "num_kv_heads", "head_dim", "value_dim", "batch"
        for name in sizes if self.layers is None else (*sizes, "layers"):
            require_int(name, getattr(self, name), minimum=1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads; got num_kv_heads={self.num_kv_heads} and "
                f"num_heads={self.num_heads}"
            )
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES.values()))}; got {self.dtype!r:.80}")
        require_choice("device", self.device, ("cpu", "cuda"))
        require_probability("dropout_p", self.dropout_p)
        check_score_mod(self.score_mod)
        check_zero_keys(self.pattern, self.score_mod, self.num_tokens, self.num_tokens)
        self._engine_of_call(drops=self.dropout_p > 0)  # raises for an engine that cannot serve the call

    @property
    def engine(self) -> str:
        """Name of the engine that computes a call in training, with dropout if dropout_p is above 0."""
        return self._engine_of_call(drops=self.dropout_p > 0)

    def _engine_of_call(self, *, drops: bool) -> str:
        size = self.device, self.dtype, min(self.head_dim, self.value_dim)
        return planned_engine(self.named_engine, *size, score_mod=self.score_mod, drops=drops)

    def reads_table(self, bound: Bound) -> bool:
        """True if the engine reads the pattern's table of chosen keys or blocks directly, without block lists.

        bound: `pattern`, bound to these sizes.
        """
        return reads_table(bound, self.engine)

    @property
    def embed_dim(self) -> int:
        """Width of the LongNet: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    @property
    def heads_text(self) -> str:
        """Number of heads as text: "8 heads", or "8 heads over 2" with 2 key/value heads."""
        grouped = f" over {self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        return f"{self.num_heads} heads{grouped}"

    @property
    def head_dim_text(self) -> str:
        """Head dim as text: "head dim 64", or "head dim 192, values 128" if value_dim differs."""
        return f"head dim {self.head_dim}" + (f", values {self.value_dim}" if self.value_dim != self.head_dim else "")

    def attention(self, num_tokens: int) -> AttentionSize:
        """Return the sizes of a call of `attend` with num_tokens queries and keys, for the memory estimate."""
        heads = self.num_heads, self.head_dim, self.dtype, self.batch, self.num_kv_heads
        return AttentionSize(num_tokens, *heads, value_dim=self.value_dim)

    @property
    def model(self) -> ModelSize:
        """Sizes of a LongNet of `layers` layers, for the memory estimate; its values have head dim head_dim.

        `layers` must not be None.
        """
        assert self.layers is not None
        kv_heads = None if self.num_kv_heads == self.num_heads else self.num_kv_heads
        return ModelSize(self.embed_dim, self.layers, self.num_heads, self.dtype, self.batch, kv_heads)

    def memory_of(self, call: AttentionSize, planned: Plan | None = None) -> AttentionMemory:
        """Predict the memory of a call: `inference_peak` without dropout, all other fields with dropout_p.

        planned: the plan of the call by `engine`, if the caller has one; None: it is made here if needed.
        """

        def predicted(drops: bool) -> AttentionMemory:
            engine = self._engine_of_call(drops=drops)
            return attention_memory(
                self.pattern,
                call,
                device=self.device,
                engine=engine,
                drops=drops,
                score_mod=self.score_mod,
                planned=planned if engine == self.engine else None,
            )

        if self.dropout_p == 0:
            return predicted(False)
        return replace(predicted(True), inference_peak=predicted(False).inference_peak)
