"""A plan as plain data and as tables: its terms, what else was weighed, what it computes and holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate

from ..engines.flex._flex_program import allowed_on
from ..masks.core._bound import Bound
from ..masks.core._pattern import Mixture
from ..masks.core._spelling import shortened
from ..masks.inspection import Description, describe_plan, fitted_facts, fitted_table
from ..masks.planning._options import ANYTHING, Option
from ..masks.planning._planner import Plan, plan
from ..masks.planning.lowering._term import Term
from ..memory._memory import attention_memory
from ..nn._model_memory import attention_size, model_memory
from ..tuning._tune import measure_options
from ._plan_settings import DTYPES, PlanSettings
from ._sizes import bytes_text, tokens_text

_MOST_LINES = 24
_WIDEST_RULE = 60


def report_data(settings: PlanSettings) -> dict[str, Any]:
    """All that is known of the plan, as plain data. ValueError where it does not bind or blocks are too many."""
    bound = _bound(settings)
    allowed = ANYTHING if settings.device == "cpu" else allowed_on(torch.device(settings.device))
    best = plan(bound, device=settings.device, allowed=allowed)
    described = describe_plan(best, head_dim=settings.head_dim)
    return {
        "pattern": repr(settings.pattern),
        "num_tokens": settings.num_tokens,
        "num_heads": settings.num_heads,
        "num_kv_heads": settings.num_kv_heads,
        "head_dim": settings.head_dim,
        "batch": settings.batch,
        "dtype": settings.dtype,
        "device": settings.device,
        "engine": "tiles" if settings.device == "cpu" else "flex",
        **_work(described, settings.batch),
        "terms": _terms(best),
        "options": [_option(number, option, option is options[0])
                    for number, options in enumerate(best.options, start=1) for option in options],
        "measured": _measured(settings, bound),
        "memory": _memory(settings),
    }  # fmt: skip


def _bound(settings: PlanSettings) -> Bound:
    sizes = {"num_queries": settings.num_tokens, "num_keys": settings.num_tokens}
    return settings.pattern.bind(num_heads=settings.num_heads, **sizes)


def _work(described: Description, batch: int) -> dict[str, Any]:
    return {
        "useful_pairs": batch * described.useful_pairs,
        "computed_pairs": batch * described.computed_pairs,
        "all_pairs": batch * described.all_pairs,
        "forward_flops": batch * described.forward_flops,
        "backward_flops": batch * described.backward_flops,
        "block_list_bytes": described.table_bytes,
    }


def _terms(best: Plan) -> list[dict[str, Any]]:
    """The terms of each branch's choice; those that differ in where they lie alone are one, with their number."""
    found: list[dict[str, Any]] = []
    for number, options in enumerate(best.options, start=1):
        alike = Counter(tuple(_term(term).items()) for term in options[0].terms)
        shared = {"branch": _branch(number, options[0]), "layout": options[0].layout}
        found += [{**shared, **dict(term), "terms": times} for term, times in alike.items()]
    return found


def _term(term: Term) -> dict[str, Any]:
    return {
        "shape": f"blocks of {term.block_side}" if term.shape == "blocks" else term.shape,
        "rule": repr(term.rule),
        "times": term.multiplicity,
        "heads": len(term.heads),
        "folds": term.folds,
        "queries": term.q.num_slots,
        "keys": term.k.num_slots,
    }


def _branch(number: int, option: Option) -> int | str:
    """The number of an option's branch, or that it computes all of a mixture."""
    return "all" if isinstance(option.branch, Mixture) else number


def _option(number: int, option: Option, chosen: bool) -> dict[str, Any]:
    cost = option.cost
    return {
        "branch": _branch(number, option),
        "layout": option.layout,
        "computed_pairs": cost.computed_pairs,
        "moved_bytes": cost.gather_bytes,
        "launches": cost.launches,
        "predicted_s": cost.seconds,
        "chosen": chosen,
    }


def _measured(settings: PlanSettings, bound: Bound) -> list[dict[str, Any]]:
    if not settings.measure:
        return []
    sizes = settings.head_dim, settings.num_kv_heads
    found = measure_options(bound, settings.device, DTYPES[settings.dtype], *sizes, backward=False)
    return [{"option": name, "predicted_s": predicted, "measured_s": took} for name, predicted, took in found]


def _memory(settings: PlanSettings) -> dict[str, Any]:
    device, tokens = settings.device, settings.num_tokens
    call = attention_memory(settings.pattern, settings.attention(tokens), device=device)
    inside = attention_memory(settings.pattern, attention_size(settings.model, tokens), device=device)
    models = {name: model_memory(settings.model, tokens, inside, checkpoint=name == "checkpointed")
              for name in ("plain", "checkpointed")}  # fmt: skip
    return {
        "attention": {
            "inputs": call.inputs,
            "inference_peak": call.inference_peak,
            "kept_for_backward": call.kept,
            "training_peak": call.training_peak,
            "tables": call.tables,
        },
        "model": {
            "layers": settings.layers,
            "embed_dim": settings.embed_dim,
            "weights": models["plain"].weights,
            "optimizer": models["plain"].optimizer,
            "inference_peak": models["plain"].inference_peak,
            "training_peak": models["plain"].training_peak,
            "checkpointed_training_peak": models["checkpointed"].training_peak,
        },
    }


def report_text(data: dict[str, Any], *, columns: int) -> str:
    """The same as tables, in lines of at most so many characters."""
    parts = [fitted_facts(_facts(data), columns=columns), "How it is computed", _terms_table(data["terms"], columns)]
    parts += ["What was weighed", _options_table(data["options"], columns)]
    if data["measured"]:
        parts += ["Forward on this machine", _measured_table(data["measured"])]
    return "\n\n".join([*parts, "Memory", _memory_table(data)])


def _facts(data: dict[str, Any]) -> list[tuple[str, str]]:
    heads = f"{data['num_heads']} heads"
    if data["num_kv_heads"] != data["num_heads"]:
        heads += f" over {data['num_kv_heads']}"
    useful, computed = data["useful_pairs"], data["computed_pairs"]
    waste = f", {computed / useful:.3f} for each useful one" if useful else ""
    kind = data["dtype"] + (f", batch {data['batch']}" if data["batch"] > 1 else "")
    return [
        ("pattern", data["pattern"]),
        ("size", f"{tokens_text(data['num_tokens'])} tokens, {heads}, head dim {data['head_dim']}, {kind}"),
        ("engine", f"{data['engine']} on {data['device']}"),
        ("useful pairs", f"{useful:,}, {useful / data['all_pairs']:.4%} of all"),
        ("computed", f"{computed:,} in blocks{waste}"),
        ("FLOPs", f"{data['forward_flops']:.3e} forward, {data['backward_flops']:.3e} backward"),
        ("block lists", bytes_text(data["block_list_bytes"])),
    ]  # fmt: skip


def _terms_table(terms: Sequence[dict[str, Any]], columns: int) -> str:
    names = ("branch", "layout", "shape", "rule", "times", "heads", "slots", "terms")
    lines = [[str(term[name]) for name in names] for term in ({**term, **_shown(term)} for term in terms[:_MOST_LINES])]
    headers = [name if name != "slots" else "folds x slots" for name in names]
    more = len(terms) - _MOST_LINES
    rest = f"\n... and {more} more; --json prints all" if more > 0 else ""
    return fitted_table(lines, headers, columns=columns) + rest


def _shown(term: dict[str, Any]) -> dict[str, str]:
    """How a term's rule and sizes are printed."""
    keys = "" if term["keys"] == term["queries"] else f" by {term['keys']:,}"
    return {"rule": shortened(term["rule"], _WIDEST_RULE), "slots": f"{term['folds']}x{term['queries']:,}{keys}"}


def _options_table(options: Sequence[dict[str, Any]], columns: int) -> str:
    lines = [
        (str(option["branch"]), option["layout"], f"{option['computed_pairs']:,}", bytes_text(option["moved_bytes"]),
         f"{option['launches']:,}", f"{option['predicted_s'] * 1e3:.3g}", "chosen" if option["chosen"] else "")
        for option in options
    ]  # fmt: skip
    headers = ("branch", "layout", "computed pairs", "moved", "launches", "predicted ms", "")
    return fitted_table(lines, headers, columns=columns, align=("left", "left", "right", "right", "right", "right"))


def _measured_table(measured: Sequence[dict[str, Any]]) -> str:
    lines = [
        (each["option"], f"{each['predicted_s'] * 1e3:.3g}", f"{each['measured_s'] * 1e3:.3g}") for each in measured
    ]
    return tabulate(lines, ("option", "predicted ms", "measured ms"), disable_numparse=True)


def _layers(model: dict[str, Any]) -> str:
    return f"{model['layers']} layer{'s' if model['layers'] != 1 else ''}"


def _memory_table(data: dict[str, Any]) -> str:
    attention, model, tokens = data["memory"]["attention"], data["memory"]["model"], data["batch"] * data["num_tokens"]
    lines = [
        ("attend: q, k, v", attention["inputs"]),
        ("attend: inference, peak", attention["inference_peak"]),
        ("attend: kept for the backward", attention["kept_for_backward"]),
        ("attend: training, peak", attention["training_peak"]),
        ("model: weights", model["weights"]),
        ("model: AdamW's state", model["optimizer"]),
        ("model: inference, peak", model["inference_peak"]),
        ("model: training, peak", model["training_peak"]),
        ("model: training with checkpointing, peak", model["checkpointed_training_peak"]),
    ]
    table = [(name, bytes_text(held), bytes_text(held / tokens)) for name, held in lines]
    note = f"The model is a LongNet of {_layers(model)}, embed dim {model['embed_dim']}, without vocabulary."
    aligned = {"disable_numparse": True, "colalign": ("left", "right", "right")}
    return f"{tabulate(table, ('', 'bytes', 'a token'), **aligned)}\n\n{note}"
