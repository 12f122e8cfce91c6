"""Docstrings of the public names: each has an example, which runs and prints what it shows."""

import doctest
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flexdilated
from flexdilated import biases, distributed, integrations, masks, schedules, selection, testing, viewer
from tests.support.commands import make_memory_up

PACKAGES = (flexdilated, masks, masks.extend, biases, schedules)
PACKAGES += (distributed, integrations.torchscale, selection.recipes, testing, viewer)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Iterator[DeviceMesh]:
    """One rank, as the examples of attention over ranks need."""
    group = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{group}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_has_an_example_that_runs(package, mesh, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_memory_up(monkeypatch)  # no example prints a plan's bytes
    given = {"fd": flexdilated, "masks": masks, "mesh": mesh, "testing": testing, "torch": torch, "viewer": viewer}
    given["__name__"] = __name__  # the module of the functions that examples define
    printed: list[str] = []
    for name in package.__all__:
        made = getattr(package, name)
        if inspect.isclass(made) or inspect.isfunction(made):
            example = doctest.DocTestParser().get_doctest(inspect.getdoc(made) or "", dict(given), name, None, 0)
            assert example.examples, f"the docstring of {name} has no example"
            doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert printed == []
