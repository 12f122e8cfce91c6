"""Patterns and selections given to layers: which get one, what the config keeps, dropout; Trainer and LoRA."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

import flexdilated as fd
from flexdilated import integrations, masks
from flexdilated.integrations.transformers import attention_layers, set_pattern
from tests.integrations.passes import assert_dropout_trains

from .models import batch_of, model_of, tokens

LONGNET = masks.longnet((4, 16), (1, 2))
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
NARROW = masks.local_window(left=2, right=0)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(tokens()).logits


def test_layers_by_number_and_by_function() -> None:
    model = model_of("llama")
    assert set_pattern(model, {1: NARROW}) is model
    by_number = logits(model)
    set_pattern(model, lambda layer: NARROW if layer.layer_idx == 1 else None)
    assert torch.equal(logits(model), by_number)
    set_pattern(model, NARROW)
    assert not torch.allclose(logits(model), by_number, atol=1e-4)


def test_no_patterns_give_the_model_back() -> None:
    """With nothing in its config to load."""
    model = model_of("llama")
    before, config = logits(model), model.config.to_dict()
    set_pattern(model, LONGNET)
    assert not torch.allclose(logits(model), before, atol=1e-4)
    set_pattern(model, {})
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == config


def test_a_module_around_a_model() -> None:
    """And another name of the implementation, twice."""
    wrapped: Any = nn.Sequential(model_of("llama"))
    for _ in range(2):
        set_pattern(wrapped, LONGNET, name="sparse")
    assert wrapped[0].config._attn_implementation == "sparse"
    alone = model_of("llama")
    set_pattern(alone, LONGNET)
    assert torch.equal(logits(wrapped[0]), logits(alone))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"attention_dropout": 0.1}),
        ("gpt2", {"attn_pdrop": 0.1}),
        ("bert", {"attention_probs_dropout_prob": 0.1}),
        ("vit", {"attention_probs_dropout_prob": 0.1}),
        ("whisper", {"attention_dropout": 0.1}),
    ],
)
def test_attention_dropout_trains(name: str, options: dict[str, float]) -> None:
    model, batch = model_of(name, **options), batch_of(name)
    set_pattern(model, {})
    assert_dropout_trains(model, lambda: next(iter(model(**batch).values())))


def losses(model, folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=2, learning_rate=1e-2, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, data_seed=0, seed=0,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in (*tokens(), *tokens())]
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pattern the losses are those of SDPA; with one they fall as well, and are others."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # accelerate's, for seconds
    dense, same, sparse = (model_of("llama") for _ in range(3))
    dense.set_attn_implementation("sdpa")
    set_pattern(same, {})
    set_pattern(sparse, LONGNET)
    want = losses(dense, tmp_path)
    assert losses(same, tmp_path) == pytest.approx(want, abs=1e-3)
    found = losses(sparse, tmp_path)
    assert found[-1] < found[0]
    assert found != pytest.approx(want, abs=1e-3)


def test_lora() -> None:
    from peft import LoraConfig, get_peft_model

    plain, adapted = model_of("llama"), get_peft_model(model_of("llama"), LoraConfig(target_modules=["q_proj"]))
    for model in (plain, adapted):
        set_pattern(model, LONGNET)
    assert len(attention_layers(adapted)) == 2
    # An adapter begins as nothing.
    torch.testing.assert_close(adapted(input_ids=tokens()).logits, plain(tokens()).logits, rtol=0, atol=1e-5)
    adapted(input_ids=tokens(), labels=tokens()).loss.backward()
    grads = {name for name, x in adapted.named_parameters() if x.grad is not None and bool(x.grad.any())}
    assert len(grads) == 2
    assert all("q_proj.lora_B" in name for name in grads)


def test_what_is_needed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(integrations, "transformers")
    monkeypatch.setattr(integrations, "version", lambda name: "4.57.1")
    with pytest.raises(ImportError, match=r"needs transformers 5 or newer; got 4\.57\.1"):
        integrations.transformers  # noqa: B018


def selection(most: int = 2, gradient: str = "none", **options: Any) -> fd.SelectedAttention:
    options = {"always": masks.chunked(8), **options}
    return fd.SelectedAttention(fd.BlockSelector(block=8, choose=fd.TopK(most), **options), gradient)


MORE = tokens(length=80)


def test_all_blocks_are_the_model_as_it_was() -> None:
    """Logits and gradients, with padding on either side; with few blocks they are others."""
    model = model_of("llama")
    for padding in (slice(0, 0), slice(0, 21), slice(60, 80)):
        mask = torch.ones(2, 80, dtype=torch.long)
        mask[1, padding] = 0
        model.set_attn_implementation("sdpa")
        expected = model(MORE, attention_mask=mask).logits[mask.bool()]
        set_pattern(model, selection(10))
        logits = model(MORE, attention_mask=mask).logits[mask.bool()]
        assert_close(logits, expected, rtol=0, atol=1e-5)
        weights = tuple(model.parameters())
        found, wanted = (torch.autograd.grad(x.square().mean(), weights) for x in (logits, expected))
        assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        set_pattern(model, {1: selection(1)})
        assert (model(MORE, attention_mask=mask).logits[mask.bool()] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("gradient", ["none", "bias"])
def test_decoding_is_one_pass(gradient: str) -> None:
    """In chunks and steps over a DynamicCache, and by generate."""
    model, cache = model_of("llama"), DynamicCache()
    set_pattern(model, selection(gradient=gradient))
    with torch.no_grad():
        whole = model(MORE).logits
        parts = [model(part, past_key_values=cache).logits for part in MORE.split([50, 1, 1, 28], dim=1)]
    assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)
    found = model.generate(MORE, max_new_tokens=6, do_sample=False, eos_token_id=None)
    again = model.generate(MORE, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)
    assert found.equal(again)


@torch.no_grad()
@pytest.mark.parametrize("kept", ["padding", "documents"])
def test_a_cache_of_fixed_size_is_longer_than_its_tokens(kept: str) -> None:
    """Masks and positions that say something of each key, in a prefill and, of one document, a step after it."""
    model = model_of("llama")
    set_pattern(model, selection())
    given = {"attention_mask": torch.ones(2, 51, dtype=torch.long), "position_ids": torch.arange(51).expand(2, -1)}
    ends = [(0, 50), (50, 51)]
    if kept == "padding":
        given["attention_mask"][1, :16] = 0
    else:
        ends.pop()
        given = {"position_ids": torch.cat([torch.arange(24), torch.arange(27)]).expand(2, -1)}

    def parts(past: Any) -> torch.Tensor:
        found = []
        for begin, end in ends:
            mask = {name: x[:, :end] if name == "attention_mask" else x[:, begin:end] for name, x in given.items()}
            found.append(model(MORE[:, begin:end], past_key_values=past, **mask).logits)
        return torch.cat(found, 1)

    fixed, grown = parts(StaticCache(config=model.config, max_cache_len=64)), parts(DynamicCache(config=model.config))
    real = given.get("attention_mask", torch.ones(2, 51))[:, : ends[-1][1]].bool()
    assert_close(fixed[real], grown[real], rtol=0, atol=1e-5)


def test_replace_leaves_out_the_rule_of_the_model() -> None:
    model = model_of("llama")
    set_pattern(model, selection(10, within=masks.every()), compose="replace")
    out = model(MORE).logits
    set_pattern(model, masks.every(), compose="replace")
    assert_close(out, model(MORE).logits, rtol=0, atol=1e-5)
