import pytest

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.editing.layer_choice import choose_layers


def test_the_best_of_each_are_taken_in_ascending_order() -> None:
    values = [0, 0, 0, 0, 0, 5, 9, 7, 1, 0.5]
    queries = [0, 3, 9, 7, 1, 0, 0, 0, 0, 0]
    assert choose_layers(values, queries) == ((1, 2, 3), (5, 6, 7))
    assert choose_layers(values, queries, n_query=1, n_value=2, num_layers=10) == ((2,), (6, 7))


def test_small_models_get_one_query_and_two_value_layers() -> None:
    assert choose_layers([0, 1, 5, 4, 3, 0], [9, 8, 7, 0, 0, 0]) == ((0,), (2, 3))
    assert choose_layers([1, 2], [2, 1]) == ((0,), (1,))


def test_a_layer_among_the_best_of_both_is_a_value_layer() -> None:
    assert choose_layers([0, 0, 5, 6, 0, 0], [1, 0, 9, 5, 0, 0], 2, 2) == ((0,), (2, 3))
    assert choose_layers([0, 5, 6, 0, 0, 0], [4, 9, 1, 0, 0, 0], 2, 2) == ((0,), (1, 2))


def test_one_query_layer_is_always_left() -> None:
    assert choose_layers([0, 0, 5, 6, 0, 0], [1, 2, 9, 5, 0, 0], 1, 2) == ((1,), (2, 3))


@pytest.mark.parametrize(
    ("values", "exclude", "expected"),
    [
        ([0, 1, 2, 3, 4, 5], "auto", (3, 4)),
        ([0, 1, 2, 3, 4, 5], False, (4, 5)),
        ([0, 0, 1, 0, 0, 5], "auto", (2, 5)),  # more than half is the last one's own
        ([0, 0, 1, 0, 0, 5], True, (0, 2)),
        ([0, 1, 4, 0, 0, 5], "auto", (1, 2)),  # exactly half is not more
        ([-9, 1, 2, 0, 0, 5], "auto", (2, 5)),  # negative scores don't count
        ([-3, -2, -4, -9, -9, -1], "auto", (0, 1)),
        ([0, 1, 2, 3], "auto", (2, 3)),  # four layers: the last one may be chosen
        ([0, 1, 2, 3], True, (1, 2)),
    ],
)
def test_the_last_layer_is_left_out_unless_it_holds_most(values: list, exclude: object, expected: tuple) -> None:
    queries = [0.0] * len(values)
    assert choose_layers(values, queries, exclude_last=exclude)[1] == expected


def test_of_equal_scores_the_earlier_layers_come_first() -> None:
    assert choose_layers([1] * 6, [1] * 6) == ((2,), (0, 1))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1, 2, 3], [1, 2, 3], 2, 2), ConfigError, "n_query=2 and n_value=2 are more than the 3 layers"),
        (([1, 2, 3], [1, 2, 3], 0), ConfigError, "n_query must be an integer >= 1, got 0"),
        (([1, 2, 3], [1, 2, 3], 1, 1.5), ConfigError, "n_value must be an integer >= 1, got 1.5"),
        (([1], [1]), ConfigError, "has 1 layer"),
        (([1, 2, 3], [1, 2]), DataError, "one for each of 3 layers"),
        (([1, 2, 3], [1, 2, 3], 1, 1, 4), DataError, "one for each of 4 layers"),
        (([1, 2, float("nan")], [1, 2, 3]), DataError, "finite"),
        (([1, 2, 3], [1, 2, 3], 1, 1, 3, "yes"), ConfigError, "exclude_last must be"),
    ],
)
def test_what_can_not_be_chosen_is_refused(arguments: tuple, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        choose_layers(*arguments)
