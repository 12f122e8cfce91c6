"""The function `plan`: reports how a pattern is computed at given sizes, with predicted times and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, overload

import torch
from tabulate import tabulate

from ._plan_size import PlanSize
from .engines import ScoreMod
from .masks.core import (
    HEADS,
    LENGTH,
    Bound,
    Expression,
    Mixture,
    advises,
    bytes_text,
    device_kind,
    outside_torch_modes,
    renamed,
    require_bool,
    require_expression,
    require_int,
    seconds_text,
    shortened,
    tokens_text,
)
from .masks.inspection import describe_plan
from .masks.planning import KeyLists, Option, Plan, TableTerm, Term, plan_with_table
from .masks.planning import plan as plan_terms
from .memory import AttentionMemory, allowed_by
from .nn import ModelMemory, attention_size, model_memory
from .tuning import measure_options

if TYPE_CHECKING:
    from .distributed.counts import RankLoads, ScheduleName
    from .distributed.group import ShardOrder
    from .distributed.wire import CodecName

_MOST_LINES = 24
_WIDEST_RULE, _WIDEST_FACT = 60, 66  # characters


@dataclass(frozen=True)
class PlannedTerm:
    """A term of the chosen plan, or several equal terms: one item of `PlanReport.terms`.

    branch: number, from 1, among the distinct branches of the pattern, or "all" for all branches of a mixture together.
        If a table of keys or blocks is read directly, 1 is for its pairs, and the other branches follow.
    layout: name of the token order or method, such as "natural" or "windows".
    shape: structure of the mask, such as "dense", "causal" or "blocks of 128"; for a table of keys or blocks that is
        read without block lists, "table of blocks of 1 x 1" or the like, or "lists of single keys".
    rule: the allowed pairs, as text.
    times: how often each pair counts in the softmax.
    heads: number of query heads.
    folds: number of separate attention problems per head, each of `queries` by `keys` slots.
    terms: number of equal terms, which differ only in their heads and in the positions of their tokens.
    """

    branch: int | str
    layout: str
    shape: str
    rule: str
    times: int
    heads: int
    folds: int
    queries: int
    keys: int
    terms: int


@dataclass(frozen=True)
class WeighedOption:
    """One way to compute a branch of a pattern, or all branches; one item of `PlanReport.options`.

    Its predicted cost is that of the forward pass for one batch entry.

    branch: as in `PlannedTerm`.
    layout: name of the token order or method, such as "natural" or "windows".
    computed_pairs: (query, key) pairs in the blocks that are computed, over all heads.
    moved_bytes: bytes read and written to gather q, k and v and to merge outputs.
    launches: number of kernel launches.
    chosen: True for an option that the plan takes.
    """

    branch: int | str
    layout: str
    computed_pairs: int
    moved_bytes: int
    launches: int
    predicted_s: float
    chosen: bool


@dataclass(frozen=True)
class MeasuredOption:
    """Predicted and measured forward time, in seconds, of one way to compute a pattern or one of its branches.

    The times are for one batch entry on this machine.

    option: name of the way; for one branch of a mixture it begins with the branch, such as "branch 1: natural".
    """

    option: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True)
class PlanReport(PlanSize):
    """Result of `plan`: how attention is computed, with its predicted time and memory; `str` returns tables.

    useful_pairs: (query, key) pairs that the pattern allows; a pair counts once for each branch that allows it.
    computed_pairs: pairs in the blocks that are computed.
    all_pairs: pairs of dense attention.
    block_list_bytes: bytes of the block lists.
    terms: the terms of the chosen plan.
    options: all ways to compute a branch, or all branches together, that were compared.
    measured: timings, empty unless requested.
    planned: the plan itself.
    attention_memory: memory of one call of `attend`.
    model_memory, checkpointed_memory: memory of a LongNet of `layers` layers with this attention and no vocabulary,
        without and with gradient checkpointing in training; None without `layers`.

    Pairs and FLOPs are sums over all heads and batch entries, but `options` counts one batch entry. Memory is computed
    on first use.
    """

    useful_pairs: int
    computed_pairs: int
    all_pairs: int
    forward_flops: int
    backward_flops: int
    block_list_bytes: int
    terms: tuple[PlannedTerm, ...]
    options: tuple[WeighedOption, ...]
    measured: tuple[MeasuredOption, ...]
    planned: Plan = field(repr=False, compare=False)

    @cached_property
    @outside_torch_modes
    def attention_memory(self) -> AttentionMemory:
        return self.memory_of(self.attention(self.num_tokens), self.planned)

    @cached_property
    def model_memory(self) -> ModelMemory | None:
        return self._memory_of_model(checkpoint=False)

    @cached_property
    def checkpointed_memory(self) -> ModelMemory | None:
        return self._memory_of_model(checkpoint=True)

    @cached_property
    def _layer_attention_memory(self) -> AttentionMemory:
        return self.memory_of(attention_size(self.model, self.num_tokens))

    @outside_torch_modes
    def _memory_of_model(self, *, checkpoint: bool) -> ModelMemory | None:
        if self.layers is None:
            return None
        return model_memory(self.model, self.num_tokens, self._layer_attention_memory, checkpoint=checkpoint)

    def to_data(self) -> dict[str, Any]:
        """Return the report as nested dicts and lists of plain values, for JSON; memory in bytes, times in seconds."""
        call = self.attention_memory
        work = ("useful_pairs", "computed_pairs", "all_pairs", "forward_flops", "backward_flops", "block_list_bytes")

        def values(*names: str) -> dict[str, Any]:
            return {name: getattr(self, name) for name in names}

        return {
            "pattern": repr(self.pattern),
            **values("num_tokens", "num_heads", "num_kv_heads", "head_dim", "value_dim", "batch", "dropout_p"),
            "dtype": self.dtype_name,
            **values("device", "engine", *work),
            **{name: [asdict(each) for each in getattr(self, name)] for name in ("terms", "options", "measured")},
            "memory": {
                "attention": {
                    "inputs": call.inputs,
                    "outputs": call.outputs,
                    "inference_peak": call.inference_peak,
                    "kept_for_backward": call.kept,
                    "training_peak": call.training_peak,
                    "tables": call.tables,
                },
                "model": self._model_data(),
            },
        }

    def _model_data(self) -> dict[str, Any] | None:
        model, checkpointed = self.model_memory, self.checkpointed_memory
        if model is None or checkpointed is None:
            return None
        return {
            "layers": self.layers,
            "embed_dim": self.embed_dim,
            "weights": model.weights,
            "optimizer": model.optimizer,
            "inference_peak": model.inference_peak,
            "training_peak": model.training_peak,
            "checkpointed_training_peak": checkpointed.training_peak,
        }

    def __str__(self) -> str:
        facts = tabulate(_facts(self), tablefmt="plain", disable_numparse=True, maxcolwidths=[None, _WIDEST_FACT])
        parts = [facts, "How it is computed", _terms_table(self.terms)]
        parts += ["What was weighed", _options_table(self.options)]
        if self.measured:
            parts += ["Forward on this machine", _measured_table(self.measured)]
        return "\n\n".join([*parts, "Memory", _memory_table(self)])


@overload
def plan(
    pattern: Expression,
    num_tokens: int,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    batch: int = 1,
    layers: int | None = None,
    dropout_p: float = 0.0,
    score_mod: ScoreMod | None = None,
    engine: str | None = None,
    measure: bool = False,
    ranks: None = None,
) -> PlanReport: ...


@overload
def plan(
    pattern: Expression,
    num_tokens: int,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    ranks: int,
    order: ShardOrder = "contiguous",
    schedule: ScheduleName = "auto",
    codec: CodecName | None = None,
) -> RankLoads: ...


@outside_torch_modes
@advises(keywords=renamed(num_tokens=LENGTH, num_heads=HEADS, batch="batch_size", layers="depth num_layers"))
def plan(
    pattern: Expression,
    num_tokens: int,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    batch: int = 1,
    layers: int | None = None,
    dropout_p: float = 0.0,
    score_mod: ScoreMod | None = None,
    engine: str | None = None,
    measure: bool = False,
    ranks: int | None = None,
    order: ShardOrder = "contiguous",
    schedule: ScheduleName = "auto",
    codec: CodecName | None = None,
) -> PlanReport | RankLoads:
    """Report how `attend` computes self-attention of num_tokens tokens with this pattern: time, work and memory.

    Returns a `PlanReport` with the chosen way, the alternatives with predicted seconds, and memory in bytes; `print` it
    for tables.

    num_kv_heads: key/value heads, a divisor of num_heads; None: num_heads.
    value_dim: head dim of values; None: head_dim.
    dtype: of tensors and weights, float32, bfloat16 or float16.
    device: "cpu" or "cuda"; "cuda" is predicted, without a GPU.
    layers: depth of a LongNet whose memory is also counted. Its width is num_heads * head_dim, its values have head dim
        head_dim. None: only the memory of the call is counted.
    dropout_p, score_mod: as in `attend`, for the choice of the engine and for memory; inference is planned without
        dropout, and gradients of tensors that score_mod captures are not counted.
    engine: the device's default ("aten" on "cpu", "flex" on "cuda"), "portable", or None as in `attend`; predicted
        seconds are those of the device's default. A table of single keys is planned as read directly. A table of
        selected blocks is so only for "aten"; for other engines its pairs are planned as block lists.
    measure: True to time the alternatives on this machine's CPU. A way for a branch is not timed if it is predicted to
        take over 4 times as long as the cheapest way for that branch. False: no attention is computed.

        >>> report = fd.plan(masks.longnet((2048, 8192), (1, 4)) & masks.causal(), 1 << 20, num_heads=8)
        >>> peak = report.attention_memory.training_peak  # bytes

    With `ranks`, from 1 to 4096, it returns instead the load of each rank in `distributed.attend`, counted exactly and
    without a process group: `received_forward` and `received_backward`, in bytes, and `pairs`, counted as
    `PlanReport.useful_pairs`, each a tuple with one entry per rank; their `max_over_mean`; and `to_data()`.

    order: as in `distributed.Sharding`.
    schedule, codec: as in `distributed.attend`, without codec "auto".

    `device`, `layers`, `dropout_p`, `score_mod`, `engine` and `measure` must then be left out.

        >>> loads = fd.plan(masks.longnet((64, 256), (1, 4)) & masks.causal(), 1024, ranks=4, order='zigzag')
        >>> loads.max_over_mean['pairs']
        1.0

    Raises ValueError or TypeError for sizes that do not fit together or do not fit the pattern, for a pattern that
    lacks run-time tensors or has them for several batch entries, for more blocks than can be listed, and for arguments
    that have no effect together.
    """
    one = {"device": not device_kind(device).on_host, "layers": layers is not None, "measure": measure}
    one |= {"dropout_p": dropout_p != 0, "score_mod": score_mod is not None, "engine": engine is not None}
    many = {"order": order != "contiguous", "schedule": schedule != "auto", "codec": codec is not None}
    for name, is_given in (many if ranks is None else one).items():
        if is_given:
            instead = "without ranks: give ranks=" if ranks is None else "with ranks: leave it out"
            raise ValueError(f"{name} has no effect {instead}")
    require_int("num_tokens", num_tokens, minimum=1)
    bound = require_expression(pattern).bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    if bound.pattern.num_entries() > 1:
        raise ValueError(
            "plan takes a pattern of one batch entry: give run-time tensors of one entry; got "
            f"{bound.pattern.num_entries()} entries"
        )
    size = PlanSize(
        pattern=pattern if pattern.pads and not pattern.varies else bound.pattern,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        dtype=dtype,
        device=device,
        batch=batch,
        layers=layers,
        dropout_p=dropout_p,
        score_mod=score_mod,
        named_engine=engine,
    )
    if ranks is not None:
        from .distributed.counts import MOST_RANKS, rank_loads
        from .distributed.group import Sharding

        sharding = Sharding(num_tokens, require_int("ranks", ranks, minimum=1, maximum=MOST_RANKS), order)
        return rank_loads(size.pattern, sharding, size.attention(num_tokens), schedule=schedule, codec=codec)
    if require_bool("measure", measure) and not device_kind(device).on_host:
        raise ValueError(f"measure=True needs device='cpu', as it times the CPU of this machine; got {device=}")
    if measure and size.engine != "aten":
        raise ValueError(
            "measure=True times engine 'aten': leave out dropout_p, score_mod and engine='portable'; "
            f"got a call by engine {size.engine!r}"
        )
    if measure and size.reads_table(bound):
        raise ValueError(
            "measure=True compares the planner's ways, and a table of selected blocks is computed in one way: leave "
            f"measure out, and time attend; got {pattern!r:.80}"
        )
    return _report(size, bound, measure=measure)


def _report(size: PlanSize, bound: Bound, *, measure: bool) -> PlanReport:
    allowed, operands = allowed_by(size.engine, size.device), size.attention(size.num_tokens).operands(size.engine)
    planned = partial(plan_with_table, engine=size.engine) if size.reads_table(bound) else plan_terms
    best = planned(bound, device=size.device, allowed=allowed, operands=operands)
    described = describe_plan(best, head_dim=size.head_dim, value_dim=size.value_dim)
    timed = ()
    if measure:
        timed = measure_options(bound, size.device, size.dtype, operands.head_dim, size.num_kv_heads, backward=False)
    work = ("useful_pairs", "computed_pairs", "all_pairs", "forward_flops", "backward_flops")
    return PlanReport(
        **{each.name: getattr(size, each.name) for each in fields(PlanSize)},
        **{name: size.batch * getattr(described, name) for name in work},
        block_list_bytes=described.table_bytes,
        terms=tuple(_planned_terms(best)),
        options=tuple(_weighed_options(best)),
        measured=tuple(MeasuredOption(*each) for each in timed),
        planned=best,
    )


def _branch_label(number: int, option: Option) -> int | str:
    return "all" if isinstance(option.branch, Mixture) else number


def _shape_text(term: Term) -> str:
    if isinstance(term, TableTerm):
        if isinstance(term.problems, KeyLists):
            return "lists of single keys"
        return "table of blocks of {} x {}".format(*term.problems.block)
    return f"blocks of {term.block_side}" if term.shape == "blocks" else term.shape


def _planned_terms(best: Plan) -> Iterator[PlannedTerm]:
    """Yield one `PlannedTerm` for each group of equal terms in each chosen option."""
    for number, chosen in enumerate(best.chosen, start=1):
        alike = Counter(
            (
                _shape_text(term),
                *(repr(term.rule), term.multiplicity, len(term.heads), term.folds, term.q.num_slots, term.k.num_slots),
            )
            for term in chosen.terms
        )
        for term, times in alike.items():
            yield PlannedTerm(_branch_label(number, chosen), chosen.layout, *term, times)


def _weighed_options(best: Plan) -> Iterator[WeighedOption]:
    for number, options in enumerate(best.options, start=1):
        for option in options:
            cost, is_chosen = option.cost, option is options[0]
            work = cost.computed_pairs, cost.gather_bytes, cost.launches, cost.seconds
            yield WeighedOption(_branch_label(number, option), option.layout, *work, is_chosen)


def _facts(found: PlanReport) -> list[tuple[str, str]]:
    useful, computed = found.useful_pairs, found.computed_pairs
    batch = f", batch {found.batch}" if found.batch > 1 else ""
    size = f"{tokens_text(found.num_tokens)} tokens, {found.heads_text}, {found.head_dim_text}, {found.dtype_name}"
    dropout = f", dropout {found.dropout_p:g}" if found.dropout_p else ""
    overcompute = f", {computed / useful:.3f} for each useful one" if useful else ""
    return [
        ("pattern", repr(found.pattern)),
        ("size", f"{size}{batch}"),
        ("engine", f"{found.engine} on {found.device}{dropout}"),
        ("useful pairs", f"{useful:,}, {useful / found.all_pairs:.4%} of all"),
        ("computed", f"{computed:,} in blocks{overcompute}"),
        ("FLOPs", f"{found.forward_flops:.3e} forward, {found.backward_flops:.3e} backward"),
        ("block lists", bytes_text(found.block_list_bytes)),
    ]


def _terms_table(terms: Sequence[PlannedTerm]) -> str:
    headers = ("branch", "layout", "shape", "rule", "times", "heads", "batch x length", "terms")
    lines = [
        (str(term.branch), term.layout, term.shape, shortened(term.rule, _WIDEST_RULE), str(term.times),
         str(term.heads), f"{term.folds}x{term.queries:,}{f' by {term.keys:,}' * (term.keys != term.queries)}",
         str(term.terms))
        for term in terms[:_MOST_LINES]
    ]  # fmt: skip
    more = len(terms) - _MOST_LINES
    rest = f"\n... and {more} more; --json prints all" if more > 0 else ""
    return tabulate(lines, headers, disable_numparse=True, maxcolwidths=[None, 16, None, 28]) + rest


def _options_table(options: Sequence[WeighedOption]) -> str:
    lines = [
        (str(option.branch), option.layout, f"{option.computed_pairs:,}", bytes_text(option.moved_bytes),
         f"{option.launches:,}", seconds_text(option.predicted_s), "chosen" if option.chosen else "")
        for option in options
    ]  # fmt: skip
    headers = ("branch", "layout", "computed pairs", "moved", "launches", "predicted", "")
    return tabulate(lines, headers, disable_numparse=True, colalign=("left", "left", *("right",) * 4))


def _measured_table(measured: Sequence[MeasuredOption]) -> str:
    lines = [(each.option, seconds_text(each.predicted_s), seconds_text(each.measured_s)) for each in measured]
    return tabulate(lines, ("option", "predicted", "measured"), disable_numparse=True)


def _memory_table(found: PlanReport) -> str:
    call, tokens = found.attention_memory, found.batch * found.num_tokens
    lines = [
        ("attend: q, k, v", call.inputs),
        ("attend: inference, peak", call.inference_peak),
        ("attend: kept for the backward", call.kept),
        ("attend: training, peak", call.training_peak),
    ]
    note = ""
    if found.model_memory is not None and found.checkpointed_memory is not None:
        model = found.model_memory
        lines += [
            ("model: weights", model.weights),
            ("model: AdamW's state", model.optimizer),
            ("model: inference, peak", model.inference_peak),
            ("model: training, peak", model.training_peak),
            ("model: training with checkpointing, peak", found.checkpointed_memory.training_peak),
        ]
        layers = f"{found.layers} layer{'s' if found.layers != 1 else ''}"
        note = f"\n\nThe model is a LongNet of {layers}, embed dim {found.embed_dim}, without vocabulary."
    table = [(name, bytes_text(held), bytes_text(held / tokens)) for name, held in lines]
    aligned = {"disable_numparse": True, "colalign": ("left", "right", "right")}
    return f"{tabulate(table, ('', 'bytes', 'a token'), **aligned)}{note}"
