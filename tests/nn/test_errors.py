"""What modules and models refuse, in one table for each; tests/project/errors.md has more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from tests.support.longnet_oracle import TINY

B, N, E, H = 3, 11, 12, 2
X, SOME = torch.zeros(N, B, E), fd.SelectedLayers(block=8, most=2)
TOKENS, IDS = torch.zeros(2, N, dtype=torch.int64), torch.zeros(2, N, dtype=torch.int64)
Row = tuple[Any, type[Exception], str]


def multihead(**options: Any) -> fd.MultiheadDilatedAttention:
    arguments = {"embed_dim": E, "num_heads": H, "segment_lengths": (4,), "dilation_rates": (1,)}
    return fd.MultiheadDilatedAttention(**(arguments | options))


def attend(query: Any = X, key: Any = X, value: Any = None, **options: Any) -> Any:
    return multihead()(query, key, key if value is None else value, **options)


def sparse(pattern: Any = None, **options: Any) -> fd.BlockSparseAttention:
    return fd.BlockSparseAttention(masks.causal() if pattern is None else pattern, **options)


Q = torch.zeros(2, 4, 9, 8)


def call(q: Any = Q, k: Any = Q, v: Any = Q, **options: Any) -> Any:
    return sparse()(q, k, v, **options)


def model(**options: Any) -> fd.LongNet:
    return fd.LongNet(replace(TINY, **options))


def rows(function: Callable[..., Any], table: list[tuple[dict[str, Any], type[Exception], str]]) -> list[Row]:
    return [(partial(function, **options), error, message) for options, error, message in table]


GROUPS = {"heads": "grouped", "segment_lengths": (4, 4, 4), "dilation_rates": (1, 1, 1)}
PER_HEAD = masks.per_head([masks.causal()] * 3)
BY_IDS = {"segment_lengths": None, "dilation_rates": None, "pattern": "documents('ids')"}
MULTIHEAD = [
    *rows(
        multihead,
        [
            ({"dropout": "0"}, TypeError, "dropout must be a real number"),
            ({"num_heads": 0}, ValueError, "num_heads must be at least 1"),
            ({"kdim": 0}, ValueError, "kdim must be at least 1"),
            ({"batch_first": None}, TypeError, "batch_first must be True or False"),
            ({"bias": 1}, TypeError, "bias must be True or False"),
            ({"engine": "dense"}, ValueError, "got engine='dense'"),
            (GROUPS, ValueError, "at least the number of head groups, 3; got num_heads=2"),
        ],
    ),
    *rows(
        attend,
        [
            ({"key_padding_mask": torch.ones(B, N)}, ValueError, "must hold 0 or -inf; got 1.0"),
            ({"key_padding_mask": [True]}, TypeError, "must hold booleans, .*; got list"),
            ({"is_causal": None}, TypeError, "is_causal must be True or False"),
            ({"attn_mask": torch.ones(N, N).triu(1) > 0}, ValueError, "a module that is made with causal=True"),
            ({"key": torch.zeros(N, B, 13)}, ValueError, r"key must have shape \(tokens, 12\), .* got \(11, 3, 13\)"),
            ({"key": X[None]}, ValueError, "key must have shape"),
            ({"value": torch.zeros(N + 1, B, E)}, ValueError, "key and value must agree in tokens and batch"),
            ({"key": X.double()}, ValueError, "key must have the module's dtype"),
            ({"key": X.to("meta")}, ValueError, "key must be on the module's device"),
            ({"key": None}, TypeError, "key must be a tensor; got NoneType"),
            ({"bindings": {"ids": IDS}}, ValueError, "bindings must name run-time tensors of the pattern"),
        ],
    ),
]
SPARSE = [
    *rows(
        sparse,
        [
            ({"engine": "dense"}, ValueError, "got engine='dense'"),
            ({"scale": float("nan")}, ValueError, "scale must be finite"),
            ({"enable_gqa": 1}, TypeError, "enable_gqa must be True or False"),
            ({"block_size": 0}, ValueError, "block_size must be at least 1"),
            ({"sinks": torch.zeros(4)}, TypeError, "sinks must be True or False"),
            ({"num_heads": 4}, ValueError, "needs sinks=True; got sinks=False, num_heads=4"),
            ({"sinks": True, "num_heads": 0}, ValueError, "num_heads must be at least 1"),
            ({"pattern": PER_HEAD, "sinks": True, "num_heads": 4}, ValueError, "3 for 4 heads"),
        ],
    ),
    (partial(fd.DilatedAttention, (8,), (1,), scale="1"), TypeError, "scale must be a real number"),
    *rows(
        call,
        [
            ({"k": Q[:, :2], "v": Q[:, :2]}, ValueError, "need enable_gqa=True"),
            ({"q": Q[0]}, ValueError, "4 dims"),
            ({"q": Q.double()}, ValueError, "one dtype"),
            ({"q_offset": -1}, ValueError, "q_offset must be at least 0"),
            ({"k": [1]}, TypeError, "k must be a tensor; got list"),
            ({"k": [1], "key_padding_mask": IDS > 0}, TypeError, "k must be a tensor; got list"),
            ({"k": Q[0, 0], "key_padding_mask": IDS > 0}, ValueError, "k must have the 4 dims"),
            ({"key_padding_mask": IDS > 0}, ValueError, r"shape \(2, 9\), one entry for each key; got \(2, 11\)"),
            ({"key_padding_mask": IDS}, TypeError, "got torch.int64"),
            ({"key_padding_mask": [[True] * 9] * 2}, TypeError, "got list"),
        ],
    ),
]
CONFIGS = rows(
    partial(replace, TINY),
    [
        ({"num_heads": 5}, ValueError, "multiple of num_heads; got embed_dim=24 and num_heads=5"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1"),
        ({"depth": 0}, ValueError, "depth must be at least 1"),
        ({"depth": 2.0}, TypeError, "depth must be an integer"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1"),
        ({"ffn_dim": 0}, ValueError, "ffn_dim must be at least 1"),
        ({"rotary_base": 1.0}, ValueError, "rotary_base must be above 1; got rotary_base=1.0"),
        ({"rotary_base": float("nan")}, ValueError, "rotary_base must be finite"),
        ({"position": "alibi"}, ValueError, "'rotary', 'xpos', 'learned'; got position='alibi'"),
        ({"max_positions": 9}, ValueError, "take position='learned'; got position='rotary', max_positions=9"),
        ({"xpos_scale": 0}, ValueError, "xpos_scale must be at least 1"),
        ({"norm": "batch"}, ValueError, "'layer', 'rms'; got norm='batch'"),
        ({"drop_path": -0.1}, ValueError, "drop_path must be at least 0"),
        ({"bias": None}, TypeError, "bias must be True or False"),
        ({"engine": "dense"}, ValueError, "got engine='dense'"),
        ({"checkpoint": 1}, TypeError, "checkpoint must be True or False"),
        ({"causal": None}, TypeError, "causal must be True or False"),
        ({"heads": "grouped", "num_heads": 2}, ValueError, "at least the number of head groups, 3"),
        ({"selection": SOME, "layout": "residue"}, ValueError, "layout must be 'auto' or 'natural'"),
        (
            {"selection": {"blocks": 8, "most": 2}},
            *(ValueError, "selection has block, most, .*; got blocks"),
        ),
    ],
) + rows(
    partial(replace, SOME),
    [
        ({"scorer": torch.nn.Linear(2, 2)}, TypeError, "scorer must be the name of one.*; got Linear"),
        ({"gradient": "distill"}, ValueError, "gradient='distill' trains a scorer module"),
        ({"always": "causal() + causal()"}, TypeError, "always must be the text of a pattern that is not a mixture"),
    ],
)

MODELS: list[Row] = [
    (lambda: model()(TOKENS.to("meta")), ValueError, "on the model's device cpu; got meta"),
    (lambda: model(vocab_size=None)(torch.zeros(2, 5, 23)), ValueError, r"shape \(batch, tokens, 24\)"),
    (
        lambda: model(vocab_size=None)(torch.zeros(2, 5, 24).double()),
        TypeError,
        "dtype torch.float32; got torch.float64",
    ),
    (
        lambda: model()(TOKENS, key_padding_mask=IDS[:, 1:] > 0),
        ValueError,
        r"\(2, 11\), one entry for .*; got \(2, 10\)",
    ),
    (lambda: model(**BY_IDS)(TOKENS), ValueError, "the pattern needs the run-time tensor 'ids'"),
    (lambda: model(**BY_IDS)(TOKENS, bindings={"ids": [0]}), TypeError, "must hold tensors; got list for 'ids'"),
    (lambda: model(**BY_IDS)(TOKENS, bindings={"a": IDS}), ValueError, "of the pattern, which needs 'ids'"),
    (lambda: model(**BY_IDS)(TOKENS, bindings={"ids": IDS[:, 1:]}), ValueError, "must hold one id for each of the 11"),
    (lambda: model()(TOKENS, bindings={"ids": IDS}), ValueError, "needs no run-time tensor; got 'ids'"),
    (
        lambda: model(**BY_IDS | {"pattern": masks.local_window(left=3, right=3), "causal": False}).new_caches(),
        *(ValueError, "a cache needs a causal pattern"),
    ),
    (
        lambda: fd.LongNetEncoderDecoder(replace(TINY, causal=False), replace(TINY, causal=False)),
        ValueError,
        "decoder .* causal=True",
    ),
    (
        lambda: fd.LongNetEncoderDecoder(replace(TINY, causal=False), replace(TINY, vocab_size=None)),
        ValueError,
        "have a vocabulary",
    ),
    (lambda: fd.LongNetEncoderDecoder(replace(TINY, causal=False), 3), TypeError, "must be a LongNetConfig; got int"),
    (
        lambda: fd.LongNetEncoderDecoder(replace(TINY, **BY_IDS, causal=False), TINY),
        *(ValueError, "the encoder must have a pattern without run-time tensors"),
    ),
    (
        lambda: fd.LongNetEncoderDecoder(replace(TINY, causal=False), replace(TINY, **BY_IDS)),
        *(ValueError, "the decoder must have a pattern without run-time tensors"),
    ),
    (lambda: fd.LongNetClassifier(TINY, 0), ValueError, "num_outputs must be at least 1"),
    (lambda: fd.LongNetClassifier(TINY, 1)(TOKENS[:, :0]), ValueError, r"needs a token .*; got shape \(2, 0\)"),
    (lambda: fd.LongNet(TINY, memory_dim=4)(TOKENS), ValueError, "memory_dim=4 and no memory"),
    (lambda: fd.LongNet(TINY, memory_dim=0), ValueError, "memory_dim must be at least 1"),
    (
        lambda: fd.LongNet(TINY, memory_dim=4)(TOKENS, memory=torch.ones(2, 3)),
        *(ValueError, r"memory must have shape \(batch, tokens, 4\); got \(2, 3\)"),
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [*MULTIHEAD, *SPARSE, *CONFIGS, *MODELS])
def test_bad_input(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("bad", "says"), [(-1, "-1 to 3"), (TINY.vocab_size, f"0 to {TINY.vocab_size}")])
def test_a_token_outside_of_the_vocabulary(bad, says) -> None:
    tokens = torch.tensor([[0, 3, bad, 2]])
    with pytest.raises(ValueError, match=rf"below vocab_size={TINY.vocab_size} .*; got values from {says}"):
        model()(tokens)
