import numpy as np
import pytest

from hf_xai.errors import ConfigError, DataError
from hf_xai.transformers.feature_gaps.directions import (
    KINDS,
    LANCZOS_SIZE,
    ContrastScores,
    contrast_differences,
    contrast_direction,
    direction_weights,
    top_eigenvector,
)
from tests.transformers.feature_gaps.planted_answers import planted_answers


def differences(rows: int, channels: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((rows, channels)) * np.linspace(0.2, 2, channels) + 0.7


def test_centred_pca_is_the_top_eigenvector_of_the_covariance() -> None:
    matrix = differences(200, 12)
    values, vectors = np.linalg.eigh(np.cov(matrix.T))
    found = contrast_direction(matrix, "pca")
    assert abs(found.vector @ vectors[:, -1]) == pytest.approx(1, abs=1e-12)
    assert found.explained_variance_ratio == pytest.approx(values[-1] / values.sum())


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (LANCZOS_SIZE + 20, LANCZOS_SIZE + 60)], ids=str)
@pytest.mark.parametrize("kind", ["pca", "pca_uncentered"])
def test_both_gram_matrices_give_the_top_right_singular_vector(shape: tuple[int, int], kind: str) -> None:
    matrix = differences(*shape)
    reference = np.linalg.svd(matrix - matrix.mean(axis=0) if kind == "pca" else matrix)[2][0]
    assert abs(contrast_direction(matrix, kind).vector @ reference) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [50, LANCZOS_SIZE + 20])
def test_inner_products_alone_give_the_same_direction(kind: str, rows: int) -> None:
    matrix = differences(rows, 70)
    weights = direction_weights(matrix @ matrix.T, kind)
    assert weights is not None
    np.testing.assert_allclose(matrix.T @ weights, contrast_direction(matrix, kind).vector, atol=1e-8)


def test_a_planted_direction_is_recovered_from_few_rows_in_many_channels() -> None:
    generator = np.random.default_rng(1)
    planted = np.eye(256)[7]
    sizes = 10 * generator.standard_normal((64, 1))
    matrix = sizes * planted + generator.standard_normal((64, 256)) / np.sqrt(256) * 10 / 10
    assert abs(contrast_direction(matrix, "pca").vector @ planted) > 0.99


def test_a_constant_shift_leaves_centred_pca_alone_and_turns_the_mean() -> None:
    matrix, shift = differences(60, 20), 50 * np.eye(20)[3]
    unmoved = [contrast_direction(matrix, kind).vector for kind in ("pca", "mean_diff")]
    moved = [contrast_direction(matrix + shift, kind).vector for kind in ("pca", "mean_diff")]
    assert abs(unmoved[0] @ moved[0]) == pytest.approx(1, abs=1e-9)
    assert abs(unmoved[1] @ moved[1]) < 0.9
    assert moved[1][3] > 0.95


def test_the_mean_difference_has_unit_length() -> None:
    matrix = differences(30, 8)
    mean = matrix.mean(axis=0)
    found = contrast_direction(matrix, "mean_diff")
    np.testing.assert_allclose(found.vector, mean / np.linalg.norm(mean))
    assert found.cosine_to_mean == pytest.approx(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_direction_points_along_the_mean_difference(kind: str) -> None:
    matrix = differences(30, 8)
    for side in (matrix, -matrix):
        assert contrast_direction(side, kind).vector @ side.mean(axis=0) > 0


def test_what_a_direction_says_about_itself_has_closed_forms() -> None:
    sizes = np.array([1.0, 2.0, 3.0, 6.0])
    along_one_channel = contrast_direction(sizes[:, None] * np.eye(5)[2], "pca")
    assert along_one_channel.explained_variance_ratio == pytest.approx(1)
    assert along_one_channel.largest_share == pytest.approx(1)
    assert along_one_channel.cosine_to_mean == pytest.approx(1)
    evenly = contrast_direction(sizes[:, None] * np.ones(5), "pca_uncentered")
    assert evenly.largest_share == pytest.approx(1 / 5)
    # Varies along one channel, and is shifted at 45 degrees to it.
    turned = contrast_direction(np.array([[-1.0, 1.0], [3.0, 1.0]]), "pca")
    assert turned.cosine_to_mean == pytest.approx(np.sqrt(0.5))


@pytest.mark.parametrize("rows", [6, 40])
def test_equal_differences_have_no_direction_of_variation(rows: int) -> None:
    equal = np.tile(np.linspace(1, 2, 20), (rows, 1))
    for matrix in (equal, equal * (1 + 1e-8 * np.random.default_rng(0).standard_normal(equal.shape))):
        with pytest.raises(DataError, match="all equal, so direction='pca'"):
            contrast_direction(matrix, "pca")
        assert direction_weights(matrix @ matrix.T, "pca") is None
        assert contrast_direction(matrix, "pca_uncentered").cosine_to_mean == pytest.approx(1)
        assert direction_weights(matrix @ matrix.T, "pca_uncentered") is not None


def test_without_a_mean_there_is_no_mean_direction() -> None:
    matrix = np.array([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0]])
    with pytest.raises(DataError, match="mean difference between the two prompts is zero"):
        contrast_direction(matrix, "mean_diff")
    assert direction_weights(matrix @ matrix.T, "mean_diff") is None


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_change_nothing_have_no_direction(kind: str) -> None:
    with pytest.raises(DataError, match=f"direction='{kind}' has no direction"):
        contrast_direction(np.zeros((5, 3)), kind)
    for size in (5, LANCZOS_SIZE + 1):
        assert direction_weights(np.zeros((size, size)), kind) is None


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="kind must be one of .*, got 'svd'"):
        contrast_direction(differences(5, 4), "svd")
    with pytest.raises(DataError, match=r"finite and \(answers, channels\), got shape \(2, 2\)"):
        contrast_direction([[1, np.nan], [0, 1]], "pca")
    with pytest.raises(DataError, match=r"got shape \(3,\)"):
        contrast_direction([1, 2, 3], "pca")


def test_the_top_eigenvector_is_found_without_a_gap_below_it() -> None:
    vector = top_eigenvector(np.eye(LANCZOS_SIZE + 1))
    assert np.linalg.norm(vector) == pytest.approx(1)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_products_give_the_scores_of_each_subsets_own_directions(kind: str) -> None:
    data, _ = planted_answers(40)
    features, positions = ("honesty", "context_comprehension"), (0, 2)
    subsets = [np.arange(0, 40, 2), np.arange(25)]
    contrasts = ContrastScores(data, features, positions)
    contrasts.prepare(subsets, KINDS)
    for rows in subsets:
        scores = contrasts.along(rows, kind)
        for f, feature in enumerate(features):
            for k, position in enumerate(positions):
                vector = contrast_direction(contrast_differences(data, feature, position)[rows], kind).vector
                expected = data.states["standard"][:, position].astype(np.float64) @ vector
                np.testing.assert_allclose(scores[:, f, k], expected, atol=1e-9)
        one_by_one = ContrastScores(data, features, positions).along(rows, kind)
        np.testing.assert_array_equal(one_by_one, scores)


def test_a_layer_without_a_direction_is_named() -> None:
    data, _ = planted_answers(20)
    for side in ("honesty.positive", "honesty.negative"):
        data.states[side][:, 1] = 1
    with pytest.raises(DataError, match="honesty, hidden state 2: the differences .* all equal"):
        ContrastScores(data, ("context_reliance", "honesty"), (0, 1)).along(np.arange(20), "pca")


def test_a_feature_whose_states_are_absent_is_named() -> None:
    data, _ = planted_answers(20)
    del data.states["honesty.negative"]
    with pytest.raises(DataError, match="'honesty' needs the states of 'honesty.negative'.*config.features"):
        ContrastScores(data, ("honesty",), (0,)).along(np.arange(20), "pca")


def test_comprehension_is_the_standard_prompt_minus_the_resolved_one() -> None:
    data, _ = planted_answers(20)
    resolved = data.states["context_comprehension.negative"][:, 1]
    expected = data.states["standard"][:, 1].astype(np.float64) - resolved
    np.testing.assert_array_equal(contrast_differences(data, "context_comprehension", 1), expected)
