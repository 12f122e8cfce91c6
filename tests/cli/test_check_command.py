"""`python -m flexdilated check`: a pattern held to its definition, the counterexample, the exit status."""

import json

import pytest

from flexdilated import masks
from flexdilated.cli import _check, main
from flexdilated.testing import _attend_trials
from flexdilated.testing._attend_trials import Trial, attend_trials, run_trial

FEW = ["--examples", "8", "--heads", "2", "--max-tokens", "20"]

FILE = """
import torch
from flexdilated import masks
from flexdilated.masks import EMPTY, FULL, PARTIAL


def near(b, h, q, k):
    return (k <= q) & (k > q - 5)


def right(head, q_first, q_last, k_first, k_last):
    inside = (k_last <= q_first) & (k_first > q_last - 5)
    return torch.where(k_first > q_last, EMPTY, torch.where(inside, FULL, PARTIAL))


def too_sure(head, q_first, q_last, k_first, k_last):
    return torch.where(k_first > q_last, EMPTY, torch.where(k_last <= q_first, FULL, PARTIAL))


good = masks.custom(near, classify=right)
bad = masks.custom(near, classify=too_sure) | masks.first_tokens(1)
number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("pattern", ["longnet((4, 8), (1, 2)) & causal()", "per_head((chunked(3), ~strided(2)))"])
def test_a_pattern_that_is_right(pattern, capsys) -> None:
    assert main(["check", pattern, *FEW]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{masks.parse(pattern)!r}: no counterexample in 8 boxes a kind and 8 calls of attend")
    assert "16/16" in said.err
    assert main(["check", pattern, *FEW, "--examples", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["counterexample"] is None
    assert (told["examples"], told["num_heads"], told["max_tokens"], told["seed"]) == (4, 2, 20, 0)


def test_a_json_file(tmp_path, capsys) -> None:
    (tmp_path / "p.json").write_text(masks.to_json(masks.strided(3)), encoding="utf-8")
    assert main(["check", str(tmp_path / "p.json"), *FEW]) == 0
    assert "strided(3): no counterexample" in capsys.readouterr().out


def test_a_pattern_of_ones_own(file, capsys) -> None:
    assert main(["check", f"{file}:good", *FEW]) == 0
    assert main(["check", f"{file}:bad", *FEW]) == 1
    said = capsys.readouterr().out
    assert "counterexample, after 0 examples" in said
    assert "head 0, queries 6, keys 1: 0 of 1 pairs are allowed, count says 1 to 1 (FULL)" in said
    assert main(["check", f"{file}:bad", *FEW, "--json"]) == 1
    assert "count must bound" in json.loads(capsys.readouterr().out)["counterexample"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("one = 1\nraise LookupError('none')\n", "mine.py must run without an error, line 2; got LookupError: none"),
        ("import sys\nsys.exit(3)\n", "mine.py must run without an error, line 2; got SystemExit: 3"),
        ("def (\n", "mine.py must run without an error; got SyntaxError: invalid syntax"),
    ],
)
def test_a_file_that_raises(text, words, tmp_path, capsys) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    assert main(["check", f"{tmp_path / 'mine.py'}:good", *FEW]) == 2
    assert words in capsys.readouterr().err


def test_a_seed_is_that_of_all_that_is_drawn(monkeypatch) -> None:
    """Portions of the rule's examples have seeds of their own, and calls the one that is given."""
    seeds: dict[str, list[int]] = {"rule": [], "calls": []}
    monkeypatch.setattr(_check, "check_pattern", lambda pattern, *, seed, **sizes: seeds["rule"].append(seed))
    monkeypatch.setattr(_check, "attend_trials", lambda pattern, *, seed, **sizes: seeds["calls"].append(seed) or ())
    assert main(["check", "causal()", "--seed", "1000", "--examples", "60"]) == 0
    assert seeds["calls"] == [1000]
    assert len(set(seeds["rule"])) == len(seeds["rule"]) > 1
    assert all(1000 <= seed < 1060 for seed in seeds["rule"])


def test_a_seed_that_is_too_large(capsys) -> None:
    assert main(["check", "causal()", "--seed", "9" * 20]) == 2
    assert "--seed must be of less than 63 bits; got 99999" in capsys.readouterr().err


def test_an_attend_that_is_wrong(monkeypatch, capsys) -> None:
    """The rule is right, so what attend gets wrong is found by the second half; the trial shrinks."""
    attend = _attend_trials.attend

    def from_nine_on(q, k, v, pattern, **options):
        if k.shape[2] >= 9:
            pattern = pattern | masks.causal()
        return attend(q, k, v, pattern, **options)

    monkeypatch.setattr(_attend_trials, "attend", from_nine_on)
    assert main(["check", "local_window(left=2, right=0)", *FEW, "--examples", "30"]) == 1
    said = capsys.readouterr().out
    assert "attend must be the definition; for 9 tokens" in said
    assert "batch 1, 2 heads on" in said
    assert "ordinary values" in said
    assert "out is wrong" in said


def test_trials_are_drawn_at_the_edges() -> None:
    pattern = masks.chunked(7)
    trials = list(attend_trials(pattern, num_heads=4, max_tokens=40, examples=200, seed=1))
    assert trials == list(attend_trials(pattern, num_heads=4, max_tokens=40, examples=200, seed=1))
    assert {trial.num_tokens for trial in trials} >= {1, 6, 7, 8, 13, 14, 15, 40}
    assert {trial.num_kv_heads for trial in trials} == {1, 2, 4}
    assert any(trial.num_queries < trial.num_tokens for trial in trials)
    for trial in trials[:10]:
        run_trial(pattern, trial)
    only = list(attend_trials(masks.neighborhood((3, 4), (1, 1)), num_heads=1, max_tokens=20, examples=5, seed=0))
    assert {trial.num_tokens for trial in only} <= set(range(1, 13))


def test_trials_say_what_they_are() -> None:
    trial = Trial(4, 2, 9, 3, 8, 1, "large scores", 5)
    assert str(trial) == "9 tokens, the last 3 of them queries, batch 1, 4 heads on 2, head dim 8, large scores, seed 5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["causal()", "--examples", "0"], "--examples must be at least 1; got 0"),
        (["causal()", "--heads", "4096"], "squared must be at most 4194304; got 4096 heads and 96 tokens"),
        (
            ["block_list([[7]], block=16)"],
            "the pattern must take these --heads, and up to --max-tokens; block_list is out of range",
        ),
        (["causal()", "--max-tokens", "-3"], "--max-tokens must be at least 1; got -3"),
        (["casual()"], "casual"),
        (["per_head((causal(), causal()))", "--heads", "4"], "per_head needs one pattern a head; got 2 for 4 heads"),
        (["documents('ids')"], "check_pattern draws positions of its own"),
        (["no_such.py:p"], "got 'no_such.py', which is no file"),
        (["no_such.json"], "PATTERN must be an expression or a file that can be read"),
    ],
)
def test_bad_usage(arguments, message, capsys) -> None:
    assert main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_without_that_pattern(file, capsys) -> None:
    assert main(["check", f"{file}:number"]) == 2
    assert (
        "must make a pattern of that name; got 'number', and the patterns in it are 'good', 'bad'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("neighborhood((3, 4), 1)", "12 tokens, as it takes no more,"),
        ("block_list([[1], [0, 1], [2]], block=4)", "20 tokens,"),
        ("neighborhood((4, 4), 1) & ~block_list([[3], [0, 1]], block=4)", "16 tokens, as it takes no more,"),
    ],
)
def test_patterns_of_few_lengths(pattern, most, capsys) -> None:
    assert main(["check", pattern, *FEW]) == 0
    assert f"(up to {most} 2 heads" in capsys.readouterr().out
    assert main(["check", pattern, *FEW, "--examples", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_tokens"] == int(most.split()[0])
