"""What README and docs show of results/all_in.json."""

from collections.abc import Mapping
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from views.showing import Plot, Results, goals, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

TITLES = {
    "label_propagation": "label propagation, no features",
    "raw_ridge": "ridge regression on the features, no edges",
    "majority": "most frequent class",
    "bag_of_tags": "logistic regression on counts of node tags",
    "sgc": "SGC",
    "gcn": "GCN from scratch",
    "gin": "GIN from scratch",
    "zero_padded": "GCN on zero-padded features",
    "training_free": "**training-free**, `TrainingFreeEncoder`",
    "projection_only_untrained": "projection only, untrained",
    "projection_only": "projection only (no K), pretrained",
    "all_in_untrained": "ALL-IN, untrained",
    "untrained": "ALL-IN, untrained",
    "all_in_k0": "ALL-IN, k = 0",
    "all_in": "**ALL-IN**",
}
"""In the order of the tables: what a user can have without a network comes first."""
SHORT = ("label_propagation", "raw_ridge", "bag_of_tags", "sgc", "gcn", "gin", "training_free", "projection_only",
         "all_in_untrained", "all_in")  # fmt: skip


def summary(results: Results) -> str:
    """Accuracy on the real targets."""
    targets = targets_of(results)
    lines = []
    for name in SHORT:
        found = {target: best(results, "transfer", name, target=target) for target in targets}
        if any(found.values()):
            lines.append([TITLES[name], *(accuracy(row) for row in found.values())])
    seeds = len(results["seeds"]["nodes"])
    machine = results["machine"]
    note = (
        f"Accuracy on graphs that no encoder has seen, means over {seeds} seeds (GIN: one). Cora and CiteSeer: public "
        "split, encoders pretrained on the other one and on made-up graphs; molecules: ten folds, encoders "
        f"pretrained on the other four sets. {machine['processor']}, {results['date']}; `{results['command']}`."
    )
    return f"{table(['', *targets], lines)}\n\n{note}"


def transfer(results: Results) -> str:
    """Every row of the real targets."""
    return with_targets(results, "transfer")


def default_sizes(results: Results) -> str:
    """The citation networks with an encoder of the default sizes."""
    return with_targets(results, "transfer_default")


def with_targets(results: Results, part: str) -> str:
    targets = targets_of(results, part)
    lines = []
    for name in TITLES:
        counts = sorted({row["projections"] for row in rows_of(results, part) if row["method"] == name})
        for count in counts:
            found = [one(results, part, name, target=target, projections=count) for target in targets]
            lines.append([TITLES[name], count if has_projections(name) else "", *map(with_range, found)])
    return table(["Accuracy, mean (least to most over seeds)", "T", *targets], lines)


def zero_shot(results: Results) -> str:
    """Experiment A."""
    names = list(next(iter(rows_of(results, "zero_shot")))["by_target"])
    lines = [
        [
            TITLES[row["method"]],
            row["projections"] if has_projections(row["method"]) else "",
            *(f"{fmean(row['by_target'][name]):.3f}" for name in names),
            with_range(row),
        ]
        for title in TITLES
        for row in rows_of(results, "zero_shot")
        if row["method"] == title
    ]
    return table(["Accuracy without a refit", "T", *names, "mean (least to most over seeds)"], lines)


def few_shot(results: Results) -> str:
    """Experiment B."""
    lines = [
        [TITLES[row["method"]], row["projections"] if has_projections(row["method"]) else "", with_range(row)]
        for title in TITLES
        for row in rows_of(results, "few_shot")
        if row["method"] == title
    ]
    return table(["Five labels a class", "T", "accuracy, mean (least to most over seeds)"], lines)


def scale(results: Results) -> str:
    """Memory and time by size."""
    sizes = [row["num_nodes"] for row in of_kind(results, "forward")]
    lines = []
    for number in sizes:
        cells = [f"{number:,}"]
        for kind in ("forward", "forward_edge_index", "dense"):
            found = [row for row in of_kind(results, kind) if row["num_nodes"] == number]
            cells += [f"{row['peak_bytes'] / 2**20:,.0f}, {median(row['seconds']):.3g}" for row in found] or [""]
        (cost,) = (row for row in of_kind(results, "branch") if row["num_nodes"] == number)
        cells.append(f"{median(cost['branch_seconds']) / median(cost['sparse_seconds']):.2f}")
        lines.append(cells)
    heads = ["Nodes", "sparse: MiB, s", "`edge_index`: MiB, s", "n x n matrices: MiB, s", "K branch / sparse product"]
    (pubmed,) = of_kind(results, "pubmed_size")
    features = pubmed["features_bytes"] / 2**20
    note = (
        "Peak memory of a forward beside graph and features, and its time, one thread. At the size of PubMed it "
        f"adds {pubmed['peak_bytes'] / 2**20:,.0f} MiB to {features:,.0f} MiB of features; the whole process takes "
        f"{pubmed['process_bytes'] / 2**20:,.0f} MiB."
    )
    return f"{table(heads, lines)}\n\n{note}"


def rows_of(results: Results, part: str) -> list[Row]:
    return [row for row in results["rows"] if row["part"] == part]


def of_kind(results: Results, kind: str) -> list[Row]:
    return [row for row in rows_of(results, "scale") if row["what"] == kind]


def targets_of(results: Results, part: str = "transfer") -> list[str]:
    return list(dict.fromkeys(row["target"] for row in rows_of(results, part)))


def one(results: Results, part: str, method: str, **where: Any) -> Row | None:
    """The row with these fields, if there is one."""
    for row in rows_of(results, part):
        if row["method"] == method and all(row[key] == value for key, value in where.items()):
            return row
    return None


def best(results: Results, part: str, method: str, **where: Any) -> Row | None:
    """The row of the most projections."""
    found = [row for row in rows_of(results, part) if row["method"] == method]
    found = [row for row in found if all(row[key] == value for key, value in where.items())]
    return max(found, key=lambda row: row["projections"], default=None)


def has_projections(method: str) -> bool:
    return method.startswith(("all_in", "projection", "training_free", "untrained"))


def accuracy(row: Row | None) -> str:
    return "" if row is None else f"{fmean(row['accuracy']):.3f}"


def with_range(row: Row | None) -> str:
    if row is None:
        return ""
    values = row["accuracy"]
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def scale_figures(results: Results) -> dict[str, list[list[float]]]:
    """Size, peak MiB and seconds of every forward."""
    return {
        kind: [
            [row["num_nodes"] + row["num_edges"], row["peak_bytes"] / 2**20, median(row["seconds"])]
            for row in of_kind(results, kind)
        ]
        for kind in ("forward", "forward_edge_index", "dense")
    }


def draw_scale(figures: dict[str, list[list[float]]]) -> "Figure":
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    titles = {"forward": "sparse adjacency", "forward_edge_index": "edge_index", "dense": "n x n matrices"}
    for kind, values in figures.items():
        total, memory, seconds = zip(*values, strict=True)
        for ax, measured in zip(axes, (memory, seconds), strict=True):
            ax.loglog(total, measured, marker="o", label=titles[kind])
    for ax, name in zip(axes, ("peak memory beside graph and features, MiB", "seconds of a forward"), strict=True):
        ax.set(xlabel="nodes + edges", title=name)
        ax.grid(alpha=0.3)
    axes[0].legend()
    return figure


TABLES = {
    "": summary,
    "transfer": transfer,
    "default_sizes": default_sizes,
    "zero_shot": zero_shot,
    "few_shot": few_shot,
    "scale": scale,
    "goals": goals,
}
PLOTS = {"docs/assets/all-in-scale.png": Plot(scale_figures, draw_scale)}
