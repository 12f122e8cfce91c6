"""The cases of torch's tests of FlexAttention, as tables: calls of `flex_attention` by group, made from drawn tensors.

The tables say what is built and nothing of how it is checked: `verdicts` runs a case and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_own
from torch.nn.attention.flex_attention import AuxRequest, noop_mask
from torch.utils.checkpoint import checkpoint

from flexdilated import flex_attention as own

from ._calls import LAYOUTS, STRIDED, Case
from ._functions import BUFFERS, BUILT_IN, LEARNED, NARROW, SCORES, Reads, Size, integer, per_entry, plain
from ._masks import CAUSAL, EDITS, PAGED, RULES, of_tokens, paged

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values


HALVES = (torch.bfloat16, torch.float16)
_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_PAGES = Size(keys=384, kv_batch=1)
_TORCHS = torch_own.create_block_mask
_GQA: Mapping[str, Any] = {"enable_gqa": True}
_LSE: Mapping[str, Any] = {"return_aux": AuxRequest(lse=True)}


def _of(scores: Mapping[str, Reads], **fields: Any) -> list[Case]:
    return [Case(name, score, **fields) for name, score in scores.items()]


def _named(text: str, cases: list[Case]) -> list[Case]:
    return [replace(case, name=f"{text}, {case.name}") for case in cases]


def _ruled(name: str, **fields: Any) -> Case:
    rule, lists = RULES[name]
    return Case(name, **{"rule": rule, "lists": lists, **fields})


def _each(sizes: Mapping[str, Mapping[str, Any]], scores: Mapping[str, Reads] = BUILT_IN) -> list[Case]:
    return [case for text, fields in sizes.items() for case in _named(text, _of(scores, **fields))]


def _poisoned(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, by: float) -> Tensor:
    return torch.where(q >= k, s, by)


def _recomputed(attention: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, attention, use_reentrant=False)


def _between_layers(attention: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, *given, **how: attention(q.sin(), *given, **how).cos()


def _narrower(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype, but for the formula in float64."""
    return x if x.dtype == torch.float64 else x.to(dtype)


GROUPS: dict[str, list[Case]] = {
    "score functions": _of(BUILT_IN | SCORES),
    "score functions, dtypes": _each(
        {_NAMES[dtype]: {"dtype": dtype} for dtype in (torch.float32, *HALVES)},
        BUILT_IN | {name: SCORES[name] for name in ("soft cap", "even keys", "sine of cosine", "grid window", "SiLU")},
    ),
    "tensors that they read": [
        *_of({name: reads for name, reads in BUFFERS.items() if name not in NARROW}),
        *_each(
            {"float32": {"dtype": torch.float32}, "bfloat16": {"dtype": torch.bfloat16}},
            {name: BUFFERS[name] for name in ("of heads", "all four", "one integer", "documents", *NARROW)},
        ),
    ],
    "learned biases": [
        *_each(
            {
                f"{n} tokens, {_NAMES[dtype]}": {"size": Size(queries=n, keys=n), "dtype": dtype}
                for n, dtype in ((101, torch.float64), (96, torch.float32), (37, torch.bfloat16))
            },
            LEARNED,
        ),
        *_named(
            "nothing else",
            _of({name: LEARNED[name] for name in ("distances", "heads", "all four")}, fixed=frozenset("qkv")),
        ),
        *_named(
            "with a mask",
            _of(
                {name: LEARNED[name] for name in ("queries and keys", "factor", "two")},
                rule=CAUSAL,
                dtype=torch.float32,
            ),
        ),
    ],
    "block masks": [
        *(_ruled(name) for name in RULES),
        Case("lists for more entries than the batch has", None, RULES["by batch entry"][0], lists=(3, None)),
        *_named("made by torch, float32", [_ruled(name, maker=_TORCHS, dtype=torch.float32) for name in RULES]),
    ],
    "blocks and lengths": [
        *(
            replace(_ruled(name, block=block), name=f"{name}, blocks of {block}")
            for name, block in product(("causal", "all", "window"), (16, 48, 128, 256, (32, 64), (64, 32)))
        ),
        *(
            replace(_ruled(name, size=Size(queries=n, keys=m)), name=f"{name}, {n} and {m} tokens")
            for name, (n, m) in product(
                ("causal", "all", "documents", "padding"),
                ((95, 95), (101, 101), (31, 31), (96, 160), (160, 96), (50, 101)),
            )
        ),
        *(replace(_ruled("causal", score=BUILT_IN[name], block=64), name=f"causal, {name}") for name in BUILT_IN),
        Case("queries and keys plus a mask", BUFFERS["queries and keys"], CAUSAL),
        Case("in the middle of a block, learned", LEARNED["two"], CAUSAL, Size(queries=93, keys=93)),
        Case("in the middle of a block, a factor", LEARNED["factor"], None, Size(queries=99, keys=99)),
        *(
            Case(f"{text} where the mask hides", plain(partial(_poisoned, by=by)), CAUSAL)
            for text, by in (("inf", torch.inf), ("-inf", -torch.inf), ("nan", torch.nan))
        ),
        Case("lists for each of five entries, alike", None, CAUSAL, Size(batch=5), lists=(5, None)),
    ],
    "edited lists": [Case(name, **{"rule": CAUSAL, **fields}) for name, fields in EDITS.items()],
    "heads and batch entries": _each(
        {
            "4 of 1": {"size": Size(kv_heads=1), "how": _GQA},
            "4 of 2": {"size": Size(kv_heads=2, queries=12), "how": _GQA},
            "8 of 2": {"size": Size(heads=8, kv_heads=2), "how": _GQA},
            "one entry of keys for 3": {
                "size": Size(batch=3, kv_heads=2, kv_batch=1),
                "rule": plain(noop_mask),
                "lists": (3, 1),
                "how": _GQA,
            },
            "one entry of keys for 4, causal": {
                "size": Size(batch=4, kv_heads=1, kv_batch=1),
                "rule": CAUSAL,
                "lists": (4, 1),
                "how": _GQA,
            },
        }
    ),
    "head dims and scales": [
        *_each({f"{d} and {e}": {"size": Size(dim=d, value_dim=e)} for d, e in ((16, 8), (8, 16))}),
        *_named(
            "identity",
            [
                Case(f"{d} and {e}, {_NAMES[dtype]}", BUILT_IN["identity"], CAUSAL, Size(dim=d, value_dim=e), dtype)
                for (d, e), dtype in product(
                    ((1, 1), (7, 5), (24, 24), (96, 80), (64, 128)), (torch.float64, torch.float32)
                )
            ],
        ),
        *(
            Case(f"scale {scale}", BUILT_IN["relative"], CAUSAL, how={"scale": scale})
            for scale in (0.3, 1.0, 0.0, -0.5, 1)
        ),
    ],
    "keys of a narrower dtype": [
        Case(
            f"{_NAMES[wide]}, keys and values in {_NAMES[dtype]}",
            None,
            CAUSAL,
            dtype=wide,
            layouts={name: partial(_narrower, dtype=dtype) for name in "kv"},
        )
        for wide, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16))
    ],
    "lengths": _each(
        {f"{n} queries, {m} keys": {"size": Size(queries=n, keys=m)} for n, m in ((48, 96), (96, 48), (1, 1), (3, 130))}
    ),
    "one query": [
        *_each(
            {
                "of 101 keys": {"size": Size(queries=1, keys=101)},
                "4 heads of 1, float32": {
                    "size": Size(queries=1, kv_heads=1),
                    "dtype": torch.float32,
                    "rule": plain(noop_mask),
                    "how": _GQA,
                },
            }
        ),
        *(
            Case(name, None, rule, Size(queries=1), lists=lists)
            for name, rule, lists in (
                ("at a place", Reads(lambda at: lambda b, h, q, k: q + at >= k, values=(integer(40),)), (None, None)),
                (
                    "at a place of each entry",
                    Reads(lambda at: lambda b, h, q, k: q + at[b] >= k, values=(per_entry,)),
                    (2, None),
                ),
                ("window", plain(lambda b, h, q, k: (q + 60 - k >= 0) & (q + 60 - k < 16)), (None, None)),
                ("by head", plain(lambda b, h, q, k: k % 4 == h), (None, 4)),
                ("a full row", plain(noop_mask), (2, 4)),
            )
        ),
        *_of(
            {name: BUFFERS[name] for name in ("of heads", "of keys", "queries and keys", "one integer", "all four")},
            size=Size(queries=1),
        ),
    ],
    "pages": [
        *_of({name: paged(score) for name, score in BUILT_IN.items()}, rule=CAUSAL, size=_PAGES, **PAGED),
        *_named(
            "all pairs",
            _of(
                {name: paged(BUFFERS[name]) for name in ("of heads", "of batch entries", "one integer", "documents")},
                rule=plain(noop_mask),
                size=_PAGES,
                **PAGED,
            ),
        ),
        *(
            Case(f"one query, {name}", paged(BUILT_IN[name]), plain(noop_mask), size, how=_GQA, **PAGED)
            for name, size in (
                ("identity", replace(_PAGES, queries=1)),
                ("ALiBi", replace(_PAGES, queries=1, kv_heads=2)),
            )
        ),
    ],
    "memory": [
        *(
            Case(
                f"q {q}, k {k}, v {v}, gradient {out}",
                BUILT_IN["ALiBi"],
                layouts={"q": LAYOUTS[q], "k": LAYOUTS[k], "v": LAYOUTS[v], "out": LAYOUTS[out]},
            )
            for q, k, v, out in STRIDED
        ),
        *(
            Case(f"all {name}{', a mask' * (rule is not None)}", None, rule, layouts=dict.fromkeys("qkv", layout))
            for (name, layout), rule in product(LAYOUTS.items(), (None, CAUSAL))
        ),
        *(
            Case(
                f"all {name}, {n} tokens, a batch of {b}",
                size=Size(b, 2, n, n),
                layouts=dict.fromkeys("qkv", LAYOUTS[name]),
            )
            for name, (b, n) in product(
                ("tokens before heads", "heads before entries", "tokens first"), ((2, 128), (4, 64), (1, 1))
            )
        ),
    ],
    "lse": [
        *_each({"lse": {"how": _LSE}, "lse in float32": {"how": _LSE, "dtype": torch.float32}}),
        *_named("maxima", _of(BUILT_IN, how={"return_aux": AuxRequest(max_scores=True)})),
        *_named(
            "both",
            _of(
                {name: BUILT_IN[name] for name in ("identity", "squared", "causal")},
                how={"return_aux": AuxRequest(lse=True, max_scores=True)},
            ),
        ),
        *(_ruled(name, how=_LSE) for name in ("half of the queries", "nothing", "causal window", "beyond a window")),
        *_named(
            "bfloat16", [_ruled(name, how=_LSE, dtype=torch.bfloat16) for name in ("causal", "half of the queries")]
        ),
        *_named("float16", [_ruled("causal", how=_LSE, dtype=torch.float16)]),
        Case("the older argument", BUILT_IN["causal"], how={"return_lse": True}),
        Case("no more asked for", BUILT_IN["causal"], how={"return_aux": AuxRequest()}),
        Case("of a score in float64", SCORES["wider"], dtype=torch.float32, how=_LSE),
        Case("one query", LEARNED["heads"], size=Size(queries=1), how=_LSE),
        Case("one key", LEARNED["heads"], size=Size(queries=1, keys=1), how=_LSE),
        Case("fewer heads of keys", BUILT_IN["ALiBi"], size=Size(kv_heads=2), how={**_LSE, **_GQA}),
        *_named(
            "learned",
            _of({name: LEARNED[name] for name in ("heads", "queries and keys", "factor", "one number")}, how=_LSE),
        ),
    ],
    "calls in turn": [
        *(
            Case(
                f"{name}, shorter and shorter",
                BUILT_IN[name],
                plain(noop_mask),
                steps=tuple({"size": Size(batch=b, queries=n, keys=n)} for b, n in ((2, 96), (4, 48), (8, 24))),
                dynamic=True if index % 2 else None,
            )
            for index, name in enumerate(BUILT_IN)
        ),
        *(
            Case(
                f"{name}, other lengths, its own mask",
                None,
                RULES[name][0],
                lists=RULES[name][1],
                steps=tuple({"size": Size(queries=n, keys=n)} for n in (96, 95, 128, 127)),
            )
            for name in ("causal", "all", "window", "documents", "padding")
        ),
        *(
            Case(f"{name}, other values", reads, steps=({}, {}, {}), in_place=True)
            for name, reads in (LEARNED | BUFFERS).items()
            if reads.axes and "Q" not in reads.axes and name in ("heads", "factor", "two", "one number", "all four")
        ),
        Case("another score function", steps=tuple({"score": BUILT_IN[name]} for name in BUILT_IN)),
        Case("another mask", steps=tuple({"rule": RULES[name][0]} for name in ("causal", "window", "prefix", "all"))),
        Case("with and without a mask", steps=({"rule": CAUSAL}, {}, {"rule": CAUSAL})),
        Case("another dtype", BUILT_IN["causal"], steps=({}, {"dtype": torch.float32}, {"dtype": torch.bfloat16})),
        Case(
            "more batch entries",
            None,
            RULES["padding"][0],
            lists=(2, None),
            steps=tuple({"size": Size(batch=b), "lists": (b, None)} for b in (2, 3, 5)),
        ),
        Case("other numbers of heads", BUILT_IN["ALiBi"], steps=tuple({"size": Size(heads=h)} for h in (2, 4, 5))),
        Case("two in one function", BUILT_IN["relative"], then=(BUILT_IN["causal"],)),
        Case("three in one function", BUILT_IN["relative"], then=(BUILT_IN["causal"], BUILT_IN["relative"])),
        Case("two with a learned bias", LEARNED["heads"], then=(SCORES["soft cap"],)),
        Case("two with a mask", None, CAUSAL, then=(BUILT_IN["squared"],)),
    ],
    "in larger functions": [
        *(
            Case(f"{text}, {name}", score, rule, around=around, dtype=torch.float32)
            for (text, around), (name, score, rule) in product(
                (("recomputed in the backward", _recomputed), ("between layers", _between_layers)),
                (("identity", None, None), ("causal", None, CAUSAL), ("a bias", LEARNED["heads"], CAUSAL)),
            )
        ),
        *(
            _ruled(name, mask_inside=True)
            for name in ("causal", "window", "documents", "padding", "documents of each entry", "by head")
        ),
    ],
    "kernel options": [
        Case(
            ", ".join(f"{name} {value}" for name, value in options.items()),
            BUILT_IN["relative"],
            CAUSAL,
            how={"kernel_options": options},
        )
        for options in (
            {"BLOCK_M": 16},
            {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4},
            {"PRESCALE_QK": True},
            {"ROWS_GUARANTEED_SAFE": True},
            {"BLOCKS_ARE_CONTIGUOUS": True},
            {"FORCE_USE_FLEX_ATTENTION": True},
            {"FORCE_USE_FLEX_ATTENTION": False},
            {"BACKEND": "TRITON"},
        )
    ],
    "refused by torch too": [
        Case("fewer heads of keys, not allowed", size=Size(kv_heads=2), refused=True),
        Case("heads that do not divide", size=Size(kv_heads=3), how=_GQA, refused=True),
        Case("another number of batch entries", size=Size(batch=4, kv_batch=2), refused=True),
        Case("three batch entries of keys for four", size=Size(batch=4, kv_batch=3), rule=CAUSAL, refused=True),
        Case("three axes", layouts=dict.fromkeys("qkv", lambda x: x[0]), refused=True),
        Case("another head dim of keys", layouts={"k": lambda x: x[..., :8]}, refused=True),
        Case("more values than keys", layouts={"k": lambda x: x[:, :, :50]}, refused=True),
        Case(
            "a mask of fewer tokens",
            rule=CAUSAL,
            maker=of_tokens(own.create_block_mask, 64, 64),
            refused=True,
        ),
        Case(
            "a mask of more tokens",
            rule=CAUSAL,
            maker=of_tokens(own.create_block_mask, 128, 128),
            refused=True,
        ),
        Case(
            "a mask of one token more",
            rule=CAUSAL,
            size=Size(queries=95, keys=95),
            maker=of_tokens(own.create_block_mask, 96, 96),
            refused=True,
        ),
        Case("a sliced mask", rule=CAUSAL, edit=lambda mask, size: mask[:1], lists=(2, 4), refused=True),
        Case("lse asked for twice", how={"return_lse": True, **_LSE}, refused=True),
        Case("a score function of four arguments", plain(lambda s, b, h, q: s), refused=True),
        Case("a score that is no tensor", plain(lambda s, b, h, q, k: 1.0), refused=True),
        Case("an attribute that is not there", plain(lambda s, b, h, q, k: s.not_there), refused=True),
    ],
}
