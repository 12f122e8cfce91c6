"""Documents in one row: where position_ids fall, another begins, and no token sees another document, in any call."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, StaticCache

import flexdilated as fd
from flexdilated import masks
from flexdilated.integrations.transformers import FlexdilatedCache, register, set_pattern
from flexdilated.integrations.transformers._documents import _RUNNING, _RUNNING_IN_THREAD

from .models import model_of, tokens
from .tiny import tiny_model

# B batch entries, N tokens, L layers

N = 50
LONGNET = masks.longnet((4, 16), (1, 2))
_SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
_AXES = {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}


def of_class(name: str, config: str, **options: Any) -> Any:
    register()
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval()


MAKE = {
    "llama": lambda: model_of("llama"),
    "gpt2": lambda: model_of("gpt2"),
    "bert": lambda: model_of("bert"),
    "modernbert": lambda: model_of("modernbert", local_attention=500),
    "llama 4": lambda: model_of("llama4", attention_chunk_size=500),
    "clip": lambda: of_class("CLIPTextModel", "CLIPTextConfig", **_SIZES, intermediate_size=48, eos_token_id=96),
    "qwen2.5-vl": lambda: of_class("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", **_AXES),
}
ENCODERS, WITH_AXES = ("bert", "modernbert"), ("qwen2.5-vl",)
CALLS = ("default", "no cache", "cache", "static", "ones", "padded left", "padded right", "padded inside", "axes")


@st.composite
def positions_of_rows(draw: st.DrawFn) -> Tensor:
    """Positions (2, N) that mostly rise by 1, with repeats, gaps and falls."""
    rows = []
    for _ in range(2):
        steps = draw(st.lists(st.sampled_from([1] * 12 + [0, 2, 7, -99]), min_size=N, max_size=N))
        rows.append(list(accumulate(steps, lambda at, step: max(at + step, 0), initial=0))[1:])
    return torch.tensor(rows).clamp(max=240)


def documents_of(positions: Tensor, visible: Tensor) -> Tensor:
    """The document of each token, (2, N), token by token."""
    found = torch.zeros_like(positions)
    for row, seen, ids in zip(positions.tolist(), visible.tolist(), found, strict=True):
        last, number = -1, 0
        for token, (place, real) in enumerate(zip(row, seen, strict=True)):
            if real:
                number, last = number + (place < last), place
            ids[token] = number
    return found


def same(ids: Tensor) -> Tensor:
    return ids[:, :, None] == ids[:, None, :]


def first_output(model: Any, **batch: Any) -> Tensor:
    return model(**batch)[0]


@pytest.mark.parametrize("name", MAKE)
@given(data=st.data())
@settings(max_examples=15)
@torch.no_grad()
def test_a_call_is_attention_within_documents(name: str, data: st.DataObject) -> None:
    """Documents as counted token by token; SDPA gets them as a mask of queries and keys."""
    ours = MAKE[name]()
    sdpa = copy.deepcopy(ours)
    sdpa.set_attn_implementation("sdpa")
    set_pattern(ours, {})
    positions = data.draw(positions_of_rows())
    if name == "clip":
        positions.clamp_(max=76)
    call = data.draw(st.sampled_from(CALLS))
    visible = torch.ones(2, N, dtype=torch.bool)
    options: dict[str, Any] = {}
    if call.startswith("padded") or call == "ones":
        side = {"left": slice(0, 17), "right": slice(33, None), "inside": slice(20, 24), "ones": slice(0)}
        visible[1, side[call.rsplit(" ", 1)[-1]]] = False
        options["attention_mask"] = visible.long()
        positions = torch.where(visible, positions, data.draw(st.sampled_from([0, 1])))
    elif call in ("cache", "no cache"):
        options["use_cache"] = call == "cache"
    elif call == "static" and name not in (*ENCODERS, "clip"):
        options["past_key_values"] = StaticCache(config=ours.config, max_cache_len=64)
    given_positions = positions
    if call == "axes" and name in WITH_AXES:
        given_positions = torch.stack([positions, *[positions.flip(1)] * data.draw(st.integers(2, 3))])
    ids = documents_of(positions, visible)
    allowed = same(ids) & visible[:, None, :]
    if name not in ENCODERS:
        allowed &= torch.ones(N, N, dtype=torch.bool).tril()
    if call == "no cache" and name in ("llama", "gpt2", "llama 4"):
        # transformers divides the row itself, wherever the difference is not 1
        allowed &= same((positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1))
    want = first_output(sdpa, input_ids=tokens(), position_ids=given_positions, attention_mask=allowed[:, None])
    got = first_output(ours, input_ids=tokens(), position_ids=given_positions, **options)
    torch.testing.assert_close(got[visible], want[visible], rtol=0, atol=2e-5)
