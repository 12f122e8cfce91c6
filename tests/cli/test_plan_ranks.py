"""plan --ranks: bytes and pairs of each rank against the dense rule, the table, and bad input refused."""

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


@pytest.mark.parametrize(
    ("order", "ranks", "schedule"), [("contiguous", 1, "ring"), ("contiguous", 3, "exchange"), ("zigzag", 8, "ring")]
)
def test_pairs_are_those_of_the_dense_rule(capsys, order, ranks, schedule) -> None:
    """Looked at one by one; what is received is compared with what ranks send in tests/distributed/test_loads.py."""
    asked = ["--ranks", str(ranks), "--order", order, "--schedule", schedule, "--batch", "3"]
    found, sharding = data_of(capsys, LONGNET, *SMALL, *asked), Sharding(500, ranks, order)
    position, heads = torch.arange(500), torch.arange(4)[:, None, None]
    branches = [each.bind(num_heads=4, num_queries=500, num_keys=500) for each in masks.parse(LONGNET).branches()]
    allowed = [branch.mask_mod()(torch.tensor(0), heads, position[:, None], position) for branch in branches]
    pairs = torch.stack([each.expand(4, 500, 500).sum((0, 2)) for each in allowed]).sum(0)
    columns = found["ranks"]
    assert columns["tokens"] == list(sharding.lengths)
    assert columns["pairs"] == [3 * int(pairs[sharding.positions(rank)].sum()) for rank in range(ranks)]
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
