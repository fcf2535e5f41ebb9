"""``hf-xai uq``: fit a Feature-Gap head to a language model's answers, score answers with it, report how it does."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich import box
from rich.table import Table
from typer import Argument, Option, Typer

from hf_xai.cli.language_models import Dtype, load_language_model, quiet_transformers
from hf_xai.cli.printing import note, print_json, print_table, warnings_as_notes, write_json
from hf_xai.cli.questions import group_by_passage, load_questions, read_scored
from hf_xai.errors import ConfigError

if TYPE_CHECKING:
    from hf_xai.transformers import FeatureGapHead, FeatureGapReport

app = Typer(help="Feature-Gaps: how far an answer from a passage can be trusted.", no_args_is_help=True)

ANSWERS_ON_A_PAGE = 200  # passages make a page heavy

Model = Annotated[str, Argument(help="Folder or Hub id of a causal language model.")]
Head = Annotated[str, Argument(help="Folder or Hub id of a fitted head.")]
Data = Annotated[
    str, Argument(help="JSON, JSON-lines, CSV or Parquet file with context, question and answers, or a Hub data set.")
]
Split = Annotated[str, Option(help="Split of a Hub data set.")]
Columns = Annotated[
    list[str] | None, Option("--column", metavar="NAME=COLUMN", help="Column by another name: context=passage.")
]
Limit = Annotated[int | None, Option(min=1, help="Number of questions, from the start; all without.")]
Batch = Annotated[int, Option(min=1, help="Questions at a time.")]
Precision = Annotated[Dtype, Option(help="Precision; auto is the model's own on an accelerator, else float32.")]
Device = Annotated[str, Option(help="Device of torch; auto is the accelerator, if there is one.")]
Gguf = Annotated[str | None, Option(metavar="FILE", help="GGUF file in MODEL that holds model and tokenizer.")]
Correctness = Annotated[
    Literal["contains", "f1", "contains_or_f1", "exact_match"],
    Option(help="When an answer is right: it contains a gold one, their words have an F1 >= 0.5, either, or is one."),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


@app.command()
def fit(
    model: Model,
    data: Data,
    output: Annotated[Path, Option(help="Folder for the head and its card.")],
    feature: Annotated[list[str] | None, Option(help="Feature to read; all three without.")] = None,
    direction: Annotated[str, Option(help="auto, pca (the paper's), pca_uncentered or mean_diff.")] = "auto",
    scorer: Annotated[
        str, Option(help="gaps (the paper's), probabilities, saplma, mean_diff, or auto: the best of them.")
    ] = "gaps",
    extra_feature: Annotated[
        list[str] | None, Option(help="Probability score that joins: logprob, min_logprob, sequence_logprob, entropy.")
    ] = None,
    layers_per_feature: Annotated[int, Option(min=1, help="Layers that each feature is read at.")] = 1,
    folds: Annotated[int, Option(min=2, help="Folds of the cross-validation.")] = 5,
    calibration: Annotated[Literal["none", "isotonic"], Option(help="How to calibrate the confidence.")] = "none",
    target_risk: Annotated[
        float | None, Option(help="Error rate that accepted answers may have; sets the threshold.")
    ] = None,
    correctness: Correctness = "contains",
    max_new_tokens: Annotated[int, Option(min=1, help="Length of the answers.")] = 128,
    baselines: Annotated[bool, Option(help="Measure P(True) and five sampled answers as well.")] = True,
    resume_dir: Annotated[Path | None, Option(help="Folder that keeps finished batches of a stopped run.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of folds, samples and random directions.")] = 0,
    split: Split = "train",
    column: Columns = None,
    limit: Limit = None,
    batch_size: Batch = 8,
    dtype: Precision = "auto",
    device: Device = "auto",
    gguf_file: Gguf = None,
    push: Annotated[str | None, Option(metavar="REPO_ID", help="Hub repository to push the head to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fits a head to MODEL's answers to the questions of DATA, and compares it with all baselines on the same rows."""
    from hf_xai.transformers import CORRECTNESS, FeatureGapConfig, FeatureGapReport, fit_feature_gap

    chosen: dict[str, Any] = {"features": feature} if feature else {}
    config = FeatureGapConfig(
        direction=direction,
        scorer=scorer,
        extra_features=extra_feature or (),
        layers_per_feature=layers_per_feature,
        folds=folds,
        calibration=None if calibration == "none" else calibration,
        target_risk=target_risk,
        max_new_tokens=max_new_tokens,
        **chosen,
    )
    records = load_questions(data, split=split, columns=column or (), limit=limit)
    language_model, tokenizer = load_language_model(model, dtype, device, gguf_file)
    note(f"Reading the answers to {len(records)} questions; this is one generation and up to eight passes for each.")
    with quiet_transformers(progress_bars=True), warnings_as_notes():
        head = fit_feature_gap(
            language_model,
            tokenizer,
            records,
            config=config,
            correctness_fn=CORRECTNESS[correctness],
            groups=group_by_passage(records),
            batch_size=batch_size,
            resume_dir=resume_dir,
            baselines=baselines,
            seed=seed,
            verbose=False,
        )
    with quiet_transformers():
        head.save_pretrained(output)
    note(f"Saved to {output}.")
    if push is not None:
        note(f"Pushed: {head.push_to_hub(push, with_custom_generate=True)}")
    _show(FeatureGapReport.of(head), as_json)


@app.command()
def score(
    head: Head,
    model: Model,
    data: Data,
    output: Annotated[Path, Option(help="JSON-lines file for the answers with their confidence.")],
    page: Annotated[Path | None, Option(help="HTML file that shows the answers, tokens coloured.")] = None,
    threshold: Annotated[
        float | None, Option(min=0, max=1, help="Smallest accepted confidence; the head's own without.")
    ] = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Length of the answers; the head's without.")] = None,
    correctness: Correctness = "contains",
    split: Split = "train",
    column: Columns = None,
    limit: Limit = None,
    batch_size: Batch = 8,
    dtype: Precision = "auto",
    device: Device = "auto",
    gguf_file: Gguf = None,
    as_json: AsJson = False,
) -> None:
    """Answers the questions of DATA with MODEL, or takes the answers in its column answer, and writes the confidence.

    Answers are also labelled where DATA has answers or a column correctness, and the summary then says how well the
    confidence tells right from wrong.
    """
    from huggingface_hub.utils import tqdm

    from hf_xai.transformers import CORRECTNESS, FeatureGapQAPipeline, FeatureGapReport, confidence_page

    fitted = _load_head(head)
    records = load_questions(data, split=split, columns=column or (), limit=limit)
    language_model, tokenizer = load_language_model(model, dtype, device, gguf_file)
    with warnings_as_notes():
        qa = FeatureGapQAPipeline(
            language_model, tokenizer, feature_gap=fitted, all_probabilities=True, device=language_model.device
        )
    options = {"return_tokens": True, "threshold": "fitted" if threshold is None else threshold}
    given = sum(isinstance(record.get("answer"), str) for record in records)
    note(f"Scoring {'given' if given == len(records) else 'new'} answers to {len(records)} questions.")
    with quiet_transformers(progress_bars=True), warnings_as_notes():
        if given == len(records):
            answers = qa.score(records, batch_size=batch_size, **options)
        else:
            length = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
            one_by_one = qa((record for record in records), batch_size=batch_size, **options, **length)
            answers = list(tqdm(one_by_one, "Answering", total=len(records), unit="question"))
    rows = _labelled(records, answers, CORRECTNESS[correctness])
    _write_lines(output, rows)
    note(f"Wrote {output}.")
    report = FeatureGapReport.of(fitted, rows)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        accepted = fitted.config.threshold if threshold is None else threshold
        page.write_text(_page(confidence_page, rows, f"Answers of {model}", accepted), encoding="utf-8")
        note(f"Wrote {page}.")
    _show(report, as_json, only="Scored answers")


@app.command()
def report(
    head: Head,
    scored: Annotated[Path | None, Argument(help="What hf-xai uq score has written.")] = None,
    output: Annotated[
        Path | None, Option(help="Folder for report.json, risk_coverage.png, reliability.png and page.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the figures of HEAD's fit and, with SCORED answers, how it does on them; draws both."""
    from hf_xai.transformers import FeatureGapReport, confidence_page

    rows = None if scored is None else read_scored(scored)
    fitted = _load_head(head)
    found = FeatureGapReport.of(fitted, rows)
    if output is not None:
        pictures = _draw(found, output)
        write_json(output / "report.json", found.to_dict())
        title = f"Feature-Gap head on {found.base_model}"
        text = _page(confidence_page, rows or [], title, found.threshold, figures=pictures, tables=found.tables())
        (output / "page.html").write_text(text, encoding="utf-8")
        note(f"Wrote {', '.join(sorted(path.name for path in output.iterdir()))} to {output}.")
    _show(found, as_json)


def _load_head(head: str) -> "FeatureGapHead":
    from hf_xai.transformers import FeatureGapConfig, FeatureGapHead

    folder = Path(head)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"The folder {head!r} is no Feature-Gap head: it has no config.json.")
    if not folder.is_dir() and (folder.is_absolute() or head.startswith(".") or head.count("/") > 1):
        raise ConfigError(f"There is no folder {head!r}.")
    with quiet_transformers():
        try:
            kind = FeatureGapConfig.get_config_dict(head)[0].get("model_type")
            if kind != FeatureGapConfig.model_type:
                raise ConfigError(f"{head!r} is no Feature-Gap head: its config.json is of model_type {kind!r}.")
            return FeatureGapHead.from_pretrained(head)
        except OSError as error:
            raise ConfigError(f"Can't load a Feature-Gap head from {head!r}: {error}") from error


def _labelled(
    records: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    correctness: Callable[[Mapping[str, Any], str], int],
) -> list[dict[str, Any]]:
    """Answers with their question, passage, gold answers and, where one can tell, correctness; JSON values."""
    rows = []
    for record, answer in zip(records, answers, strict=True):
        row = {name: record[name] for name in ("id", "question", "context", "answers") if name in record} | dict(
            answer
        )
        if record.get("correctness") is not None:
            row["correctness"] = int(record["correctness"])
        elif record.get("answers") is not None:
            row["correctness"] = correctness(record, answer["answer"])
        # JSON has no NaN: a confidence that isn't known is null.
        rows.append(json.loads(json.dumps(row, default=str), parse_constant=lambda name: None))
    return rows


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _page(
    write: Callable[..., str],
    rows: Sequence[Mapping[str, Any]],
    title: str,
    threshold: float | None,
    **above: Any,
) -> str:
    left_out = max(0, len(rows) - ANSWERS_ON_A_PAGE)
    return write(rows[:ANSWERS_ON_A_PAGE], title=title, threshold=threshold, num_left_out=left_out, **above)


def _draw(report: "FeatureGapReport", output: Path) -> dict[str, bytes]:
    """Writes the plots, those that there is something for, and returns them by their captions."""
    output.mkdir(parents=True, exist_ok=True)
    scored = report.scored is not None and report.scored.has_both
    plots: dict[str, tuple[str, Callable[[], Any]]] = {}
    if scored:
        plots["Risk against coverage"] = ("risk_coverage.png", report.plot)
        plots["Reliability"] = ("reliability.png", report.plot_reliability)
    elif report.scored is None and report.fit.get("cross_validated"):
        plots["What ranks the answers of the fit"] = ("ranking.png", report.plot)
    pictures = {}
    for caption, (name, draw) in plots.items():
        figure = draw().figure
        figure.savefig(output / name, dpi=150, bbox_inches="tight")
        _close(figure)
        pictures[caption] = (output / name).read_bytes()
    return pictures


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)


def _show(report: "FeatureGapReport", as_json: bool, only: str | None = None) -> None:
    """Prints all tables of a report, or the one of that caption."""
    if as_json:
        print_json(report.to_dict())
        return
    for name in ("reason", "verdict") if only is None else ():
        if report.fit.get(name):
            print(report.fit[name])
    for caption, (heads, *rows) in report.tables().items():
        if only in (None, caption):
            table = Table(title=caption, title_justify="left", box=box.SIMPLE_HEAD)
            for number, head in enumerate(heads):
                table.add_column(head, justify="right" if number else "left")
            for cells in rows:
                table.add_row(*cells)
            print_table(table)
