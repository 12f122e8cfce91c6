"""The plan command: tables and data, the longest sequence that fits, and the loads of ranks."""

import functools
import json
from dataclasses import replace

import pytest
import torch

import flexdilated
from bench._dense import counts
from flexdilated import masks
from flexdilated.cli import main
from flexdilated.distributed import Sharding
from flexdilated.memory._memory import AttentionSize, attention_memory
from flexdilated.nn._model_memory import model_memory
from tests.support import commands

LONGNET = "longnet((256, 1024), (1, 4)) & causal()"
SMALL = ["--heads", "4", "--head-dim", "16", "--layers", "2"]


@pytest.fixture(autouse=True, scope="module")
def one_dry_run_a_size():
    """A memory model runs the call on no memory, which takes seconds: once for each size."""
    call, model = functools.cache(attention_memory), functools.cache(model_memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexdilated._plan_size.attention_memory", call)
        for module in ("flexdilated.cli._plan", "flexdilated._plan"):
            patch.setattr(f"{module}.model_memory", model)
        yield


@pytest.fixture
def made_up_memory(monkeypatch) -> None:
    commands.make_memory_up(monkeypatch)


def data_of(capsys, *arguments: str):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def pairs_of(text: str, *, tokens: int) -> torch.Tensor:
    """Of each query: the pairs of all branches and of four heads, looked at one by one."""
    return counts(masks.parse(text), tokens, num_heads=4).sum((0, 2))


def test_fd_plan_is_what_the_command_prints(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "value_dim": 16, "dtype": torch.bfloat16, "batch": 3}
    sizes |= {"layers": 2}
    words = ["--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--value-dim", "16", "--dtype", "bf16"]
    words += ["--batch", "3", "--layers", "2"]
    for device, dropout_p in (("cpu", 0.0), ("cuda", 0.1)):
        found = flexdilated.plan(masks.parse(LONGNET), 512, **sizes, device=device, dropout_p=dropout_p)
        asked = [LONGNET, "-n", "512", *words, "--device", device, "--dropout-p", str(dropout_p)]
        assert data_of(capsys, *asked) == found.to_data()
        assert main(["plan", *asked]) == 0
        assert capsys.readouterr().out == f"{found}\n"
        parts = "512 tokens, 4 heads over 2, head dim 32, values 16, bf16, batch 3", "How it is computed", "predicted"
        parts += "attend: kept for the backward", "model: training with checkpointing, peak"
        parts += "LongNet of 2 layers, embed dim 128", f"{found.engine} on {device}", f"pattern       {LONGNET}"
        assert [part for part in parts if part not in str(found)] == []
        assert found.useful_pairs == 3 * int(pairs_of(LONGNET, tokens=512).sum())
        assert found.attention_memory.inputs == 3 * 512 * 2 * (4 * 32 + 2 * (32 + 16))
        assert found.to_data()["memory"]["attention"]["outputs"] == 3 * 512 * 2 * 4 * 16
        assert found.forward_flops == 2 * (32 + 16) * found.useful_pairs
        assert found.backward_flops == (6 * 32 + 4 * 16) * found.useful_pairs
        assert (found.engine, found.embed_dim) == ("aten" if device == "cpu" else "flex", 128)
        assert found.checkpointed_memory.training_peak < found.model_memory.training_peak


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"engine": "portable"}, "portable"),
        ({"score_mod": lambda score, b, h, q, k: score + h}, "portable"),
        ({"score_mod": lambda score, b, h, q, k: score + h, "device": "cuda"}, "flex"),
        ({"value_dim": 8, "device": "cuda"}, "portable"),
        ({"dropout_p": 0.1}, "portable"),
        ({"dropout_p": 0.1, "device": "cuda"}, "flex"),
    ],
)
def test_plan_names_the_engine_that_attend_chooses(options, engine) -> None:
    """Of a training step; inference has no dropout, so that its peak is that of a call without it."""
    sizes = {"num_heads": 2, "layers": 1, **options}
    found = flexdilated.plan(masks.causal(), 300, **sizes)
    assert (found.engine, found.to_data()["engine"]) == (engine, engine)
    size, drops = AttentionSize(300, 2, 64, torch.float32, value_dim=sizes.get("value_dim")), "dropout_p" in options
    how = {"device": sizes.get("device", "cpu"), "score_mod": sizes.get("score_mod")}
    trained = attention_memory(masks.causal(), size, **how, engine=engine, drops=drops)
    alone = attention_memory(masks.causal(), size, **how, engine=None if drops else engine)
    assert found.attention_memory == replace(trained, inference_peak=alone.inference_peak)
    assert ("dropout 0.1" in str(found)) == drops


@pytest.mark.usefixtures("made_up_memory")
def test_fd_plan_takes_run_time_tensors_of_one_entry() -> None:
    ids = torch.arange(40)[None] // 10
    found = flexdilated.plan(masks.causal().per_document(ids), 40, layers=1)
    assert found.useful_pairs == 4 * (10 * 11 // 2)
    with pytest.raises(ValueError, match=r"plan takes a pattern of one batch entry.*; got 2 entries"):
        flexdilated.plan(masks.causal().per_document(torch.cat([ids, ids // 2])), 40)
    with pytest.raises(ValueError, match="ids"):
        flexdilated.plan(masks.documents("ids"), 40)
    rows = torch.arange(40)[:, None] // torch.tensor([1, 2, 3])
    allowed = rows[:, :1] % 3 != torch.arange(40)
    for pattern in (
        *(masks.documents(ids), masks.visible_keys(ids > 0), masks.mask(allowed)),
        *(masks.selected_keys(rows[None]), masks.sparse(allowed.to_sparse()), masks.lengths(torch.tensor([9]))),
        masks.causal() & masks.documents(ids) | masks.selected_keys(rows[None]),
    ):
        assert "attend: inference, peak" in str(flexdilated.plan(pattern, 40)), pattern


def test_budget_fits_and_a_little_more_does_not(capsys) -> None:
    """By the engine's own steps at that many tokens, and at an eighth more."""
    found = data_of(capsys, "causal()", *SMALL, "--dtype", "fp16", "--budget", str(32 / 1024))
    (line,) = found["longest"]
    assert line["budget_bytes"] == 32 << 20

    def peaks(tokens: int) -> tuple[int, int]:
        memory = attention_memory(masks.causal(), AttentionSize(tokens, 4, 16, torch.float16))
        return memory.inference_peak, memory.training_peak

    for place, name in enumerate(("attention, inference", "attention, training")):
        tokens = line[name]
        assert peaks(tokens)[place] <= 32 << 20 < peaks(tokens + tokens // 8)[place], name
    assert line["model, training, checkpointed"] > 1.2 * line["model, training"]


@pytest.mark.usefixtures("made_up_memory")
def test_a_grid_fits_at_most_as_a_whole(capsys) -> None:
    found = data_of(capsys, "neighborhood((64, 64), 3)", *SMALL, "--budget", "8")
    assert set(found["longest"][0].values()) == {8 << 30, 4096}


def test_a_grid_of_one_token_fits(capsys) -> None:
    found = data_of(capsys, "neighborhood((1, 1), 0)", *SMALL, "--budget", "8")
    assert set(found["longest"][0].values()) == {8 << 30, 1}


RANKED = "longnet((32, 128, 512), (1, 4, 16)) & causal()"
SIZES = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "-n", "500"]


@pytest.mark.parametrize(
    ("order", "ranks", "schedule"), [("contiguous", 1, "ring"), ("contiguous", 3, "exchange"), ("zigzag", 8, "ring")]
)
def test_pairs_of_ranks_are_those_of_the_dense_rule(capsys, order, ranks, schedule) -> None:
    """Looked at one by one; what is received is compared with what ranks send in tests/distributed/test_loads.py."""
    asked = ["--ranks", str(ranks), "--order", order, "--schedule", schedule, "--batch", "3"]
    found, sharding = data_of(capsys, RANKED, *SIZES, *asked), Sharding(500, ranks, order)
    pairs, columns = pairs_of(RANKED, tokens=500), found["ranks"]
    assert columns["tokens"] == list(sharding.lengths)
    assert columns["pairs"] == [3 * int(pairs[sharding.positions(rank)].sum()) for rank in range(ranks)]
    assert list(found["max_over_mean"]) == list(columns)[1:]
    for name, ratio in found["max_over_mean"].items():
        assert ratio == (pytest.approx(max(columns[name]) * ranks / sum(columns[name])) if any(columns[name]) else 1)
    assert (found["num_ranks"], found["order"], found["schedule"], found["reason"]) == (ranks, order, schedule, None)


def test_plan_of_ranks_is_what_the_command_prints(capsys) -> None:
    pattern, sizes = masks.parse(RANKED), {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ranks": 3}
    loads = flexdilated.plan(pattern, 500, **sizes, dtype=torch.bfloat16, order="zigzag", codec="int8")
    arguments = [RANKED, *SIZES, "--ranks", "3", "--dtype", "bf16", "--order", "zigzag", "--codec", "int8"]
    assert data_of(capsys, *arguments) == loads.to_data()
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert text == f"{loads}\n"
    facts, table = text.split("\n\n")
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(facts.split()) == (
        f"pattern {RANKED} ranks 3, 500 tokens, zigzag schedule exchange, int8 on the wire: {loads.reason}"
    )
    assert [line.split()[0] for line in table.splitlines()[3:]] == ["0", "1", "2", "max", "max"]
    assert table.splitlines()[-1].split()[-1] == f"{loads.max_over_mean['pairs']:.4f}"
