"""Host reads of run-time tensors: one for each state of the tensors, whatever the number of layers."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import _flex_op, _run_time_rules, masks
from flexdilated._call_key import CallKey
from flexdilated._run_time_rules import rules_of
from flexdilated.masks._documents import Documents

PATTERN = masks.causal() & masks.documents("ids")
KEY = CallKey(PATTERN.text, 2, 2, 40, 40, 0, 0, 0, 2, 1, (16, 16))


@pytest.fixture
def reads(monkeypatch) -> list[Tensor]:
    """The tensors read, one after the other; CPU tensors pass for an accelerator's."""
    seen: list[Tensor] = []
    table = Documents.table

    def counted(self, tensor, extent):
        seen.append(tensor)
        return table(self, tensor, extent)

    monkeypatch.setattr(Documents, "table", counted)
    monkeypatch.setattr(_run_time_rules, "_is_here", lambda x: False)
    _run_time_rules._reads.clear()
    return seen


def ids_of(last: int) -> Tensor:
    return torch.arange(40) * (last + 1) // 40


def test_one_read_for_all_layers(reads):
    ids = ids_of(3)
    first = rules_of(KEY, [ids])
    assert all(rules_of(KEY, [ids]) is first for _ in range(5))
    assert len(reads) == 1
    assert first == KEY.rules([ids])


def test_what_changes_is_read_again(reads):
    """In place, through a view, and back: every state by its version, not by its values."""
    ids = ids_of(3)
    rules = [rules_of(KEY, [ids])]
    for change in (lambda: ids.copy_(ids_of(5)), lambda: ids[:7].fill_(-1), lambda: ids.copy_(ids_of(3))):
        change()
        rules.append(rules_of(KEY, [ids]))
        assert rules[-1] == KEY.rules([ids.clone()])
    assert rules[0] == rules[-1]
    assert rules[0] is not rules[-1]
    assert len({rule.text for rule in rules}) == 3


def test_other_tensors_and_sizes_are_others(reads):
    ids, shorter = ids_of(3), KEY._replace(num_queries=20, num_keys=20)
    assert rules_of(KEY, [ids]) is not rules_of(KEY, [ids.clone()])
    with pytest.raises(ValueError, match="one for each of the 20 positions"):
        rules_of(shorter, [ids])
    other = KEY._replace(pattern=(PATTERN & masks.local_window(left=3, right=0)).text)
    assert rules_of(other, [ids]) == other.rules([ids])


def test_what_is_remembered_goes_with_its_tensors(reads, monkeypatch):
    """A dead tensor's rule is dropped, before another tensor takes its place in memory; and there is a limit."""
    ids = ids_of(3)
    rules_of(KEY, [ids])
    assert len(_run_time_rules._reads) == 1
    del ids
    reads.clear()
    gc.collect()
    assert len(_run_time_rules._reads) == 0
    for last in (1, 2, 3, 4):
        assert rules_of(KEY, [ids_of(last)]) == KEY.rules([ids_of(last)])
    monkeypatch.setattr(_run_time_rules, "_MOST", 2)
    held = [ids_of(last) for last in range(5)]
    for ids in held:
        rules_of(KEY, [ids])
    assert len(_run_time_rules._reads) == 2


def test_an_address_is_not_a_tensor(reads):
    """A tensor at whose address another was remembered is read for itself."""
    before, after = ids_of(3), ids_of(5)
    rules_of(KEY, [before])
    (entry,) = _run_time_rules._reads.values()
    _run_time_rules._reads[(KEY.pattern, KEY.extent, id(after))] = entry
    assert rules_of(KEY, [after]) == KEY.rules([after]) != entry.rule


def test_what_counts_no_versions_is_read_every_time(reads):
    with torch.inference_mode():
        ids = ids_of(3)
        first = rules_of(KEY, [ids])
        ids.copy_(ids_of(5))
        assert rules_of(KEY, [ids]) != first


def test_tensors_of_the_cpu_are_read_every_time(monkeypatch):
    """NumPy changes them, and torch counts no version."""
    ids = ids_of(3)
    first = rules_of(KEY, [ids])
    ids.numpy()[:] = ids_of(5).numpy()
    assert rules_of(KEY, [ids]) == KEY.rules([ids_of(5)]) != first


def layers(q: Tensor, ids: Tensor, engine: str, times: int = 3) -> Tensor:
    for _ in range(times):
        q = fd.attend(q, q, q, PATTERN, bindings={"ids": ids}, engine=engine)
    return q


def test_a_model_reads_once_in_eager_mode(reads):
    """Backward included: the ops hand the very tensors on."""
    ids, q = ids_of(3), torch.randn(1, 2, 40, 16, requires_grad=True)
    layers(q, ids, "tiles").sum().backward()
    assert len(reads) == 1


@pytest.mark.slow
def test_a_compiled_model_reads_once(reads):
    """Inside a graph as well, and again after a change; the results follow."""
    torch.compiler.reset()
    compiled = torch.compile(lambda q, ids: layers(q, ids, "flex"), fullgraph=True, dynamic=False)
    ids, q = ids_of(3), torch.randn(1, 2, 40, 16)
    with torch.no_grad():
        compiled(q, ids)
        reads.clear()
        for last in (2, 6):
            ids.copy_(ids_of(last))
            exact = layers(q, ids.clone(), "reference")
            reads.clear()
            for _ in range(2):
                assert_close(compiled(q, ids), exact, rtol=1e-4, atol=1e-5)
            assert sum(read is ids for read in reads) == 1


@pytest.mark.slow
def test_traced_programs_are_bounded(monkeypatch):
    """The oldest goes first; a graph that still runs is then traced anew, and right."""
    monkeypatch.setattr(_flex_op, "_MOST_TRACED", 2)
    _flex_op._traced.clear()
    torch.compiler.reset()
    pattern = masks.dilated(16, 2)
    compiled = torch.compile(lambda q: fd.attend(q, q, q, pattern, engine="flex"), fullgraph=True, dynamic=False)
    with torch.no_grad():
        for N in (40, 50, 60, 40, 50):
            q = torch.randn(1, 2, N, 16)
            assert_close(compiled(q), fd.attend(q, q, q, pattern), rtol=1e-4, atol=1e-5)
            assert len(_flex_op._traced) <= 2
