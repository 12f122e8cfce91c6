"""The calls whose kernels are run: each pattern of the catalogue, and what a call may bring beside its pattern."""

from __future__ import annotations

from typing import Any

import torch

from tests.interpreted.cases import Case

_LONGNET = "masks.longnet([350, 700], [1, 2])"
_DOCUMENTS = "masks.documents('documents')"
_ROWS = "masks.selected_blocks(chosen(num_tokens, (128, 128), 2), block=128, most=2)"
_QUERIES = "masks.selected_blocks(chosen(num_tokens, (1, 128), 2), block=(1, 128), most=2)"

# One of each pattern of the catalogue, by its name there.
CATALOGUE = (
    Case("causal", "masks.causal()", 400, head_dim=64),
    Case("every", "masks.every()", 300, dtype="float32", lacks=("empty",)),
    Case("local_window", "masks.local_window(left=300, right=40)", 600),
    Case("dilated_window", "masks.dilated_window(left=300, right=0, rate=2)", 900, rate=2),
    Case("chunked", "masks.chunked(350) & masks.causal()", 700),
    Case("strided", "masks.strided(2) & masks.causal()", 900, rate=2),
    Case("fixed", "masks.fixed(300, summary=256) & masks.causal()", 500),
    Case("dilated", "masks.dilated(1200, 4) & masks.causal()", 1900),
    Case("longnet", f"{_LONGNET} & masks.causal()", 700, heads=2),
    Case("longnet, full", _LONGNET, 700, heads=2),
    Case("global_tokens", "masks.global_tokens(128)", 400),
    Case("first_tokens", "masks.first_tokens(140) & masks.causal()", 400, head_dim=48),
    Case("landmark_tokens", "masks.landmark_tokens(256)", 400, lacks=("full",)),
    Case("landmark_tokens, keys", "masks.landmark_tokens(64, rows=False) & masks.causal()", 400, lacks=("full",)),
    Case("prefix_lm", "masks.prefix_lm(200)", 400),
    Case("random_blocks", "masks.random_blocks(num_tokens, block=128, count=2)", 500, heads=2),
    Case("block_list", "masks.block_list(block_rows(num_tokens, block=128), block=128)", 500),
    Case("blockwise", "masks.blockwise(masks.dilated_window(left=1, right=0, rate=2), 128)", 500, dtype="float32"),
    Case("neighborhood, 1-D", "masks.neighborhood((num_tokens,), 150)", 500),
    Case("neighborhood, 2-D", "masks.neighborhood((2, 300), (0, 149))", 600),
    Case("neighborhood, 3-D", "masks.neighborhood((2, 1, 300), (0, 0, 149))", 600),
    Case(
        "per_head",
        "masks.per_head([masks.local_window(left=300, right=0), masks.dilated_window(left=100, right=0, rate=2)])",
        500,
        heads=2,
    ),
    Case(
        "head_groups",
        "masks.head_groups([masks.local_window(left=300, right=0), masks.dilated(700, 2, 0) & masks.causal()])",
        700,
        heads=2,
    ),
    Case("documents", "masks.documents(documents) & masks.causal()", 600),
    Case("lengths", "masks.lengths(length) & masks.local_window(left=200, right=200)", 500),
    Case("visible_keys", "masks.visible_keys(visible) & masks.local_window(left=300, right=0)", 500),
    Case("selected_blocks", f"({_ROWS} | masks.chunked(128)) & masks.causal()", 500),
    Case("per_document", "masks.longnet([350, 700], [1, 2]).per_document(documents) & masks.causal()", 700, heads=2),
    Case("custom", "masks.custom(widening(150), classify=boxes_of_widening(150), period=1)", 500, heads=2),
    Case("longformer", "recipes.longformer(150, 16)", 700),
    Case("bigbird", "recipes.bigbird(num_tokens)", 900),
    Case("bigbird, block 128", "recipes.bigbird(num_tokens, block=128, num_global=1, num_random=1)", 700),
    Case("sparse_transformer_strided", "recipes.sparse_transformer_strided(300)", 700),
    Case("sparse_transformer_fixed", "recipes.sparse_transformer_fixed(300, summary=256)", 700),
    Case("streaming_llm", "recipes.streaming_llm(300)", 600, head_dim=96),
    Case("darcstar_local_window", "recipes.darcstar_local_window(local_window_size=256, block_size=128)", 600),
    Case("darcstar_dilated_sparse", "recipes.darcstar_dilated_sparse([1, 2, 4])", 600),
    Case(
        "darcstar_global_local",
        "recipes.darcstar_global_local(global_tokens=140, local_window_size=256, block_size=128)",
        600,
    ),
    Case(
        "darcstar_hierarchical",
        "recipes.darcstar_hierarchical([(128, 256), (256, 512), (512, -1)], block_size=128)",
        600,
        head_dim=128,
    ),
)

# What a call may bring beside its pattern: every two of them meet in some case.
_ALL: dict[str, Any] = {"has_sinks": True, "has_score_mod": True}
FEATURES = (
    Case("blocks of each query, grouped", f"{_QUERIES} & masks.causal()", 400, heads=2, kv_heads=1, lacks=("full",)),
    Case(
        "blocks of each query, score_mod",
        f"{_QUERIES} & masks.causal()",
        400,
        dtype="float32",
        has_score_mod=True,
        lacks=("full",),
    ),
    Case(
        "blocks of 64 queries, in documents, sinks",
        "(masks.selected_blocks('chosen_rows', block=(64, 128), most=2) | masks.chunked(64)) & masks.causal()"
        f" & {_DOCUMENTS}",
        450,
        heads=2,
        run_time=("chosen_rows", "documents"),
        has_sinks=True,
    ),
    Case("grouped heads, sinks and score_mod", "masks.causal()", 400, heads=2, kv_heads=1, **_ALL),
    Case("score_mod and sinks, float32", "masks.local_window(left=300, right=0)", 500, dtype="float32", **_ALL),
    Case("later queries", "masks.local_window(left=300, right=0)", 300, keys=556, q_offset=256, head_dim=128),
    Case(
        "later queries, grouped, score_mod and sinks",
        "masks.causal()",
        300,
        heads=2,
        kv_heads=1,
        keys=556,
        q_offset=256,
        head_dim=96,
        value_dim=32,
        **_ALL,
    ),
    Case("rows without keys", "masks.dilated(1200, 4, 1) & masks.causal()", 1200),
    Case("rows without keys, sinks", "masks.local_window(left=300, right=0) & masks.first_tokens(150)", 600, **_ALL),
    Case("residue order, score_mod and sinks", "masks.dilated(1200, 2) & masks.causal()", 900, rate=2, **_ALL),
    Case(
        "mixture, grouped, score_mod and sinks",
        f"{_LONGNET} & masks.causal()",
        700,
        heads=2,
        kv_heads=1,
        head_dim=48,
        value_dim=80,
        **_ALL,
    ),
    Case("mixture, float32", f"{_LONGNET} & masks.causal()", 700, heads=2, dtype="float32", head_dim=64),
    Case("documents of a call", f"{_DOCUMENTS} & masks.causal()", 600, run_time=("documents",), head_dim=64),
    Case(
        "documents of each batch entry, grouped, score_mod and sinks",
        "masks.documents('documents_of_two') & masks.local_window(left=300, right=0)",
        600,
        heads=2,
        kv_heads=1,
        batch=2,
        run_time=("documents_of_two",),
        **_ALL,
    ),
    Case(
        "lengths of each batch entry, mixture",
        "masks.longnet([350, 700], [1, 2]).per_document(masks.lengths('lengths_of_two', padding='left'))",
        700,
        heads=2,
        batch=2,
        run_time=("lengths_of_two",),
        head_dim=128,
    ),
    Case(
        "a mask of each batch entry and head",
        "masks.mask('mask_of_two') & masks.local_window(left=300, right=300)",
        450,
        heads=2,
        batch=2,
        run_time=("mask_of_two",),
        lacks=("full", "empty"),
    ),
    Case(
        "packed cross-attention",
        "masks.same_document('pairs')",
        500,
        heads=2,
        run_time=("pairs",),
        has_sinks=True,
        lacks=("full",),
    ),
    Case(
        "a pattern of each batch entry, score_mod",
        "masks.per_sample([masks.causal(), masks.local_window(left=200, right=100)], 'which')",
        450,
        heads=2,
        kv_heads=1,
        batch=2,
        run_time=("which",),
        has_score_mod=True,
    ),
    Case(
        "queries from another position in each batch entry",
        "masks.local_window(left=300, right=0).queries_from('starts')",
        300,
        keys=556,
        batch=2,
        run_time=("starts",),
    ),
    Case(
        "one query", "masks.causal()", 1, keys=500, q_offset=499, trains=False, lacks=("full", "empty", "three a side")
    ),
    Case(
        "a grid in groups of queries, of which one axis is causal",
        "masks.neighborhood((2, 300), kernel_size=(2, 298), stride=(1, 45), causal=(True, False))",
        600,
    ),
    Case(
        "a grid with rates, in groups of queries, causal",
        "masks.neighborhood((600,), kernel_size=280, rate=2, stride=31, causal=True)",
        600,
        rate=2,
    ),
    Case("heads of 128, float32", "masks.causal()", 400, head_dim=128, dtype="float32"),
    Case("heads of 128", "masks.causal()", 400, head_dim=128),
    # Lengths of whole tiles that are no whole blocks: the last tile of the last block lies beyond the tokens.
    Case("blocks of 256", "masks.causal()", 640, block=256),
    Case("blocks of 256, all pairs", "masks.every()", 640, block=256, dtype="float32", lacks=("empty",)),
    Case("blocks of 256, mixture", f"{_LONGNET} & masks.causal()", 640, heads=2, block=256, has_sinks=True),
    Case(
        "selected blocks of 256 keys",
        "masks.selected_blocks(chosen(num_tokens, (128, 256), 2), block=(128, 256), most=2) & masks.causal()",
        640,
        heads=2,
        kv_heads=1,
        lacks=("ragged",),
    ),
)
if torch.__version__ >= "2.15":
    FEATURES += (
        Case("blocks of 64, mixture", f"{_LONGNET} & masks.causal()", 700, heads=2, block=64, has_sinks=True),
        Case("blocks of 64, heads of 128", "masks.causal()", 250, block=64, head_dim=128),
    )
