"""The benchmark: peers and oracle agree with the library's reference; every measure runs at tiny sizes."""

import json
import os
import runpy
import sys
from dataclasses import replace

import pytest
import torch

import flexdilated as fd
from bench import __main__, _run, attention, roofline
from bench.__main__ import main
from bench._checks import by_definition, check_forward, check_training
from bench._jobs import Job, Problem, Size, interleave, peak_bytes
from bench._measures import Gap, Measure, Row, Timing, at_least, at_most
from bench._report import results_page
from bench._rules import GIGAPATH_5, LONGNET_4, LONGNET_5, PAPER_5, LongNet, Union, dense, longnet_n
from bench._run import MEASURES
from bench.peers import block_rows, branch_loop, dense_attention, natural_block_mask
from bench.planning import block_lists
from flexdilated import masks

SIZE = Size(256, num_heads=4, head_dim=16, repeats=1)
SPECS = [LONGNET_4.shrunk(64), LONGNET_4.shrunk(64).as_causal()]
ODD = LongNet("odd", (1, 100, 333, 50), (1, 3, 7, 60), causal=True)  # rates that divide nothing, one above its segment
label = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)


@pytest.mark.parametrize("spec", [*SPECS, replace(ODD, causal=False), ODD], ids=lambda spec: spec.label)
def test_definition_is_the_librarys_reference(spec) -> None:
    """Two formulations: branches weighted by denominators here, one softmax over the multiset there."""
    problem = Problem.draw(Size(70, num_heads=5, head_dim=8))
    q, k, v, grad = (x.double() for x in (problem.q, problem.k, problem.v, problem.grad))
    results = []
    for reference in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if reference:
            out, lse = fd.attend(*leaves, spec.pattern(), engine="reference", return_lse=True)
        else:
            parts = by_definition(*(x[0] for x in leaves), spec, torch.arange(70))
            out, lse = (part[None] for part in parts)
        grads = torch.autograd.grad((out, lse), leaves, (grad, grad[..., 0]))
        results.append((out, lse, *grads))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("spec", [*SPECS, replace(ODD, causal=False), ODD, dense(64, causal=True)])
def test_closed_form_counts_the_pairs_of_the_definition(spec) -> None:
    for num_tokens in (1, 70, 128):
        allowed = spec.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=5)
        assert spec.pairs(num_tokens=num_tokens, num_heads=5) == sum(int(mask.sum()) for mask in allowed)


def test_named_rules() -> None:
    """What stands on docs/performance.md under their names."""
    assert LONGNET_4.branches == ((2048, 1), (4096, 2), (8192, 4), (16384, 8))
    assert LONGNET_5.branches == (*LONGNET_4.branches, (32768, 16))
    assert (PAPER_5.segment_lengths, PAPER_5.dilation_rates) == (LONGNET_5.segment_lengths, (1, 2, 4, 6, 12))
    assert GIGAPATH_5.branches == ((1024, 1), (5792, 2), (32768, 4), (185363, 8), (1048576, 16))
    assert longnet_n(2048).branches == ((2048, 1),)
    assert (longnet_n(1 << 20).branches[-1], len(longnet_n(1 << 20).branches)) == ((1 << 20, 512), 10)


@label
def test_dense_peer_and_library_pass_the_check(spec) -> None:
    problem = Problem.draw(SIZE)
    check_training(dense_attention(causal=spec.causal), problem, dense(SIZE.num_tokens, causal=spec.causal))
    check_training(spec.attention(), problem, spec)
    check_forward(Union(spec).attention(), problem, Union(spec))


@label
def test_branch_loop_has_the_output_but_not_the_gradient(spec) -> None:
    """With constant branch weights its gradient is exact; as the gradient of its output it is not."""
    problem = Problem.draw(SIZE)
    check_training(branch_loop(spec), problem, spec, constant_weights=True)
    with pytest.raises(AssertionError, match="dq must be within"):
        check_training(branch_loop(spec), problem, spec)
    x = torch.zeros(1, 2, 100, 4)
    with pytest.raises(ValueError, match=r"rate \| segment \| tokens; got rate=1, length=64, 100 tokens"):
        branch_loop(LongNet("cut", (64,), (1,)))(x, x, x)


@pytest.mark.parametrize("change", ["out", "dq", "dk", "dv"])
def test_check_sees_a_wrong_attention(change) -> None:
    spec, problem = SPECS[0], Problem.draw(SIZE)

    def wrong(q, k, v):
        tensors = {"dq": q, "dk": k, "dv": v}
        if change in tensors:
            # The same value with a gradient that is off by 1 in 1000.
            tensors[change] = tensors[change] * 1.001 - tensors[change].detach() * 0.001
        out = spec.attention()(*tensors.values())
        return out * 1.001 if change == "out" else out

    with pytest.raises(AssertionError, match=f"{change} must be within"):
        check_training(wrong, problem, spec)


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole blocks"])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_rows_of_blocks_are_those_of_the_definition(masked, rows_at_once) -> None:
    """Any number of rows at once, with two heads and pairs hidden within the blocks."""
    problem, block = Problem.draw(Size(40, num_heads=2, head_dim=4)), 8
    columns = torch.tensor([[0, 1], [4, 1], [2, 3], [0, 2], [3, 4]])
    allowed = torch.rand(5, block, 2 * block, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[..., 0] = True
    wanted = torch.zeros(40, 40, dtype=torch.bool)
    for row, listed in enumerate(columns.tolist()):
        for place, column in enumerate(listed):
            tile = allowed[row, :, place * block : (place + 1) * block] if masked else True
            wanted[row * block : (row + 1) * block, column * block : (column + 1) * block] = tile
    found = block_rows(columns, block=block, allowed=allowed if masked else None, rows_at_once=rows_at_once)
    scores = problem.q.double() @ problem.k.double().mT * problem.q.shape[-1] ** -0.5
    dense = (scores.masked_fill(~wanted, -torch.inf).softmax(-1) @ problem.v.double()).float()
    torch.testing.assert_close(found(problem.q, problem.k, problem.v), dense, rtol=1e-4, atol=1e-5)


def test_block_lists_see_a_difference() -> None:
    full, causal = (
        natural_block_mask(dense(256, causal=causal), num_heads=1, num_tokens=256) for causal in (False, True)
    )
    lists = block_lists(causal, 2)
    assert lists["partial, key side"].tolist() == [[[True, False], [False, True]]] * 2
    assert lists["full, key side"].tolist() == [[[False, False], [True, False]]] * 2
    assert lists["full, query side"].tolist() == [[[False, True], [False, False]]] * 2
    assert block_lists(full, 1)["full, key side"].all()


def test_jobs_take_turns_and_rows_become_data() -> None:
    order = []
    jobs = [Job(name, lambda given, name=name: order.append((name, given)), prepare=lambda: 7) for name in "ab"]
    timings = interleave(jobs, repeats=2)
    assert order == [("a", 7), ("b", 7)] * 2
    assert [(timing.name, len(timing.seconds)) for timing in timings] == [("a", 2), ("b", 2)]
    with pytest.raises(ValueError, match="repeats must be at least 1; got repeats=0"):
        interleave(jobs, repeats=0)
    row = Row("speed", at_least(0.5), 0.25, (Timing("job", (3.0, 1.0, 2.0)),), {"why": "test"})
    assert row.to_data() == {
        "measure": "speed",
        "target": "≥ 0.5",
        "measured": 0.25,
        "measured_text": "0.25",
        "met": False,
        "timings": [{"name": "job", "repeats": 3, "median_s": 2.0, "spread_s": 2.0}],
        "detail": {"why": "test"},
    }
    assert Row("bound", at_most(2, "s"), 2.0).met
    assert Row("large", at_least(100, "×"), 12345.6).to_data()["measured_text"] == "12,346 ×"
    gap = Gap("speed", at_least(1), "none")
    measure = Measure("m", lambda spec: [{"num_tokens": 1}, gap], {"spec": LONGNET_4}, {"spec": SPECS[0]})
    answer = measure.answer(small=True)
    assert (answer["points"], answer["rows"]) == ([{"num_tokens": 1}], [gap.to_data()])
    assert answer["config"]["spec"]["segment_lengths"] == SPECS[0].segment_lengths


def allocate(megabytes):
    return lambda: bytearray(megabytes << 20)


def test_peak_memory_is_what_the_work_adds() -> None:
    assert peak_bytes(allocate, 64) == pytest.approx(64 << 20, rel=0.05)


def here(function, *arguments, limit_s=None):
    """Instead of `run_apart`, in this process."""
    return function(*arguments)


@pytest.fixture
def in_this_process(monkeypatch):
    for module in ("_run", "_jobs", "catalogue"):
        monkeypatch.setattr(f"bench.{module}.run_apart", here)


def test_names(monkeypatch, capsys) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == list(MEASURES)
    assert all(line.endswith("?") for line in lines)
    monkeypatch.setattr(sys, "argv", ["bench", "--list"])
    monkeypatch.delitem(sys.modules, "bench.__main__")
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("bench", run_name="__main__")
    assert capsys.readouterr().out.splitlines() == lines
    with pytest.raises(SystemExit, match="2"):
        main(["C99"])
    assert "a name must be one of forward_vs_dense, " in capsys.readouterr().err
    codes = [each.code for each in MEASURES.values() if each.code]
    assert sorted(codes) == sorted(
        [f"C{n}" for n in (*range(1, 16), *range(17, 21), 27, 28)] + [f"D{n}" for n in range(1, 7)]
    )
    names = {"C4": "vs_branch_loop", "c14": "few_queries", "D2": "planning_collectives", "MASK_BUILD": "mask_build"}
    asked = []
    monkeypatch.setattr(__main__, "ask", lambda name, **_: asked.append(name))
    assert main(["--small", *names]) == 1
    assert asked == list(names.values())


COMPILES = {"changing_lengths": 4, "first_step": 5}
ELSEWHERE = {"roofline", "accuracy", "catalogue", "rank_accuracy", "ring_memory"}  # other tests run them at these sizes


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", [name for name in MEASURES if name not in ELSEWHERE | COMPILES.keys()])
def test_measure_runs_at_tiny_sizes(name, tmp_path, capsys) -> None:
    """File, plot, table in the terminal, page of results; numbers in every row."""
    assert main(["--small", "--out", str(tmp_path), name]) == 0
    table = capsys.readouterr().out
    files = [f"{name}.json", *(["sweep.png"] if name == "sweep" else [])]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    document = json.loads((tmp_path / f"{name}.json").read_text())
    check_document(document)
    assert all(row["measure"] in table for row in document["rows"])
    if name == "sweep":
        assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    page = results_page(tmp_path)
    assert ("| tokens" if name == "sweep" else document["rows"][0]["target"]) in page
    assert page.rstrip().endswith("tiny sizes.")


@pytest.mark.slow
def test_measures_in_processes_of_their_own(tmp_path, monkeypatch, capsys) -> None:
    """From one command: a file for each, and their rows in one table; one that fails does not stop the others."""
    names, apart = ["cold_plans", "plan_lookup", "work_balance"], _run.run_apart

    def fail_or(function, name, small):
        return apart(os._exit, 3) if name == "plan_lookup" else apart(function, name, small)

    monkeypatch.setattr(_run, "run_apart", fail_or)
    assert main(["--small", "--out", str(tmp_path), *names]) == 1
    table, err = capsys.readouterr()
    assert "plan_lookup failed: the process ended with exit code 3" in err
    assert err.endswith("failed: plan_lookup\n")
    assert "plan_lookup" not in table
    documents = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("cold_plans", "work_balance")]
    assert len([*tmp_path.iterdir()]) == len(documents)
    assert all(row["measure"] in table for document in documents for row in document["rows"])


def check_document(document) -> None:
    about = {"name", "question", "small", "config", "machine", "versions", "commit", "date"}
    assert set(document) == about | {"rows", "points"}
    assert set(document["machine"]) == {"cpu", "cores", "threads", "memory_gib", "system"}
    assert set(document["versions"]) == {"python", "torch", "flexdilated"}
    assert document["small"] is True
    assert document["rows"] or document["points"]
    for row in document["rows"]:
        assert set(row) == {"measure", "target", "measured", "measured_text", "met", "timings", "detail"}
        assert isinstance(row["met"], bool)
        assert all(set(timing) == {"name", "repeats", "median_s", "spread_s"} for timing in row["timings"])
    for point in document["points"]:
        assert set(point) == {"attention", "num_tokens", "forward", "backward", "peak_bytes"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILES)
def test_measure_that_compiles_runs(name) -> None:
    """A compiled step is held against eager, in processes that the measure starts itself."""
    rows = _run.answer_to(name, True)["rows"]
    assert len(rows) == COMPILES[name]
    if name == "changing_lengths":
        compilations, left_to_eager, *_ = rows
        assert 1 <= compilations["measured"] <= 2
        assert left_to_eager["measured"] == 0


def test_accuracy_measures_the_error(monkeypatch) -> None:
    """An attention that rounds its output shows up as many times dense attention's error."""
    small = MEASURES["accuracy"].small
    config = {**small, "specs": small["specs"][:1]}
    good = next(iter(attention.accuracy(**config)))
    attend = fd.attend
    monkeypatch.setattr(fd, "attend", lambda *args, **kw: tuple(x.bfloat16().float() for x in attend(*args, **kw)))
    bad = next(iter(attention.accuracy(**config)))
    assert good.met
    assert bad.measured > 1000


KIND = {
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "kernel",
    **dict.fromkeys(("aten::index_select", "aten::index_copy_", "aten::copy_"), "moves"),
    **dict.fromkeys(("aten::index_add_", "aten::add_"), "sums"),
    "aten::lerp_": "merges",
    **dict.fromkeys(("aten::masked_fill_", "aten::where"), "masks"),
    "aten::fill_": "fills",
    **dict.fromkeys(("flexdilated::aten", "aten::as_strided")),
}


def test_shares_of_the_roofline_are_of_the_work_that_is_done() -> None:
    """A run that only gathers is nearly all moves, and what was prepared does not count."""
    assert {operator: roofline._kind(operator) for operator in KIND} == KIND
    x, index = torch.randn(1 << 11, 2048), torch.randperm(1 << 11)
    shares = roofline.parts_of(lambda: (x @ x.T, x)[1], lambda given: given.index_select(0, index))
    assert set(shares) == set(roofline.KINDS)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["moves"] > 0.5
    assert shares["kernel"] == 0.0


def test_patterns_and_shapes_of_the_roofline(monkeypatch) -> None:
    """Shares sum to 1, shapes count all their problems, and a pattern that is a key too wide is not timed."""
    small = MEASURES["roofline"].small
    patterns = roofline.roofline(**small)[0].detail["patterns"]
    assert list(patterns) == ["forward", "backward"]
    for figures in patterns.values():
        assert list(figures) == ["dense", *(case.name for case in small["cases"])]
        for figure in figures.values():
            assert sum(figure["shares"].values()) == pytest.approx(1.0)
            kernel = sum(figure["shares"][kind] for kind in ("useful", "beyond", "below"))
            assert kernel == pytest.approx(figure["in_kernel"])
    assert patterns["forward"]["dense"]["waste"] == 1.0
    shape = roofline.Shape(8, 16, pairs=1000)
    assert (shape.count, shape.flops(4)) == (7, 4 * 64 * 7 * 8 * 16)
    found = [job.run(None) for job in roofline.kernel_jobs(shape)]
    assert found[0][0].shape == (7, 1, 8, 64)
    assert [x.shape[2] for x in found[1]] == [8, 16, 16]
    names = [case.name for case in roofline.CASES]
    assert len(set(names)) == len(names)
    for case in roofline.CASES:
        assert case.pattern(2048).bind(num_heads=2, num_queries=2048, num_keys=2048)
    attend, wide = fd.attend, masks.local_window(left=1024, right=0)
    monkeypatch.setattr(fd, "attend", lambda q, k, v, pattern: attend(q, k, v, wide))
    with pytest.raises(AssertionError, match="out must be within"):
        roofline.roofline(**{**small, "cases": (roofline.Case("narrow", "masks.local_window(left=9, right=0)"),)})
