"""Published claims: what stands for each is what it says, and the pages show the results as they are."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from bench import __main__ as command
from bench import _compare, _guard, _pages, buffers, claims
from bench._checks import check_forward
from bench._jobs import Problem, Size
from bench._measures import Claim, Timing, at_least
from bench._pages import PAGES
from bench._report import filled
from bench._rules import same_branch
from bench._run import MEASURES
from bench.claims import CLAIMS, Length
from bench.peers import block_rows, dense_attention
from tests.support.measured import MEASURED

ROOT = Path(__file__).resolve().parents[2]
PAGE, BENCHMARKS = Path("docs/performance.md"), Path("docs/contributing/benchmarks.md")
FULL, SMALL = MEASURES["claims"].full, MEASURES["claims"].small


def dense_rows(problem: Problem, allowed: torch.Tensor) -> torch.Tensor:
    scores = problem.q.double() @ problem.k.double().transpose(-1, -2) * problem.q.shape[-1] ** -0.5
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ problem.v.double()).float()


@pytest.mark.parametrize("fused", [True, False], ids=["flash", "matmuls"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole blocks"])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_rows_of_blocks_are_those_of_the_definition(fused, masked, rows_at_once) -> None:
    """In any order, any number of rows at once, with two heads and pairs hidden within the blocks."""
    problem, block = Problem.draw(Size(40, num_heads=2, head_dim=4)), 8
    columns = torch.tensor([[0, 1], [4, 1], [2, 3], [0, 2], [3, 4]])
    allowed = torch.rand(5, block, 2 * block, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[..., 0] = True
    wanted = torch.zeros(40, 40, dtype=torch.bool)
    for row, listed in enumerate(columns.tolist()):
        for place, column in enumerate(listed):
            tile = allowed[row, :, place * block : (place + 1) * block] if masked else True
            wanted[row * block : (row + 1) * block, column * block : (column + 1) * block] = tile
    for order in (None, torch.tensor([3, 0, 4, 2, 1])):
        found = block_rows(
            columns,
            block=block,
            allowed=allowed if masked else None,
            rows_at_once=rows_at_once,
            order=order,
            fused=fused,
        )
        assert_close(found(problem.q, problem.k, problem.v), dense_rows(problem, wanted), rtol=1e-4, atol=1e-5)


def test_naive_attention_forms_all_pairs_and_is_dense() -> None:
    problem = Problem.draw(Size(50, num_heads=2, head_dim=4))
    q, k, v = problem.q, problem.k, problem.v
    assert_close(claims.naive(q, k, v), dense_attention(causal=False)(q, k, v), rtol=1e-4, atol=1e-5)


def test_branches_of_the_length_claim() -> None:
    """The sizes of the source: four heads over three branches, and as many times the pairs as the figure shows."""
    length = FULL["length"]
    assert length.branch_of_head == [(8192, 1, 0), (8192, 1, 0), (16384, 2, 1), (32768, 8, 2)]
    assert (length.size.num_tokens, length.size.num_heads, length.size.head_dim) == (131072, 4, 8)
    assert length.ratio_of_pairs == pytest.approx(25, rel=0.002)


def test_pairs_of_the_length_claim_are_counted_right() -> None:
    length = Length((16, 32, 64), (1, 2, 8), Size(128, num_heads=5, head_dim=4), rows=16, check_tokens=64)
    t = torch.arange(128)
    pairs = sum(
        int(same_branch(torch.tensor(branch), t[:, None], t[None], length=segment, rate=rate).sum())
        for segment, rate, branch in length.branch_of_head
    )
    assert length.ratio_of_pairs == 5 * 128**2 / pairs


def test_a_wrong_pattern_is_not_timed(monkeypatch) -> None:
    length = SMALL["length"]
    wrong = replace(length, dilation_rates=(1, 4, 8))
    monkeypatch.setattr(
        Length, "branch_of_head", property(lambda self: [(128, 1, 0), (128, 1, 0), (256, 2, 1), (512, 8, 2)])
    )
    pattern = claims.masks.per_head([claims.masks.dilated(128, rate) for rate in (1, 1, 4, 8)])
    with pytest.raises(AssertionError, match="out must be within"):
        check_forward(partial(claims.fd.attend, pattern=pattern), Problem.draw(wrong.size), wrong)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.says)
def test_a_claim_names_its_source(claim) -> None:
    """Repository, commit and file, and a figure that is the target's."""
    assert re.fullmatch(r"[\w.-]+/[\w.-]+, commit [0-9a-f]{7}, \S+\.(md|png)( and \S+\.py)?", claim.source)
    bound = claim.target.bound
    figures = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", claim.claimed)]
    assert {bound, round(100 * (bound - 1), 6), 2.04 if bound == 2 else bound} & set(figures)


@pytest.mark.slow
def test_each_claim_is_measured_once() -> None:
    answer = MEASURES["claims"].answer(small=True)
    assert [row["measure"] for row in answer["rows"]] == [claim.says for claim in CLAIMS]
    for row in answer["rows"]:
        assert {"claimed", "source"} <= set(row["detail"])
    found = {row["measure"]: row for row in answer["rows"]}
    hits = found[claims.HITS.says]
    counts = hits["detail"]
    assert hits["measured"] == pytest.approx(100 * counts["hits"] / (counts["hits"] + counts["misses"]))
    long = found[claims.LONG.says]
    dense, ours = (timing["median_s"] for timing in long["timings"])
    assert long["measured"] == pytest.approx(dense / ours * 2048 / 128)


def test_every_claim_is_in_a_table() -> None:
    assert list(CLAIMS) == [value for value in vars(claims).values() if isinstance(value, Claim)]
    pages = (PAGE, Path("docs/howto/ranks.md"))
    shown = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    assert all(value.claimed in shown for value in vars(buffers).values() if isinstance(value, Claim))


def test_the_page_says_what_is_missed(tmp_path, monkeypatch) -> None:
    """With times in ms, and details in the unit of their names."""
    claim = Claim("m", "2 times", "a/b", "this", at_least(2, "×"))
    row = claim.row(1.0, (Timing("job", (0.25,)),), peak_bytes=3 << 20, some_percent=5.0, n=1234, best="x").to_data()
    (tmp_path / "claims.json").write_text(json.dumps({"rows": [row], **MEASURED}))
    monkeypatch.setattr(_pages, "CLAIMS", (claim,))
    parts = {name: PAGES[PAGE][name](tmp_path) for name in ("claims", "notes")}
    assert "| m       | 2 times   | 1 ×    | **no**    |" in parts["claims"]
    assert parts["notes"].strip() == "1. This. Job 250 ms; peak: 3 MiB; some: 5 %; n: 1,234; best: x. Source: a/b."


def test_the_page_of_benchmarks_lists_measures_and_cases() -> None:
    text = (ROOT / BENCHMARKS).read_text(encoding="utf-8")
    parts = {name: part(ROOT) for name, part in PAGES[BENCHMARKS].items()}
    assert filled(text, parts) == text, "`python -m bench pages` lists them"
    assert all(f"| `{name}`" in text for name in MEASURES)


def test_the_page_of_benchmarks_names_the_bounds() -> None:
    text = (ROOT / BENCHMARKS).read_text(encoding="utf-8")
    assert f"the bound, {_compare.BOUND:g} unless you say otherwise" in " ".join(text.split())
    assert f"It may be {_guard.BOUND:g} times the ratio" in text
    assert f"{_compare.LEAST_NOISE:.0%}".replace("%", " %") in text


def test_a_part_without_its_result_stays_as_it_is(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    other = PAGE.parent / "other.md"
    PAGE.parent.mkdir()
    before = "<!-- claims -->\nold\n<!-- end claims -->\n<!-- notes -->\nold\n<!-- end notes -->\n"
    PAGE.write_text(before, encoding="utf-8")
    other.write_text("<!-- figure -->\nold\n<!-- end figure -->\n", encoding="utf-8")
    monkeypatch.setattr(
        command,
        "PAGES",
        {PAGE: {name: PAGES[PAGE][name] for name in ("claims", "notes")}, other: {"figure": lambda _: "new"}},
    )
    assert command.main(["pages"]) == 0
    said = f"{PAGE}, claims: stays as it is; bench/results/claims.json is not there"
    assert said in capsys.readouterr().err
    assert PAGE.read_text(encoding="utf-8") == before
    assert other.read_text(encoding="utf-8") == "<!-- figure -->\nnew\n<!-- end figure -->\n"
