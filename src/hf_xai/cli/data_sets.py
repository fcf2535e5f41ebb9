"""Rows that a verb is given: a file, a folder of datasets, or a data set of the Hub."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hf_xai.cli.printing import first_line
from hf_xai.errors import ConfigError, DataError, MissingDependencyError

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_rows(data: str, split: str, what: str) -> "Dataset":
    """Reads the rows of ``data``.

    Args:
        data: File of one of ``READERS``, folder of ``datasets.save_to_disk``, or id of a data set.
        split: Split of a data set with several.
        what: What the rows are, for errors.

    Raises:
        ConfigError: If there is no such file, folder or data set, or it can't be read.
        DataError: If a file is empty.
        MissingDependencyError: If datasets is missing.
    """
    path = Path(data)
    if path.is_file():
        if path.suffix not in READERS:
            raise ConfigError(f"{data!r} must be a file of {', '.join(READERS)}, got {path.suffix or 'no ending'!r}.")
        if not path.stat().st_size:
            raise DataError(f"{data!r} holds no row.")
    elif not path.is_dir() and (
        path.is_absolute() or data.startswith(".") or data.count("/") > 1 or path.suffix in READERS
    ):
        raise ConfigError(f"There is no file or folder {data!r}.")
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError:
        raise MissingDependencyError(f"Reading {data!r} needs datasets: pip install 'hf-xai[transformers]'") from None
    with quiet_datasets():
        try:
            if path.is_file():
                return load_dataset(READERS[path.suffix], data_files=data, split="train")
            if not any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
                return load_dataset(data, split=split)
            saved = load_from_disk(data)
            return saved[split] if isinstance(saved, DatasetDict) else saved
        except Exception as error:  # readers raise of many libraries; each means that the data can't be read
            raise ConfigError(f"Can't read {what} from {data!r}: {first_line(error)}") from error


def renamed_columns(columns: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """What ``--column NAME=COLUMN`` asks for: the data's column by the name that a verb knows it by."""
    renamed = {}
    for setting in columns:
        name, equals, source = setting.partition("=")
        if not equals or not source or name not in known:
            raise ConfigError(f"--column takes NAME=COLUMN with NAME of {', '.join(known)}; got {setting!r}.")
        renamed[name] = source
    return renamed


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """A block without progress bars and remarks of datasets, which then are as they were."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    with ExitStack() as undo:
        undo.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if not are_progress_bars_disabled():
            disable_progress_bars()
            undo.callback(enable_progress_bars)
        yield
