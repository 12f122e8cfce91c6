"""The pages that show figures: for each the parts between its marks, rendered from the files of results."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import _selection_tables, _tables
from ._catalogue import ENTRIES, MILLION, QUADRATIC, WIDE_ROW, Entry
from ._guard_cases import CASES
from ._jobs import tokens_text
from ._report import (
    Document,
    Part,
    answers,
    from_result,
    growth,
    machines,
    markdown,
    missed,
    read,
    short,
    sizes,
    with_condition,
)
from .catalogue import BUILD_MB, BUILD_S, WASTE, file_name

Figures = Mapping[str, Any]


# docs/contributing/benchmarks.md


def _cases(_: Path) -> str:
    lines = [(f"`{name}`", (case.__doc__ or "").strip()) for name, case in CASES.items()]
    return f"\n{markdown(lines, ('case', 'what runs'))}\n"


# docs/catalogue.md


def _catalogue_table(document: Document) -> str:
    figures = document["rows"][0]["detail"]["patterns"]
    headers = ("pattern", "density", "waste", "computed as", "tokens", "`BlockMask`", "plan and lists")
    return with_condition(markdown([_line(entry, figures[entry.name]) for entry in ENTRIES], headers), document)


def _section_of(name: str) -> Part:
    """The pictures of a constructor's entries, each with what it shows and what keeps it from a target."""

    def part(results: Path) -> str:
        figures = read(results, "catalogue")["rows"][0]["detail"]["patterns"]
        return "\n\n".join(_section(entry, figures[entry.name]) for entry in ENTRIES if entry.kind == name)

    return part


def _section(entry: Entry, figures: Figures) -> str:
    heads = f", {entry.num_heads} heads" if entry.num_heads > 1 else ""
    larger = f", at a million tokens `{entry.million}`" if entry.million else ""
    lines = [
        f"![{entry.name}](images/catalogue/{file_name(entry)})",
        "",
        f"Drawn: `{entry.small}`. Measured: `{entry.text}`{heads}{larger}.",
    ]
    if not WASTE.met_by(figures["waste"]):
        lines.append(f"*Waste:* {entry.waste_why}")
    if not _built(figures) and entry.build_why not in ("", QUADRATIC, WIDE_ROW):  # which the page says once
        lines.append(f"*At a million tokens:* {entry.build_why}")
    return "\n".join(lines)


def _line(entry: Entry, figures: Figures) -> tuple[str, ...]:
    return (
        f"[{entry.name}](#{entry.kind})",
        _density(figures),
        f"{figures['waste']:.3f}" if WASTE.met_by(figures["waste"]) else f"**{figures['waste']:.3f}**",
        figures["layout"],
        tokens_text(figures["built_tokens"]),
        _cost(figures, "build") if _built(figures) else f"**{_cost(figures, 'build')}**",
        _cost(figures, "plan"),
    )


def _density(figures: Figures) -> str:
    percent = 100 * figures["density"]
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _cost(figures: Figures, what: str) -> str:
    """Time and memory; a peak below the page size of the measurement is no memory."""
    return f"{figures[f'{what}_s']:.2g} s, {max(0.0, figures[f'{what}_mb']):.0f} MB"


def _built(figures: Figures) -> bool:
    within = BUILD_S.met_by(figures["build_s"]) and BUILD_MB.met_by(figures["build_mb"])
    return within and figures["built_tokens"] == MILLION


def _from(name: str, **renders: Callable[[Document], str]) -> dict[str, Part]:
    """Parts of one result; a part's name has spaces for underscores."""
    return {part.replace("_", " "): from_result(name, render) for part, render in renders.items()}


_DOCS = Path("docs")
_HOWTO, _CONTRIBUTING = _DOCS / "howto", _DOCS / "contributing"
_RECIPES = (
    ("moba",),
    ("quest",),
    ("xattention",),
    ("seer_attention", "seer_attention_r"),
    ("NativeSparseAttention",),
    ("CoarseToFineAttention",),
)
PAGES: dict[Path, dict[str, Part]] = {
    Path("README.md"): {"sizes": sizes, "missed": missed, **_from("versions", versions=_tables.versions)},
    _DOCS / "catalogue.md": {
        **_from("catalogue", all_patterns=_catalogue_table),
        **{entry.kind: _section_of(entry.kind) for entry in ENTRIES},
    },
    _DOCS / "performance.md": {
        **{"answers": answers, "short": short, "growth": growth, "machines": machines},
        **_from("roofline", rates=_tables.rates),
        **_from("training_memory", against_dense=_tables.against_dense),
        **_from("fits", predicted_and_measured=_tables.peaks),
        **_from("pool", pool_claims=_tables.pool_claims),
        **_from("claims", claims=_tables.claims, notes=_tables.claims_notes),
    },
    _HOWTO / "adaptive.md": {
        **_from("selection_cost", cost=_selection_tables.chosen_cost),
        **_from("needles", found=_selection_tables.found),
        "learned": _selection_tables.learned,
        **_from("byte_model", read=_selection_tables.read_untrained),
        **_from("byte_training", exchanged=_selection_tables.exchanges),
        **{names[0]: from_result("recipe_cost", _selection_tables.recipe(*names)) for names in _RECIPES},
    },
    _HOWTO / "choosing.md": {
        **_from(
            "fits",
            what_fits_on_cpu=_tables.longest("cpu"),
            what_fits_on_cuda=_tables.longest("cuda"),
        ),
        **_from("checkpointing", checkpointing=_tables.checkpointing),
    },
    _HOWTO / "compiling.md": {
        **_from("first_step", first_step=_tables.first_steps),
        **_from("changing_lengths", lengths=_tables.lengths),
    },
    _HOWTO / "ranks.md": {
        **_from("exchange_bytes", keys_received=_tables.keys_received),
        **_from("work_balance", balance=_tables.balance),
        **_from("pool", single_buffers=_tables.single_buffers),
        **_from("codec", codec_bytes=_tables.codec_bytes, codec_errors=_tables.codec_errors),
    },
    _HOWTO / "slide_encoder.md": _from("received", received=_tables.received),
    _CONTRIBUTING / "benchmarks.md": {"cases": _cases},
    _CONTRIBUTING / "tests.md": _from("versions", versions=_tables.versions, left_out=_tables.left_out),
    _CONTRIBUTING / "kernels.md": {
        **_from("interpreted_kernels", interpreted=_tables.interpreted),
        **_from("interpreted_kernels_torch_2.15.0", newest_interpreted=_tables.interpreted),
        **_from("kernel_code", code=_tables.code),
        **_from("kernel_code_torch_2.15.0", newest_code=_tables.code),
        **_from("flex_program", program=_tables.counted),
        **_from("flex_program_torch_2.15.0", newest_program=_tables.counted),
        **_from("flex_bytes", moved=_tables.counted),
        **_from("flex_bytes_torch_2.15.0", newest_moved=_tables.counted),
    },
}
