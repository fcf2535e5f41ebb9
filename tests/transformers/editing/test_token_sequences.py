from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing.token_sequences import TokenSequences, read_sequences
from tests.tiny.causal_lms import tiny_chat_tokenizer
from tests.transformers.editing.statistics_texts import texts

LINES = texts(9)


def read(dataset: Any, **settings: Any) -> TokenSequences:
    return read_sequences(dataset, tiny_chat_tokenizer(), **settings)


def encoded(lines: list[str]) -> list[list[int]]:
    tokenizer = tiny_chat_tokenizer()
    return [tokenizer(line)["input_ids"] for line in lines]


def as_lists(sequences: TokenSequences) -> list[list[int]]:
    return [sequences[index].tolist() for index in range(len(sequences))]


def test_each_text_is_by_itself_and_long_ones_are_cut() -> None:
    expected = [ids[start : start + 7] for ids in encoded(LINES) for start in range(0, len(ids), 7)]
    assert as_lists(read(LINES, sequence_length=7)) == expected
    assert as_lists(read(LINES)) == encoded(LINES)
    assert as_lists(read(LINES, sequence_length=1)) == [[token] for ids in encoded(LINES) for token in ids]


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 10**9])
def test_reading_stops_at_the_number_of_tokens(max_tokens: int) -> None:
    flat = [token for ids in encoded(LINES) for token in ids]
    found = read(LINES, sequence_length=7, max_tokens=max_tokens)
    assert found.tokens.tolist() == flat[:max_tokens]
    assert found.lengths.min() > 0
    assert found.num_tokens == found.lengths.sum() == min(max_tokens, len(flat))


def test_no_more_texts_are_read_than_needed() -> None:
    def endless() -> Any:
        while True:
            yield from LINES

    assert read(endless(), max_tokens=5000).num_tokens == 5000


def test_all_kinds_of_rows_give_the_same() -> None:
    rows = [{"text": line, "id": index} for index, line in enumerate(LINES)]
    dataset = Dataset.from_list(rows)
    for given in (LINES, rows, dataset, dataset.to_iterable_dataset(), dataset.with_format("torch"), iter(LINES)):
        assert read(given).fingerprint() == read(LINES).fingerprint()
    renamed = dataset.rename_column("text", "body")
    assert read(renamed, text_column="body").fingerprint() == read(LINES).fingerprint()
    assert read(["", " \n", *LINES, "\t"]).num_texts == len(LINES)


def test_the_fingerprint_knows_tokens_and_cuts() -> None:
    kinds = [read(LINES), read(LINES[::-1]), read(LINES, sequence_length=7), read(LINES[:-1]), read(["".join(LINES)])]
    assert len({found.fingerprint() for found in kinds}) == 5


@pytest.mark.parametrize("batch_tokens", [1, 30, 10**6])
def test_batches_hold_every_sequence_once_and_no_padding(batch_tokens: int) -> None:
    sequences = read(texts(40), sequence_length=10)
    order = sequences.longest_first(range(len(sequences)))
    seen: list[int] = []
    for indices, input_ids in sequences.batches(order, batch_tokens):
        assert input_ids.numel() <= max(batch_tokens, 10)
        assert input_ids.tolist() == [sequences[index].tolist() for index in indices]
        seen += indices
    assert seen == order
    assert sorted(seen) == list(range(len(sequences)))
    assert (np.diff(sequences.lengths[order]) <= 0).all()


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ([], "dataset is empty"),
        (["", "  "], "dataset is empty"),
        (Dataset.from_dict({"text": []}), "dataset is empty"),
        (Dataset.from_dict({"body": ["a"], "id": [0]}), r"no column 'text'; it has body, id\. Pass text_column="),
        ([{"text": "a"}, {"body": "b"}], "Row 1 has no 'text'; it has body"),
        (["a", None], "Row 1 must be a text, got NoneType"),
        ("a text", "a list of texts, got str"),
        (DatasetDict(train=Dataset.from_dict({"text": ["a"]})), "DatasetDict; choose a split of it, one of train"),
        (7, "got int"),
    ],
)
def test_what_holds_no_texts_is_refused(dataset: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(dataset)


@pytest.mark.parametrize("settings", [{"max_tokens": 0}, {"sequence_length": 0}, {"sequence_length": None}])
def test_numbers_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        read(LINES, **settings)
