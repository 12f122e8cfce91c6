"""Ranks that disagree find out before anything is exchanged, all of them, and are told in what."""

from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flexdilated import masks
from flexdilated.distributed import traffic
from flexdilated.distributed.group._agreement import check_agreement, check_device, disagreement, named
from flexdilated.distributed.group._messages import communicating
from flexdilated.distributed.group._ranks import Ranks
from tests.support.rank_worker import set_group_timeout
from tests.support.ranks import on_ranks, outcomes_on_ranks


def all_ranks(device_type: str = "cpu") -> Ranks:
    return Ranks.of(init_device_mesh(device_type, (dist.get_world_size(),)))


def transfers_of_three_checks() -> list[int]:
    ranks, counts = all_ranks(), []
    for num_tokens in (8, 8, 9):
        before = traffic().transfers["set-up"]
        check_agreement(ranks, {"pattern": masks.causal(), "num_tokens": num_tokens})
        counts.append(traffic().transfers["set-up"] - before)
    return counts


def agrees_often() -> list[str]:
    """The ranks come in all orders."""
    return [error for number in range(200) if (error := error_of(all_ranks(), {"number": number}))]


def error_of(ranks: Ranks, facts: dict) -> str:
    try:
        check_agreement(ranks, facts)
    except ValueError as error:
        return str(error)
    return ""


def errors(facts_by_rank: list[dict]) -> str:
    return error_of(all_ranks(), facts_by_rank[dist.get_rank()])


def disagree_and_go_on() -> list[str]:
    ranks = all_ranks()
    rounds = [{"num_tokens": 8 + dist.get_rank()}, {"num_tokens": 7}, {"num_tokens": 8 + dist.get_rank()}]
    return [error_of(ranks, facts) for facts in rounds]


def functions_of_this_process() -> str:
    return error_of(all_ranks(), {"function": lambda q, k: q >= k})


def rows_of_a_mesh() -> list[str]:
    """Ranks 0 and 1 share one sequence, 2 and 3 another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ranks = Ranks.of(mesh["sequence"])
    row = dist.get_rank() // 2
    return [error_of(ranks, {"num_tokens": 8 + row}), error_of(ranks, {"num_tokens": dist.get_rank()})]


def changes_on_rank_0() -> None:
    """Step 2 is a new call on rank 0 and the old one elsewhere, as if only rank 0 had changed its pattern."""
    ranks = all_ranks()
    check_agreement(ranks, {"pattern": "causal"})
    set_group_timeout(4)
    check_agreement(ranks, {"pattern": "chunked" if dist.get_rank() == 0 else "causal"})
    with communicating("the exchange of keys", ranks):
        dist.all_to_all_single(torch.empty(dist.get_world_size()), torch.ones(dist.get_world_size()))


def one_does_not_come() -> None:
    set_group_timeout(3)
    if dist.get_rank() != 1:
        check_agreement(all_ranks(), {"pattern": "causal"})


def cpu_tensor_in_a_group_without_cpu() -> str:
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        check_device(all_ranks(), torch.ones(2))
    except ValueError as error:
        return str(error)
    return ""


def tensors_of_two_devices() -> list[str]:
    """One that the group does not serve, and one that it serves (as it serves both) while the mesh is of the other."""
    ranks, found = all_ranks(), []
    check_device(ranks, torch.ones(2))
    for of, device in ((ranks, "meta"), (replace(ranks, device_type="cuda"), "cpu")):
        try:
            check_device(of, torch.ones(2, device=device))
        except ValueError as error:
            found.append(str(error))
    return found


def test_the_check_is_made_once_for_the_same_facts() -> None:
    assert on_ranks(3, transfers_of_three_checks) == [[1, 0, 1]] * 3
    assert on_ranks(3, transfers_of_three_checks) == [[1, 0, 1]] * 3, "a new group has agreed on nothing yet"
    assert on_ranks(1, transfers_of_three_checks) == [[0, 0, 0]]


def test_ranks_that_agree_agree_in_whatever_order_they_come() -> None:
    assert on_ranks(4, agrees_often) == [[]] * 4


def test_all_ranks_are_told_who_has_what() -> None:
    causal, chunked = {"pattern": masks.causal(), "dtype": torch.float32}, {"pattern": masks.chunked(4)}
    found = on_ranks(4, errors, [causal, {**chunked, "dtype": torch.float32}, causal, causal])
    assert len(set(found)) == 1
    assert "disagree in pattern: ranks 0, 2, 3 have " in found[0]
    assert f"{masks.causal()!r}; rank 1 has {masks.chunked(4)!r}" in found[0]
    assert "dtype" not in found[0]
    assert on_ranks(2, errors, [causal, {"pattern": masks.causal()}]) == [
        "all ranks must make the same call; they disagree in dtype: rank 0 has torch.float32; rank 1 has nothing"
    ] * 2  # fmt: skip


def test_after_a_disagreement_the_ranks_may_agree_and_disagree_again() -> None:
    wrong = "all ranks must make the same call; they disagree in num_tokens: rank 0 has 8; rank 1 has 9"
    assert on_ranks(2, disagree_and_go_on)[1] == [wrong, "", wrong]


def test_the_same_function_in_two_processes_is_no_difference() -> None:
    assert on_ranks(2, functions_of_this_process) == ["", ""]


def test_only_ranks_that_share_a_sequence_must_agree() -> None:
    first, second = on_ranks(4, rows_of_a_mesh)[1::2]
    assert first == ["", "all ranks must make the same call; they disagree in num_tokens: rank 0 has 0; rank 1 has 1"]
    assert second == ["", "all ranks must make the same call; they disagree in num_tokens: rank 0 has 2; rank 1 has 3"]


@pytest.mark.slow
def test_a_rank_alone_with_a_new_call_ends_all_with_an_error() -> None:
    ended = outcomes_on_ranks(3, changes_on_rank_0)
    assert "rank 0 of 3: the check that all ranks make the same call failed: ranks 1, 2 did not" in ended[0].error
    assert "not make this rank's new call: pattern='chunked'" in ended[0].error
    for rank in (1, 2):
        assert f"DistError: rank {rank} of 3: the exchange of keys failed after" in ended[rank].error
        assert "the timeout of the process group is 4 s" in ended[rank].error
        assert "begun a call with other arguments (rank 0: pattern='chunked')" in ended[rank].error


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    for outcome in outcomes_on_ranks(3, one_does_not_come)[::2]:
        assert "make the same call failed: rank 1 did not answer within the timeout of the process group, 3 s" in (
            outcome.error
        )


def test_a_tensor_must_be_where_the_group_can_send_from() -> None:
    (error,) = on_ranks(1, cpu_tensor_in_a_group_without_cpu)
    assert error.endswith("got a tensor on cpu, a mesh of cpu devices and a process group of cuda:gloo")
    of_no_backend, of_another_mesh = on_ranks(1, tensors_of_two_devices)[0]
    assert "got a tensor on meta, a mesh of cpu devices" in of_no_backend
    assert "got a tensor on cpu, a mesh of cuda devices and a process group of cpu:gloo,cuda:gloo" in of_another_mesh


def test_many_ranks_are_named_in_few_words() -> None:
    assert [named([3]), named([0, 1]), named([0, 1, 2, 5]), named([])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0 to 2, 5",
        "",
    ]
    assert named(range(0, 4096, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 2040 more runs"
    text = disagreement([{"num_tokens": str(rank)} for rank in range(4096)])
    assert text.endswith("rank 7 has 7; 4088 more values")
