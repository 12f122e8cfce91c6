"""transformers' Trainer and PEFT's LoRA, over models with patterns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexdilated import masks
from flexdilated.integrations.transformers import attention_layers, set_pattern

from .models import model_of, tokens

LONGNET = masks.longnet((4, 16), (1, 2))
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


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


def test_trainer(tmp_path: Path) -> None:
    """Without a pattern the losses are those of SDPA; with one they fall as well, and are others."""
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
