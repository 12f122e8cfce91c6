"""The engine "aten" as a custom op of torch, of which torch.compile traces only the shapes and the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...masks import Layout, cache
from ...masks.core import Bound, Expression, device_kind
from ...masks.orders import Placement
from ...masks.patterns import lists_keys, rules_of_entries, tables, without_start
from ...masks.planning import (
    ANYTHING,
    SLOTS_AT_ONCE,
    Allowed,
    Choice,
    OperandSizes,
    Option,
    Plan,
    machine_of,
    plan,
    rule_of_joined_entries,
    takes_mask,
    without_scattered_keys,
)
from .._call import Call, check_heads
from .._gather import merge_
from .._merge import WholeRows, add_sinks, sum_dtype
from .._ops import own_op, set_gradient
from .._rows import RowProgram, needs_no_plan, row_program_of_call
from .._tables import key_lists, table_problems, table_split_of, without_table
from .._tuned import measured_choice
from ._program import Entries, EntryRange, Packed, Program, in_format_of, make_program
from ._query_rows import QueryRows
from ._single_keys import SingleKeys

_Executable = Program | QueryRows | SingleKeys | RowProgram

_CUDA_SLOTS_AT_ONCE = 1 << 18  # copied slots that occupy the device and are a small share of its memory


def portion_limits_on(kind: str) -> dict[str, int]:
    """Return the keyword arguments of `make_program` that bound the sizes of terms; {} on CPU, where defaults apply.

    kind: kind of device, such as "cpu".
    """
    return {} if device_kind(kind).on_host else {"slots_at_once": _CUDA_SLOTS_AT_ONCE}


def plan_aten(
    bound: Bound,
    layout: Layout,
    kind: str,
    choice: Choice | None = None,
    operands: OperandSizes | None = None,
    *,
    allowed: Allowed = ANYTHING,
) -> Plan:
    """Return a plan of attention by a bound pattern on a kind of device.

    On CPU the plan is that of `masks.planning.plan` for tokens in the order of `layout`. It has the options of
    `choice`; without a choice, or where the pattern lacks them, it has the `allowed` options of lowest predicted cost.

    On other devices the tokens are in natural order, and each branch has its cheapest option whose terms are all dense
    or causal; layout, choice and allowed are not used.

    kind: kind of device, such as "cpu".
    choice: options that were measured to be the fastest.
    operands: sizes on which costs depend; None for the device's usual sizes.

    Raises ValueError there for a branch without such an option.
    """
    if device_kind(kind).on_host:
        return plan(bound, layout=layout, allowed=allowed, choice=choice, operands=operands)
    best = plan(bound, device=kind, allowed=Allowed(any_windows=True, key_weights=False), operands=operands)
    chosen = tuple(_dense_or_causal_first(options, kind) for options in best.options)
    return Plan.of(best.bound, best.layout, chosen, best.together)


def _dense_or_causal_first(options: tuple[Option, ...], kind: str) -> tuple[Option, ...]:
    """Return the options with the first of only dense and causal terms moved to the front.

    Raises ValueError if there is no such option.
    """
    for index, option in enumerate(options):
        if all(term.shape in ("dense", "causal") for term in option.terms):
            return (option, *options[:index], *options[index + 1 :])
    raise ValueError(
        f"aten on {kind} runs ATen's kernels, which take branches that are dense or causal in some order of their "
        f"tokens; {options[0].branch} needs lists of blocks. engine='flex' serves it"
    )


@own_op("flexdilated::aten")
def aten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    constants: str,
    q_offset: int,
    k_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, natural lse) of a call for q, k and v: out in the dtype of q, lse in float32 or wider.

    The plan is looked up when the op runs, so other sizes need no retracing.

    sinks: for each head the logit of an extra key with value 0; None for no sinks.
    bindings: run-time tensors of the pattern, sorted by name.
    constants, q_offset, k_offset: `Call.arguments`: the pattern and further sizes as text, and the positions of the
        first query and the first key.

    k and v are cast to the dtype of q. Each gradient has the dtype of its tensor: if k and v are wider than q, dk and
    dv are not rounded to the dtype of q, so that callers can add them up in full precision.
    """
    call = Call.of(q, k, constants, q_offset, k_offset)
    return attention(call, q, k.to(q.dtype), v.to(q.dtype), sinks, bindings, scale)


def attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    scale: float,
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (out, natural lse) of a call, without autograd; out is in the dtype of q or, if `wide`, in that of lse.

    sinks: for each head the logit of an extra key with value 0; None for no sinks.
    bindings: run-time tensors of the pattern, sorted by name.

    q, k and v have one dtype. lse is in float32 or wider; a query without keys has output 0, and as lse the sink of its
    head, or -inf without sinks.
    """
    programs, others = _programs_for(call, bindings, q)
    out, lse = _run_on_entries(programs, lambda program, *x: program.forward(*x, scale), (q, k, v), (q, q[..., 0]))
    if others is not None:
        merge_(out, lse, *attention(others[0], q, k, v, None, others[1], scale, wide=True))
    if sinks is not None:
        # A sink scales whole rows, so the backward, which gets this out and lse, needs no sinks.
        out, lse = add_sinks(out, lse, sinks)
    return out if wide else in_format_of(out, q), lse


def _run_on_entries(
    programs: Sequence[tuple[Entries, _Executable]],
    compute: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    likes: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return the results for all batch entries, each shaped as its item of `likes`; a program computes some entries.

    programs: pairs (batch entries, program), which together cover the batch.
    compute: function of a program and of `inputs` for its entries. It returns a tuple: a result for each of `likes`.

    Results are in float32 or wider, but a single program for an EntryRange decides the dtypes of its results.
    """
    if len(programs) == 1 and isinstance(programs[0][0], EntryRange):
        return compute(programs[0][1], *inputs)
    results = tuple(torch.empty_like(x, dtype=sum_dtype(x)) for x in likes)
    for entries, program in programs:
        for x, part in zip(results, compute(program, *map(entries.of, inputs)), strict=True):
            entries.put(x, part)
    return results


@aten.register_fake
def _(q, k, v, sinks, bindings, constants, *options):
    check_heads(constants)
    lse = q.new_empty(q.shape[:3], dtype=sum_dtype(q))
    return torch.empty_like(q), lse


@own_op("flexdilated::aten_backward")
def aten_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bindings: list[Tensor],
    constants: str,
    q_offset: int,
    k_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of the op `aten`, in the dtypes of q, k and v, from its arguments and results out and lse.

    grad_out, grad_lse: gradients of out and lse; grad_lse None counts as 0.
    """
    call = Call.of(q, k, constants, q_offset, k_offset)
    whole, keys = WholeRows(out, lse, grad_out, grad_lse), (k.to(q.dtype), v.to(q.dtype))
    dq, dk, dv = gradients(call, q, *keys, bindings, whole, scale, wide=k.dtype != q.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def gradients(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    whole: WholeRows,
    scale: float,
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of a call, in the dtypes of q, k and v or, if `wide`, in that of lse (float32 or wider).

    bindings: run-time tensors of the pattern, sorted by name.
    whole: out, lse and their gradients, of rows that may have more keys than the call, or a sink.
    """
    programs, others = _programs_for(call, bindings, q)

    def compute(program: _Executable, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        return program.backward(q, k, v, WholeRows(*rows), scale)

    rows = (whole.out, whole.lse, whole.grad_out, *(() if whole.grad_lse is None else (whole.grad_lse,)))
    dq, dk, dv = _run_on_entries(programs, compute, (q, k, v, *rows), (q, k, v))
    if others is not None:
        beside = gradients(others[0], q, k, v, others[1], whole, scale, wide=True)
        dq, dk, dv = (total.add_(part) for total, part in zip((dq, dk, dv), beside, strict=True))
    return (dq, dk, dv) if wide else (in_format_of(dq, q), in_format_of(dk, k), in_format_of(dv, v))


@aten_backward.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


set_gradient(
    aten,
    aten_backward,
    refusal="the aten engine has no second derivative; "
    "attend(..., engine='portable') has one, and so has engine='reference' (dense, small inputs)",
)


def _programs_for(
    call: Call, bindings: list[Tensor], q: Tensor
) -> tuple[Sequence[tuple[Entries, _Executable]], tuple[Call, list[Tensor]] | None]:
    """Return ([(batch entries, executable), ...], second call or None), which together compute a call.

    The executable is SingleKeys or QueryRows for a table of keys or blocks; RowProgram on CPU if `needs_no_plan` and
    the call has no measured options; otherwise a Program. The second call, (call, run-time tensors), has the pairs
    beside the table, and its results are to be merged by lse; None if there are none.
    """
    selection = table_split_of(call)
    if selection is not None:
        others = None if selection.others is None else without_table(call, selection, bindings)
        if lists_keys(selection.leaf):
            lists = key_lists(call, selection, bindings, len(q)).on(q.device)
            return [(EntryRange(slice(None)), SingleKeys(lists, call.offsets))], others
        rows = [QueryRows(each) for each in table_problems(call, selection, bindings, len(q))]
        entries = [slice(None)] if len(rows) == 1 else [slice(entry, entry + 1) for entry in range(len(rows))]
        return [(EntryRange(some), each) for some, each in zip(entries, rows, strict=True)], others
    choice = measured_choice(call, q)
    if not needs_no_plan(call) or not device_kind(q.device).on_host or choice is not None:
        return _planned_programs(call, bindings, q.shape[0], q.device.type, choice, call.operands(q)), None
    if not bindings:
        return [(EntryRange(slice(None)), row_program_of_call(call, None, q.device))], None
    found = []
    for rows, of_rows in rules_of_entries(call.rules(bindings), q.shape[0]):
        rule, start = without_start(of_rows)
        found.append(
            (EntryRange(rows), row_program_of_call(call._replace(q_offset=call.q_offset + start), rule, q.device))
        )
    return found, None


def _planned_programs(
    call: Call,
    bindings: list[Tensor],
    batch: int,
    kind: str = "cpu",
    choice: Choice | None = None,
    operands: OperandSizes | None = None,
) -> list[tuple[Entries, Program]]:
    """Return pairs (batch entries, program) that cover the batch.

    kind: kind of device, such as "cpu".
    choice, operands: as in `program_of`.

    There is one pair for all `batch` entries, unless run-time tensors give the entries different masks.
    """
    written = call.pattern
    if not bindings:
        return [(EntryRange(slice(None)), program_of(call, None, kind, choice, operands, written=written))]
    rule = call.cached_rules(bindings)
    packed, visible = _joined_entries(call, rule, batch), None
    if packed is not None:
        call, groups = packed
    else:
        many = not takes_mask(call.num_heads, call.num_queries, call.num_keys)
        splits = many and device_kind(kind).on_host and not (choice or call.placement)
        apart = without_scattered_keys(rule) if splits else None
        if apart is not None:
            rule = apart[0]
            rows = apart[1].rows[:, call.k_offset : call.k_offset + call.num_keys]
            visible = Layout(call.num_keys, call.rate).apply(rows, dim=1)
        groups = [(EntryRange(rows), of_rows) for rows, of_rows in rules_of_entries(rule, batch)]
    found = []
    for entries, rule in groups:
        each, start = (rule, 0) if call.placement else without_start(rule)
        own = call._replace(pattern=each.text, q_offset=call.q_offset + start)
        program = program_of(own, each, kind, choice, operands, written=written, hides_keys=visible is not None)
        if visible is not None and isinstance(entries, EntryRange):
            program = replace(program, visible=entries.rows_of(visible))
        found.append((entries, program))
    return found


def _joined_entries(call: Call, rule: Expression, batch: int) -> tuple[Call, list[tuple[Entries, Expression]]] | None:
    """Return (call, [(all entries, rule)]) of one sequence to which all batch entries are joined, or None.

    The result is None if joining is impossible or useless: if queries and keys are not at positions 0 to N - 1 in
    natural order, if an entry has more than SLOTS_AT_ONCE tokens over all heads, if all entries have equal tables, or
    if their rules cannot be joined to one. Raises ValueError unless the rule has 1 or `batch` entries.
    """
    tokens = call.num_queries
    rule.require_entries(batch)
    is_whole = tokens == call.num_keys and not (call.q_offset or call.k_offset or call.placement)
    if not is_whole or call.rate != 1 or tokens * call.num_heads > SLOTS_AT_ONCE:
        return None
    if all(torch.equal(table.rows, table.rows[:1].expand_as(table.rows)) for table in tables(rule)):
        return None
    joined = rule_of_joined_entries(rule, tokens, batch)
    call = call._replace(num_queries=batch * tokens, num_keys=batch * tokens)
    return None if joined is None else (call, [(Packed(), joined)])


def program_of(
    call: Call,
    rule: Expression | None,
    kind: str,
    choice: Choice | None,
    operands: OperandSizes | None,
    *,
    written: str,
    hides_keys: bool = False,
) -> Program:
    """Return the cached program of a call on devices of a kind, such as "cpu"; make it if it is not in the cache.

    rule: the pattern with the values of its run-time tensors; None if it has none.
    choice: options measured to be the fastest; None for the cheapest by predicted cost.
    operands: sizes on which costs depend; None for usual ones.
    written: JSON text of the caller's pattern, by which the cache groups its programs.
    hides_keys: True if the caller sets `Program.visible`. The plan then has no key weights: kernels add either these or
        a mask of keys to the scores.
    """

    def build() -> Program:
        # With a requested block size, short sequences use block lists too, not one dense mask.
        allowed = Allowed(masks=not call.block_size, key_weights=not hides_keys)
        sizes = {"num_kv_heads": call.num_kv_heads, "block_size": call.block_size, **portion_limits_on(kind)}
        if call.placement:
            assert not hides_keys, "without a placement only"
            planned = call.plan(rule, operands=operands)
            return make_program(planned, call.layout, placement=Placement.read(call.placement), **sizes)
        planned = plan_aten(call.bound(rule), call.layout, kind, choice, operands, allowed=allowed)
        return make_program(planned, call.layout, **sizes)

    name = ("aten", call, kind, machine_of(kind).text, choice, operands, hides_keys)
    return cache().get(name, build, lambda program: program.nbytes, pattern=written)
