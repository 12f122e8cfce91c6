"""The benchmark: peers and oracle agree with the library's reference; every question runs at tiny sizes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flexdilated as fd
from bench import _run, _table
from bench.__main__ import main
from bench._apart import DiedApart, run_apart
from bench._longnets import GIGAPATH_5, LONGNET_4, LONGNET_5, PAPER_5, LongNet, Union, dense
from bench._memory import peak_bytes
from bench._oracle import by_definition, check_forward, check_training
from bench._problem import Problem, Size
from bench._questions import QUESTIONS
from bench._result import Result, Row, Timing, at_least, at_most
from bench._timing import Job, interleave
from bench.bench_mask_build import block_lists
from bench.peer_branch_loop import branch_loop
from bench.peer_dense import dense_attention
from bench.peer_flex import natural_block_mask

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize("num_tokens", [1, 70, 128])
@pytest.mark.parametrize("spec", [*SPECS, replace(ODD, causal=False), ODD, dense(64, causal=True)])
def test_closed_form_counts_the_pairs_of_the_definition(spec, num_tokens) -> None:
    allowed = spec.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=5)
    assert spec.pairs(num_tokens=num_tokens, num_heads=5) == sum(int(mask.sum()) for mask in allowed)


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


def test_branch_loop_refuses_what_it_cannot_cut() -> None:
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


def test_block_lists_see_a_difference() -> None:
    full, causal = (
        natural_block_mask(dense(256, causal=causal), num_heads=1, num_tokens=256) for causal in (False, True)
    )
    lists = block_lists(causal, 2)
    assert lists["partial, key side"].tolist() == [[[True, False], [False, True]]] * 2
    assert lists["full, key side"].tolist() == [[[False, False], [True, False]]] * 2
    assert lists["full, query side"].tolist() == [[[False, True], [False, False]]] * 2
    assert block_lists(full, 1)["full, key side"].all()


def test_configurations_are_those_of_the_targets() -> None:
    assert LONGNET_4.branches == ((2048, 1), (4096, 2), (8192, 4), (16384, 8))
    assert LONGNET_5.branches == (*LONGNET_4.branches, (32768, 16))
    assert (PAPER_5.segment_lengths, PAPER_5.dilation_rates) == (LONGNET_5.segment_lengths, (1, 2, 4, 6, 12))
    assert GIGAPATH_5.branches == ((1024, 1), (5792, 2), (32768, 4), (185363, 8), (1048576, 16))


def test_jobs_take_turns() -> None:
    order = []
    jobs = [Job(name, lambda given, name=name: order.append((name, given)), prepare=lambda: 7) for name in "ab"]
    timings = interleave(jobs, repeats=2)
    assert order == [("a", 7), ("b", 7)] * 2
    assert [(timing.name, len(timing.seconds)) for timing in timings] == [("a", 2), ("b", 2)]
    with pytest.raises(ValueError, match="repeats must be at least 1; got repeats=0"):
        interleave(jobs, repeats=0)


def test_row_as_data() -> None:
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


def allocate(megabytes):
    return lambda: bytearray(megabytes << 20)


def test_peak_memory_is_what_the_work_adds() -> None:
    assert peak_bytes(allocate, 64) == pytest.approx(64 << 20, rel=0.05)


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(DiedApart, match="exit code 3"):
        run_apart(os._exit, 3)


def test_a_question_that_fails_does_not_stop_the_others(monkeypatch, capsys) -> None:
    ask = _run.answer_to
    monkeypatch.setattr(_run, "run_apart", lambda function, name, small: leave_or(ask, name, small))
    assert main(["--small", "C6", "C12"]) == 1
    out, err = capsys.readouterr()
    assert "C12" in out
    assert "C6" not in out
    assert "C6 failed: exit code 3" in err
    assert err.endswith("failed: C6\n")


def leave_or(ask, name, small):
    if name == "C6":
        raise DiedApart("exit code 3")
    return ask(name, small)


def test_names(capsys) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == list(QUESTIONS)
    assert all(line.endswith("?") for line in lines)
    with pytest.raises(SystemExit, match="2"):
        main(["C99"])
    assert "a name must be one of C1, C2," in capsys.readouterr().err


QUICK = [name for name in QUESTIONS if name not in ("C2", "C11", "first_step")]
# They start processes themselves: one that was started for them would have to start a server of such processes anew.
HERE = ["C7", "C13", "D1", "D2", "D3", "D5", "D6", "catalogue", "checkpointing", "claims", "fits", "fuzz"]
HERE += ["pool", "received", "sweep"]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_question_that_does_not_compile_runs(name, tmp_path, monkeypatch, capsys) -> None:
    """Process, file, plot, table in the terminal, table in Markdown."""
    if name in HERE:
        monkeypatch.setattr(_run, "run_apart", lambda function, *arguments: function(*arguments))
    assert main(["--small", "--out", str(tmp_path), name]) == 0
    table = capsys.readouterr().out
    files = [f"{name}.json", *(["sweep.png"] if name == "sweep" else [])]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    document = json.loads((tmp_path / f"{name}.json").read_text())
    check_document(document)
    assert all(row["measure"] in table for row in document["rows"])
    if name == "sweep":
        assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")

    assert main(["table", "--out", str(tmp_path)]) == 0
    markdown = capsys.readouterr().out
    assert ("| tokens" if name == "sweep" else f"`{tmp_path}/{name}.json`") in markdown
    assert markdown.rstrip().endswith("tiny sizes.")


@pytest.mark.slow
def test_several_questions_in_processes_of_their_own(tmp_path, capsys) -> None:
    """From one command: a file for each, and their rows in one table."""
    names = ["C6", "D4", "cache"]
    assert main(["--small", "--out", str(tmp_path), *names]) == 0
    table = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json" for name in names]
    documents = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    assert [document["name"] for document in documents] == names
    assert all(row["measure"] in table for document in documents for row in document["rows"])
    assert main(["table", "--out", str(tmp_path)]) == 0
    markdown = capsys.readouterr().out
    assert all(f"`{tmp_path}/{name}.json`" in markdown for name in names)


def check_document(document) -> None:
    wanted = {
        "name",
        "question",
        "small",
        "config",
        "rows",
        "points",
        "machine",
        "versions",
        "commit",
        "date",
    }
    assert set(document) == wanted
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
@pytest.mark.parametrize(("name", "num_rows"), [("C2", 2), ("C11", 3), ("first_step", 5)])
def test_question_that_compiles_runs(name, num_rows) -> None:
    """C2 holds the FlexAttention peer against the definition, the others a compiled step against eager."""
    # The others compile in processes that they start themselves.
    answer = run_apart(_run.answer_to, name, True) if name == "C2" else _run.answer_to(name, True)
    assert len(answer["rows"]) == num_rows
    if name == "C11":
        compilations, left_to_eager, _ = answer["rows"]
        assert 1 <= compilations["measured"] <= 2
        assert left_to_eager["measured"] == 0


def test_accuracy_question_measures_the_error(monkeypatch) -> None:
    """An attention that rounds its output shows up as many times dense attention's error."""
    question = QUESTIONS["C8"]
    config = replace(question.SMALL, specs=question.SMALL.specs[:1])
    good, *_ = question.run(config).rows
    attend = fd.attend
    monkeypatch.setattr(fd, "attend", lambda *args, **kw: tuple(x.bfloat16().float() for x in attend(*args, **kw)))
    bad, *_ = question.run(config).rows
    assert good.met
    assert bad.measured > 1000


def test_markdown_needs_results(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="`python -m bench` writes them"):
        _table.markdown_table(tmp_path)


def test_python_m_bench_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("C1\t")


def test_result_holds_points_beside_rows() -> None:
    assert Result(points=({"num_tokens": 1},)).to_data() == {"rows": [], "points": [{"num_tokens": 1}]}
