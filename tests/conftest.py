"""Set-up of the whole suite: shape checks on the modules that compute, hypothesis profiles, threads."""

import gc
import os
import sys

import pytest
from hypothesis import settings

from pytest_flexdilated import register_profiles

# Named, as a checkout need not be installed; where it is, the plugin has the same name and is there once.
pytest_plugins = ["pytest_flexdilated", "pytester", "tests.support.record_versions"]

# Every call is checked against its annotations, shapes included. Not here: what torch.compile traces (the
# check would break the graph), the custom op (its schema is read from plain annotations), and what callers'
# own values reach (the check would answer before our errors do); nor boxes, whose tensors have one axis each, and whose
# functions are called so often that the wrappers alone take seconds.
CHECKED = [
    *(f"flexdilated.masks.blocks.{name}" for name in ("_blocks", "_block_search", "_rule", "_tables")),
    *(f"flexdilated.masks.planning.{name}" for name in ("_cost", "_planner", "lowering._layouts")),
    "flexdilated.masks.attended._row",
    "flexdilated.decoding._held_keys",
    "flexdilated.selection._scores",
    *(
        f"flexdilated.engines.{name}"
        for name in ("_gather", "_reference", "kernels._kernel", "kernels._portable", "_rows")
    ),
    *(f"flexdilated.engines.aten._{name}" for name in ("tile_blocks", "tile_calls")),
]

# What is imported and collected stays: nothing is to be found there that could be freed.
gc.disable()

register_profiles()
# Few examples of each property, the same at each run; --hypothesis-profile=flexdilated-thorough draws more.
settings.register_profile("suite", settings.get_profile("flexdilated-ci"), max_examples=20)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Import the library so that its calls are checked; not in the process that hands tests to xdist's workers."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    from tests.support.shape_checks import checked_on_import

    assert not sys.modules.keys() & set(CHECKED), "a conftest or a plugin has imported what is to be checked"
    with checked_on_import(CHECKED):
        import flexdilated  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the tests marked as thorough, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked as thorough, unless everything is asked for or a test by its name."""
    if config.getoption("--all") or config.getoption("--record") or any("::" in each for each in config.args):
        return
    others = [item for item in items if item.get_closest_marker("thorough")]
    if others:
        config.hook.pytest_deselected(items=others)
        kept = set(items).difference(others)
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many as cores: more keep them no busier and each collects and warms up anew; few, as each takes a gigabyte."""
    return min(4, os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    gc.freeze()
    # What is frozen is not counted as old, so that full collections would be frequent: a twentieth of the suite's time.
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What earlier modules have imported and compiled stays, and their old cycles: full collections would read it."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_worker():
    """Where several workers share the cores, each computes on one thread."""
    import torch

    before = torch.get_num_threads()
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def without_masks():
    """Few tokens are computed as many are, in blocks and terms, and not in one kernel call under a mask."""
    from flexdilated import masks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks.planning._candidates, "_MOST_MASKED_PAIRS", 0)
        masks.cache().clear()
        yield
    masks.cache().clear()


@pytest.fixture(scope="session")
def browser():
    """A browser of this run's own, for all that is tested in one."""
    from tests.support.browser import Browser, needed_browser

    with Browser(needed_browser()) as opened:
        yield opened


@pytest.fixture
def show(browser, tmp_path):
    """What opens a page of the viewer."""
    from tests.support.viewer_pages import pages

    with pages(browser, tmp_path) as opened:
        yield opened


@pytest.fixture
def plain_terminal(monkeypatch):
    """80 by 24, and no wish for less color, whatever terminal the tests were started from."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.delenv("NO_COLOR", raising=False)
