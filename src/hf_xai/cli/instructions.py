"""Instructions as the verbs take them: rows of a file or data set, encoded with a model's chat template."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_xai.cli.data_sets import load_rows, renamed_columns
from hf_xai.cli.printing import first_line
from hf_xai.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

KINDS = (("messages",), ("prompt", "completion"), ("text",))
COLUMNS = ("messages", "prompt", "completion", "text", "query")
IGNORED = -100  # label of a token without loss
ARROW = " → "


@dataclass(frozen=True)
class Instructions:
    """Rows to train on, or to ask about.

    Attributes:
        source: What the user asked for.
        rows: One mapping a row, with ``messages``, with ``prompt`` and ``completion``, or with ``text``.
        ids: Id of each row: its position in the source, counted from 0, or the value of the column that was named.
        column_names: All columns of the source.
    """

    source: str
    rows: list[dict[str, Any]]
    ids: list[Any]
    column_names: tuple[str, ...]

    def texts(self) -> dict[Any, str]:
        """What people are shown of each row, by its id: the last turn before the answer, and the answer."""
        return {one: shown_text(row) for one, row in zip(self.ids, self.rows, strict=True)}


@dataclass(frozen=True)
class EncodedRows:
    """Rows as a collator takes them.

    Attributes:
        dataset: With ``input_ids``, ``attention_mask`` and ``labels``; the labels of a prompt are -100.
        ids: Id of each row.
        names: Query that each row belongs to.
        left_out: Ids of the rows whose answer begins beyond the longest length.
    """

    dataset: "Dataset"
    ids: list[Any]
    names: list[str]
    left_out: list[Any]

    def by_query(self) -> dict[str, "Dataset"]:
        """The rows of each query by its name, in the order in which names come up."""
        return {
            name: self.dataset.select([place for place, one in enumerate(self.names) if one == name])
            for name in dict.fromkeys(self.names)
        }


def load_instructions(
    data: str,
    *,
    split: str = "train",
    columns: Sequence[str] = (),
    id_column: str | None = None,
    limit: int | None = None,
) -> Instructions:
    """Reads rows with ``messages``, ``prompt`` and ``completion``, or ``text``; the first kind that is there.

    Args:
        data: A JSON, JSON-lines, CSV or Parquet file, a folder that ``datasets`` can load, or the id of a data set on
            the Hub.
        split: Split of a folder or of a data set of the Hub.
        columns: Settings such as ``prompt=instruction``: the name that we use, and the one in the data. One whose
            column is absent does nothing; `check_columns` finds those that do nothing anywhere.
        id_column: Column with a unique id for each row; None takes positions.
        limit: Number of rows to read, from the start; all if None.

    Raises:
        ConfigError: If there is no such file, data set or split, or a setting can't be read.
        DataError: If there is no row, a column is missing, or a row is not what its kind needs.
        MissingDependencyError: If ``datasets`` is missing.
    """
    renamed = renamed_columns(columns, COLUMNS)
    dataset = load_rows(data, split, "rows")
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    if not len(dataset):
        raise DataError(f"{data!r} holds no row.")
    known = tuple(dataset.column_names)
    if id_column is not None and id_column not in known:
        raise DataError(f"{data!r} has no column {id_column!r} with ids; it has {', '.join(known)}.")
    wanted = {name: renamed[name] if renamed.get(name) in known else name for name in COLUMNS}
    kind = next((kind for kind in KINDS if all(wanted[name] in known for name in kind)), None)
    if kind is None:
        raise DataError(
            f"{data!r} has no column messages, no prompt and completion, and no text; it has {', '.join(known)}. Name "
            "others with --column, such as --column prompt=instruction --column completion=output."
        )
    kept = {name: wanted[name] for name in kind}
    if wanted["query"] in known and wanted["query"] not in kept.values():  # else it is a prompt of that name
        kept["query"] = wanted["query"]
    values = {name: list(dataset[source]) for name, source in kept.items()}
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    for number, row in enumerate(rows):
        problem = _problem(row)
        if problem:
            raise DataError(f"Row {number} of {data!r} {problem}")
    ids = list(range(len(rows))) if id_column is None else list(dataset[id_column])
    repeated = [one for one, count in Counter(ids).items() if count > 1 or not isinstance(one, int | str)]
    if repeated:
        raise DataError(f"The ids in column {id_column!r} must be unique numbers or texts; {repeated[0]!r} is not.")
    return Instructions(data, rows, ids, known)


def check_columns(columns: Sequence[str], *read: Instructions) -> None:
    """Refuses settings of columns that nothing that was read has: slips.

    Raises:
        DataError: Names the first of them.
    """
    known = {name for one in read for name in one.column_names}
    for name, source in renamed_columns(columns, COLUMNS).items():
        if source not in known:
            raise DataError(
                f"--column {name}={source}: there is no column {source!r}, but {', '.join(sorted(known))}."
            )


def encode(
    instructions: Instructions, tokenizer: "PreTrainedTokenizerBase", max_length: int, *, may_leave_out: bool = False
) -> EncodedRows:
    """Encodes rows, with the chat template of the tokenizer where it has one; only the last answer has labels.

    Without a template, prompt and completion are put one after the other, with the end-of-sequence token behind.
    Text without a prompt is learned as a whole. What is longer than ``max_length`` tokens is cut off at its end.

    Args:
        instructions: The rows.
        tokenizer: That of the model.
        max_length: Longest row, in tokens.
        may_leave_out: Whether rows without a token to learn are left out; an error otherwise.

    Raises:
        ConfigError: If rows are messages and the tokenizer has no chat template.
        DataError: If the template refuses a row, or no token is left to learn.
    """
    from datasets import Dataset
    from huggingface_hub.utils import tqdm

    found: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    ids, names, left_out = [], [], []
    bar = tqdm(instructions.rows, f"Encoding {Path(instructions.source).name}", unit="row")
    for number, (row, one) in enumerate(zip(bar, instructions.ids, strict=True)):
        prompt, whole = _tokens(row, tokenizer, f"Row {number} of {instructions.source!r}")
        hidden = _common_length(prompt, whole)
        tokens = whole[:max_length]
        if len(tokens) <= max(hidden, 1):
            if not may_leave_out:
                raise DataError(
                    f"Row {number} of {instructions.source!r} has no token to learn: its prompt alone has {hidden} "
                    f"tokens, --max-length is {max_length}."
                )
            left_out.append(one)
            continue
        found["input_ids"].append(tokens)
        found["attention_mask"].append([1] * len(tokens))
        found["labels"].append([IGNORED] * hidden + tokens[hidden:])
        ids.append(one)
        names.append("query" if row.get("query") is None else str(row["query"]))
    if not ids:
        raise DataError(f"No row of {instructions.source!r} has a token to learn within --max-length {max_length}.")
    return EncodedRows(Dataset.from_dict(found), ids, names, left_out)


def shown_text(row: Mapping[str, Any]) -> str:
    """A row on one line: the turn before the answer, an arrow, and the answer."""
    if "text" in row:
        return " ".join(row["text"].split())
    *_, before, answer = [{"content": ""}, *_messages(row)]
    return " ".join(f"{before['content']}{ARROW}{answer['content']}".split())


def _problem(row: Mapping[str, Any]) -> str | None:
    """What keeps a row from being used, as the end of a sentence."""
    if "text" in row:
        return None if isinstance(row["text"], str) and row["text"].strip() else "has no text."
    if "messages" not in row and not isinstance(row["completion"], str | list):
        return f"has a completion that is no text and no list of messages, but {row['completion']!r}."
    if "messages" not in row and not isinstance(row["prompt"], str | list):
        return f"has a prompt that is no text and no list of messages, but {row['prompt']!r}."
    messages = row["messages"] if "messages" in row else _messages(row)
    if not isinstance(messages, list) or not all(_is_message(one) for one in messages):
        return "has messages that are no list of role and content, both text."
    if not messages or messages[-1]["role"] != "assistant":
        return "does not end with a message of the assistant, which is what is learned."
    if not messages[-1]["content"].strip():
        return "has an empty answer."
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    if "messages" in row:
        return list(row["messages"])
    turns: list[dict[str, str]] = []
    for role, name in (("user", "prompt"), ("assistant", "completion")):
        turns += row[name] if isinstance(row[name], list) else [{"role": role, "content": row[name]}]
    return turns


def _tokens(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", where: str) -> tuple[list[int], list[int]]:
    """Tokens of the prompt and of the whole row."""
    if "text" in row:
        return [], _plain(tokenizer, row["text"])
    if tokenizer.chat_template is None:
        if "messages" in row or not (isinstance(row["prompt"], str) and isinstance(row["completion"], str)):
            raise ConfigError(f"{where} is a list of messages, and the model's tokenizer has no chat template.")
        return tokenizer(row["prompt"])["input_ids"], _plain(tokenizer, row["prompt"] + row["completion"])
    from jinja2 import TemplateError

    messages = _messages(row)
    try:
        before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError as error:
        raise DataError(f"{where} is refused by the model's chat template: {first_line(error)}") from error
    # The template writes the special tokens itself.
    prompt, tokens = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, whole))
    return prompt, tokens


def _plain(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    tokens = list(tokenizer(text)["input_ids"])
    end = tokenizer.eos_token_id
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _common_length(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """Tokens of the prompt that the whole begins with: a token may reach across the border of the two."""
    for place, (left, right) in enumerate(zip(prompt, whole, strict=False)):
        if left != right:
            return place
    return min(len(prompt), len(whole))
