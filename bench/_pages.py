"""The pages that show figures: for each the parts between its marks, rendered from the files of results."""

from pathlib import Path

from . import _tables
from ._catalogue import ENTRIES, MILLION, QUADRATIC, WIDE_ROW, Entry
from ._guard import CASES
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
from ._tables import Figures, Render, before, percent
from .catalogue import BUILD_MB, BUILD_S, WASTE, file_name

# docs/contributing/benchmarks.md and docs/catalogue.md


def _cases(_: Path) -> str:
    lines = [(f"`{name}`", (case.__doc__ or "").strip()) for name, case in CASES.items()]
    return f"\n{markdown(lines, ('case', 'what runs'))}\n"


def _built(figures: Figures) -> bool:
    within = BUILD_S.met_by(figures["build_s"]) and BUILD_MB.met_by(figures["build_mb"])
    return within and figures["built_tokens"] == MILLION


def _cost(figures: Figures, what: str) -> str:
    """Time and memory; a peak below the page size of the measurement is 0."""
    return f"{figures[f'{what}_s']:.2g} s, {max(0.0, figures[f'{what}_mb']):.0f} MB"


def _catalogue_table(document: Document) -> str:
    patterns, lines = document["rows"][0]["detail"]["patterns"], []
    for entry in ENTRIES:
        figures = patterns[entry.name]
        density, waste, build = 100 * figures["density"], f"{figures['waste']:.3f}", _cost(figures, "build")
        lines.append(
            (
                f"[{entry.name}](#{entry.kind})",
                f"{density:.0f} %" if density >= 10 else f"{density:.2g} %",
                waste if WASTE.met_by(figures["waste"]) else f"**{waste}**",
                figures["layout"],
                tokens_text(figures["built_tokens"]),
                build if _built(figures) else f"**{build}**",
                _cost(figures, "plan"),
            )
        )
    headers = ("pattern", "density", "waste", "computed as", "tokens", "`BlockMask`", "plan and lists")
    return with_condition(markdown(lines, headers), document)


def _sections(kind: str) -> Part:
    """The pictures of a constructor's entries, each with its expression and the reason why it misses a target."""

    def part(results: Path) -> str:
        figures = read(results, "catalogue")["rows"][0]["detail"]["patterns"]
        return "\n\n".join(_section(entry, figures[entry.name]) for entry in ENTRIES if entry.kind == kind)

    return part


def _section(entry: Entry, figures: Figures) -> str:
    heads = f", {entry.num_heads} heads" if entry.num_heads > 1 else ""
    larger = f", at a million tokens `{entry.million}`" if entry.million else ""
    lines = [f"![{entry.name}](images/catalogue/{file_name(entry)})", ""]
    lines.append(f"Drawn: `{entry.small}`. Measured: `{entry.text}`{heads}{larger}.")
    if not WASTE.met_by(figures["waste"]):
        lines.append(f"*Waste:* {entry.waste_why}")
    if not _built(figures) and entry.build_why not in ("", QUADRATIC, WIDE_ROW):  # which the page says once
        lines.append(f"*At a million tokens:* {entry.build_why}")
    return "\n".join(lines)


# docs/howto/adaptive.md


def _chosen_cost(document: Document) -> str:
    """A line for each way and length: times as fast as dense attention, and the share of choosing."""
    lines: dict[str, list[str]] = {}
    for row in document["rows"]:
        way, _, rest = row["measure"].rpartition(", forward")
        if "choosing_share" in row["detail"]:
            share = [] if rest.startswith(" + backward") else [percent(row["detail"]["choosing_share"])]
            lines.setdefault(way, []).extend((row["measured_text"], *share))
    headers = ("who chooses", "tokens", "forward", "of it choosing", "forward + backward")
    text = markdown([(*way.rsplit(", ", 1), *line) for way, line in lines.items()], headers)
    even = [row for row in document["rows"] if "times_as_fast" in row["detail"]]
    from_on = "; ".join(f"{before(', forward')(row)}: {row['measured_text']}" for row in even)
    return with_condition(f"{text}\n\nNo slower than dense attention from, forward: {from_on}.", document)


def _recipes(*names: str) -> Render:
    """The figures of recipes, a sentence each."""

    def sentence(name: str, document: Document) -> str:
        cases = {
            row["measure"].partition(", ")[2].removesuffix(": times as fast as dense"): row["measured_text"]
            for row in document["rows"]
            if row["measure"].startswith(f"{name}, ")
        }
        return f"`{name}` over dense attention: {'; '.join(f'{case}: {text}' for case, text in cases.items())}."

    return lambda document: "\n".join(sentence(name, document) for name in names)


def _from(name: str, **renders: Render) -> dict[str, Part]:
    """Parts of one result; a part's name has spaces for underscores."""
    return {part.replace("_", " "): from_result(name, render) for part, render in renders.items()}


_DOCS = Path("docs")
_HOWTO, _CONTRIBUTING = _DOCS / "howto", _DOCS / "contributing"
_RECIPES = ("moba", "quest", "xattention", "seer_attention", "NativeSparseAttention", "CoarseToFineAttention")
_SEVERAL = {"seer_attention": ("seer_attention", "seer_attention_r")}
_NEWEST = "torch_2.15.0"
PAGES: dict[Path, dict[str, Part]] = {
    Path("README.md"): {"sizes": sizes, "missed": missed, **_from("versions", versions=_tables.versions)},
    _DOCS / "catalogue.md": {
        **_from("catalogue", all_patterns=_catalogue_table),
        **{entry.kind: _sections(entry.kind) for entry in ENTRIES},
    },
    _DOCS / "performance.md": {
        **{"answers": answers, "short": short, "growth": growth, "machines": machines},
        **_from("roofline", rates=_tables.rates),
        **_from("training_memory", against_dense=_tables.against_dense),
        **_from("fits", predicted_and_measured=_tables.peaks),
    },
    _HOWTO / "adaptive.md": {
        **_from("selection_cost", cost=_chosen_cost),
        **{name: from_result("recipe_cost", _recipes(*_SEVERAL.get(name, (name,)))) for name in _RECIPES},
    },
    _HOWTO / "choosing.md": {
        **_from("fits", what_fits_on_cpu=_tables.longest("cpu"), what_fits_on_cuda=_tables.longest("cuda")),
        **_from("checkpointing", checkpointing=_tables.checkpointing),
        **_from("quality", quality=_tables.quality),
    },
    _HOWTO / "compiling.md": {
        **_from("first_step", first_step=_tables.first_steps),
        **_from("changing_lengths", lengths=_tables.lengths),
    },
    _HOWTO / "flex_attention.md": _from("flex_cases", cases=_tables.flex_cases),
    _HOWTO / "ranks.md": {
        **_from("exchange_bytes", keys_received=_tables.keys_received),
        **_from("work_balance", balance=_tables.balance),
        **_from("pool", single_buffers=_tables.single_buffers),
        **_from("codec", codec_bytes=_tables.codec_bytes, codec_errors=_tables.codec_errors),
    },
    _HOWTO / "slide_encoder.md": _from("received", received=_tables.received),
    _DOCS / "integrations" / "diffusers.md": _from(
        "diffusers", converted_models=_tables.converted_models, refused_models=_tables.refused_models
    ),
    _CONTRIBUTING / "benchmarks.md": {"cases": _cases},
    _CONTRIBUTING / "tests.md": _from("versions", versions=_tables.versions, left_out=_tables.left_out),
    _CONTRIBUTING / "kernels.md": {
        **_from("interpreted_kernels", interpreted=_tables.interpreted),
        **_from(f"interpreted_kernels_{_NEWEST}", newest_interpreted=_tables.interpreted),
        **_from("kernel_code", code=_tables.code),
        **_from(f"kernel_code_{_NEWEST}", newest_code=_tables.code),
        **_from("flex_program", program=_tables.counted),
        **_from("flex_program_torch_2.15.0", newest_program=_tables.counted),
        **_from("flex_bytes", moved=_tables.counted),
        **_from(f"flex_bytes_{_NEWEST}", newest_moved=_tables.counted),
        **_from("listed_keys", listed=_tables.counted),
        **_from("listed_keys_code", listed_code=_tables.code),
    },
}
