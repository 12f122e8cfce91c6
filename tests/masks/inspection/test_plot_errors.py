"""Bad input to masks.plot, and what it leaves alone."""

import sys
from io import BytesIO

import pytest

from flexdilated import masks

CAUSAL = masks.causal()
BAD = {
    "no pattern": ({"pattern": "causal()"}, TypeError, "pattern must be a pattern or mixture"),
    "no tokens": ({"num_tokens": 0}, ValueError, "num_queries must be at least 1; got num_queries=0"),
    "head": ({"head": 2, "num_heads": 2}, ValueError, "head must be below the number of heads; got head=2 of 2"),
    "second head": ({"head": (0, -1), "num_heads": 2}, ValueError, "head must be at least 0; got head=-1"),
    "no head": ({"head": ()}, ValueError, r"head must be one value, or several that differ; got head=\(\)"),
    "head as text": ({"head": "0"}, TypeError, "head must be an integer; got head='0' of type str"),
    "heads twice": (
        {"head": (0, 0)},
        ValueError,
        r"head must be one value, or several that differ; got head=\(0, 0\)",
    ),
    "order": ({"order": "random"}, ValueError, "order must be one of 'natural', 'residue'; got order='random'"),
    "queries": (
        {"queries": range(8, 8)},
        ValueError,
        r"queries must be a range of step 1 within 0 to 64, and not empty",
    ),
    "keys": ({"keys": range(0, 65)}, ValueError, r"keys must be a range of step 1 .*; got keys=range\(0, 65\)"),
    "step": ({"keys": range(0, 64, 2)}, ValueError, "keys must be a range of step 1"),
    "slice": ({"keys": slice(0, 4)}, ValueError, "keys must be a range of step 1"),
    "block": ({"block_size": 0}, ValueError, "block_size must be at least 1; got block_size=0"),
    "blocks": ({"block_size": (8, 8, 8)}, ValueError, "block_size must be one side or"),
    "small blocks": (
        {"num_tokens": 1 << 20, "block_size": 128},
        ValueError,
        "to show 1048576 tokens in 512 pixels, block sides must share a divisor of at least 2048; got 128: take",
    ),
    "size": ({"size": 8}, ValueError, "size must be at least 16; got size=8"),
    "batch": ({"batch": 1}, ValueError, "batch must be below the number of batch entries; got batch=1 of 1"),
    "legend": ({"legend": "no"}, TypeError, "legend must be True or False; got legend='no'"),
    "title": ({"title": 3}, TypeError, "title must be text or None; got int"),
    "panels": (
        {"head": range(33), "num_heads": 33},
        ValueError,
        "at most 32 panels, one for each head and order; got 33",
    ),
    "unbound": ({"pattern": masks.documents("ids")}, ValueError, "ids"),
}


@pytest.mark.parametrize(("given", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(given: dict, error: type[Exception], message: str) -> None:
    given = {"pattern": CAUSAL, "num_tokens": 64, **given}
    with pytest.raises(error, match=message):
        masks.plot(given.pop("pattern"), given.pop("num_tokens"), **given)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flexdilated.masks.inspection._plot_figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'masks.plot draws with matplotlib: pip install "flexdilated\[plot\]"'):
        masks.plot(CAUSAL, 8)


def test_neither_pyplot_nor_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing pyplot fails here, and nobody does."""
    matplotlib = pytest.importorskip("matplotlib", reason="draws with matplotlib")
    for module in ("_plot", "_plot_figure"):
        monkeypatch.delitem(sys.modules, f"flexdilated.masks.inspection.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    settings = {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}
    drawn = BytesIO()
    masks.plot(CAUSAL, 8).savefig(drawn, format="svg")
    assert drawn.getvalue().startswith(b"<?xml")
    assert {name: matplotlib.rcParams[name] for name in settings} == settings
