"""What fits into a budget of memory, as plain data and as a table."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from ._plan_fits import Memories, Peak, longest, longest_bound, slope
from ._plan_settings import PlanSettings
from ._sizes import bytes_text, tokens_text

# Where bytes a token are told: the growth from one to the other.
_BETWEEN = (1 << 16, 1 << 20)


def budget_data(settings: PlanSettings) -> dict[str, Any]:
    """Bytes a token, and the longest sequence for each budget. Raises ValueError where the pattern does not bind."""
    settings.pattern.check_heads(settings.num_heads)
    memories, most = Memories(settings), longest_bound(settings.pattern)
    peaks = _peaks(memories)
    between = min(_BETWEEN[0], most // 2), min(_BETWEEN[1], most)
    return {
        "pattern": repr(settings.pattern),
        "num_heads": settings.num_heads,
        "num_kv_heads": settings.num_kv_heads,
        "head_dim": settings.head_dim,
        "batch": settings.batch,
        "dtype": settings.dtype,
        "device": settings.device,
        "layers": settings.layers,
        "embed_dim": settings.embed_dim,
        "bytes_a_token": {name: slope(peak, between) for name, peak in peaks.items()},
        "longest": [
            {"budget_bytes": budget, **{name: longest(peak, budget, most=most) for name, peak in peaks.items()}}
            for budget in settings.budgets
        ],
    }


def _peaks(memories: Memories) -> dict[str, Peak]:
    return {
        "attention, inference": lambda tokens: memories.attention(tokens).inference_peak,
        "attention, training": lambda tokens: memories.attention(tokens).training_peak,
        "model, inference": lambda tokens: memories.model(tokens, False).inference_peak,
        "model, training": lambda tokens: memories.model(tokens, False).training_peak,
        "model, training, checkpointed": lambda tokens: memories.model(tokens, True).training_peak,
    }


def budget_text(data: dict[str, Any]) -> str:
    """Bytes a token in the first line, then a line for each budget, with what was counted."""
    heads = f"{data['num_heads']} heads" + (
        f" over {data['num_kv_heads']}" if data["num_kv_heads"] != data["num_heads"] else ""
    )
    sizes = f"{heads}, head dim {data['head_dim']}, {data['dtype']}, batch {data['batch']}, on {data['device']}"
    headers = ("", "attend:\ninference", "attend:\ntraining", "model:\ninference", "model:\ntraining",
               "model: training,\ncheckpointed")  # fmt: skip
    lines = [("bytes a token", *(bytes_text(each) for each in data["bytes_a_token"].values()))]
    for each in data["longest"]:
        budget, *tokens = each.values()
        lines.append((bytes_text(budget), *(tokens_text(number) if number else "none" for number in tokens)))
    note = (
        f"The longest sequence, in tokens, for each budget. attend: one call, with q, k, v and, in training, all\n"
        f"gradients. model: a LongNet of {data['layers']} layers, embed dim {data['embed_dim']}, without vocabulary, "
        f"with its weights,\nand in training their gradients and AdamW's two moments. K is 1,024, M is 1,048,576."
    )
    table = tabulate(lines, headers, disable_numparse=True, colalign=("left", *["right"] * 5))
    return f"{data['pattern']}\n{sizes}\n\n{table}\n\n{note}"
