"""Entry of the flex engine: finds the program of a call in the cache or, inside torch.compile, in a traceable store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ...masks import cache
from ...masks.core import TILE, Expression, device_kind, suspended_torch_modes
from ...masks.orders import Placement
from ...masks.patterns import tables
from ...masks.planning import Allowed, Choice, OperandSizes, Plan, machine_of
from .._call import Call
from .._features import Features
from .._merge import merge
from .._operands import MOST_ELEMENTS, HiddenSlots, readable
from .._ops import own_op
from .._tuned import measured_choice
from ._flash import flash_cannot
from ._flex import run_flex
from ._kernel_call import is_flash
from ._program import TABLES, FlexProgram, FlexStep, list_width, make_flex_program, mask_of, tables_of
from ._selected_flex import copies_of, sides_of_table, unit_of
from ._selected_op import SelectedParts, selected_flex, selected_parts, takes_table
from ._traced import MAKERS, traced

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


def static_program(
    call: Call, device: torch.device, choice: Choice | None = None, operands: OperandSizes | None = None
) -> FlexProgram:
    """Return the FlexProgram of a call without run-time tensors; cached.

    choice: measured options of the planner; None for those of lowest predicted cost.
    operands: sizes of the tensors, on which predicted costs depend; None for the device's usual ones.
    """
    allowed = replace(allowed_on(device), residues=not call.placement)  # queries of a placement stay in order

    def planned() -> Plan:
        return call.plan(device=device, allowed=allowed, choice=choice, operands=operands)

    return _cached_program(call, call.pattern, device, planned, choice, operands)


def allowed_on(device: torch.device) -> Allowed:
    """Return the kinds of terms that the flex engine can run on this device.

    On CPU FlexAttention returns no lse for a merge, so no two terms may contribute to one row of the output.
    """
    return Allowed(shared_rows=device_kind(device).flex_trains, windows=False, key_weights=False, lists_only=True)


def run_time_program(
    call: Call,
    device: torch.device,
    bindings: Sequence[Tensor],
    batch: int,
    operands: OperandSizes | None = None,
    *,
    in_graph: bool = False,
) -> FlexProgram:
    """Return the FlexProgram of a call for these values of its run-time tensors; cached.

    bindings: the tensors, sorted by name.
    batch: number of batch entries.
    operands: as in `static_program`.
    in_graph: True for the block sizes of `blank_program`, so that the two programs differ only in tensors and their
        shapes. False allows smaller blocks where these values give short lists.

    The plan does not depend on the values: the terms are those of `blank_program`, with the values in their rules.

    Raises ValueError unless each run-time tensor has 1 or `batch` batch entries.
    """
    rule = call.rules(bindings)
    rule.require_entries(batch)

    def blank_plan() -> Plan:
        return _blank_plan(call, device, call.blank(bindings), operands)

    def planned() -> Plan:
        best = blank_plan()
        real = dict(zip(call.blank(bindings).branches(), rule.branches(), strict=True))
        terms = tuple(replace(term, rule=real.get(term.rule, term.rule)) for term in best.terms)
        return replace(best, bound=replace(best.bound, pattern=rule, batch=rule.num_entries()), terms=terms)

    sized_as = blank_plan if in_graph and not call.sides else None
    return _cached_program(call, rule.text, device, planned, None, operands, sized_as)


def blank_program(
    call: Call, device: torch.device, bindings: Sequence[Tensor], batch: int, operands: OperandSizes | None = None
) -> FlexProgram:
    """Return the FlexProgram of a call for placeholder values of its run-time tensors; cached.

    bindings: the tensors, sorted by name, of which only the shapes matter.
    batch: number of batch entries.
    operands: as in `static_program`.

    Programs from `run_time_program` with in_graph differ from this one only in the tensors that `run_time_tables`
    returns, padded and expanded to one size for all values.

    Raises ValueError unless each run-time tensor has 1 or `batch` batch entries.
    """
    blank = call.blank(bindings)
    blank.require_entries(batch)
    return _cached_program(call, blank.text, device, lambda: _blank_plan(call, device, blank, operands), None, operands)


def _blank_plan(call: Call, device: torch.device, blank: Expression, operands: OperandSizes | None) -> Plan:
    allowed = replace(allowed_on(device), shared_rows=False, residues=not call.placement)
    return call.plan(blank, device=device, allowed=allowed, operands=operands)


def _cached_program(
    call: Call,
    rule: str,
    device: torch.device,
    planned: Callable[[], Plan],
    choice: Choice | None,
    operands: OperandSizes | None,
    sized_as: Callable[[], Plan] | None = None,
) -> FlexProgram:
    """Return the FlexProgram of a call from the cache; build it from the plan `planned()` if it is not there.

    rule: text in place of the call's pattern in the cache key, such as the pattern with values of run-time tensors. The
        program is evicted when the cache forgets the call's pattern.
    choice, operands: as in `static_program`.
    sized_as: function that returns the plan from whose terms the block sizes follow; None: `planned`.
    """

    def build() -> FlexProgram:
        return make_flex_program(
            planned(),
            call.layout,
            num_kv_heads=call.num_kv_heads,
            block_size=call.sides,
            sized_as=sized_as() if sized_as else None,
            device=device,
            placement=Placement.read(call.placement) if call.placement else None,
        )

    in_graph = sized_as is not None
    name = ("flex", call._replace(pattern=rule), device, machine_of(device.type).text, choice, operands, in_graph)
    return cache().get(name, build, lambda program: program.nbytes, pattern=call.pattern, device=device)


@own_op("flexdilated::run_time_tables")
def run_time_tables(
    q: Tensor, k: Tensor, bindings: list[Tensor], constants: str, q_offset: int, k_offset: int
) -> list[Tensor]:
    """Return the tensors of a call's program that may differ from those of `blank_program`, term after term.

    For each term they are its block tables (as in BlockMask) and, if its rule has run-time tables, the rows of these
    tables that its mask reads, and its masks of hidden queries and keys. No shape depends on the values of `bindings`.

    bindings: the run-time tensors, sorted by name.
    constants, q_offset, k_offset: `Call.arguments`.
    """
    key = Call.of(q, k, constants, q_offset, k_offset)
    program = run_time_program(key, q.device, bindings, len(q), key.operands(q), in_graph=True)
    declared = _declared_shapes(key, q.device, bindings, len(q), key.operands(q))
    return [  # copies, contiguous and of the declared shapes; heads whose values are equal share a table of the program
        pad(x, (0, width - x.shape[-1])).expand(shape).contiguous()
        for (x, width), (shape, _) in zip(_varying_tensors(program), declared, strict=True)
    ]


@run_time_tables.register_fake
def _(q, k, bindings, *arguments):
    found = Call.of(q, k, *arguments)
    with suspended_torch_modes():
        shapes = _declared_shapes(found, q.device, bindings, int(q.shape[0]), found.operands(q))
    return [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def _declared_shapes(
    call: Call, device: torch.device, bindings: Sequence[Tensor], batch: int, operands: OperandSizes | None
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return (shape, dtype) of each result of `run_time_tables`; cached.

    Arguments are as in `blank_program`.
    """

    def build() -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        program = blank_program(call, device, bindings, batch, operands)
        return tuple(((*x.shape[:-1], width), x.dtype) for x, width in _varying_tensors(program))

    name = ("shapes", call, device, tuple(tuple(map(int, x.shape)) for x in bindings), batch, operands)
    return cache().get(name, build, lambda _: 0, pattern=call.pattern, device=device)


def _varying_tensors(program: FlexProgram) -> Iterator[tuple[Tensor, int]]:
    """Yield (tensor, padded width) for all tensors of a program that may depend on the values of run-time tensors.

    The padded width is a size of the last dim that is enough for all values. The order is that in which `with_tables`
    reads the tensors: for each step its block tables and, if it has run-time tables, their rows and its masks of hidden
    slots.
    """
    for step in program.steps:
        device = step.mask.kv_num_blocks.device
        by_row, by_column = list_width(step.term, step.structure.sides, device)
        for name, table in tables_of(step).items():
            width = by_row if "kv" in name else by_column
            yield table, table.shape[-1] if name.endswith("num_blocks") else width
        for x in (*(table.on(device).rows for table in tables(step.term.rule)), *_hidden_sides(step)):
            yield x, x.shape[-1]


def with_tables(program: FlexProgram, found: Sequence[Tensor]) -> FlexProgram:
    """Return the program, a call's `blank_program`, with the tensors `found` of the call's `run_time_tables`.

    The rows of run-time tables that masks read are replaced in place, so in the given program too. torch.compile can
    trace this function.
    """
    steps, following = [], iter(found)
    for step in program.steps:
        mask = mask_of(step, {name: next(following) for name in TABLES})
        for held in step.held:
            held.rows = next(following)
        hidden = HiddenSlots(*(next(following) for _ in _hidden_sides(step))) if step.held else step.hidden
        steps.append(
            FlexStep(mask, hidden, step.term, step.held, step.indices, step.queries, step.keys, step.structure)
        )
    return FlexProgram(tuple(steps), program.shares_rows, program.enter, None, ())


def _hidden_sides(step: FlexStep) -> tuple[Tensor, ...]:
    """Return (mask of hidden queries, mask of hidden keys) of a step; () if its term has no run-time tables.

    A mask is (batch entries, heads, slots), with as many entries and heads as the block tables, and True for hidden
    slots: a hidden query attends to no key, and no query attends to a hidden key. A side without hidden slots has a
    mask of False, so that the number of masks does not depend on the values of run-time tensors.
    """
    lead, device = step.mask.kv_num_blocks.shape[:2], step.mask.kv_num_blocks.device
    sides = ((step.hidden.queries, step.term.q.num_slots), (step.hidden.keys, step.term.k.num_slots))
    return tuple(
        torch.zeros(*lead, slots, dtype=torch.bool, device=device) if side is None else side.expand(*lead, -1)
        for side, slots in (sides if step.held else ())
    )


def _check_block_size(q: Tensor, call: Call) -> None:
    unit = 64 if torch.__version__ >= "2.15" else TILE  # newer torch has smaller tiles for smaller blocks
    if device_kind(q.device).flex_trains and q.dtype.itemsize == 2 and any(side % unit for side in call.block_size):
        raise ValueError(
            f"flex on {q.device.type} takes blocks whose sides are multiples of {unit} for {q.dtype}, as its "
            f"kernels' tiles have to divide them; got block_size={call.block_size}"
        )


def _check_table(q: Tensor, call: Call) -> None:
    """Raise ValueError if selected blocks are computed from their table, but FlashAttention does not support them."""
    table = selected_parts(call.pattern)
    if table is None or not takes_table(table, call):
        return
    sides = sides_of_table(table.block, unit_of(table.block, call.q_offset) or 0)
    reason = flash_cannot(q.device, q.dtype, q.shape[3], sides)
    if reason is not None:
        raise ValueError(f"selected blocks of {table.block}: {reason}")


def kv_head_parts(q: Tensor, k: Tensor, v: Tensor, copies: int = 1) -> list[range]:
    """Return ranges that together are all key/value heads, each with tensors of at most MOST_ELEMENTS elements.

    The tensors of a range are k and v of its heads and, for their query heads, q, the output, and the gathered copies
    of q. On CPU the result is a single range.

    copies: number of gathered copies of each query.

    Raises ValueError on accelerators if one key/value head exceeds the limit.
    """
    kv_heads = k.shape[1]
    rows = q.numel() // q.shape[3] * max(q.shape[3], v.shape[3])  # of q or of the output
    each = max(rows // kv_heads * copies, k.numel() // kv_heads, v.numel() // kv_heads)
    if not device_kind(q.device).flex_trains or each * kv_heads <= MOST_ELEMENTS:
        return [range(kv_heads)]
    if each > MOST_ELEMENTS:
        raise ValueError(
            f"flex needs tensors of at most {MOST_ELEMENTS} elements for one key/value head and its query heads, as "
            f"its kernels count in 32 bits; got {each}, of shapes {tuple(q.shape)} and {tuple(k.shape)}. Call attend "
            "for parts of the batch, or for parts of the query heads with head_offset and num_heads_global"
        )
    at_once = MOST_ELEMENTS // each
    return [range(begin, min(begin + at_once, kv_heads)) for begin in range(0, kv_heads, at_once)]


def call_of_part(call: Call, part: range) -> Call:
    """Return the Call (pattern and sizes) restricted to the key/value heads in `part` and their query heads."""
    groups = call.num_heads // call.num_kv_heads
    sizes = {"num_heads": len(part) * groups, "num_kv_heads": len(part)}
    return call._replace(**sizes, head_offset=call.head_offset + part.start * groups)


def heads_of_part(x: Tensor, part: range, kv_heads: int) -> Tensor:
    """Return a view of the heads of x that belong to the key/value heads in `part`.

    x: (B, X, N, D) or (X,), where X is a multiple of kv_heads, the number of key/value heads.
    """
    each = x.shape[-3 if x.dim() == 4 else 0] // kv_heads
    return x.narrow(1 if x.dim() == 4 else 0, part.start * each, len(part) * each)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    call: Call,
    features: Features,
) -> tuple[Tensor, Tensor | None]:
    """Return (out, natural lse) of attention by FlexAttention, eagerly or under torch.compile(fullgraph=True).

    The lse may be None without features.return_lse. On CPU the results have no gradient.

    bindings: the pattern's run-time tensors, sorted by name.
    call: pattern and sizes.

    Raises ValueError for numbers of elements, block sizes and selected blocks that the kernels do not support.
    """
    if not features.drops:
        return _attend_in_parts(q, k, v, bindings, call, features)
    # FlexAttention has no weights to drop, but it can attend to the kept pairs alone.
    features = features._replace(return_lse=True)
    kept, kept_lse = _attend_in_parts(q, k, v, bindings, call, features._replace(sinks=None))
    _, lse = _attend_in_parts(q, k, v, bindings, call, features.with_dropout(None))
    assert kept_lse is not None
    assert lse is not None
    return output_with_dropout(kept, kept_lse, lse, features.dropout_p), lse


def output_with_dropout(
    kept: Float[Tensor, "B H N D"], kept_lse: Float[Tensor, "B H N"], lse: Float[Tensor, "B H N"], p: float
) -> Float[Tensor, "B H N D"]:
    """Return the output of attention with dropout of probability p: kept * exp(kept_lse - lse) / (1 - p).

    kept, kept_lse: output and natural log-sum-exp over the kept pairs only.
    lse: over all pairs, and sinks if there are any.

    A row without kept pairs has output 0.
    """
    none = kept_lse == -torch.inf
    share = (kept_lse.masked_fill(none, 0.0) - lse.masked_fill(none, 0.0)).exp().masked_fill(none, 0.0)
    return (kept * (share / (1 - p))[..., None]).to(kept.dtype)


def _attend_in_parts(
    q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], call: Call, features: Features
) -> tuple[Tensor, Tensor | None]:
    if is_flash(features.kernel_options):
        _check_table(q, call)
    else:
        _check_block_size(q, call)
    if not device_kind(q.device).flex_trains:
        # On CPU FlexAttention refuses inputs that require a gradient, even under torch.no_grad().
        q, k, v = q.detach(), k.detach(), v.detach()
    q, k, v = readable(q), readable(k), readable(v)
    table = selected_parts(call.pattern) if device_kind(q.device).flex_trains else None
    sizes = call.num_queries, call.num_keys
    copies = 1 if table is None else copies_of(table.block, call.q_offset, table.most, sizes)
    parts = kv_head_parts(q, k, v, copies)
    if len(parts) == 1:
        return _attend(q, k, v, bindings, call, features)
    outs, lses = [], []
    for part in parts:
        some_q, some_k, some_v = (heads_of_part(x, part, k.shape[1]) for x in (q, k, v))
        sinks = None if features.sinks is None else heads_of_part(features.sinks, part, k.shape[1])
        own = call_of_part(call, part)
        out, lse = _attend(some_q, some_k, some_v, bindings, own, features._replace(sinks=sinks))
        outs.append(out)
        lses += [] if lse is None else [lse]
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1) if lses else None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], call: Call, features: Features
) -> tuple[Tensor, Tensor | None]:
    table = selected_parts(call.pattern) if device_kind(q.device).flex_trains and not features.drops else None
    if table is not None and takes_table(table, call):
        return _attend_with_table(q, k, v, bindings, call, table, features)
    if torch.compiler.is_compiling():
        program = traced("program", q, k, bindings, call)
        program = with_tables(program, run_time_tables(q, k, bindings, *call.arguments)) if bindings else program
        return run_flex(program, q, k, v, features)
    if bindings:
        program = run_time_program(call, q.device, bindings, len(q), call.operands(q))
    else:
        program = static_program(call, q.device, measured_choice(call, q), call.operands(q))
    return run_flex(program, q, k, v, features)


def _attend_with_table(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    call: Call,
    table: SelectedParts,
    features: Features,
) -> tuple[Tensor, Tensor]:
    """Return (out, natural lse) of a call whose pattern has a table of selected blocks.

    The pairs in selected blocks and the pattern's other pairs are computed one after the other and merged by lse.

    table: the pattern, split into the table and the other pairs.
    """
    sinks, features = features.sinks, features._replace(sinks=None, return_lse=True)
    parts = [selected_flex(q, k, v, bindings, table, call, features)]
    if table.others:
        needed = [bindings[table.names.index(name)] for name in table.needed]
        own = call._replace(pattern=table.others)
        part, part_lse = _attend(q, k, v, needed, own, features)
        assert part_lse is not None
        parts.append((part, part_lse))
    out, lse = merge(parts, [] if sinks is None else [sinks[:, None]])
    return out.to(q.dtype), lse


def _traced_program(call: Call, q: Tensor, bindings: list[Tensor]) -> FlexProgram:
    if bindings:
        return blank_program(call, q.device, bindings, int(q.shape[0]), call.operands(q))
    return static_program(call, q.device, measured_choice(call, q), call.operands(q))


MAKERS["program"] = _traced_program
