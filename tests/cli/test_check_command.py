"""`python -m flexdilated check`: a pattern held to its definition, the counterexample, the exit status."""

import json

import pytest

from flexdilated import masks
from flexdilated.cli import _check, main

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


def test_a_pattern_of_ones_own(file, capsys) -> None:
    assert main(["check", f"{file}:good", *FEW]) == 0
    assert main(["check", f"{file}:bad", *FEW]) == 1
    said = capsys.readouterr().out
    assert "counterexample, after 0 examples" in said
    assert "head 0, queries 6, keys 1: 0 of 1 pairs are allowed, count says 1 to 1 (FULL)" in said
    assert main(["check", f"{file}:bad", *FEW, "--json"]) == 1
    assert "count must bound" in json.loads(capsys.readouterr().out)["counterexample"]


def test_an_attend_that_is_wrong(monkeypatch, capsys) -> None:
    """The rule is right, so what attend gets wrong is found by the second half, in the shortest case."""
    attend = _check.attend

    def from_nine_on(q, k, v, pattern, *, q_offset=0, **options):
        if k.shape[2] >= 9:
            pattern = pattern | masks.causal()
        return attend(q, k, v, pattern, q_offset=q_offset, **options)

    monkeypatch.setattr(_check, "attend", from_nine_on)
    assert main(["check", "local_window(left=2, right=0)", *FEW, "--examples", "30"]) == 1
    said = capsys.readouterr().out
    assert "3 of 3 checks failed" in said
    assert "9 tokens" in said
    assert "out is wrong" in said


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("neighborhood((3, 4), 1)", "12 tokens, as it takes no more,"),
        ("neighborhood((4, 4), 1) & ~block_list([[3], [0, 1]], block=4)", "16 tokens, as it takes no more,"),
    ],
)
def test_patterns_of_few_lengths(pattern, most, capsys) -> None:
    assert main(["check", pattern, *FEW, "--examples", "3"]) == 0
    assert f"(up to {most} 2 heads" in capsys.readouterr().out
    assert main(["check", pattern, *FEW, "--examples", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    sizes = [told[name] for name in ("counterexample", "examples", "num_heads", "max_tokens", "seed")]
    assert sizes == [None, 2, 2, int(most.split()[0]), 0]
