"""The plan command: its tables and its data, the longest sequence that fits, and what it refuses."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated
from flexdilated import masks
from flexdilated.cli import main
from flexdilated.cli._plan import BUDGETS, longest, longest_bound, rounded, slope
from flexdilated.engines.kernels import _kernel
from flexdilated.masks.core import bytes_text, seconds_text, tokens_text
from flexdilated.masks.inspection._describe import MOST_DESCRIBED
from flexdilated.memory._memory import NOWHERE, AttentionSize, LiveBytes, attention_memory
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


def pairs_of(text: str, *, tokens: int, heads: int) -> int:
    """The pairs of all branches and heads, looked at one by one."""
    position, zero = torch.arange(tokens), torch.zeros((), dtype=torch.int64)
    return sum(
        int(mod(zero, torch.tensor(head), position[:, None], position).sum())
        for branch in masks.parse(text).branches()
        for mod in [branch.bind(num_heads=heads, num_queries=tokens, num_keys=tokens).mask_mod()]
        for head in range(heads)
    )


@pytest.mark.usefixtures("made_up_memory")
@pytest.mark.parametrize(
    ("text", "branches"), [(LONGNET, [1, 2]), ("longnet((2048, 4096), (1, 4)) & causal()", ["all"])]
)
def test_report_lists_the_chosen_terms_and_all_options(text, branches, capsys) -> None:
    found = data_of(capsys, text, "-n", "8K", *SMALL)
    described = masks.describe(masks.parse(text), 8192, num_heads=4, head_dim=16)
    options = [option for branch in described.branches for option in branch.options]
    assert [option["layout"] for option in found["options"]] == [option.layout for option in options]
    assert [option["predicted_s"] for option in found["options"]] == [option.cost.seconds for option in options]
    assert [option["branch"] for option in found["options"] if option["chosen"]] == branches
    terms = [term for branch in described.branches for term in branch.options[0].terms]
    assert sum(term["terms"] for term in found["terms"]) == len(terms)
    slots = sum(len(term.heads) * term.folds * term.q.num_slots for term in terms)
    listed = (term["terms"] * term["heads"] * term["folds"] * term["queries"] for term in found["terms"])
    assert sum(listed) == slots


@pytest.mark.usefixtures("made_up_memory")
def test_batch_multiplies_work_and_tensors_and_not_lists(capsys) -> None:
    one, three = (data_of(capsys, LONGNET, "-n", "4K", *SMALL, "--batch", batch) for batch in ("1", "3"))
    for name in ("useful_pairs", "computed_pairs", "forward_flops", "backward_flops"):
        assert three[name] == 3 * one[name]
    assert three["block_list_bytes"] == one["block_list_bytes"]
    assert three["memory"]["attention"]["inputs"] == 3 * one["memory"]["attention"]["inputs"]
    assert three["memory"]["model"]["weights"] == one["memory"]["model"]["weights"]


def test_fd_plan_is_what_the_command_prints(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "value_dim": 16, "dtype": torch.bfloat16, "batch": 3}
    sizes |= {"layers": 2}
    words = ["--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--value-dim", "16", "--dtype", "bf16"]
    words += ["--batch", "3", "--layers", "2"]
    for device in ("cpu", "cuda"):
        found = flexdilated.plan(masks.parse(LONGNET), 512, **sizes, device=device)
        assert data_of(capsys, LONGNET, "-n", "512", *words, "--device", device) == found.to_data()
        assert main(["plan", LONGNET, "-n", "512", *words, "--device", device]) == 0
        assert capsys.readouterr().out == f"{found}\n"
        parts = "512 tokens, 4 heads over 2, head dim 32, values 16, bf16, batch 3", "How it is computed", "predicted"
        parts += "attend: kept for the backward", "model: training with checkpointing, peak"
        parts += "LongNet of 2 layers, embed dim 128", f"{found.engine} on {device}", f"pattern       {LONGNET}"
        assert [part for part in parts if part not in str(found)] == []
        assert found.useful_pairs == 3 * pairs_of(LONGNET, tokens=512, heads=4)
        assert found.attention_memory.inputs == 3 * 512 * 2 * (4 * 32 + 2 * (32 + 16))
        assert found.to_data()["memory"]["attention"]["outputs"] == 3 * 512 * 2 * 4 * 16
        assert found.forward_flops == 2 * (32 + 16) * found.useful_pairs
        assert found.backward_flops == (6 * 32 + 4 * 16) * found.useful_pairs
        assert (found.engine, found.embed_dim) == ("aten" if device == "cpu" else "flex", 128)
        assert found.checkpointed_memory.training_peak < found.model_memory.training_peak
        assert sum(option.chosen for option in found.options) == len({option.branch for option in found.options})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_training_with_dropout_is_that_of_its_engine_and_inference_is_without(device, capsys) -> None:
    pattern, sizes = masks.parse(LONGNET), {"num_heads": 4, "head_dim": 16, "value_dim": 32, "layers": 1}
    size = AttentionSize(1500, 4, 16, torch.float32, value_dim=32)
    found = flexdilated.plan(pattern, 1500, **sizes, device=device, dropout_p=0.1)
    engine = "portable" if device == "cpu" else "flex"
    assert found.engine == engine
    trained = attention_memory(pattern, size, device=device, engine=engine, drops=True)
    alone = attention_memory(pattern, size, device=device)
    assert found.attention_memory == replace(trained, inference_peak=alone.inference_peak)
    words = ["--heads", "4", "--head-dim", "16", "--value-dim", "32", "--layers", "1", "--device", device]
    words += ["--dropout-p", "0.1"]
    assert data_of(capsys, LONGNET, "-n", "1500", *words) == found.to_data()
    assert f"{engine} on {device}, dropout 0.1" in str(found)
    assert found.model_memory.training_peak > 0
    (line,) = data_of(capsys, LONGNET, *words, "--budget", "0.25")["longest"]
    peak = flexdilated.plan(pattern, line["attention, training"], **sizes, device=device, dropout_p=0.1)
    assert peak.attention_memory.training_peak <= 1 << 28


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"engine": "portable"}, "portable"),
        ({"engine": "aten"}, "aten"),
        ({"score_mod": lambda score, b, h, q, k: score + h}, "portable"),
        ({"score_mod": lambda score, b, h, q, k: score + h, "device": "cuda"}, "flex"),
        ({"engine": "portable", "device": "cuda"}, "portable"),
        ({"head_dim": 8, "device": "cuda"}, "portable"),
        ({"value_dim": 8, "device": "cuda"}, "portable"),
    ],
)
def test_plan_names_the_engine_that_attend_chooses(options, engine) -> None:
    sizes = {"num_heads": 2, "layers": 1, **options}
    found = flexdilated.plan(masks.causal(), 300, **sizes)
    assert (found.engine, found.to_data()["engine"]) == (engine, engine)
    size = AttentionSize(300, 2, sizes.get("head_dim", 64), torch.float32, value_dim=sizes.get("value_dim"))
    how = {"device": sizes.get("device", "cpu"), "engine": engine, "score_mod": sizes.get("score_mod")}
    assert found.attention_memory == attention_memory(masks.causal(), size, **how)


@pytest.mark.usefixtures("made_up_memory")
def test_fd_plan_takes_run_time_tensors_of_one_entry() -> None:
    ids = torch.arange(40)[None] // 10
    found = flexdilated.plan(masks.causal().per_document(ids), 40, layers=1)
    assert found.useful_pairs == 4 * (10 * 11 // 2)
    with pytest.raises(ValueError, match=r"plan takes a pattern of one batch entry.*; got 2 entries"):
        flexdilated.plan(masks.causal().per_document(torch.cat([ids, ids // 2])), 40)
    with pytest.raises(ValueError, match="ids"):
        flexdilated.plan(masks.documents("ids"), 40)


@pytest.mark.usefixtures("made_up_memory")
@pytest.mark.slow
def test_measured_options_stand_beside_the_predicted(capsys) -> None:
    found = data_of(capsys, "dilated(256, 4) & causal()", "-n", "1K", *SMALL, "--measure")
    assert len(found["measured"]) >= 1
    assert all(each["measured_s"] > 0 and each["predicted_s"] > 0 for each in found["measured"])
    assert main(["plan", "causal()", "-n", "1K", *SMALL, "--measure"]) == 0
    assert "  measured\n" in capsys.readouterr().out


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
def test_the_table_has_a_line_for_each_memory(capsys) -> None:
    assert main(["plan", "causal()", *SMALL, "--budget"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sizes = [line.split("  ")[0] for line in lines if line[:1].isdigit() and "GiB" in line]
    assert sizes == [bytes_text(budget) for budget in BUDGETS] == [f"{g} GiB" for g in (8, 16, 24, 40, 48, 80, 96, 141)]


@pytest.mark.usefixtures("made_up_memory")
def test_a_grid_fits_at_most_as_a_whole(capsys) -> None:
    found = data_of(capsys, "neighborhood((64, 64), 3)", *SMALL, "--budget", "8")
    assert set(found["longest"][0].values()) == {8 << 30, 4096}
    assert longest_bound(masks.neighborhood((64, 64), 3)) == 4096


@given(
    constant=st.integers(0, 1 << 30), few=st.integers(1, 900), many=st.integers(1, 900),
    bend=st.integers(0, 1 << 28), fits=st.integers(0, 30), most=st.integers(1, 1 << 30),
)  # fmt: skip
def test_longest_fits_and_twice_as_many_do_not(constant, few, many, bend, fits, most) -> None:
    """Of peaks that are constant, then a line, then a steeper one; of a line it is the last that fits, rounded."""

    def peak(tokens: int) -> int:
        return constant + few * tokens + many * max(0, tokens - bend)

    budget = peak(1 << fits)
    found = longest(peak, budget, most=most)
    assert found <= most
    if found:
        assert peak(found) <= budget
        assert found == most or peak(2 * found) > budget
    else:
        assert peak(min(1024, most)) > budget
    if bend == 0 and 1024 <= (budget - constant) // (few + many) < most:
        assert found == rounded((budget - constant) // (few + many))
        assert slope(peak, (10, 20)) == few + many


def test_sizes_as_text() -> None:
    assert [tokens_text(number) for number in (0, 1000, 4096, 3 << 20)] == ["0", "1,000", "4K", "3M"]
    assert [bytes_text(number) for number in (0, 999, 1024, 1 << 30, 141 << 30, 1 << 50)] == [
        "0 B", "999 B", "1 KiB", "1 GiB", "141 GiB", "1,024 TiB",
    ]  # fmt: skip
    assert [seconds_text(number) for number in (0, 2.5e-6, 1e-3, 0.1234, 1, 4321)] == [
        "0 us", "2.5 us", "1 ms", "123 ms", "1 s", "4,321 s",
    ]  # fmt: skip


def test_a_budget_is_a_number_of_gib(capsys) -> None:
    for text in ("", "8GiB", "0", "-1", "nan", "inf", "1e400", "1e-12"):
        assert main(["plan", "causal()", f"--budget={text}"]) == 2
        assert "--budget takes a number of GiB above 0, such as 24 or 0.5; got" in capsys.readouterr().err


# What must be named of the arguments: the option, or the place in the pattern, and the value.
REFUSED = {
    "no ranks": (["causal()", "--ranks", "0"], ["--ranks must be at least 1; got 0"]),
    "many ranks": (["causal()", "--ranks", "4097"], ["--ranks must be at most 4096; got 4097"]),
    "codec": (["causal()", "-n", "64", "--ranks", "2", "--codec", "bf16", "--dtype", "fp16"], ['codec="bf16" makes']),
    "heads": (["causal()", "--heads", "0"], ["--heads must be at least 1", "0"]),
    "head dim": (["causal()", "--head-dim", "9" * 20], ["--head-dim must be at most"]),
    "dropout": (["causal()", "--dropout-p", "1"], ["dropout_p", "below 1", "1.0"]),
    "kv heads": (
        ["causal()", "--kv-heads", "3"],
        ["num_kv_heads must divide num_heads; got num_kv_heads=3 and num_heads=8"],
    ),
    "embed dim": (["causal()", "--embed-dim", "100"], ["--embed-dim", "--heads", "100", "8"]),
    "odd head dim": (["causal()", "-n", "64", "--head-dim", "15"], ["15"]),
    "too many": (["causal()", "-n", "4000M"], ["--tokens", "2147483647", str(4000 << 20)]),
    "values": (["documents('ids')"], ["--bind ids"]),
    "many rules": (["documents('d')", "--bind", "d=two.pt"], ["--bind", "2"]),
    "budget of values": (["documents('d')", "--bind", "d=two.pt", "--budget", "1"], ["--bind", "--budget"]),
    "budget of carried values": (["mine.py:mine", "--budget", "1"], ["--budget"]),
    "grid": (["neighborhood((8, 8), 1)", "-n", "65"], ["8x8", "64", "up to position 64"]),
    "by head": (["per_head([causal(), causal()])", "-n", "64", "--heads", "3"], ["per_head", "2", "3"]),
    "by head, budget": (["per_head([causal(), causal()])", "--heads", "3", "--budget", "8"], ["per_head", "2", "3"]),
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(arguments, named, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(torch.zeros(2, 4, dtype=torch.int64), "two.pt")
    Path("mine.py").write_text(commands.MODULE, encoding="utf-8")
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert [word for word in named if word not in output.err] == []


def test_tokens_whose_blocks_would_fill_the_memory_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "local_window(left=9, right=0)", "-n", str(MOST_DESCRIBED + 1)]) == 2
    assert str(MOST_DESCRIBED + 1) in capsys.readouterr().err
    with pytest.raises(ValueError, match=str(MOST_DESCRIBED + 1)):
        masks.describe(masks.local_window(left=9, right=0), MOST_DESCRIBED + 1, num_heads=1)


@pytest.mark.usefixtures("made_up_memory")
def test_a_billion_tokens_are_counted_where_no_blocks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    billion = 1 << 30
    told = masks.describe(masks.dilated(segment=2048, rate=4), billion, num_heads=1)
    assert told.useful_pairs == billion * 2048 // 16
    assert main(["plan", "longnet((2048, 4096), (1, 2))", "-n", str(billion)]) == 0
    assert "dense" in capsys.readouterr().out


def test_two_of_many_alike_calls_tell_the_memory_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision problems are copied to float32 a few at a time; without values the others are left out."""
    monkeypatch.setattr(_kernel, "_FLOAT32_BYTES", 1)
    with NOWHERE:
        q, k, v, out, grad = (torch.empty(12, 2, 64, 16, dtype=torch.float16) for _ in range(5))
        lse = torch.empty(12, 2, 64)
    peaks = {}
    for enough in (1, 2, 12):
        monkeypatch.setattr(_kernel, "_ENOUGH", enough)
        with LiveBytes(q, k, v, out, grad, lse) as memory:
            _kernel.flash_backward(grad, q, k, v, out, lse, scale=0.25)
        peaks[enough] = memory.peak
    assert peaks[1] < peaks[2] == peaks[12]
    assert _kernel._ENOUGH == 12
    monkeypatch.undo()
    assert _kernel._ENOUGH == 2
