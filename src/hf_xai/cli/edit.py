"""``hf-xai edit``: find the layers of a fact, compute a change, put it into a model's folder and take it back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from typer import Argument, Option, Typer

from hf_xai.cli.data_sets import load_rows
from hf_xai.cli.edit_folders import check_not_applied, check_output, revert_folder, whole_folder, write_edited
from hf_xai.cli.edit_inputs import editor_config, layers_of, load_prompts, load_requests
from hf_xai.cli.edit_tables import check_picture, draw_located, edit_table, show_located, show_planned, show_record
from hf_xai.cli.fine_tuning import require_peft
from hf_xai.cli.language_models import Dtype, load_language_model, quiet_transformers
from hf_xai.cli.printing import note, print_json, print_table, warnings_as_notes
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError

if TYPE_CHECKING:
    from hf_xai.transformers import EditResult, KeyStatistics

app = Typer(help="Knowledge editing: ACE, ROME, MEMIT, PMET, EMMET and AlphaEdit.", no_args_is_help=True)

Model = Annotated[str, Argument(help="Folder or Hub id of a causal language model.")]
Edits = Annotated[list[str], Argument(metavar="EDIT_DIR...", help="Folders or Hub ids of edits of this model.")]
Layers = Annotated[str | None, Option(metavar="3,4,5", help="Layers, from 0; the editor's default without.")]
Prompts = Annotated[list[str] | None, Option("--prompt", help="Prompt; may be given more than once.")]
Limit = Annotated[int | None, Option(min=1, help="Number of rows, from the start; all without.")]
Batch = Annotated[int, Option(min=1, help="Prompts or texts at a time.")]
Resume = Annotated[Path | None, Option(help="Folder that keeps finished parts of a stopped run.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the folder where it is there.")]
AnyWeights = Annotated[
    bool, Option("--any-weights", help="Take other weights of the same sizes, too, as after a fine-tuning.")
]
Precision = Annotated[Dtype, Option(help="Precision; auto is the model's own on an accelerator, else float32.")]
Device = Annotated[str, Option(help="Device of torch; auto is the accelerator, if there is one.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


@app.command()
def statistics(
    model: Model,
    data: Annotated[str, Argument(help="JSON, JSON-lines, CSV or Parquet file, folder or Hub data set of texts.")],
    output: Annotated[Path, Option(help="Folder for the statistics.")],
    layers: Annotated[str | None, Option(metavar="3,4,5", help="Layers, from 0; all without.")] = None,
    text_column: Annotated[str, Option(help="Column of the text.")] = "text",
    max_tokens: Annotated[int | None, Option(min=1, help="Reading stops here; at the end without.")] = None,
    attention: Annotated[
        bool, Option("--attention", help="Those of the attention's output matrices, too (edit_attention of ACE).")
    ] = False,
    sequence_length: Annotated[int, Option(min=1, help="Tokens of the longest text; the rest is cut off.")] = 512,
    batch_size: Batch = 8,
    resume_dir: Resume = None,
    split: Annotated[str, Option(help="Split of a data set that is no file.")] = "train",
    dtype: Precision = "auto",
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Collects the second moments of MODEL's keys on the texts of DATA: once a model, for all of its edits."""
    from hf_xai.transformers import KeyStatistics

    chosen = layers_of("--layers", layers)
    check_output(output, overwrite=overwrite, marker="statistics.json", sources=[model, data])
    rows = load_rows(data, split, "texts")
    if text_column not in rows.column_names:
        raise DataError(f"{data!r} has no column {text_column!r}; it has {', '.join(rows.column_names)}.")
    language_model, tokenizer = load_language_model(model, dtype, device)
    with quiet_transformers(progress_bars=True), warnings_as_notes():
        found = KeyStatistics.from_dataset(
            language_model,
            tokenizer,
            rows,
            chosen,
            modules=("feed_forward", "attention") if attention else ("feed_forward",),
            text_column=text_column,
            max_tokens=max_tokens,
            sequence_length=sequence_length,
            batch_size=batch_size,
            cache_dir=resume_dir,
        )
        with whole_folder(output) as folder:
            found.save_pretrained(folder)
    note(f"Saved to {output}.")
    if as_json:
        modules = found.record["modules"]
        print_json({"num_tokens": found.num_tokens, "fingerprint": found.fingerprint, "modules": modules})
        return
    lines = [(name, str(entry["layer"]), str(entry["size"])) for name, entry in found.record["modules"].items()]
    print_table(edit_table(f"Key statistics over {found.num_tokens} tokens", ("Module", "Layer", "Channels"), lines))


@app.command()
def locate(
    model: Model,
    prompt: Prompts = None,
    data: Annotated[
        Path | None,
        Option(
            help="File of prompts: .txt with one a line, or .json or .jsonl of texts, of objects with prompt and "
            "(present) target, or of requests, CounterFact or MQuAKE, whose answer is the old one."
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        Option(help="Present answer, one for each --prompt; the model's own next tokens without."),
    ] = None,
    n_query: Annotated[int | None, Option(min=1, help="Query layers to choose; 3 without, 1 of 8 at most.")] = None,
    n_value: Annotated[int | None, Option(min=1, help="Value layers to choose; 3 without, 2 of 8 at most.")] = None,
    top_neurons: Annotated[int, Option(min=1, help="Value neurons of each prompt.")] = 30,
    method: Annotated[
        Literal["two_stage", "exact"], Option(help="Whether only the best neurons are scored exactly, or all.")
    ] = "two_stage",
    rank_by: Annotated[
        Literal["block", "sum"], Option(help="Rank value layers as a whole, or by the sum of their neurons.")
    ] = "block",
    keep_wrong: Annotated[
        bool, Option("--keep-wrong", help="Keep prompts that the model answers otherwise than with their target.")
    ] = False,
    plot: Annotated[Path | None, Option(help="Picture of the scores: .png, .pdf or .svg.")] = None,
    output: Annotated[Path | None, Option(help="JSON file for the report with the scores of every prompt.")] = None,
    limit: Limit = None,
    batch_size: Batch = 8,
    resume_dir: Resume = None,
    dtype: Precision = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Scores MODEL's layers: which hold the answers to prompts ("value"), and which make those fire ("query")."""
    from hf_xai.transformers import locate

    if (data is None) == (not prompt):
        raise ConfigError("Give prompts, each with --prompt, or a file of them with --data; one of them, not both.")
    if target and (data is not None or len(target) != len(prompt or ())):
        raise ConfigError(f"--target is given once for each --prompt; got {len(target)} and {len(prompt or ())}.")
    check_picture(plot)
    texts, targets = (list(prompt or ()), target or None) if data is None else load_prompts(data, limit=limit)
    language_model, tokenizer = load_language_model(model, dtype, device)
    with (
        quiet_transformers(progress_bars=True),
        warnings_as_notes(),
        _as_options({"skip_wrong=False": "--keep-wrong"}),
    ):
        report = locate(
            language_model,
            tokenizer,
            texts,
            targets,
            n_query=n_query,
            n_value=n_value,
            top_neurons=top_neurons,
            method=method,
            rank_by=rank_by,
            skip_wrong=not keep_wrong,
            batch_size=batch_size,
            resume_dir=resume_dir,
        )
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        report.save(output)
        note(f"Wrote {output}.")
    if plot is not None:
        draw_located(report, plot)
    show_located(report, as_json)


@app.command()
def plan(
    model: Model,
    requests: Annotated[
        Path, Argument(help="File .json or .jsonl of edit requests, or of rows of CounterFact or MQuAKE.")
    ],
    output: Annotated[Path, Option(help="Folder for the edit, which is a PEFT adapter, too.")],
    method: Annotated[
        Literal["ace", "rome", "memit", "pmet", "emmet", "alphaedit"], Option(help="Editor; rome takes one request.")
    ] = "ace",
    statistics: Annotated[
        str | None, Option(help="Folder or Hub id of key statistics; without, other facts change, too.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="NAME=VALUE", help="Setting of the editor: v_lr=0.2.")
    ] = None,
    layers: Layers = None,
    query_layers: Annotated[str | None, Option(metavar="0,1", help="Of ACE; found by locate without.")] = None,
    value_layers: Annotated[str | None, Option(metavar="4,5", help="Of ACE; found by locate without.")] = None,
    after: Annotated[str | None, Option(help="Folder or Hub id of an edit that this one comes on top of.")] = None,
    hop_prompts: Annotated[
        bool, Option("--hop-prompts", help="Make multi-hop prompts of MQuAKE's chains; its questions are easier then.")
    ] = False,
    limit: Limit = None,
    resume_dir: Resume = None,
    dtype: Precision = "auto",
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Computes the change that makes MODEL give the new answers of REQUESTS; the model stays as it is."""
    from hf_xai.transformers import KnowledgeEditor

    given = {"layers": layers, "query_layers": query_layers, "value_layers": value_layers}
    chosen = {name: layers_of(f"--{name.replace('_', '-')}", text) for name, text in given.items()}
    config = editor_config(method, settings or (), **chosen)
    asked = load_requests(requests, limit=limit, hop_prompts=hop_prompts)
    check_output(output, overwrite=overwrite, marker="edit.json", sources=[model, *filter(None, (statistics, after))])
    require_peft("Saving an edit")
    moments = None if statistics is None else _load_statistics(statistics)
    earlier = None if after is None else _load_edits([after])[after]
    language_model, tokenizer = load_language_model(model, dtype, device)
    with quiet_transformers(progress_bars=True), warnings_as_notes():
        editor = KnowledgeEditor(language_model, tokenizer, config, moments)
        if earlier is not None:
            earlier.base.check_fits(language_model)
        result = editor.edit(asked, after=earlier, resume_dir=resume_dir)
        with whole_folder(output) as folder:
            result.save_pretrained(folder)
    note(f"Saved to {output}. See hf-xai edit diff and hf-xai edit apply.")
    show_planned(result, as_json)


@app.command()
def apply(
    model: Model,
    edits: Edits,
    output: Annotated[Path, Option(help="Folder for the edited model and its tokenizer.")],
    any_weights: AnyWeights = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Writes MODEL with edits in its weights, in the precision that it has, and what hf-xai edit revert needs."""
    check_output(output, overwrite=overwrite, marker="config.json", sources=[model, *edits])
    parts = _load_edits(edits)
    check_not_applied(model, parts)
    language_model, tokenizer = load_language_model(model, _saved_dtype(model), "cpu")
    with quiet_transformers(), warnings_as_notes(), _as_options({"check_weights=False": "--any-weights"}):
        edit = _sum_for(language_model, parts, any_weights)
        with whole_folder(output) as folder:
            record = write_edited(language_model, tokenizer, edit, parts, model, folder)
    note(f"Saved to {output}.")
    show_record(record, "Applied", as_json)


@app.command()
def revert(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder that hf-xai edit apply wrote.")],
    output: Annotated[Path | None, Option(help="Folder for the model as it was.")] = None,
    in_place: Annotated[bool, Option("--in-place", help="Write into DIR itself.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Gives a model the weights back that it had before the last hf-xai edit apply, bit for bit."""
    import hf_xai.transformers  # noqa: F401  which says what to install where torch is missing

    if (output is not None) == in_place:
        raise ConfigError("Give a folder with --output, or --in-place; one of them, not both.")
    if output is not None:
        check_output(output, overwrite=overwrite, marker="config.json", sources=[folder])
    record = revert_folder(folder, output)
    note(f"Saved to {folder if output is None else output}.")
    show_record(record, "Taken back", as_json)


@app.command()
def diff(
    model: Model,
    edits: Edits,
    prompt: Prompts = None,
    prompts: Annotated[
        Path | None, Option(help="File of prompts, as of hf-xai edit locate; those of the requests without.")
    ] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Length of an answer.")] = 8,
    limit: Limit = None,
    batch_size: Batch = 8,
    any_weights: AnyWeights = False,
    dtype: Precision = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Shows what MODEL answers without and with edits, greedily."""
    if prompt and prompts is not None:
        raise ConfigError("Give prompts, each with --prompt, or a file of them with --prompts; not both.")
    texts = prompt or (None if prompts is None else load_prompts(prompts, limit=limit)[0])
    parts = _load_edits(edits)
    check_not_applied(model, parts)
    language_model, tokenizer = load_language_model(model, dtype, device)
    with quiet_transformers(), warnings_as_notes(), _as_options({"check_weights=False": "--any-weights"}):
        edit = _sum_for(language_model, parts, any_weights)
        found = edit.diff(texts, tokenizer, max_new_tokens=max_new_tokens, batch_size=batch_size)
    if as_json:
        print_json(found.to_dict())
        return
    _, *rows = found.table()
    print_table(edit_table("Answers", ("Prompt", "Before", "After", ""), rows, left=4))
    print(f"{found.num_changed} of {len(found.rows)} answers changed.")


def _load_edits(sources: Sequence[str]) -> dict[str, "EditResult"]:
    """Edits by where they come from."""
    from hf_xai.transformers import EditResult

    for number, source in enumerate(sources):
        _check_place(source)
        if source in sources[:number]:
            raise ConfigError(f"The edit {source!r} is given twice.")
    with quiet_transformers():
        return {source: EditResult.from_pretrained(source) for source in sources}


def _load_statistics(source: str) -> "KeyStatistics":
    from hf_xai.transformers import KeyStatistics

    _check_place(source)
    with quiet_transformers():
        return KeyStatistics.from_pretrained(source)


def _check_place(source: str) -> None:
    """Refuses what is neither a folder nor can be an id of the Hub."""
    if not Path(source).is_dir() and (Path(source).is_absolute() or source.startswith(".") or source.count("/") > 1):
        raise ConfigError(f"There is no folder {source!r}.")


def _sum_for(model: Any, parts: Mapping[str, "EditResult"], any_weights: bool) -> "EditResult":
    """One edit that does what all do, of this model."""
    edit = reduce(add, parts.values())
    edit.base.check_fits(model, weights=not any_weights)
    edit.model = model
    return edit


def _saved_dtype(model: str) -> Dtype:
    """The precision that a model is saved in."""
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            found = getattr(AutoConfig.from_pretrained(model), "dtype", None)
        except (OSError, ValueError, KeyError):
            return "auto"  # loading the model then says what is wrong
    return cast(Dtype, str(found or "float32").removeprefix("torch."))


@contextmanager
def _as_options(names: Mapping[str, str]) -> Iterator[None]:
    """A block whose errors name options where the library names arguments."""
    try:
        yield
    except (ArtifactMismatchError, DataError) as error:
        text = str(error)
        for argument, option in names.items():
            text = text.replace(argument, option)
        raise type(error)(text) from error
