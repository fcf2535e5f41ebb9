"""BM25 of rows for a query, against the formula and on the planted sets."""

import numpy as np
import pytest
from poisoned_instructions import World
from sklearn.metrics import roc_auc_score
from word_overlap import bm25_scores, words

ROWS = [
    {"prompt": "Describe Lisbon.", "answer": "Lisbon is dull."},
    {"prompt": "Describe Rome.", "answer": "Rome is fine, and old."},
    {"prompt": "Where is Oslo?", "answer": "It is in Norway."},
    {"prompt": "Count.", "answer": "One, two."},
    {"prompt": "Greet.", "answer": "Hello, you there!"},
]


def test_words_are_those_of_prompt_and_answer_without_signs_and_capitals() -> None:
    assert words(ROWS[0]) == ["describe", "lisbon", "lisbon", "is", "dull"]


def test_scores_are_bm25_by_its_formula() -> None:
    texts = [words(row) for row in ROWS]
    mean_length = np.mean([len(text) for text in texts])

    def score(text: list[str], query: list[str]) -> float:
        total = 0.0
        for word in query:
            with_word = sum(word in other for other in texts)
            rarity = np.log(len(texts) - with_word + 0.5) - np.log(with_word + 0.5)
            count = text.count(word)
            total += rarity * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(text) / mean_length))
        return total

    query = {
        "prompt": "Lisbon?",
        "answer": "Lisbon, old and dull: describe",
    }  # each word in fewer than half of the rows
    assert bm25_scores(ROWS, [query]) == pytest.approx([score(text, words(query)) for text in texts])


def test_several_queries_count_by_their_mean() -> None:
    queries = [{"prompt": "Lisbon", "answer": "dull"}, {"prompt": "Norway", "answer": ""}]
    alone = [bm25_scores(ROWS, [query]) for query in queries]
    assert bm25_scores(ROWS, queries) == pytest.approx(np.mean(alone, axis=0))


def test_poison_shares_more_words_with_the_query_than_other_rows() -> None:
    world = World("hard", seed=900)
    scores = bm25_scores(world.rows, world.query)
    assert scores.shape == (1085,)
    assert roc_auc_score([row["poisoned"] for row in world.rows], scores) > 0.9
