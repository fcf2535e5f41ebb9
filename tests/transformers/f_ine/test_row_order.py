"""Row numbers of batches as the data loader draws them."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_xai.errors import ConfigError, DataError, UnsupportedModelError
from hf_xai.transformers.f_ine.row_order import RowOrder
from hf_xai.transformers.f_ine.sample_ids import CarriedRows, DrawnRows, SampleIds
from tests.transformers.f_ine.training_runs import rows


def loader(**arguments: object) -> DataLoader[int]:
    return DataLoader(range(10), batch_size=3, shuffle=True, **arguments)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine of one core
@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_come_in_the_order_of_the_batches(workers: int) -> None:
    batches = loader(num_workers=workers)
    original = batches.batch_sampler
    order = RowOrder(batches)
    with order.watched():
        assert len(batches) == 4
        for _ in range(2):  # two epochs, drawn anew
            for batch in batches:
                assert order.pop() == batch.tolist()
        iterator = iter(batches)  # an epoch that ends early leaves nothing for the next one
        next(iterator)
        for batch in batches:
            assert order.pop() == batch.tolist()
    assert batches.batch_sampler is original


def test_what_is_drawn_does_not_depend_on_being_watched() -> None:
    def drawn(watch: bool) -> list[list[int]]:
        torch.manual_seed(0)
        batches = loader()
        if not watch:
            return [batch.tolist() for batch in batches]
        with RowOrder(batches).watched():
            return [batch.tolist() for batch in batches]

    assert drawn(True) == drawn(False)


def test_batches_that_a_resumed_run_throws_away_do_not_count() -> None:
    batches = loader()
    order = RowOrder(batches, skipped=2)
    with order.watched():
        seen = [batch.tolist() for batch in batches]
        assert [order.pop(), order.pop()] == seen[2:]
        with pytest.raises(DataError, match="did not draw"):
            order.pop()
        seen = [batch.tolist() for batch in batches]
        assert [order.pop() for _ in range(4)] == seen


def test_the_watching_sampler_is_the_original_in_everything_else() -> None:
    batches = loader()
    with RowOrder(batches).watched():
        assert batches.batch_sampler.batch_size == 3
        assert len(batches.batch_sampler) == 4
        assert copy.copy(batches.batch_sampler).batch_size == 3
        assert not hasattr(batches.batch_sampler, "set_epoch")


def test_loaders_without_row_numbers_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(4))

    with pytest.raises(UnsupportedModelError, match="use attach_influence"):
        RowOrder(DataLoader(Stream(), batch_size=2))
    with pytest.raises(UnsupportedModelError, match="use attach_influence"):
        RowOrder(DataLoader(range(4), batch_size=None))  # type: ignore[arg-type]

    class DataLoaderDispatcher:
        base_dataloader = DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]

    with pytest.raises(UnsupportedModelError, match="dispatch_batches"):
        RowOrder(DataLoaderDispatcher())


def test_ids_come_from_what_is_given_then_from_the_column_then_from_the_place() -> None:
    dataset = rows(3).add_column("name", ["a", "b", "c"])
    assert SampleIds.of(dataset, None, None).ids.tolist() == [0, 1, 2]
    assert SampleIds.of(dataset, "name", None).ids.tolist() == ["a", "b", "c"]
    assert SampleIds.of(dataset, "name", [7, 8, 9]).ids.tolist() == [7, 8, 9]
    assert SampleIds.of(dataset, "name", None).positions(["c", "a"]) == [2, 0]
    with pytest.raises(DataError, match="no training row with the id 'd'"):
        SampleIds.of(dataset, "name", None).positions(["a", "d"])
    with pytest.raises(ConfigError, match="no column 'nom'"):
        SampleIds.of(dataset, "nom", None)
    with pytest.raises(DataError, match="unique; 1 come more than once, as \\['a'\\]"):
        SampleIds([*"abca"])


def test_packed_rows_have_an_id_a_segment() -> None:
    from datasets import Dataset

    packed = Dataset.from_list([{"id": [4, 4, 6, 6, 6]}, {"id": [9, 4, 4]}])
    ids = SampleIds.of(packed, "id", None)
    assert ids.is_packed
    assert ids.ids.tolist() == [4, 6, 9]
    assert [ids.of_dataset_row(0), ids.of_dataset_row(1)] == [[0, 1], [2, 0]]
    lengths = Dataset.from_list([{"id": [4, 4, 4, 4], "seq_lengths": [2, 2]}])
    assert SampleIds.of(lengths, "id", None).of_dataset_row(0) == [0, 0]


def test_a_collator_that_merges_rows_is_told() -> None:
    batches = loader()
    order = RowOrder(batches)
    with order.watched():
        next(iter(batches))
        with pytest.raises(DataError, match="has 2 rows, 3 were drawn"):
            DrawnRows(order, SampleIds(range(10))).pop(2)


def test_rows_of_a_stream_are_told_by_the_ids_that_come_along() -> None:
    carried = CarriedRows()
    carried.push(["x", "y"])
    carried.push(["y", "z"])
    assert carried.pop(2) == [0, 1]
    assert carried.pop(2) == [1, 2]
    assert carried.ids == ["x", "y", "z"]
    with pytest.raises(DataError, match="has 2 rows and 0 sample ids"):
        carried.pop(2)
