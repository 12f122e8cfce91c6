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
    Case("grid_window", "masks.grid_window((3, 200), [(0, 199), (1, 149)])", 600),
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
    Case("sliding_tile", "recipes.sliding_tile((4, 1, 150), tile=(1, 1, 150), num_tiles=(3, 1, 1))", 600),
    Case("radial", "recipes.radial((5, 1, 300))", 1500),
    Case("sparse_videogen_spatial", "recipes.sparse_videogen_spatial((4, 1, 150), near_frames=1)", 600),
    Case("sparse_videogen_temporal", "recipes.sparse_videogen_temporal((3, 1, 300), near_places=40)", 900),
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
_GROUPED: dict[str, Any] = {"heads": 2, "kv_heads": 1}
_LATER: dict[str, Any] = {"keys": 556, "q_offset": 256}
_WIDE: dict[str, Any] = {"head_dim": 96, "value_dim": 32}
_TWO_DOCUMENTS: dict[str, Any] = {"batch": 2, "run_time": ("documents_of_two",)}
_WINDOW, _LONGNETS = "masks.local_window(left=300, right=0)", f"{_LONGNET} & masks.causal()"
_PADDED = "masks.longnet([350, 700], [1, 2]).per_document(masks.lengths('lengths_of_two', padding='left'))"
_CAUSAL_QUERIES = f"{_QUERIES} & masks.causal()"
_ROWS_OR_OWN = "(masks.selected_blocks('chosen_rows', block=(64, 128), most=2) | masks.chunked(64))"
_PACKED = f"{_ROWS_OR_OWN} & masks.causal() & {_DOCUMENTS}"
_TWO = f"masks.documents('documents_of_two') & {_WINDOW}"
_MASK = "masks.mask('mask_of_two') & masks.local_window(left=300, right=300)"
_MOVED = f"{_WINDOW}.queries_from('starts')"
_LARGE = "masks.selected_blocks(chosen(num_tokens, (128, 256), 2), block=(128, 256), most=2)"
_SAMPLES = "masks.per_sample([masks.causal(), masks.local_window(left=200, right=100)], 'which')"
_GRID = "masks.neighborhood((2, 300), kernel_size=(2, 298), stride=(1, 45), causal=(True, False))"
_LINE = "masks.neighborhood((600,), kernel_size=280, rate=2, stride=31, causal=True)"


def _bound(*names: str, batch: int = 1) -> dict[str, Any]:
    return {"run_time": names, "batch": batch}


FEATURES = (
    Case("blocks of each query, grouped", _CAUSAL_QUERIES, 400, **_GROUPED, lacks=("full",)),
    Case("blocks of each query, score_mod", _CAUSAL_QUERIES, 400, dtype="float32", has_score_mod=True, lacks=("full",)),
    Case(
        "blocks of 64 queries, in documents, sinks",
        _PACKED,
        450,
        2,
        **_bound("chosen_rows", "documents"),
        has_sinks=True,
    ),
    Case("grouped heads, sinks and score_mod", "masks.causal()", 400, **_GROUPED, **_ALL),
    Case("score_mod and sinks, float32", _WINDOW, 500, dtype="float32", **_ALL),
    Case("later queries", _WINDOW, 300, **_LATER, head_dim=128),
    Case("later queries, grouped, score_mod and sinks", "masks.causal()", 300, **_GROUPED, **_LATER, **_ALL, **_WIDE),
    Case("rows without keys", "masks.dilated(1200, 4, 1) & masks.causal()", 1200),
    Case("rows without keys, sinks", f"{_WINDOW} & masks.first_tokens(150)", 600, **_ALL),
    Case("residue order, score_mod and sinks", "masks.dilated(1200, 2) & masks.causal()", 900, rate=2, **_ALL),
    Case("mixture, grouped, score_mod and sinks", _LONGNETS, 700, **_GROUPED, **_ALL, head_dim=48, value_dim=80),
    Case("mixture, float32", _LONGNETS, 700, heads=2, dtype="float32", head_dim=64),
    Case("documents of a call", f"{_DOCUMENTS} & masks.causal()", 600, **_bound("documents"), head_dim=64),
    Case(
        "documents of each batch entry, grouped, score_mod and sinks", _TWO, 600, **_GROUPED, **_ALL, **_TWO_DOCUMENTS
    ),
    Case("lengths of each batch entry, mixture", _PADDED, 700, 2, **_bound("lengths_of_two", batch=2), head_dim=128),
    Case(
        "a mask of each batch entry and head", _MASK, 450, 2, **_bound("mask_of_two", batch=2), lacks=("full", "empty")
    ),
    Case(
        "packed cross-attention",
        "masks.same_document('pairs')",
        500,
        2,
        **_bound("pairs"),
        has_sinks=True,
        lacks=("full",),
    ),
    Case(
        "a pattern of each batch entry, score_mod",
        _SAMPLES,
        450,
        **_GROUPED,
        **_bound("which", batch=2),
        has_score_mod=True,
    ),
    Case("queries from another position in each batch entry", _MOVED, 300, keys=556, **_bound("starts", batch=2)),
    Case(
        "one query", "masks.causal()", 1, keys=500, q_offset=499, trains=False, lacks=("full", "empty", "three a side")
    ),
    Case("a grid in groups of queries, of which one axis is causal", _GRID, 600),
    Case("a grid with rates, in groups of queries, causal", _LINE, 600, rate=2),
    Case("heads of 128, float32", "masks.causal()", 400, head_dim=128, dtype="float32"),
    Case("heads of 128", "masks.causal()", 400, head_dim=128),
    # Lengths of whole tiles that are no whole blocks: the last tile of the last block lies beyond the tokens.
    Case("blocks of 256", "masks.causal()", 640, block=256),
    Case("blocks of 256, all pairs", "masks.every()", 640, block=256, dtype="float32", lacks=("empty",)),
    Case("blocks of 256, mixture", _LONGNETS, 640, heads=2, block=256, has_sinks=True),
    Case("selected blocks of 256 keys", f"{_LARGE} & masks.causal()", 640, **_GROUPED, lacks=("ragged",)),
)
if torch.__version__ >= "2.15":
    FEATURES += (
        Case("blocks of 64, mixture", f"{_LONGNET} & masks.causal()", 700, heads=2, block=64, has_sinks=True),
        Case("blocks of 64, heads of 128", "masks.causal()", 250, block=64, head_dim=128),
    )
