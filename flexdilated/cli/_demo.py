"""The demo: train a small LongNet on source text, measure it, leave a table, pictures and a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from .. import masks
from ..masks.plan_cache._cache_stats import CacheStats
from ..nn import LongNetConfig
from . import _checkpoint, _extras
from ._attention_time import measure
from ._baselines import bigram_bits, unigram_bits
from ._corpus import Corpus, load_corpus
from ._evaluate import mean_bits
from ._interrupt import Interrupt
from ._loss_picture import save_loss_picture
from ._model import PICTURE_BLOCK, PICTURE_TOKENS, build_model, model_config, picture_config
from ._optimizer import Optimizers
from ._out import prepare, replace
from ._results import Results, save_report, table
from ._run import Run
from ._sample import FILE_NAME as SAMPLE_FILE
from ._sample import draw_sample, save_sample
from ._settings import Settings
from ._team import Team, team_of
from ._train import train
from ._usage import UsageError
from ._windows import validation_windows

_VALIDATION_WINDOWS = 12


@dataclass(frozen=True)
class _Validation:
    """The windows every figure is measured on, and what simple models make of them."""

    windows: UInt8[Tensor, "w m"]
    unigram: float
    bigram: float


def demo(settings: Settings) -> None:
    """Run the whole demo, on all processes that torchrun has started, or on this one.

    Raises UsageError before any training where the settings cannot be served.
    """
    _check_environment()
    with team_of(settings.device) as team:
        _check_context(settings, team)
        team.by_first(lambda: prepare(settings.out))
        corpus = load_corpus(settings.data, context=settings.context)
        identity = _identity(settings, corpus)
        team.check_alike({**identity, "steps": settings.steps})
        run = _begin(settings, identity, team)
        _introduce(run, corpus, team)
        _run(run, corpus, settings, identity, team)


def _run(run: Run, corpus: Corpus, settings: Settings, identity: dict[str, Any], team: Team) -> None:
    """Train and measure together; what takes one process is left to the first."""

    def save() -> None:
        if team.is_first:
            _checkpoint.save(settings.out, run.state(identity))

    validation = _validation(corpus, settings)
    with Interrupt() as interrupt:
        if run.step == 0:
            run.before = mean_bits(run.model, validation.windows, team)
        ended_by = train(run, corpus, settings, team, interrupt, save)
        if interrupt.requested:
            print("stopping early; a second Ctrl-C ends at once, without results")
        stats = masks.cache().stats()  # before the timing, which looks up plans of its own
        after = mean_bits(run.model, validation.windows, team) if run.step else run.before
        if team.is_first:
            results = _measure(run, validation, settings, interrupt, ended_by=ended_by, after=after, stats=stats)
            print(f"\n{table(results)}\n")
            if settings.sample:
                _sample(run, validation, settings)
            _leave(results, run, settings, identity, team)


def _check_context(settings: Settings, team: Team) -> None:
    if settings.context < team.size:
        raise UsageError(
            f"--context must be at least the number of processes, as each has a part of every text; got "
            f"{settings.context} bytes and {team.size} processes"
        )


def _check_environment() -> None:
    try:
        masks.cache()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _identity(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """What a run that goes on from a checkpoint must share with the one that wrote it."""
    return {
        "context": settings.context,
        "seed": settings.seed,
        "corpus": corpus.fingerprint,
        "model": asdict(model_config(settings.context)),
    }


def _begin(settings: Settings, identity: dict[str, Any], team: Team) -> Run:
    model = build_model(settings.context, seed=settings.seed, mesh=team.mesh).to(team.device)
    run = Run(model, Optimizers(model), team.device)
    if settings.resume:
        run.load(team.by_first(lambda: _checkpoint.load(settings.out, identity=identity)))
    return run


def _introduce(run: Run, corpus: Corpus, team: Team) -> None:
    sides = [
        f"{name} {len(text) / 1e6:.2f} MB in {len(files)} file{'s' if len(files) != 1 else ''}"
        for name, text, files in (
            ("training", corpus.train, corpus.train_files),
            ("validation", corpus.validation, corpus.validation_files),
        )
    ]
    print(f"text      {corpus.source}: {', '.join(sides)}")
    print(f"model     causal LongNet, {_parameters(run):,} parameters, {_branches(run.model.trunk.config)}")
    if team.mesh is not None:
        print(f"ranks     {team.size} processes, each with its part of every text, on {team.device.type}")
    if run.step:
        print(f"resumed   at step {run.step}")


def _branches(config: LongNetConfig) -> str:
    segments, rates = (", ".join(map(str, x)) for x in (config.segment_lengths, config.dilation_rates))
    return f"segments {segments} at rates {rates}"


def _parameters(run: Run) -> int:
    return sum(parameter.numel() for parameter in run.model.parameters())


def _validation(corpus: Corpus, settings: Settings) -> _Validation:
    windows = validation_windows(corpus.validation, context=settings.context, limit=_VALIDATION_WINDOWS)
    return _Validation(windows, unigram_bits(corpus.train, windows), bigram_bits(corpus.train, windows))


def _measure(
    run: Run,
    validation: _Validation,
    settings: Settings,
    interrupt: Interrupt,
    *,
    ended_by: str,
    after: float,
    stats: CacheStats,
) -> Results:
    trunk = run.model.trunk
    heads, head_dim = trunk.config.num_heads, trunk.config.head_dim
    sizes = {"num_heads": heads, "num_tokens": settings.context, "head_dim": head_dim}
    time = measure(trunk.pattern, **sizes, device=run.device, interrupt=interrupt)
    facts = masks.describe(trunk.pattern, settings.context, num_heads=heads, head_dim=head_dim)
    return Results(
        before=run.before,
        after=after,
        unigram=validation.unigram,
        bigram=validation.bigram,
        parameters=_parameters(run),
        steps=run.step,
        seconds=run.seconds,
        ended_by=ended_by,
        context=settings.context,
        time=time,
        density=facts.density,
        block_density=facts.block_density,
        waste=facts.waste,
        cache=stats,
    )


def _sample(run: Run, validation: _Validation, settings: Settings) -> None:
    """Continue the first half of the first validation window, on one process."""
    prompt = validation.windows[0][: max(1, settings.context // 2)]
    model = build_model(settings.context, seed=settings.seed).to(run.device)
    model.load_state_dict(run.model.state_dict())
    sample = draw_sample(model, prompt, num_bytes=settings.sample, seed=settings.seed)
    print(f"{sample.summary()}\n\n{sample.text()}")
    save_sample(settings.out, sample)


def _leave(results: Results, run: Run, settings: Settings, identity: dict[str, Any], team: Team) -> None:
    """Write report and pictures, and say where they are."""
    config = {**identity, "steps": settings.steps, "minutes": settings.minutes, "device": settings.device}
    config["processes"] = team.size
    save_report(settings.out / "report.json", results, config=config, losses=run.losses)
    written = ["report.json", _checkpoint.FILE_NAME, *([SAMPLE_FILE] if settings.sample else [])]
    if _extras.find("matplotlib") is None:
        print(_extras.missing_line("matplotlib"))
    else:
        _draw(results, run, settings.out)
        written += ["mask.png", "loss.png"]
    print("written   " + ", ".join(str(settings.out / name) for name in written))


def _draw(results: Results, run: Run, out: Path) -> None:
    small = picture_config()
    mask = masks.plot(
        small.pattern,
        PICTURE_TOKENS,
        num_heads=small.num_heads,
        order=("natural", "residue"),
        block_size=PICTURE_BLOCK,
        title=f"Causal LongNet, {_branches(small)}",
    )
    replace(out / "mask.png", lambda path: mask.savefig(path, format="png"))
    baselines = {"byte unigram": results.unigram, "byte bigram": results.bigram}
    replace(
        out / "loss.png",
        lambda path: save_loss_picture(
            path, run.losses, before=results.before, after=results.after, baselines=baselines
        ),
    )
