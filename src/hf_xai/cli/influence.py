"""``hf-xai influence``: train and see which rows did it, score saved checkpoints, and look at scores."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option, Typer

from hf_xai.cli.fine_tuning import (
    LEARNING_RATES,
    RunFolder,
    TrainingSettings,
    collator_of,
    fine_tune,
    require_peft,
    settings_of_run,
    with_adapters_of,
)
from hf_xai.cli.instructions import EncodedRows, Instructions, check_columns, encode, load_instructions
from hf_xai.cli.language_models import Dtype, load_language_model, quiet_transformers
from hf_xai.cli.printing import note, warnings_as_notes
from hf_xai.cli.ranked_rows import Order, draw_rows, show_scores
from hf_xai.errors import ConfigError

if TYPE_CHECKING:
    from hf_xai.transformers import InfluenceScores

app = Typer(help="f-INE: which training rows made a model do what it does.", no_args_is_help=True)

SHOWN_ROWS = 10
MIN_CHECKPOINTS = 3
MIN_ONLINE_ROWS = 8  # the spread over fewer rows says too little

Model = Annotated[str, Argument(help="Folder or Hub id of a causal language model.")]
Queries = Annotated[
    str | None,
    Argument(help="Rows that show the behaviour, of the same kinds; a column query names several queries."),
]
Output = Annotated[Path, Option(help="Folder for the results.")]
SIMILARITY_HELP = "Product of gradients, or that divided by both of their norms"
Similarity = Annotated[Literal["dot", "cosine"], Option(help=f"{SIMILARITY_HELP}.")]
Weighting = Annotated[
    Literal["learning_rate", "none"], Option(help="Whether moments count by their learning rates, or all alike.")
]
Estimator = Annotated[
    Literal["gaussian", "auc", "median", "max"], Option(help="How mu is estimated; max is the paper's, and biased.")
]
Itself = Annotated[
    bool, Option("--self-influence", help="Influence of each row on itself, to find wrong labels; without queries.")
]
Keep = Annotated[
    bool, Option("--save-observations", help="Keep the products of every checkpoint, for trade-off curves.")
]
Length = Annotated[int, Option(min=2, help="Longest row, in tokens; the rest of a longer one is cut off.")]
Split = Annotated[str, Option(help="Split of a data set that is no file.")]
Columns = Annotated[
    list[str] | None,
    Option("--column", metavar="NAME=COLUMN", help="Column by another name: prompt=instruction."),
]
IdColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="Column with a unique id for each training row; else its position.")
]
Limit = Annotated[int | None, Option(min=1, help="Number of training rows, from the start; all without.")]
Precision = Annotated[Dtype, Option(help="Precision; auto is the model's own on an accelerator, else float32.")]
Seed = Annotated[int, Option(min=0, help="Seed of everything that is random.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


@app.command()
def train(
    model: Model,
    train: Annotated[
        str,
        Argument(
            help="Rows to train on: a JSON, JSON-lines, CSV or Parquet file, a folder or a Hub data set, with "
            "messages, with prompt and completion, or with text."
        ),
    ],
    output: Output,
    queries: Queries = None,
    mode: Annotated[
        Literal["checkpoint", "online"],
        Option(help="Score all rows at some moments, or each row only in the steps that train on it."),
    ] = "checkpoint",
    lora: Annotated[bool, Option("--lora/--full", help="Train adapters, or all weights.")] = False,
    rank: Annotated[int | None, Option(min=1, help="Rank of the adapters; 16 without.")] = None,
    epochs: Annotated[float, Option(help="Passes over the rows.")] = 3.0,
    batch_size: Annotated[int, Option(min=1, help="Rows in an optimizer step.")] = 16,
    micro_batch_size: Annotated[
        int | None, Option(min=1, help="Rows in one pass, to save memory; all of a step without.")
    ] = None,
    learning_rate: Annotated[
        float | None, Option(help="At the start, falling to 0; 2e-5 without, with --lora 2e-4.")
    ] = None,
    max_length: Length = 1024,
    num_checkpoints: Annotated[int | None, Option(min=3, help="Moments at which rows are scored; 10 without.")] = None,
    every: Annotated[int | None, Option(min=1, help="Optimizer steps from one of them to the next, instead.")] = None,
    similarity: Annotated[
        Literal["dot", "cosine", "adam"],
        Option(help=f"{SIMILARITY_HELP}, or LESS's: that of Adam's step on the row (for --lora)."),
    ] = "dot",
    weighting: Weighting = "learning_rate",
    estimator: Estimator = "gaussian",
    control: Annotated[
        Literal["detrend", "none", "auxiliary"],
        Option(help="How the trend of the run is taken out; auxiliary trains a second model first."),
    ] = "detrend",
    self_influence: Itself = False,
    save_observations: Keep = False,
    split: Split = "train",
    column: Columns = None,
    id_column: IdColumn = None,
    limit: Limit = None,
    dtype: Annotated[Dtype, Option(help="Of the weights; auto is float32, with --lora the model's own.")] = "auto",
    device: Annotated[Literal["auto", "cpu"], Option(help="auto is the accelerator, if there is one.")] = "auto",
    keep_checkpoints: Annotated[
        bool, Option("--keep-checkpoints", help="Keep about one for each scored moment, for hf-xai influence score.")
    ] = False,
    seed: Seed = 0,
    resume: Annotated[bool, Option("--resume", help="Go on with a run that was stopped.")] = False,
    as_json: AsJson = False,
) -> None:
    """Trains MODEL on the rows of TRAIN and finds those that made it do what QUERIES show.

    OUTPUT/model gets the model or its adapters, OUTPUT/influence the scores.
    """
    from hf_xai.transformers import InfluenceConfig, InfluenceScores

    _check_run(mode, batch_size, lora, rank, num_checkpoints, every)
    config = InfluenceConfig(
        mode=mode,
        every_n_steps=every,
        num_checkpoints=num_checkpoints or 10,
        similarity=similarity,
        weighting=weighting,
        estimator=estimator,
        control=control,
        self_influence=self_influence,
        save_observations=save_observations,
        sample_id_column=id_column,
        seed=seed,
    )
    settings = TrainingSettings(
        lora=lora,
        rank=rank or 16,
        epochs=epochs,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size or batch_size,
        learning_rate=LEARNING_RATES["lora" if lora else "full"] if learning_rate is None else learning_rate,
        seed=seed,
        cpu=device == "cpu",
    )
    folder = RunFolder(output, resume=resume)
    rows, asked = _load_both(train, queries, self_influence, split, column, id_column, limit)
    precision: Dtype = "float32" if dtype == "auto" and not lora else dtype
    sources: dict[str, Any] = {
        "model": model,
        "train": train,
        "queries": queries,
        "split": split,
        "column": column or [],
    }
    sources |= {"limit": limit, "max_length": max_length, "dtype": precision}
    made_of = settings_of_run(settings, config, keep_checkpoints, **sources)
    folder.check_same(made_of)
    if folder.is_finished:
        note(f"{output} is finished; these are its scores.")
        scores = InfluenceScores.from_pretrained(folder.scores)
    else:
        with quiet_transformers(progress_bars=True), warnings_as_notes():
            loaded = [load_language_model(model, precision, device)]
            encoded, query_rows = _encoded(rows, asked, loaded[0][1], max_length)
            folder.claim(made_of)
            scores = fine_tune(
                lambda: loaded.pop() if loaded else load_language_model(model, precision, device),
                encoded,
                query_rows,
                config,
                settings,
                folder,
                keep_checkpoints=keep_checkpoints,
            )
        note(f"Saved the model to {folder.model}, the scores to {folder.scores}.")
    show_scores(scores, scores.query_names, SHOWN_ROWS, "proponents", rows.texts(), as_json)


@app.command()
def score(
    model: Model,
    checkpoint: Annotated[
        list[str], Argument(help="Checkpoints that a Trainer has saved in one run, or the folder that holds them.")
    ],
    train: Annotated[str, Option(help="Rows that the run was trained on; see hf-xai influence train.")],
    batch_size: Annotated[int, Option(min=1, help="Rows in an optimizer step of the run.")],
    output: Output,
    queries: Annotated[str | None, Option(help="Rows that show the behaviour.")] = None,
    score_batch_size: Annotated[int, Option(min=1, help="Rows in one pass.")] = 8,
    max_length: Length = 1024,
    similarity: Similarity = "dot",
    weighting: Weighting = "learning_rate",
    estimator: Estimator = "gaussian",
    control: Annotated[Literal["detrend", "none"], Option(help="How the trend of the run is taken out.")] = "detrend",
    self_influence: Itself = False,
    save_observations: Keep = False,
    resume_dir: Annotated[Path | None, Option(help="Folder that keeps finished batches of a stopped run.")] = None,
    split: Split = "train",
    column: Columns = None,
    id_column: IdColumn = None,
    limit: Limit = None,
    dtype: Precision = "auto",
    device: Annotated[str, Option(help="Device of torch; auto is the accelerator, if there is one.")] = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Scores the rows of a run that has ended, from CHECKPOINTs of MODEL or of adapters on it."""
    from hf_xai.transformers import InfluenceConfig, score_checkpoints

    config = InfluenceConfig(
        similarity=similarity,
        weighting=weighting,
        estimator=estimator,
        control=control,
        self_influence=self_influence,
        save_observations=save_observations,
        sample_id_column=id_column,
        score_batch_size=score_batch_size,
        seed=seed,
    )
    folders = _checkpoints(checkpoint)
    rows, asked = _load_both(train, queries, self_influence, split, column, id_column, limit)
    with quiet_transformers(progress_bars=True), warnings_as_notes():
        language_model, tokenizer = load_language_model(model, dtype, device)
        encoded, query_rows = _encoded(rows, asked, tokenizer, max_length)
        scores = score_checkpoints(
            with_adapters_of(language_model, folders[0]),
            folders,
            encoded.dataset,
            query_rows,
            collator_of(tokenizer),
            config,
            batch_size=batch_size,
            sample_ids=encoded.ids,
            resume_dir=resume_dir,
        )
    scores.save_pretrained(output)
    note(f"Saved the scores to {output}.")
    show_scores(scores, scores.query_names, SHOWN_ROWS, "proponents", rows.texts(), as_json)


@app.command()
def report(
    scores: Annotated[str, Argument(help="Folder of a run or of scores, or a data set of scores on the Hub.")],
    query: Annotated[str | None, Option(help="Name of the query to look at; all without.")] = None,
    k: Annotated[int, Option("--k", min=1, help="Number of rows.")] = 20,
    order: Annotated[Order, Option(help="Rows that lower the query's loss first, or those that raise it.")] = (
        "proponents"
    ),
    train: Annotated[str | None, Option(help="Rows of the run, to show their text.")] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help="Picture to draw the rows in, such as rows.png.")] = None,
    compare: Annotated[
        str | None, Option(metavar="SCORES", help="Scores of another run, to see how far they agree.")
    ] = None,
    split: Split = "train",
    column: Columns = None,
    id_column: IdColumn = None,
    as_json: AsJson = False,
) -> None:
    """Shows the rows of SCORES that count most, draws them, and compares them with those of another run."""
    found = _load_scores(scores)
    names = found.query_names if query is None else (query,)
    if query is not None and query not in found.query_names:
        raise ConfigError(f"There is no query {query!r}; the queries are {', '.join(found.query_names)}.")
    if plot is not None and len(names) > 1:
        raise ConfigError(f"--plot draws one query; name it with --query: {', '.join(names)}.")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot takes a file of .png, .svg or .pdf, got {str(plot)!r}.")
    texts: Mapping[Any, str] = {}
    if train is not None:
        column_of_ids = id_column or found.config.sample_id_column
        rows = load_instructions(train, split=split, columns=column or (), id_column=column_of_ids)
        check_columns(column or (), rows)
        texts = rows.texts()
    agreement = {}
    if compare is not None:
        other = _load_scores(compare)
        agreement = {name: found.compare(other, query=name) for name in names}
    if plot is not None:
        draw_rows(found, names[0], k, order, texts, plot)
    show_scores(found, names, k, order, texts, as_json, agreement)


def _check_run(
    mode: str, batch_size: int, lora: bool, rank: int | None, num_checkpoints: int | None, every: int | None
) -> None:
    """Refuses options that say nothing beside the others."""
    if rank is not None and not lora:
        raise ConfigError("--rank is that of adapters; give --lora too.")
    if num_checkpoints is not None and every is not None:
        raise ConfigError("--num-checkpoints and --every say the same thing; give one of them.")
    if num_checkpoints is not None and mode == "online":
        raise ConfigError("--num-checkpoints is for --mode checkpoint; --mode online has --every.")
    if mode == "online" and batch_size < MIN_ONLINE_ROWS:
        raise ConfigError(
            f"--mode online compares the rows of a batch, {MIN_ONLINE_ROWS} at least; got --batch-size {batch_size}."
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("hf-xai influence train runs in one process; for more, use InfluenceCallback in a script.")


def _load_both(
    train: str,
    queries: str | None,
    self_influence: bool,
    split: str,
    column: list[str] | None,
    id_column: str | None,
    limit: int | None,
) -> tuple[Instructions, Instructions | None]:
    if self_influence == (queries is not None):
        raise ConfigError("Give rows that show a behaviour as QUERIES, or --self-influence; one of them, not both.")
    rows = load_instructions(train, split=split, columns=column or (), id_column=id_column, limit=limit)
    asked = None if queries is None else load_instructions(queries, split=split, columns=column or ())
    check_columns(column or (), rows, *([] if asked is None else [asked]))
    return rows, asked


def _encoded(
    rows: Instructions, asked: Instructions | None, tokenizer: Any, max_length: int
) -> tuple[EncodedRows, dict[str, Any] | None]:
    queries = None if asked is None else encode(asked, tokenizer, max_length).by_query()
    encoded = encode(rows, tokenizer, max_length, may_leave_out=True)
    if encoded.left_out:
        some = ", ".join(map(str, encoded.left_out[:5]))
        note(
            f"Left out {len(encoded.left_out)} of {len(rows.ids)} rows, whose answers begin beyond --max-length "
            f"{max_length}: {some}{' ...' if len(encoded.left_out) > 5 else ''}"
        )
    return encoded, queries


def _checkpoints(given: list[str]) -> list[Path]:
    """The folders themselves, or all checkpoints of the one folder that is given."""
    folders = [Path(one) for one in given]
    missing = [one for one in folders if not one.is_dir()]
    if missing:
        raise ConfigError(f"There is no folder {str(missing[0])!r}.")
    if len(folders) == 1 and not (folders[0] / "trainer_state.json").is_file():
        inside = sorted(folders[0].glob("checkpoint-*")) or sorted((folders[0] / "checkpoints").glob("checkpoint-*"))
        if not inside:
            raise ConfigError(f"The folder {str(folders[0])!r} is no checkpoint of a Trainer and holds none.")
        folders = inside
    without = [one for one in folders if not (one / "trainer_state.json").is_file()]
    if without:
        raise ConfigError(f"{str(without[0])!r} is no checkpoint of a Trainer: it has no trainer_state.json.")
    if len(folders) < MIN_CHECKPOINTS:
        raise ConfigError(f"f-INE needs {MIN_CHECKPOINTS} checkpoints at least, got {len(folders)}.")
    if (folders[0] / "adapter_config.json").is_file():
        require_peft(f"The checkpoint {str(folders[0])!r} holds adapters and")
    return folders


def _load_scores(source: str) -> "InfluenceScores":
    from hf_xai.transformers import InfluenceScores

    folder = Path(source)
    if not folder.is_dir() and (folder.is_absolute() or source.startswith(".") or source.count("/") > 1):
        raise ConfigError(f"There is no folder {source!r}.")
    inside = folder / "influence"
    return InfluenceScores.from_pretrained(inside if inside.is_dir() else source)
