"""The cases of torch's tests of FlexAttention, as tables: calls of `flex_attention` by group, made from drawn tensors.

The tables say what is built and nothing of how it is checked: `verdicts` runs a case and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_own
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, noop_mask

from flexdilated import flex_attention as own

from ._functions import BUFFERS, BUILT_IN, LEARNED, NARROW, SCORES, SIZE, Reads, Size, integer, per_entry, plain
from ._masks import CAUSAL, EDITS, PAGED, RULES, paged

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values


@dataclass(frozen=True)
class Case:
    """One call of `flex_attention`, or several in turn.

    rule: of the block mask; None for a call without one. lists: batch entries and heads with lists of their own.
    maker: makes the block mask of the rule. edit: changes it, given the size; the lists count then.
    layouts: how q, k, v and the gradient of the output lie in memory, by name; the others are contiguous.
    how: further arguments of the call.
    fixed: whichever of "q", "k", "v" and "score" needs no gradient.
    then: score functions of further calls, each of which has the output as its queries.
    steps: fields that replace those of the case in calls that follow each other.
    in_place: each step writes its values into the tensors of the first.
    refused: torch answers the call by an error.
    """

    name: str
    score: Reads | None = None
    rule: Reads | None = None
    size: Size = SIZE
    dtype: torch.dtype = torch.float64
    lists: tuple[int | None, int | None] = (None, None)
    block: int | tuple[int, int] = 32
    maker: Callable[..., BlockMask] = own.create_block_mask
    edit: Callable[[BlockMask, Size], BlockMask] | None = None
    layouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    then: tuple[Reads, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ({},)
    in_place: bool = False
    refused: bool = False

    def in_turn(self) -> Iterator[Case]:
        for step in self.steps:
            yield replace(self, steps=({},), **step)


# How tensors lie in memory: each takes a contiguous tensor and returns its values elsewhere.


def lies(*order: int) -> Callable[[Tensor], Tensor]:
    """Contiguous in this order of its axes."""
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    return lambda x: x.permute(order).contiguous().permute(back)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "at an offset": lambda x: torch.cat([x.new_zeros(97), x.flatten()])[97:].view_as(x),
    "tokens before heads": lies(0, 2, 1, 3),
    "heads before entries": lies(1, 0, 2, 3),
    "tokens first": lies(2, 0, 1, 3),
    "head dim before tokens": lies(0, 1, 3, 2),
    "longer rows": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "every other token": lambda x: torch.stack([x, x], 3).flatten(2, 3)[:, :, ::2],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one entry for all": lambda x: x[:1].expand_as(x),
    "one token for all": lambda x: x[:, :, :1].expand_as(x),
    "a third of a projection": lambda x: lies(0, 2, 1, 3)(torch.cat([x, x, x], 1)).chunk(3, 1)[1],
}
_STRIDED: tuple[tuple[str, str, str, str], ...] = (
    ("at an offset", "at an offset", "at an offset", "at an offset"),
    ("at an offset", "at an offset", "tokens first", "tokens first"),
    ("at an offset", "tokens before heads", "longer rows", "tokens before heads"),
    ("tokens first", "longer rows", "tokens first", "at an offset"),
    ("tokens first", "tokens before heads", "longer rows", "tokens first"),
    ("tokens first", "at an offset", "at an offset", "tokens before heads"),
    ("a third of a projection", "a third of a projection", "a third of a projection", "tokens before heads"),
    ("heads before entries", "one head for all", "one head for all", "one entry for all"),
    ("longer rows", "one entry for all", "one entry for all", "one token for all"),
    ("every other token", "every other token", "head dim before tokens", "head dim before tokens"),
)

HALVES = (torch.bfloat16, torch.float16)
_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
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


def _of_entry(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


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
        Case("batch broadcast of a rule", None, Reads(lambda: _of_entry), Size(batch=5), lists=(5, None)),
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
        *_of({name: paged(score) for name, score in BUILT_IN.items()}, rule=CAUSAL, **PAGED),
        *_named(
            "all pairs",
            _of(
                {name: paged(BUFFERS[name]) for name in ("of heads", "of batch entries", "one integer", "documents")},
                rule=plain(noop_mask),
                **PAGED,
            ),
        ),
        *_named(
            "one query",
            [
                Case(
                    "identity",
                    paged(BUILT_IN["identity"]),
                    plain(noop_mask),
                    **{**PAGED, "size": Size(queries=1, keys=384, kv_batch=1)},
                ),
                Case(
                    "ALiBi, 4 of 2",
                    paged(BUILT_IN["ALiBi"]),
                    plain(noop_mask),
                    how=_GQA,
                    **{**PAGED, "size": Size(queries=1, keys=384, kv_batch=1, kv_heads=2)},
                ),
            ],
        ),
    ],
    "memory": [
        *(
            Case(
                f"q {q}, k {k}, v {v}, gradient {out}",
                BUILT_IN["ALiBi"],
                layouts={"q": LAYOUTS[q], "k": LAYOUTS[k], "v": LAYOUTS[v], "out": LAYOUTS[out]},
            )
            for q, k, v, out in _STRIDED
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
            )
            for name in BUILT_IN
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
            maker=lambda f, B, H, N, M, **how: own.create_block_mask(f, B, H, 64, 64, **how),
            refused=True,
        ),
        Case(
            "a mask of more tokens",
            rule=CAUSAL,
            maker=lambda f, B, H, N, M, **how: own.create_block_mask(f, B, H, 128, 128, **how),
            refused=True,
        ),
        Case(
            "a mask of one token more",
            rule=CAUSAL,
            size=Size(queries=95, keys=95),
            maker=lambda f, B, H, N, M, **how: own.create_block_mask(f, B, H, 96, 96, **how),
            refused=True,
        ),
        Case("a sliced mask", rule=CAUSAL, edit=lambda mask, size: mask[:1], lists=(2, 4), refused=True),
        Case("lse asked for twice", how={"return_lse": True, **_LSE}, refused=True),
        Case("a score function of four arguments", plain(lambda s, b, h, q: s), refused=True),
        Case("a score that is no tensor", plain(lambda s, b, h, q, k: 1.0), refused=True),
        Case("an attribute that is not there", plain(lambda s, b, h, q, k: s.not_there), refused=True),
    ],
}
