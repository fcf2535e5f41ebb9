import json
from pathlib import Path

import pytest
import render
from harness import BenchmarkError

from tests.benchmarks.results import hyca_results

ROOT = Path(__file__).parents[2]
SHORT = "<!-- benchmark:hyca:begin -->\n<!-- benchmark:hyca:end -->"
PARTS = ("methods", "costs", "goals")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with results, a README and a page that show them."""
    save(tmp_path, hyca_results())
    (tmp_path / "README.md").write_text(f"# Title\n\n{SHORT}\n\nAfter.\n")
    page = tmp_path / "docs" / "diffusers" / "hyca.md"
    page.parent.mkdir(parents=True)
    markers = [
        f"<!-- benchmark:hyca:{part}:begin -->\nto be replaced\n<!-- benchmark:hyca:{part}:end -->\n" for part in PARTS
    ]
    page.write_text("Before.\n".join(markers))
    return tmp_path


def save(root: Path, results: dict) -> None:
    path = root / "benchmarks" / "results" / "hyca.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results))


def rewrite(root: Path) -> None:
    for path, text in render.stale_documents(root).items():
        path.write_text(text)
    for path, (name, key) in render.stale_plots(root).items():
        render.draw_plot(root, path, name, key)


def test_rewriting_fills_every_table_once_and_leaves_the_rest(root: Path) -> None:
    assert set(render.stale_documents(root)) == {root / "README.md", root / "docs" / "diffusers" / "hyca.md"}
    rewrite(root)
    assert not render.stale_documents(root)
    readme = (root / "README.md").read_text()
    assert readme.startswith("# Title\n\n<!-- benchmark:hyca:begin -->\n| Full passes |")
    assert readme.endswith("\n<!-- benchmark:hyca:end -->\n\nAfter.\n")
    assert "\nstale\n" not in (root / "docs" / "diffusers" / "hyca.md").read_text()


def test_the_short_table_has_a_line_for_each_budget_and_says_what_was_measured() -> None:
    shown = render.filled(SHORT, {"hyca": hyca_results()}, "README.md")
    lines = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(lines) == 4
    assert lines[2] == (
        "| 9 | 0.0800 | **0.0200** | 0.250 (0.100 to 0.900) | 30.0 / 30.0 dB | 5.00x / 4.00x | 5.56x |"
    )
    assert "Measured on a 32x32 model" in shown
    assert "A Processor, 2 cores, 2026-01-02" in shown


@pytest.mark.parametrize("part", ["", *PARTS])
def test_every_part_is_a_table_of_even_lines(part: str) -> None:
    table = render.view("hyca").TABLES[part](hyca_results()).partition("\n\n")[0]
    columns = {line.count("|") for line in table.splitlines()}
    assert len(columns) == 1
    assert len(table.splitlines()) > 2


def test_newer_results_make_tables_and_plots_stale(root: Path) -> None:
    rewrite(root)
    assert not render.stale_documents(root)
    assert not render.stale_plots(root)
    save(root, hyca_results(error=0.03))
    assert len(render.stale_documents(root)) == 2
    assert set(render.stale_plots(root)) == {root / "docs" / "assets" / "hyca-error.png"}
    rewrite(root)
    assert not render.stale_plots(root)


def test_an_edit_by_hand_is_noticed(root: Path) -> None:
    rewrite(root)
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("0.0200", "0.0100"))
    assert set(render.stale_documents(root)) == {readme}


def test_results_that_nothing_shows_are_refused(root: Path) -> None:
    (root / "README.md").write_text("# Title\n")
    (root / "docs" / "diffusers" / "hyca.md").write_text("# HyCa\n")
    with pytest.raises(BenchmarkError, match=r"No document shows the benchmark 'hyca'; put <!-- benchmark:hyca:begin"):
        render.stale_documents(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- benchmark:hyca:begin -->", "odd number"),
        ("<!-- benchmark:hyca:end --><!-- benchmark:hyca:begin -->", "is followed by"),
        ("<!-- benchmark:hyca:begin --><!-- benchmark:hyca:goals:end -->", "is followed by"),
        ("<!-- benchmark:fud:begin --><!-- benchmark:fud:end -->", r"no results/fud\.json"),
        ("<!-- benchmark:hyca:magic:begin --><!-- benchmark:hyca:magic:end -->", "shows 'magic'"),
    ],
    ids=["no end", "wrong order", "other end", "no results", "no such part"],
)
def test_markers_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        render.filled(text, {"hyca": hyca_results()}, "README.md")


def test_readme_and_docs_show_the_committed_results() -> None:
    if render.load_results(ROOT):  # none before the first scored run
        stale = [*render.stale_documents(ROOT), *render.stale_plots(ROOT)]
        assert not [str(path.relative_to(ROOT)) for path in stale]
