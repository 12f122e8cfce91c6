"""The benchmark: peers, rules and counts agree with the library's reference; every measure runs at tiny sizes."""

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import flexdilated as fd
from bench import __main__
from bench.__main__ import main
from bench._checks import by_definition, check_forward, check_training
from bench._jobs import Problem, Size
from bench._report import results_page
from bench._rules import LONGNET_4, LONGNET_5, LongNet, Union, dense, longnet_n
from bench._run import MEASURES
from bench.peers import branch_loop, dense_attention
from bench.ranks import Heads, keys_of_queries, least_received, shard_ranges
from flexdilated.distributed import Sharding

SIZE = Size(256, num_heads=4, head_dim=16, repeats=1)
SPECS = [LONGNET_4.shrunk(64), LONGNET_4.shrunk(64).as_causal()]
LONGNET_TINY = LONGNET_5.shrunk(64)
ODD = LongNet("odd", (1, 100, 333, 50), (1, 3, 7, 60), causal=True)  # rates that divide nothing, one above its segment
OVER_RANKS = [longnet_n(4096).shrunk(32), LONGNET_TINY.as_causal(), replace(ODD, causal=False), ODD]


@pytest.mark.parametrize("spec", [*SPECS, replace(ODD, causal=False), ODD], ids=lambda spec: spec.label)
def test_definition_is_the_librarys_reference_and_its_pairs_have_a_closed_form(spec) -> None:
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
    for num_tokens in (1, 70, 128):
        allowed = spec.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=5)
        assert spec.pairs(num_tokens=num_tokens, num_heads=5) == sum(int(mask.sum()) for mask in allowed)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
def test_peers_and_library_pass_the_check(spec) -> None:
    """The loop over branches has the output and not its gradient: it takes the branches' weights as constant."""
    problem = Problem.draw(SIZE)
    check_training(dense_attention(causal=spec.causal), problem, dense(SIZE.num_tokens, causal=spec.causal))
    check_training(spec.attention(), problem, spec)
    check_forward(Union(spec).attention(), problem, Union(spec))
    check_training(branch_loop(spec), problem, spec, constant_weights=True)
    with pytest.raises(AssertionError, match="dq must be within"):
        check_training(branch_loop(spec), problem, spec)


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


def test_measures_go_by_name_or_code(monkeypatch, capsys) -> None:
    assert main(["--list"]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == list(MEASURES)
    with pytest.raises(SystemExit, match="2"):
        main(["C99"])
    assert "a name must be one of forward_vs_dense, " in capsys.readouterr().err
    asked = []
    monkeypatch.setattr(__main__, "ask", lambda name, **_: asked.append(name))
    names = {"C4": "vs_branch_loop", "c14": "few_queries", "D2": "planning_collectives", "MASK_BUILD": "mask_build"}
    assert main(["--small", *names]) == 1
    assert asked == list(names.values())


def run_here(command, **_) -> SimpleNamespace:
    """What `python -c` prints."""
    with redirect_stdout(StringIO()) as said:
        exec(command[-1], {})
    return SimpleNamespace(stdout=said.getvalue())


ELSEWHERE = {"catalogue"}  # of which another test runs a part


# Of these the work, small as it is, takes seconds.
LONG = {"first_step", "changing_lengths", "diffusers", "flex_cases", "planning_collectives", "rank_accuracy"}
LONG |= {"accuracy", "buffer_reuse", "exchange_bytes", "factors_of_unions", "quality", "ring_memory", "roofline"}
LONG |= {"vs_flex_attention"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.thorough if x in LONG else ()) for x in MEASURES if x not in ELSEWHERE],
)
def test_measure_runs_at_tiny_sizes(name, tmp_path, monkeypatch, capsys, request) -> None:
    """File, plot, table in the terminal, page of results; numbers in every row."""
    request.addfinalizer(patch.stopall)  # of measures that run in a process of their own otherwise
    for module in ("_run", "_jobs", "catalogue", "compiling"):
        monkeypatch.setattr(f"bench.{module}.run_apart", lambda function, *given, limit_s=None: function(*given))
    if name in ("first_step", "changing_lengths"):  # no kernels are built: the steps and their comparison are tried
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
        compiled = torch.compile
        monkeypatch.setattr(torch, "compile", lambda model=None, **how: compiled(model, **{**how, "backend": "eager"}))
        monkeypatch.setattr("bench.compiling.subprocess", SimpleNamespace(run=run_here))  # torch is imported here
    assert main(["--small", "--out", str(tmp_path / "out"), name]) == 0
    table = capsys.readouterr().out
    files = [f"{name}.json", *(["sweep.png"] if name == "sweep" else [])]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    document = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert document["small"] is True
    assert document["rows"] or document["points"]
    assert all(row["measure"] in table and isinstance(row["met"], bool) for row in document["rows"])
    page = results_page(tmp_path / "out")
    assert ("| tokens" if name == "sweep" else document["rows"][0]["target"]) in page
    if name == "changing_lengths":
        compilations, left_to_eager, *_ = document["rows"]
        assert 1 <= compilations["measured"] <= 2
        assert left_to_eager["measured"] == 0


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("spec", OVER_RANKS, ids=lambda spec: spec.label)
def test_marks_are_those_of_the_dense_rule(spec, order) -> None:
    num_tokens = 480
    branches = spec.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=4)
    for num_ranks, heads in ((2, Heads(4, 4)), (4, Heads(4, 2)), (8, Heads(4, 1))):
        shards, wanted = shard_ranges(num_tokens, num_ranks, order), []
        for rank, shard in enumerate(shards):
            rows = Sharding(num_tokens, num_ranks, order=order).positions(rank)
            assert rows.tolist() == [token for piece in shard for token in piece]
            seen = torch.stack([branch[:, rows].any(1) for branch in branches]).any(0)
            by_kv_head = seen.view(heads.num_kv_heads, -1, num_tokens).any(1)
            by_kv_head[:, rows] = False
            wanted.append(int(by_kv_head.sum()))
        assert least_received(spec, num_tokens, shards, heads) == wanted
    for num_tokens in (100, 1000) if spec.causal else ():
        masks = spec.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=5)
        assert torch.equal(sum(mask.sum((0, 2)) for mask in masks), keys_of_queries(spec, num_tokens, 5))
