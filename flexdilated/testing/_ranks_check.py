"""Are many ranks one? Processes of this machine hold a part of the tokens each; together they are the definition."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ._closeness import hold
from ._module_calls import Calls
from ._module_subject import DoesNotApply, Failure, Subject
from ._rounding import expected
from ._two_processes import RANKS, NoResult, on_two_processes
from ._words import tokens

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MOST_S = 120.0


def check_ranks(subject: Subject) -> str:
    """Two processes with a gloo group, each with its part of the sequence, in order."""
    calls = subject.calls
    if calls.over_ranks is None:
        raise DoesNotApply("no module over ranks is given (Calls.over_ranks)")
    length = subject.lengths[-1]
    if length < RANKS:
        raise DoesNotApply(f"fewer tokens than ranks; got {length}")
    q, k, v = subject.inputs(length)
    # A plain pickle copies tensors, where the one that processes use would share them.
    parts = [
        tuple(x.cpu() for x in part) for part in zip(*(x.tensor_split(RANKS, dim=2) for x in (q, k, v)), strict=True)
    ]
    try:
        sent = pickle.dumps((replace(calls, padded=None, packed=None, decoded=None), parts))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Failure(f"over_ranks and plain must be functions of a module, to be pickled: {error}") from None
    (answers,) = on_two_processes([partial(_own_part, sent)], job_s=_MOST_S)
    if isinstance(answers, NoResult):
        raise Failure(str(answers))
    out = torch.cat([pickle.loads(answer) for answer in answers], 2).to(subject.device)
    problem = subject.problem(q, k, v)
    rows = (problem.times() > 0).any(-1)
    try:
        hold(problem, "out", out, expected(problem, gradients=False, through_lse=False)["out"], rows=rows)
    except AssertionError as error:
        raise Failure(f"{tokens(length)} on {RANKS} ranks: {error}") from None
    return f"{tokens(length)} on {RANKS} ranks: as on one"


def _own_part(sent: bytes, mesh: DeviceMesh) -> bytes:
    """On a rank: its part of the tokens through the module."""
    calls, parts = pickle.loads(sent)
    assert isinstance(calls, Calls)
    assert calls.over_ranks is not None
    q, k, v = (x.contiguous() for x in parts[mesh.get_rank()])
    module = calls.over_ranks(mesh)
    with torch.no_grad():
        result = calls.plain(module, *(calls.into_layout(x) for x in (q, k, v)))
    first = result[0] if isinstance(result, tuple | list) else result
    return pickle.dumps(calls.out_of_layout(first, q.shape[1]).clone())
