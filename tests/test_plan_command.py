"""The plan command: its tables and its data, the longest sequence that fits, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from flexdilated import _kernel, masks
from flexdilated._live_bytes import LiveBytes, fake_tensors
from flexdilated.cli._main import main
from flexdilated.cli._plan_fits import longest, longest_bound, rounded, slope
from flexdilated.cli._plan_settings import BUDGETS, read_pattern
from flexdilated.cli._sizes import bytes_text, parse_bytes, parse_tokens, tokens_text
from flexdilated.cli._usage import UsageError
from flexdilated.masks.inspection._describe import MOST_DESCRIBED

LONGNET = "longnet((256, 1024), (1, 4)) & causal()"
SMALL = ["--heads", "4", "--head-dim", "16", "--layers", "2"]


def data_of(capsys, *arguments: str):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_report_counts_what_describe_counts(capsys) -> None:
    found = data_of(capsys, LONGNET, "-n", "4K", *SMALL)
    described = masks.describe(masks.parse(LONGNET), 4096, num_heads=4, head_dim=16)
    assert (found["num_tokens"], found["num_heads"], found["engine"]) == (4096, 4, "tiles")
    assert found["useful_pairs"] == described.useful_pairs
    assert found["computed_pairs"] == described.computed_pairs
    assert found["forward_flops"] == described.forward_flops == 4 * 16 * described.useful_pairs
    assert found["block_list_bytes"] == described.table_bytes
    assert masks.parse(found["pattern"]) == masks.parse(LONGNET)


def test_report_lists_the_chosen_terms_and_all_options(capsys) -> None:
    found = data_of(capsys, LONGNET, "-n", "4K", *SMALL)
    described = masks.describe(masks.parse(LONGNET), 4096, num_heads=4)
    options = [option for branch in described.branches for option in branch.options]
    assert [option["layout"] for option in found["options"]] == [option.layout for option in options]
    assert [option["predicted_s"] for option in found["options"]] == [option.cost.seconds for option in options]
    assert sum(option["chosen"] for option in found["options"]) == len(described.branches)
    terms = [term for branch in described.branches for term in branch.options[0].terms]
    assert sum(term["terms"] for term in found["terms"]) == len(terms)
    slots = sum(len(term.heads) * term.folds * term.q.num_slots for term in terms)
    listed = (term["terms"] * term["heads"] * term["folds"] * term["queries"] for term in found["terms"])
    assert sum(listed) == slots


def test_report_as_text(capsys) -> None:
    assert main(["plan", LONGNET, "-n", "4K", *SMALL, "--kv-heads", "2", "--batch", "3"]) == 0
    text = capsys.readouterr().out
    for part in (
        "pattern       longnet((256, 1024), (1, 4)) & causal()",
        "4K tokens, 4 heads over 2, head dim 16, fp32, batch 3",
        "tiles on cpu",
        "How it is computed",
        "predicted",
        "attend: kept for the backward",
        "model: training with checkpointing, peak",
        "LongNet of 2 layers, embed dim 64",
    ):
        assert part in text, part


def test_batch_multiplies_work_and_tensors_and_not_lists(capsys) -> None:
    one, three = (data_of(capsys, LONGNET, "-n", "4K", *SMALL, "--batch", batch) for batch in ("1", "3"))
    for name in ("useful_pairs", "computed_pairs", "forward_flops", "backward_flops"):
        assert three[name] == 3 * one[name]
    assert three["block_list_bytes"] == one["block_list_bytes"]
    assert three["memory"]["attention"]["inputs"] == 3 * one["memory"]["attention"]["inputs"]
    assert three["memory"]["model"]["weights"] == one["memory"]["model"]["weights"]


def test_cuda_is_planned_without_one(capsys) -> None:
    found = data_of(capsys, LONGNET, "-n", "4K", *SMALL, "--device", "cuda", "--dtype", "bf16")
    assert (found["engine"], found["device"]) == ("flex", "cuda")
    assert found["memory"]["attention"]["inputs"] == 3 * 4096 * 4 * 16 * 2


@pytest.mark.slow
def test_measured_options_stand_beside_the_predicted(capsys) -> None:
    found = data_of(capsys, "dilated(256, 4) & causal()", "-n", "1K", *SMALL, "--measure")
    assert len(found["measured"]) >= 1
    assert all(each["measured_s"] > 0 and each["predicted_s"] > 0 for each in found["measured"])
    assert main(["plan", "causal()", "-n", "1K", *SMALL, "--measure"]) == 0
    assert "measured ms" in capsys.readouterr().out


def test_a_million_tokens(capsys) -> None:
    """In natural order, a million million pairs: none of them is formed."""
    found = data_of(capsys, "local_window(left=1023, right=0)", "-n", "1M", "--heads", "1", "--layers", "1")
    assert found["num_tokens"] == 1 << 20
    assert found["useful_pairs"] == (1 << 20) * 1024 - 1024 * 1023 // 2


def test_json_file(tmp_path: Path, capsys) -> None:
    path = tmp_path / "pattern.json"
    path.write_text(masks.to_json(masks.parse(LONGNET)), encoding="utf-8")
    assert read_pattern(str(path)) == masks.parse(LONGNET)
    path.write_text("{}", encoding="utf-8")
    assert main(["plan", str(path)]) == 2
    assert main(["plan", str(tmp_path / "none.json")]) == 2
    assert "a file that can be read" in capsys.readouterr().err


def test_budget_fits_and_a_little_more_does_not(capsys) -> None:
    found = data_of(capsys, LONGNET, *SMALL, "--dtype", "fp16", "--budget", "1GiB")
    ((budget, *tokens),) = (list(line.values()) for line in found["longest"])
    assert budget == 1 << 30
    for name, number in zip(found["bytes_a_token"], tokens, strict=True):
        assert 0.85 * (1 << 30) < number * found["bytes_a_token"][name] <= 1 << 30, name
    names = list(found["bytes_a_token"])
    assert names[3:] == ["model, training", "model, training, checkpointed"]
    assert tokens[4] > 1.5 * tokens[3]


def test_the_table_has_a_line_for_each_memory(capsys) -> None:
    assert main(["plan", "causal()", *SMALL, "--budget"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sizes = [line.split("  ")[0] for line in lines if line[:1].isdigit() and "GiB" in line]
    assert sizes == [bytes_text(budget) for budget in BUDGETS] == [f"{g} GiB" for g in (8, 16, 24, 40, 48, 80, 96, 141)]


def test_a_grid_fits_at_most_as_a_whole(capsys) -> None:
    found = data_of(capsys, "neighborhood((64, 64), 3)", *SMALL, "--budget", "8GiB")
    assert set(found["longest"][0].values()) == {8 << 30, 4096}
    assert longest_bound(masks.neighborhood((64, 64), 3)) == 4096


@pytest.mark.parametrize("constant", [0, 3 << 20])
@pytest.mark.parametrize("budget", [1 << 22, 10_000_000, 123_456_789, 1 << 36])
def test_longest_of_a_line(constant, budget) -> None:
    def peak(tokens: int) -> int:
        return constant + 700 * tokens

    found = longest(peak, budget)
    assert peak(found) <= budget
    assert found == rounded((budget - constant) // 700)
    assert slope(peak, (10, 20)) == 700


def test_longest_is_none_where_nothing_fits_and_all_where_all_does() -> None:
    assert longest(lambda tokens: 1 << 40, 1 << 30) == 0
    assert longest(lambda tokens: tokens, 1 << 30, most=5000) == 5000
    assert longest(lambda tokens: tokens, 3000, most=5000) == rounded(3000)


def test_longest_stays_within_a_budget_of_a_peak_that_bends() -> None:
    def peak(tokens: int) -> int:
        return max(50 << 20, 400 * tokens, 900 * tokens - (300 << 20))

    for budget in (60 << 20, 300 << 20, 1 << 30, 1 << 34):
        found = longest(peak, budget)
        assert peak(found) <= budget
        assert peak(2 * found) > budget


def test_sizes_as_people_write_them() -> None:
    assert [parse_bytes(text) for text in ("8GiB", "24GB", "500 MB", "1.5kib", "7B")] == [
        8 << 30, 24 * 10**9, 500 * 10**6, 1536, 7,
    ]  # fmt: skip
    assert [parse_tokens(text) for text in ("65536", "64K", "1m", "1.5K")] == [65536, 65536, 1 << 20, 1536]
    assert [tokens_text(number) for number in (0, 1000, 4096, 3 << 20)] == ["0", "1,000", "4K", "3M"]
    assert [bytes_text(number) for number in (0, 999, 1024, 1 << 30, 141 << 30, 1 << 50)] == [
        "0 B", "999 B", "1 KiB", "1 GiB", "141 GiB", "1,024 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "8", "8G", "GiB", "-1GiB", "0GiB", "8 GiB GiB", "1e9B", "inf GiB", "table "])
def test_a_budget_needs_a_number_and_a_unit(text) -> None:
    with pytest.raises(UsageError, match="a budget must be a number above 0 with a unit, one of B, KB, KiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "0", "K", "-5", "64k tokens", "1.0001", "9" * 30, "0.1", "64G"])
def test_tokens_are_whole(text) -> None:
    with pytest.raises(UsageError, match="--tokens must be a whole number above 0"):
        parse_tokens(text)


REFUSED = {
    "expression": (["causal("], "caus"),
    "no pattern": (["3"], "an expression must give a pattern"),
    "heads": (["causal()", "--heads", "0"], "--heads must be at least 1; got 0"),
    "kv heads": (["causal()", "--kv-heads", "3"], "--kv-heads must divide --heads; got 3 and 8"),
    "embed dim": (["causal()", "--embed-dim", "100"], "--embed-dim must be --heads times --head-dim"),
    "both dims": (["causal()", "--embed-dim", "512", "--head-dim", "32"], "--heads 8, --head-dim 32"),
    "odd head dim": (["causal()", "-n", "64", "--head-dim", "15"], "head"),
    "tokens": (["causal()", "-n", "many"], "--tokens must be a whole number"),
    "too many": (["causal()", "-n", "4000M"], "num_queries must be at most 2147483647"),
    "budget": (["causal()", "--budget", "8"], "a budget must be a number above 0 with a unit"),
    "measure": (["causal()", "--measure", "--device", "cuda"], "--measure times this machine's CPU"),
    "head dim on cuda": (["causal()", "--head-dim", "8", "--device", "cuda"], "at least 16 on cuda; got 8"),
    "values": (["documents('ids')"], "needs ids with each call"),
    "grid": (["neighborhood((8, 8), 1)", "-n", "65"], "a grid of 8x8 holds 64 tokens"),
    "by head": (["per_head([causal(), causal()])", "-n", "64"], "2"),
    "by head, budget": (["per_head([causal(), causal()])", "--budget", "8GiB"], "2"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(arguments, message, capsys) -> None:
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.startswith("flexdilated: error: ")


@pytest.mark.parametrize("name", ["heads", "head-dim", "batch", "layers", "embed-dim"])
def test_sizes_that_no_tensor_has_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "causal()", f"--{name}", "99999999999999999999"]) == 2
    assert f"--{name} must be at most" in capsys.readouterr().err


def test_tokens_whose_blocks_would_fill_the_memory_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "local_window(left=9, right=0)", "-n", str(MOST_DESCRIBED + 1)]) == 2
    assert "blocks are counted up to 134217728 tokens (128M)" in capsys.readouterr().err
    with pytest.raises(ValueError, match="as their lists fill the memory beyond; got 134217729"):
        masks.describe(masks.local_window(left=9, right=0), MOST_DESCRIBED + 1, num_heads=1)


def test_a_billion_tokens_are_counted_where_no_blocks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    billion = 1 << 30
    told = masks.describe(masks.dilated(segment=2048, rate=4), billion, num_heads=1)
    assert told.useful_pairs == billion * 2048 // 16
    assert main(["plan", "longnet((2048, 4096), (1, 2))", "-n", str(billion)]) == 0
    assert "dense" in capsys.readouterr().out


def test_two_of_many_alike_calls_tell_the_memory_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision problems are copied to float32 a few at a time; without values the others are left out."""
    monkeypatch.setattr(_kernel, "_FLOAT32_BYTES", 1)
    with fake_tensors():
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
