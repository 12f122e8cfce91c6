"""LongNet with layers that choose their keys from the data: what they attend to, training, decoding, folders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks

SIZES: dict[str, Any] = {"vocab_size": 50, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_kv_heads": 2}
BRANCHES: dict[str, Any] = {"segment_lengths": (256,), "dilation_rates": (1,)}


def config(selection: fd.SelectedLayers | None, **options: Any) -> fd.LongNetConfig:
    return fd.LongNetConfig(**SIZES, **BRANCHES, **options, selection=selection)


def twins(selection: fd.SelectedLayers, **options: Any) -> tuple[fd.LongNet, fd.LongNet]:
    """Two models with the same weights: with the selection, and without."""
    torch.manual_seed(0)
    one, other = (fd.LongNet(config(own, **options)).double() for own in (selection, None))
    other.load_state_dict(one.state_dict())
    return one, other


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 50, (2, 90)), torch.arange(90) >= torch.tensor([[90], [61]])


@pytest.mark.parametrize("causal", [True, False])
def test_all_blocks_are_one_segment(causal: bool) -> None:
    """Where every block is chosen a layer reads what one segment holds, in padded batches as well."""
    options = {"causal": causal, "position": None}
    model, dense = twins(fd.SelectedLayers(block=8, most=12), **options)
    tokens, padding = padded()
    real = ~padding
    out, expected = (each(tokens, key_padding_mask=padding) for each in (model, dense))
    assert_close(out[real], expected[real])
    few, _ = twins(fd.SelectedLayers(block=8, most=1), **options)
    assert (few(tokens, key_padding_mask=padding)[real] - expected[real]).abs().max() > 1e-3


def test_named_layers_choose_and_the_others_do_not() -> None:
    """Layer 1 alone: the model is that whose layer 1 got the attention by hand."""
    model, other = twins(fd.SelectedLayers(block=8, most=2, layers=[1], always="chunked(8) | first_tokens(8)"))
    tokens, _ = padded()
    assert [block.selected is None for block in model.blocks] == [True, False]
    assert not torch.allclose(model(tokens), other(tokens))
    always = masks.chunked(8) | masks.first_tokens(8)
    selector = fd.BlockSelector(block=8, choose=fd.TopK(2), always=always)
    other.blocks[1].selected = fd.SelectedAttention(selector)
    assert_close(model(tokens), other(tokens))
    tokens, padding = padded()
    assert_close(model(tokens, key_padding_mask=padding), other(tokens, key_padding_mask=padding))
    # In whose order blocks would hold other tokens.
    other.config, other.residue_rate = replace(other.config, layout="residue"), 4
    assert_close(model(tokens), other(tokens))


@pytest.mark.parametrize(("gradient", "query_block"), [("none", 4), ("bias", 1)])
def test_caches_and_generate_follow_one_pass(gradient: str, query_block: int) -> None:
    selection = fd.SelectedLayers(block=8, most=2, gradient=gradient, query_block=query_block, scorer="minmax")
    model, _ = twins(selection)
    tokens = padded()[0]
    with torch.no_grad():
        whole, caches = model(tokens), model.new_caches()
        parts = [model(part, caches=caches) for part in tokens.split([40, 1, 1, 33, 15], dim=1)]
    assert_close(torch.cat(parts, 1), whole)
    found = model.generate(tokens, max_new_tokens=3, temperature=0, prefill_chunk=37)
    assert found[:, 90:].equal(model(found[:, :-1])[:, 89:].argmax(-1))
