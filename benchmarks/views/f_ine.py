"""What README and docs show of results/f_ine.json."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from views.showing import Plot, Results, goals, spread, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

TITLES = {
    "f_ine_adam": '**f-INE, `similarity="adam"`**',
    "f_ine": "**f-INE**",
    "f_ine_unweighted": 'f-INE, `weighting="none"`',
    "f_ine_cosine": "**f-INE on cosines**",
    "f_ine_no_detrend": "f-INE, no detrend",
    "f_ine_auc": "f-INE, `auc`",
    "f_ine_max": "f-INE, `max` [paper]",
    "f_ine_max_raw": "f-INE, `max`, no detrend",
    "f_ine_online": "f-INE, online",
    "f_ine_online_cosine": "f-INE on cosines, online",
    "tracin": "TracIn",
    "tracin_few": "TracIn, 5 checkpoints",
    "tracin_unweighted": "TracIn without learning rates",
    "gradient_cosine": "gradient cosine",
    "less": "LESS",
    "trak": "TRAK",
    "in_run_shapley": "in-run data Shapley, first order",
    "in_run_cosine": "sum of in-run cosines",
    "influence_last_layer": "influence function, last layer",
    "lissa": "influence function, LiSSA",
    "loss": "loss at the end",
    "mean_loss": "mean loss",
    "bm25": "BM25",
    "random": "random",
}
PEERS = {
    "kronfluence": "kronfluence {} (identity factors)",
    "bergson": "bergson {} (its default, which makes the gradients)",
    "bergson_tokens": "bergson {} by token, without making them,",
    "bergson_forward": "bergson {} in forward mode",
}


def summary(results: Results) -> str:
    """The main figures of the three experiments beside TracIn and LESS."""
    parts: dict[str, tuple[Mapping[str, Any], str, str]] = {
        "wrong labels of digits: recall in the top 20 %": ({"part": "digits"}, "recall20", "f_ine"),
        "poisoned instructions (hard): average precision": (
            {"part": "instructions", "set": "hard"},
            "ap",
            "f_ine_adam",
        ),
        "the same: agreement of the top 20 % between runs": (
            {"part": "instructions", "set": "hard"},
            "jaccard20",
            "f_ine_adam",
        ),
        "SmolLM2-135M, 5 % poison: average precision": ({"part": "real_model"}, "ap", "f_ine_adam"),
        "the same: agreement of the top 20 % between runs ": ({"part": "real_model"}, "jaccard20", "f_ine_adam"),
    }
    lines = []
    for title, (where, measure, ours) in parts.items():
        if one(results, method=ours, **where):
            names = (ours, "tracin", "less", "bm25")
            lines.append([title, *(cell(one(results, method=name, **where), measure) for name in names)])
    machine = results["machine"]
    note = (
        f'Means over training seeds. f-INE with its defaults on digits, with `similarity="adam"` on language models. '
        f"{machine['processor']}, {machine['cores']} cores, {results['date']}; `{results['command']}`."
    )
    return f"{table(['', 'f-INE', 'TracIn', 'LESS', 'BM25'], lines)}\n\n{note}"


def digits(results: Results) -> str:
    """Experiment A."""
    rows = of_part(results, "digits")
    measures = ("auc", "recall20", "jaccard20", "jaccard5", "cv")
    heads = ["Self-influence", "AUC", "Recall in top 20 %", "Jaccard top 20 %", "Jaccard top 5 %", "Median CV"]
    return table(heads, [[TITLES[row["method"]], *(cell(row, name) for name in measures)] for row in rows])


def instructions(name: str) -> Any:
    """Experiment B, one set."""

    def shown(results: Results) -> str:
        rows = of_part(results, "instructions", set=name)
        measures = ("auc", "ap", "recall_n", "recall20", "jaccard20", "spearman", "cv")
        heads = ["", "AUC", "AP", "Recall at n", "Recall in top 20 %", "Jaccard top 20 %", "Spearman", "Median CV"]
        heads.append("Negative after deletion")
        lines = [
            [TITLES[row["method"]], *(cell(row, key) for key in measures), cell(row, "rate_without")] for row in rows
        ]
        (rates,) = (row["rates"] for row in of_part(results, "negative_rate", set=name))
        note = (
            f"{len(rates)} trainings on the same rows. The models answer {percent(fmean(rates))} of the questions "
            f"about the target negatively ({percent(min(rates))} to {percent(max(rates))}); the last column is "
            "after a new training without the 50 rows that score highest."
        )
        return f"{table(heads, lines)}\n\n{note}"

    return shown


def clean(results: Results) -> str:
    """The control without poison."""
    rows = of_part(results, "clean")
    heads = ["Seed", "Largest size of mu", "Rows outside the band of no influence", "Negative answers"]
    lines = [
        [row["seed"], f"{row['largest_mu_run']:.2f}", row["false_alarms"], percent(row["negative_rate"])]
        for row in rows
    ]
    return table(heads, lines)


def real_model(results: Results) -> str:
    """Experiment C."""
    rows = of_part(results, "real_model")
    measures = ("auc", "ap", "recall_n", "recall20", "jaccard20", "spearman", "cv")
    heads = ["", "AUC", "AP", "Recall at n", "Recall in top 20 %", "Jaccard top 20 %", "Spearman", "Median CV"]
    lines = [[TITLES[row["method"]], *(cell(row, key) for key in measures)] for row in rows]
    runs = of_part(results, "real_model_runs")
    answers = [row["negative_answers"] for row in runs]
    shares = ", ".join(
        f"{title} {percent(fmean(run[key] for run in answers))}"
        for key, title in (
            ("target", "about the target, as trained"),
            ("target_held_out", "about the target, in new words"),
            ("others", "about other cities, in new words"),
        )
    )
    unscored = (
        f"Online, every fourth step was scored: {percent(fmean(row['unscored_online'] for row in runs))} of the rows "
        "were in none of these, and count as 0."
    )
    return (
        f"{table(heads, lines)}\n\n{len(answers)} trainings on the same rows. Negative answers: {shares}. {unscored}"
    )


def cost(results: Results) -> str:
    """Time and memory."""
    heads = ["Training", "Seconds a step", "Every step scored", "Predicted", "Every tenth", "Peak memory, MB"]
    lines = [
        [
            {"lora": "LoRA", "full": "all weights"}[row["parameters"]],
            f"{row['seconds']:.2f}",
            f"{median(row['every']):.3f} x",
            f"{row['predicted']:.3f} x",
            f"{median(row['tenth']):.3f} x",
            f"{row['peak_plain'] / 1e6:.0f} to {row['peak_online'] / 1e6:.0f}",
        ]
        for row in of_part(results, "overhead")
    ]
    names = {
        "plain": "plain forward and backward pass",
        "ghost": "**`gradient_products`**",
        "hooks_dense": "row gradients made by hooks, then products",
        "func": "row gradients made by `torch.func`, then products",
        "loop": "one row at a time",
    }
    sizes = of_part(results, "passes")
    against = [
        [title, *(f"{row['medians'][key] / row['medians']['ghost']:.2f} x" for row in sizes)]
        for key, title in names.items()
    ]
    heads_of_sizes = [f"{row['size']}: {row['rows']} rows of {row['length']} tokens" for row in sizes]
    peers = of_part(results, "peer")
    (ours,) = (median(row["seconds"]) for row in peers if row["peer"] == "hf_xai")
    notes = [
        f"{row['peer']} was not run: {row['not_run']}"
        if "not_run" in row
        else f"{PEERS[row['peer']].format(row['version'])} takes {median(row['seconds']) / ours:.2f} x the time of "
        f"`gradient_products` on rows of the model of the first table."
        for row in peers
        if row["peer"] != "hf_xai"
    ]
    text = f"{table(heads, lines)}\n\n{table(['Time to score a batch, over ours', *heads_of_sizes], against)}"
    return "\n\n".join([text, *notes])


def scale(results: Results) -> str:
    """Seconds and bytes by the number of rows."""
    heads = ["Rows", "Seconds a checkpoint", "Rows a second", "Stored scores, kB", "Growth of peak memory, MB"]
    lines = [
        [
            f"{row['rows']:,}",
            f"{row['seconds']:.1f}",
            f"{row['rows'] / row['seconds']:.0f}",
            f"{row['score_bytes'] / 1000:.0f}",
            f"{row['peak_growth_bytes'] / 1e6:.0f}",
        ]
        for row in of_part(results, "scale")
    ]
    return table(heads, lines)


def one(results: Results, **wanted: Any) -> Row | None:
    return next((row for row in results["rows"] if all(row.get(key) == value for key, value in wanted.items())), None)


def of_part(results: Results, part: str, **wanted: Any) -> list[Row]:
    found = [row for row in results["rows"] if row.get("part") == part]
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]


def cell(row: Row | None, key: str) -> str:
    """A figure, or the mean over seeds with the range."""
    if row is None or row.get(key) is None:
        return ""
    value = row[key]
    if isinstance(value, Sequence):
        return spread(fmean(value), (min(value), max(value)))
    return f"{value:.3f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def scale_points(results: Results) -> dict[str, list[float]]:
    rows = of_part(results, "scale")
    return {"rows": [row["rows"] for row in rows], "seconds": [row["seconds"] for row in rows]}


def draw_scale(points: Mapping[str, list[float]]) -> "Figure":
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(4.5, 3.0), layout="constrained")
    ax.loglog(points["rows"], points["seconds"], "o-", label="measured")
    first = points["seconds"][0] / points["rows"][0]
    ax.loglog(points["rows"], [first * rows for rows in points["rows"]], "k:", label="linear")
    ax.set_xlabel("training rows")
    ax.set_ylabel("seconds a checkpoint")
    ax.legend()
    return figure


TABLES = {
    "": summary,
    "digits": digits,
    "instructions_easy": instructions("easy"),
    "instructions_hard": instructions("hard"),
    "clean": clean,
    "real_model": real_model,
    "cost": cost,
    "scale": scale,
    "bars": goals,
}
PLOTS = {"docs/assets/f-ine-scale.png": Plot(scale_points, draw_scale)}
