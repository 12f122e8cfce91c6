"""plan --ranks: bytes, pairs and memory against the dense rule, times against hand-made numbers, bad input refused."""

import functools
import json
from pathlib import Path

import pytest
import torch

from flexdilated import masks
from flexdilated.cli import main
from flexdilated.cli._command_parser import UsageError
from flexdilated.cli._sizes import parse_seconds, parse_speed, seconds_text
from flexdilated.distributed import Sharding
from flexdilated.memory._memory import AttentionSize, attention_memory
from tests.support import commands

# W ranks, G key/value heads, N tokens

LONGNET = "longnet((32, 128, 512), (1, 4, 16)) & causal()"
SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "-n", "500"]
LONG = "longnet(({}), ({})) & causal()".format(
    ", ".join(str(2048 << power) for power in range(1, 20, 3)), ", ".join(str(1 << power) for power in range(1, 20, 3))
)


@pytest.fixture(autouse=True)
def made_up_memory(request, monkeypatch) -> None:
    """One test alone needs the numbers of the library."""
    if "true_memory" not in request.fixturenames:
        commands.make_memory_up(monkeypatch)


@pytest.fixture
def true_memory() -> None:
    """The numbers are those of the library."""


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


def dense(sharding: Sharding) -> tuple[list[list[int]], list[int]]:
    """Tokens over KV heads that each rank needs of each other, and each rank's pairs."""
    needed, pairs = dense_pairs()
    held = [sharding.positions(rank) for rank in range(sharding.num_ranks)]
    tokens = [
        [int(needed[:, mine][:, :, theirs].any(1).sum()) if mine is not theirs else 0 for theirs in held]
        for mine in held
    ]
    return tokens, [int(pairs[mine].sum()) for mine in held]


ROWS = {"none": 4 * 16, "bf16": 2 * 16, "int8": 16 + 4}  # bytes of a row as it is sent


@pytest.mark.parametrize(
    ("order", "ranks", "codec"),
    [
        *(("contiguous", 1, "none"), ("contiguous", 3, "bf16"), ("contiguous", 8, "int8")),
        *(("zigzag", 1, "int8"), ("zigzag", 3, "none"), ("zigzag", 8, "bf16")),
    ],
)
def test_numbers_are_those_of_the_dense_rule(capsys, order, ranks, codec) -> None:
    found = data_of(
        capsys, LONGNET, *SMALL, "--ranks", str(ranks), "--sharding", order, "--codec", codec, "--batch", "3"
    )
    tokens, pairs = dense(Sharding(500, ranks, order))
    expected = [[2 * 3 * ROWS[codec] * number for number in line] for line in tokens]
    assert found["matrix"] == {"ranks_in_a_group": 1, "bytes": expected}
    assert found["ranks"]["received"] == [sum(line) for line in expected]
    assert found["ranks"]["sent"] == [sum(line) for line in zip(*expected, strict=True)]
    assert found["ranks"]["pairs"] == pairs
    assert found["work"]["pairs"] == sum(pairs)
    assert found["work"]["most_over_mean"][order] == pytest.approx(max(pairs) * ranks / sum(pairs))
    other = "zigzag" if order == "contiguous" else "contiguous"
    _, others = dense(Sharding(500, ranks, other))
    assert found["work"]["most_over_mean"][other] == pytest.approx(max(others) * ranks / sum(others))


def test_ways_are_counted_beside_each_other(capsys) -> None:
    found = data_of(capsys, LONGNET, *SMALL, "--ranks", "4", "--dtype", "bf16", "--codec", "int8")
    tokens, _ = dense(Sharding(500, 4))
    received = [sum(line) for line in tokens]
    shards = [sum(125 for number in line if number) for line in tokens]
    exchange, ring, gather = found["ways"].values()
    assert list(found["ways"]) == ["exchange", "ring", "all-gather"]
    assert exchange["received"] == {"least": 0, "mean": sum(received) / 4 * 40, "most": max(received) * 40}
    assert ring["received"]["most"] == max(shards) * 2 * 40  # of 2 KV heads
    assert gather["received"]["least"] == gather["received"]["most"] == 375 * 2 * 2 * 16 * 2  # as they are
    assert exchange["gradients_sent"]["most"] == max(received) * 2 * 16 * 2  # never below bf16
    assert exchange["held"] == max(received) * 2 * 16 * 2
    assert ring["held"] == min(2 * 125, max(shards)) * 2 * 2 * 16 * 2
    assert [way["messages"]["most"] for way in found["ways"].values()] == [3, 3, 3]
    assert found["auto"]["exchange_bytes"] == exchange["received"]["most"]
    assert found["auto"]["ring_memory"] == ring["held"]


def test_memory_is_the_shard_s_call_and_what_is_held(capsys, true_memory) -> None:
    pattern = "longnet((32, 128), (1, 4)) & causal()"
    found = data_of(capsys, pattern, *SMALL, "--ranks", "4", "--dtype", "bf16")
    call = attention_memory(masks.parse(pattern), AttentionSize(125, 4, 16, torch.bfloat16, 1, 2))
    assert found["shard"]["inputs"] == call.inputs == 125 * (4 + 2 + 2) * 16 * 2
    exchange, ring, gather = found["ways"].values()
    assert exchange["inference_peak"] == call.inference_peak + call.keys + exchange["held"]
    assert gather["training_peak"] == call.training_peak + call.keys + 3 * gather["held"]  # gradients in float32
    assert ring["training_peak"] == call.training_peak + 3 * ring["held"]


def test_many_ranks_are_shown_in_groups(capsys) -> None:
    arguments = [LONGNET, *SMALL, "--ranks", "20"]
    found = data_of(capsys, *arguments)
    tokens = torch.tensor(dense(Sharding(500, 20))[0]) * 2 * 4 * 16
    assert found["matrix"]["ranks_in_a_group"] == 2
    assert found["matrix"]["bytes"] == tokens.view(10, 2, 10, 2).sum((1, 3)).tolist()
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "the group of 2 ranks of a row receives from the group of 2 ranks of a column" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("least", "mean", "most"))] == [
        "least", "mean", "most",
    ]  # fmt: skip
    # Of unequal sizes.
    found = data_of(capsys, LONGNET, *SMALL, "--ranks", "37")
    assert found["matrix"]["ranks_in_a_group"] == 3
    assert len(found["matrix"]["bytes"]) == 13
    assert sum(map(sum, found["matrix"]["bytes"])) == sum(found["ranks"]["received"]) == sum(found["ranks"]["sent"])


def test_report_as_text(capsys) -> None:
    assert main(["plan", LONGNET, *SMALL, "--ranks", "3", "--link", "1GB/s", "--codec", "int8", "--dtype", "bf16"]) == 0
    text = capsys.readouterr().out
    for part in (
        "500 tokens, 4 heads over 2, head dim 16, bf16, sent as int8",
        "3 on cpu, 166 to 167 tokens each, contiguous",
        "schedule  exchange: a rank receives at most",
        "Keys and values that the rank of a row receives from the rank of a column",
        "rank 2",
        "predicted: forward and backward",
        "Times are predicted, not measured.",
        "(builtin constants)",
    ):
        assert part in text, part
    assert max(map(len, text[text.index("Keys and values") :].splitlines())) <= 120
    assert main(["plan", LONGNET, *SMALL, "--ranks", "3"]) == 0
    text = capsys.readouterr().out
    assert "predicted:" not in text
    assert "With --link, the speed of links, times are predicted too." in text


def test_times_follow_the_links(capsys) -> None:
    arguments = [LONGNET, *SMALL, "--ranks", "4", "--dtype", "bf16"]
    fast, slow = (data_of(capsys, *arguments, "--link", speed)["ways"] for speed in ("2GB/s", "1GB/s"))
    for way in fast:
        assert slow[way]["predicted_s"]["keys"] == pytest.approx(2 * fast[way]["predicted_s"]["keys"])
        assert slow[way]["predicted_s"]["computing"] == fast[way]["predicted_s"]["computing"]
    assert fast["all-gather"]["predicted_s"]["keys"] == pytest.approx(375 * 2 * 2 * 16 * 2 / 2e9)
    late = data_of(capsys, *arguments, "--link", "2GB/s", "--latency", "5us")["ways"]
    added = late["all-gather"]["predicted_s"]["keys"] - fast["all-gather"]["predicted_s"]["keys"]
    assert added == pytest.approx(3 * 5e-6)
    nodes = data_of(capsys, *arguments, "--link", "2GB/s", "--ranks-per-node", "2", "--link-between", "1GB/s")
    assert nodes["links"]["ranks_per_node"] == 2
    assert nodes["ways"]["all-gather"]["predicted_s"]["keys"] == pytest.approx(250 * 2 * 2 * 16 * 2 / 1e9)


def test_computing_is_the_cost_model_s_time_by_pairs(capsys) -> None:
    """One rank takes what one device does, of which the plan of one device says the forward at head dim 64, fp32."""
    sizes = ["-n", "4K", "--heads", "4", "--head-dim", "64"]
    one = data_of(capsys, LONGNET, *sizes, "--layers", "1")
    chosen = {option["branch"]: option["predicted_s"] for option in one["options"] if option["chosen"]}
    alone = data_of(capsys, LONGNET, *sizes, "--ranks", "1", "--link", "1GB/s")["ways"]["exchange"]["predicted_s"]
    assert alone["forward"] == pytest.approx(sum(chosen.values()))
    assert alone["backward"] == pytest.approx(masks.machine().backward_ratio * alone["forward"])
    many = data_of(capsys, LONGNET, *sizes, "--ranks", "4", "--link", "1GB/s")
    share = max(many["ranks"]["pairs"]) / many["work"]["pairs"]
    assert many["ways"]["ring"]["predicted_s"]["computing"] == pytest.approx(share * alone["step"])


def test_picture(tmp_path: Path, capsys) -> None:
    path = tmp_path / "traffic.png"
    for ranks in ("3", "40"):
        assert main(["plan", LONGNET, *SMALL, "--ranks", ranks, "--picture", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()
    assert main(["plan", "chunked(250)", *SMALL, "--ranks", "1", "--picture", str(path)]) == 0
    assert list(tmp_path.iterdir()) == [path]


def test_cuda_is_planned_without_one(capsys) -> None:
    found = data_of(capsys, LONGNET, *SMALL, "--ranks", "2", "--device", "cuda", "--dtype", "bf16", "--link", "50GB/s")
    assert found["device"] == "cuda"
    assert found["ways"]["exchange"]["predicted_s"]["step"] > 0


def test_many_ranks_and_a_billion_tokens(capsys) -> None:
    """Without the memory of a call, which is tested alone."""
    sizes = ["--tokens", "1024M", "--heads", "8", "--dtype", "bf16"]
    found = data_of(capsys, LONG, *sizes, "--ranks", "512", "--sharding", "zigzag", "--link", "50GB/s")
    assert found["num_tokens"] == 1 << 30
    assert len(found["ranks"]["pairs"]) == 512
    assert found["work"]["most_over_mean"]["zigzag"] < 1.0001
    assert 0 < found["ways"]["exchange"]["received"]["most"] < found["ways"]["all-gather"]["received"]["most"] / 1000
    assert found["auto"]["name"] == "exchange"


def test_speeds_and_times_as_people_write_them() -> None:
    assert [parse_speed(text) for text in ("50GB/s", "1.5 GiB/s", "7B/s")] == [50e9, 1.5 * 2**30, 7]
    assert [parse_seconds(text) for text in ("5us", "5 \u00b5s", "0.2ms", "0s", "10ns")] == [5e-6, 5e-6, 2e-4, 0, 1e-8]
    assert [seconds_text(number) for number in (0, 2.5e-6, 1e-3, 0.1234, 1, 4321)] == [
        "0 us", "2.5 us", "1 ms", "123 ms", "1 s", "4,321 s",
    ]  # fmt: skip
    for text in ("", "50", "50GB", "GB/s", "0GB/s", "-1GB/s", "50GB/m", "50Gb/s/s", "1e9B/s", "/s"):
        with pytest.raises(UsageError, match="a link's speed must be a number above 0 with a unit a second"):
            parse_speed(text)
    for text in ("", "5", "us", "-1us", "5 minutes", "1e-6s"):
        with pytest.raises(UsageError, match="a latency must be a number with a unit, one of ns, us, ms, s"):
            parse_seconds(text)


TWO = ["causal()", "-n", "64", "--ranks", "2"]
REFUSED = {
    "no ranks": (["causal()", "--ranks", "0"], "--ranks must be at least 1; got 0"),
    "too many": (["causal()", "--ranks", "4097"], "--ranks must be at most 4096; got 4097"),
    "sharding alone": (["causal()", "--sharding", "zigzag"], "--sharding needs --ranks; got it without"),
    "codec alone": (["causal()", "--codec", "none"], "--codec needs --ranks"),
    "link alone": (["causal()", "--link", "1GB/s"], "--link needs --ranks"),
    "picture alone": (["causal()", "--picture", "x.png"], "--picture needs --ranks"),
    "budget": (["causal()", "--ranks", "2", "--budget", "8GiB"], "--budget has no effect with --ranks"),
    "layers": ([*TWO, "--layers", "3"], "--layers has no effect with --ranks"),
    "measure": ([*TWO, "--measure"], "--measure has no effect with --ranks"),
    "latency": ([*TWO, "--latency", "1us"], "--latency needs --link; got it without"),
    "between": ([*TWO, "--link", "1GB/s", "--link-between", "1GB/s"], "--link-between needs --ranks-per-node"),
    "nodes": ([*TWO, "--link", "1GB/s", "--ranks-per-node", "1"], "--ranks-per-node needs --link-between"),
    "no node": (
        [*TWO, "--link", "1GB/s", "--ranks-per-node", "0", "--link-between", "1GB/s"],
        "--ranks-per-node must be at least 1; got 0",
    ),
    "speed": ([*TWO, "--link", "50"], "such as 50GB/s; got '50'"),
    "codec": ([*TWO, "--codec", "bf16", "--dtype", "fp16"], 'codec "bf16" writes rows wider than float16'),
    "picture": ([*TWO, "--picture", "x.jpg"], "--picture writes .png files; got x.jpg"),
    "no folder": ([*TWO, "--picture", "none/x.png"], "--picture must be in a folder that exists"),
    "grid": (["neighborhood((8, 8), 1)", "-n", "65", "--ranks", "2"], "a grid of 8x8 holds 64 tokens"),
    "by head": (["per_head([causal(), causal()])", "-n", "64", "--heads", "3", "--ranks", "2"], "for 3 heads"),
    "values": (["documents('ids')", "--ranks", "2"], "--bind ids"),
    "tokens": (["causal()", "-n", "4000M", "--ranks", "2"], "must be at most 2147483647"),
    "pattern": (["causal(", "--ranks", "2"], "caus"),
    "kv heads": ([*TWO, "--kv-heads", "3"], "--kv-heads must divide --heads"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(arguments, message, capsys) -> None:
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.startswith("flexdilated: error: ")


def test_a_picture_that_cannot_be_drawn(monkeypatch, capsys) -> None:
    monkeypatch.setattr("flexdilated.cli._machine.find", lambda package: None)
    assert main(["plan", *TWO, "--picture", "x.png"]) == 2
    assert 'pip install "flexdilated[plot]"' in capsys.readouterr().err
