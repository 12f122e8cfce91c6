"""plan --ranks: bytes and pairs of each rank against the dense rule, the table, and bad input refused."""

import functools
import json

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.cli import main
from flexdilated.distributed import Sharding

# W ranks, G key/value heads, N tokens

LONGNET = "longnet((32, 128, 512), (1, 4, 16)) & causal()"
SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "-n", "500"]


def data_of(capsys, *arguments: str):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@functools.cache
def dense_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that each query needs over 2 KV heads of 4 heads, (2, 500, 500), and its pairs, looked at one by one."""
    needed, pairs = torch.zeros(2, 500, 500, dtype=torch.bool), torch.zeros(500, dtype=torch.int64)
    position, zero = torch.arange(500), torch.zeros((), dtype=torch.int64)
    for branch in masks.parse(LONGNET).branches():
        mod = branch.bind(num_heads=4, num_queries=500, num_keys=500).mask_mod()
        for head in range(4):
            seen = mod(zero, torch.tensor(head), position[:, None], position)
            needed[head // 2] |= seen
            pairs += seen.sum(1)
    return needed, pairs


def dense(sharding: Sharding, schedule: str) -> tuple[torch.Tensor, list[int]]:
    """Tokens over KV heads that each rank receives from each other, (W, W), and each rank's pairs."""
    needed, pairs = dense_pairs()
    ranks = range(sharding.num_ranks)
    tokens = torch.zeros(len(ranks), len(ranks), dtype=torch.int64)
    for target in ranks:
        some = needed[:, sharding.positions(target)].any(1)
        for source in ranks:
            for run in sharding.ranges(source) if source != target else ():
                number = some[:, run.start : run.stop].sum()
                tokens[target, source] += 2 * len(run) * (number > 0) if schedule == "ring" else number
    return tokens, [int(pairs[sharding.positions(rank)].sum()) for rank in ranks]


KEY_BYTES = {"none": 4 * 16, "bf16": 2 * 16, "int8": 16 + 4}  # of a row of 16 on the wire
GRADIENT_BYTES = {"none": 4 * 16, "bf16": 2 * 16, "int8": 2 * 16}


@pytest.mark.parametrize("schedule", ["exchange", "ring"])
@pytest.mark.parametrize(
    ("order", "ranks", "codec"),
    [
        *(("contiguous", 1, "none"), ("contiguous", 3, "bf16"), ("contiguous", 8, "int8")),
        *(("zigzag", 1, "int8"), ("zigzag", 3, "none"), ("zigzag", 8, "bf16")),
    ],
)
def test_numbers_are_those_of_the_dense_rule(capsys, order, ranks, codec, schedule) -> None:
    asked = [] if codec == "none" else ["--codec", codec]
    asked += ["--ranks", str(ranks), "--order", order, "--schedule", schedule, "--batch", "3"]
    found = data_of(capsys, LONGNET, *SMALL, *asked)
    sharding = Sharding(500, ranks, order)
    tokens, pairs = dense(sharding, schedule)
    forward = 2 * 3 * KEY_BYTES[codec] * tokens.sum(1)
    backward = 2 * 3 * GRADIENT_BYTES[codec] * tokens.sum(0) + (forward if schedule == "ring" else 0)
    columns = {
        "tokens": list(sharding.lengths),
        "received_forward": forward.tolist(),
        "received_backward": backward.tolist(),
        "pairs": [3 * number for number in pairs],
    }
    assert found["ranks"] == columns
    assert list(found["max_over_mean"]) == list(columns)[1:]
    for name, ratio in found["max_over_mean"].items():
        assert ratio == (pytest.approx(max(columns[name]) * ranks / sum(columns[name])) if any(columns[name]) else 1)
    assert (found["num_ranks"], found["order"], found["schedule"], found["reason"]) == (ranks, order, schedule, None)


def test_the_command_prints_what_python_returns(capsys) -> None:
    pattern, sizes = masks.parse(LONGNET), {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ranks": 3}
    loads = fd.plan(pattern, 500, **sizes, dtype=torch.bfloat16, order="zigzag", codec="int8")
    arguments = [LONGNET, *SMALL, "--ranks", "3", "--dtype", "bf16", "--order", "zigzag", "--codec", "int8"]
    assert data_of(capsys, *arguments) == loads.to_data()
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert text == f"{loads}\n"
    facts, table = text.split("\n\n")
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(facts.split()) == (
        f"pattern {LONGNET} ranks 3, 500 tokens, zigzag schedule exchange, int8 on the wire: {loads.reason}"
    )
    assert [line.split()[0] for line in table.splitlines()[3:]] == ["0", "1", "2", "max", "max"]
    assert table.splitlines()[-1].split()[-1] == f"{loads.max_over_mean['pairs']:.4f}"


def test_auto_says_why(capsys) -> None:
    """As `distributed.attend` chooses: a ring where every key is needed, on more than two ranks."""
    for pattern, ranks, name, says in (
        ("causal()", "8", "ring", "in a ring, and holds"),
        ("causal()", "2", "exchange", "in an exchange, and holds it all"),
        ("chunked(64)", "8", "exchange", "so nothing is sent"),
    ):
        found = data_of(capsys, pattern, "-n", "512", "--ranks", ranks)
        assert found["schedule"] == name
        assert says in found["reason"]


def test_zero_padding_and_run_time_values_count(capsys, tmp_path) -> None:
    padded = "longnet((16, 64), (1, 4), padding='zeros')"
    plain = data_of(capsys, padded.replace(", padding='zeros'", ""), "-n", "100", "--heads", "4", "--ranks", "3")
    assert data_of(capsys, padded, "-n", "100", "--heads", "4", "--ranks", "3")["ranks"] == plain["ranks"]
    torch.save(torch.arange(64) // 32, tmp_path / "d.pt")
    found = data_of(capsys, "documents('d')", "--bind", f"d={tmp_path / 'd.pt'}", "--heads", "1", "--ranks", "2")
    assert found["ranks"]["pairs"] == [32 * 32] * 2
    assert found["ranks"]["received_forward"] == [0, 0]
    assert found["max_over_mean"]["received_forward"] == 1
