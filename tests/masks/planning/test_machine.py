"""Machine constants: what is refused, where they are found, and that plans follow those in use."""

import json
import logging
import sys
from dataclasses import replace

import pytest
import torch

from flexdilated import masks
from flexdilated.masks.planning._planner import plan, recommended_layout
from flexdilated.masks.planning.machine import _machine_file, _machine_in_use
from flexdilated.masks.planning.machine._machine import ACCELERATOR, CPU
from flexdilated.masks.planning.machine._machine_file import (
    FORMAT,
    MachineKey,
    Measured,
    read_machine,
    stored_path,
    write_json,
)
from flexdilated.masks.planning.machine._machine_in_use import VARIABLE, forget_machines, machine_from_environment

OTHER = replace(CPU, dense_flops_per_s=1e6, launch_s=2.0)
# Where copies cost nothing a dilated branch is gathered and dense; where dense attention is slow, blocks are listed.
CHEAP_COPIES, SLOW_DENSE = replace(CPU, bytes_per_s=1e15), replace(CPU, dense_flops_per_s=1e8)


@pytest.fixture(autouse=True)
def as_before():
    yield
    masks.set_machine(None)
    forget_machines()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache directory, and nothing in the environment that names constants."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path / "cache")
    forget_machines()
    return tmp_path


def measured(machine=OTHER, **change) -> dict:
    key = replace(MachineKey.of("cpu"), **change)
    return Measured(key, machine, "2026-11-21T00:00:00+00:00", {"torch": "2.13.0"}, {"dense": 1.1}).to_data()


def bound(N=4096):
    return masks.dilated(1024, 4).bind(num_heads=2, num_queries=N, num_keys=N)


def test_constants_must_be_positive_finite_numbers():
    for name in ("dense_flops_per_s", "causal_flops_per_s", "bytes_per_s", "launch_s", "backward_ratio"):
        for value in (0, -1.0, float("nan"), float("inf"), "1", True, None):
            with pytest.raises(ValueError, match=f"{name} must be a positive finite number"):
                replace(CPU, **{name: value})
    for blocks in ((), CPU.blocks[::-1], CPU.blocks[:1] * 2, ("x",)):
        with pytest.raises(ValueError, match="blocks must hold BlockRates of growing sides"):
            replace(CPU, blocks=blocks)
    for side in (0, True, 1.5):
        with pytest.raises(ValueError, match="side must be a whole number"):
            masks.BlockRates(side, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="masked_flops_per_s must be"):
        masks.BlockRates(64, 1.0, 1.0, 0.0)


def test_rates_of_a_side_that_was_not_measured_are_those_of_the_nearest():
    assert [CPU.rates(side).side for side in (1, 64, 95, 97, 128, 256, 4096)] == [64, 64, 64, 128, 128, 256, 256]
    assert ACCELERATOR.rates(64).side == 128


def test_a_plan_belongs_to_the_constants_in_use():
    usual = plan(bound())
    masks.set_machine(OTHER)
    assert masks.machine() == OTHER
    other = plan(bound())
    assert other is not usual
    assert other.cost.seconds > 2.0
    assert masks.machine("meta") == ACCELERATOR
    masks.set_machine(None)
    assert plan(bound()) is usual
    masks.set_machine(replace(CPU, source="elsewhere"))
    assert plan(bound()) is usual, "where constants come from makes no difference"


def test_other_constants_lead_to_other_choices():
    layouts = {}
    for machine in (CHEAP_COPIES, SLOW_DENSE):
        masks.set_machine(machine)
        layouts[machine.dense_flops_per_s] = plan(bound()).options[0][0].layout
        recommended = recommended_layout(masks.dilated(1024, 4), 4096, num_heads=2)
        assert (recommended is None) == (machine is CHEAP_COPIES)
    assert layouts == {85e9: "compact", 1e8: "residue 4"}


def test_attend_follows_a_change_of_constants():
    import flexdilated as fd

    q = torch.randn(1, 2, 512, 16)
    results, stats = [], []
    for machine in (CHEAP_COPIES, SLOW_DENSE, CHEAP_COPIES):
        masks.set_machine(machine)
        results.append(fd.attend(q, q, q, masks.dilated(256, 4)))
        stats.append(masks.cache().stats().misses)
    torch.testing.assert_close(results[0], results[1])
    assert stats[1] > stats[0], "planned anew"
    assert stats[2] == stats[1], "and found again"


def test_stored_constants_are_found_and_read_once(home, monkeypatch):
    assert masks.machine() == CPU
    path = stored_path(MachineKey.of("cpu"))
    write_json(path, measured())
    assert masks.machine() == CPU, "no file is looked for twice"
    forget_machines()
    assert (masks.machine(), masks.machine().source) == (OTHER, str(path))
    monkeypatch.setattr(_machine_in_use, "read_machine", lambda path: pytest.fail("read twice"))
    assert masks.machine() == OTHER
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_threads_are_part_of_what_was_measured(home):
    before = torch.get_num_threads()
    write_json(stored_path(MachineKey.of("cpu")), measured())
    assert masks.machine() == OTHER
    try:
        torch.set_num_threads(before + 1)
        assert masks.machine() == CPU
    finally:
        torch.set_num_threads(before)
    assert masks.machine() == OTHER


BAD = {
    "empty": "",
    "cut": json.dumps(measured())[:-40],
    "a list": "[]",
    "binary": b"\xff\xfe\x00",
    "another format": json.dumps(measured() | {"format": "bench"}),
    "another version": json.dumps(measured() | {"version": 2}),
    "a field more": json.dumps(measured() | {"more": 1}),
    "no date": json.dumps({name: value for name, value in measured().items() if name != "date"}),
    "a constant less": json.dumps(measured() | {"constants": {"launch_s": 1.0}}),
    "a negative constant": json.dumps(measured() | {"constants": measured()["constants"] | {"launch_s": -1.0}}),
    "not a number": json.dumps(measured() | {"constants": measured()["constants"] | {"launch_s": float("nan")}}),
    "no blocks": json.dumps(measured() | {"constants": measured()["constants"] | {"blocks": []}}),
    "odd blocks": json.dumps(measured() | {"constants": measured()["constants"] | {"blocks": [{"side": 64}]}}),
    "no key": json.dumps(measured() | {"measured_on": {"kind": "cpu"}}),
    "threads in words": json.dumps(measured() | {"measured_on": measured()["measured_on"] | {"threads": "two"}}),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_damaged_files_are_refused_where_named_and_reported_where_stored(content, home, monkeypatch, caplog):
    path = stored_path(MachineKey.of("cpu"))
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING, logger="flexdilated"):
        assert masks.machine() == CPU
        masks.machine()
    assert [record.getMessage().startswith("stored constants are not used") for record in caplog.records] == [True]
    monkeypatch.setenv(VARIABLE, str(path))
    forget_machines()
    for ask in (masks.machine, machine_from_environment, lambda: plan(bound(4000))):
        with pytest.raises(ValueError, match=rf"(?s)\A{VARIABLE} must be 'builtin' or name a file that `tune` wrote; "):
            ask()
    with pytest.raises(ValueError, match="holds no"):
        masks.set_machine(path)


@pytest.mark.parametrize("change", [{"name": "another"}, {"torch": "1.0"}, {"threads": 99}, {"kind": "cuda"}])
def test_foreign_constants_are_not_used_where_stored(change, home, caplog):
    write_json(stored_path(MachineKey.of("cpu")), measured(**change))
    assert masks.machine() == CPU
    assert "this is" in caplog.text


def test_the_environment_names_a_file_or_the_builtin_constants(home, monkeypatch, caplog):
    write_json(stored_path(MachineKey.of("cpu")), measured())
    named = home / "named.json"
    write_json(named, measured(replace(OTHER, launch_s=5.0), name="another"))
    monkeypatch.setenv(VARIABLE, str(named))
    assert masks.machine().launch_s == 5.0
    assert "measured on another" in caplog.text, "used as asked, and said"
    assert masks.machine("cuda") == ACCELERATOR, "it speaks of the CPU only"
    monkeypatch.setenv(VARIABLE, "builtin")
    forget_machines()
    assert masks.machine() == CPU
    monkeypatch.setenv(VARIABLE, str(home / "nowhere.json"))
    forget_machines()
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        masks.machine()


def test_set_machine_takes_a_file_for_its_kind_of_device(tmp_path):
    write_json(tmp_path / "cpu.json", measured())
    masks.set_machine(tmp_path / "cpu.json")
    assert masks.machine() == OTHER
    with pytest.raises(ValueError, match="must hold constants of a device of type 'cuda'"):
        masks.set_machine(str(tmp_path / "cpu.json"), device="cuda")
    with pytest.raises(TypeError, match="set_machine needs a Machine"):
        masks.set_machine(3)
    with pytest.raises(ValueError, match="cpu and cuda; got a device of type 'meta'"):
        MachineKey.of("meta")


def test_without_platformdirs_nothing_is_stored_and_a_named_file_works(home, monkeypatch):
    write_json(home / "named.json", measured())
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert stored_path(MachineKey.of("cpu")) is None
    assert masks.machine() == CPU
    monkeypatch.setenv(VARIABLE, str(home / "named.json"))
    forget_machines()
    assert masks.machine() == OTHER


def test_a_file_is_written_in_one_piece(tmp_path):
    path = tmp_path / "new" / "machine.json"
    write_json(path, measured())
    assert read_machine(path) == (MachineKey.of("cpu"), OTHER)
    assert json.loads(path.read_text())["format"] == FORMAT
    assert _machine_file.VERSION == 1
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert read_machine(path)[1] == OTHER, "the old one stays"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
