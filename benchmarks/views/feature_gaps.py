"""What README and docs show of results/feature_gaps.json."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from views.showing import Plot, Results, goals, spread, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

TITLES = {
    "auto": '**`scorer="auto"`**',
    "gaps": '**gaps**, `direction="auto"`',
    "gaps_pca": "gaps, centred PCA [paper]",
    "gaps_pca_uncentered": "gaps, uncentred PCA",
    "gaps_mean_diff": "gaps, mean difference of the prompts",
    "gaps_several_layers": "gaps, five layers a feature",
    "gaps+probabilities": "gaps + probabilities",
    "gaps+probabilities_several_layers": "gaps + probabilities, five layers a feature",
    "context_reliance": "context-reliance alone",
    "context_comprehension": "context-comprehension alone",
    "honesty": "honesty alone",
    "probabilities": "probabilities (three, logistic regression)",
    "logprob": "perplexity (mean log-probability)",
    "sequence_logprob": "sequence log-probability",
    "min_logprob": "lowest log-probability",
    "entropy": "mean token entropy",
    "p_true": "P(True)",
    "sampled_entropy": "entropy of five samples",
    "semantic_entropy": "semantic entropy of five samples (lexical)",
    "saplma": "SAPLMA",
    "mean_diff": "mean(correct) - mean(wrong)",
    "random": "three random directions",
    "feature_gaps_auto": '**gaps**, `direction="auto"`',
    "feature_gaps_pca": "gaps, centred PCA [paper]",
    "logistic_regression": "logistic regression on the state (SAPLMA-like)",
    "logistic_regression_standardized": "the same, standardised",
    "oracle": "oracle (knows the planted latents)",
}
TASKS = {"xquad": "XQuAD", "templated": "templated"}
CURVES = ("auto", "gaps", "gaps+probabilities", "probabilities", "saplma")


def summary(results: Results) -> str:
    """The bars of the three kinds of evidence beside their strongest rivals."""
    bars = {bar["id"]: bar for bar in results["bars"]}
    labels = main_labels(results)
    real = {name: smollm2_row(results, "xquad", name, labels) for name in ("gaps", "auto", "saplma", "logprob")}
    failing = {name: failing_prr(results, name) for name in failing_methods(results)}
    kinds = [name for name in failing if name.startswith("gaps") and "+" not in name]
    best = max(kinds, key=lambda name: failing[name])
    planted = {
        name: planted_row(results, name, 64, 0.0)["prr"] for name in ("feature_gaps_auto", "logistic_regression")
    }
    lines = [
        [
            "planted activations, 64 labels",
            figure(planted["feature_gaps_auto"]),
            "",
            figure(planted["logistic_regression"]),
            "",
        ],
        [
            "planted confident failures, 64 labels",
            spread(bars["confident_failures_prr"]["value"], bars["confident_failures_prr"]["interval"]),
            "",
            figure(failing["saplma"]),
            figure(failing["logprob"]),
        ],
        [
            f"SmolLM2-135M on XQuAD, {labels} labels",
            spread(real["gaps"]["prr"], real["gaps"]["prr_interval"]),
            figure(real["auto"]["prr"]),
            figure(real["saplma"]["prr"]),
            figure(real["logprob"]["prr"]),
        ],
    ]
    heads = ["PRR on unseen answers", "Gaps (95 %)", '`scorer="auto"`', "SAPLMA", "Perplexity"]
    machine = results["machine"]
    note = (
        f"PRR: 1 is a perfect ranking, 0 chance. The gaps of the second row are {TITLES[best].strip('*')}. "
        f"{machine['processor']}, {machine['cores']} cores, {results['date']}; `{results['command']}`."
    )
    return f"{table(heads, lines)}\n\n{note}"


def smollm2(results: Results) -> str:
    """Every method on both tasks, with the main number of labels."""
    labels, tasks = main_labels(results), [task for task in TASKS if rows_of(results, "smollm2", task=task)]
    lines = []
    for method, title in TITLES.items():
        rows = [smollm2_row(results, task, method, labels) for task in tasks]
        if all(rows):
            cells = [spread(row[key], row[f"{key}_interval"]) for row in rows for key in ("prr", "auroc")]
            lines.append([title, *cells])
    heads = ["", *(f"{TASKS[task]}, {measure}" for task in tasks for measure in ("PRR (95 %)", "AUROC (95 %)"))]
    notes = [smollm2_note(results, task, labels) for task in tasks]
    return "\n\n".join([table(heads, lines), *notes])


def smollm2_note(results: Results, task: str, labels: int) -> str:
    """Accuracy, what auto chose, and its calibration."""
    base = one_row(results, "smollm2", task=task, method="base")
    kinds = "" if len(base["accuracy_by_kind"]) < 2 else f" ({shares(base['accuracy_by_kind'])})"
    chosen = smollm2_row(results, task, "auto", labels)["chosen"]
    calibration = one_row(results, "smollm2", task=task, kind="calibration")
    against = one_row(results, "smollm2", task=task, kind="auto_vs_best")
    seeds = len(chosen)
    return (
        f"{TASKS[task]}: {base['answers']} answers, {100 * base['accuracy']:.0f} % correct{kinds}; {labels} labels, "
        f"{min(base['tests'])} or more test rows, means of {seeds} fit sets. `auto` chose "
        f"{', '.join(f'{name} ({chosen.count(name)} of {seeds})' for name in dict.fromkeys(chosen))}; its PRR minus "
        f"that of the best baseline of one generation ({against['best']}) is {against['value']:+.3f}. Its ECE on the "
        f"test is {calibration['ece']:.3f}, with isotonic calibration {calibration['ece_isotonic']:.3f}."
    )


def budgets(results: Results) -> str:
    """PRR over the number of labels."""
    tasks = [task for task in TASKS if rows_of(results, "smollm2", task=task)]
    numbers = label_numbers(results, tasks[0])
    lines = []
    for task in tasks:
        for method in TITLES:
            rows = [smollm2_row(results, task, method, labels) for labels in numbers]
            if all(rows):
                cells = [f"{row['prr']:.3f} ± {row['prr_std']:.3f}" for row in rows if row]
                lines.append([TASKS[task], TITLES[method], *cells])
    heads = ["PRR (± over fit sets)", "", *(f"{labels} labels" for labels in numbers)]
    return table(heads, lines)


def transfer(results: Results) -> str:
    """Fitted on one kind of question, tested on another."""
    rows = rows_of(results, "transfer")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    pairs = list(dict.fromkeys((row["fit_on"], row["test_on"]) for row in rows))
    prr = {(row["fit_on"], row["test_on"], row["method"]): row["prr"] for row in rows}
    lines = [
        [source.replace("_", " "), target.replace("_", " "), *(figure(prr[source, target, name]) for name in methods)]
        for source, target in pairs
    ]
    means = [fmean(prr[source, target, name] for source, target in pairs) for name in methods]
    lines.append(["**mean**", "", *(f"**{figure(mean)}**" for mean in means)])
    return table(["Fitted on", "Tested on", *(TITLES[name].replace("**", "") for name in methods)], lines)


def failures(results: Results) -> str:
    """Methods on the planted failures, and which feature finds which."""
    methods = sorted(failing_methods(results), key=lambda name: -failing_prr(results, name))
    lines = []
    for method in methods:
        fits = [failing_fits(results, method, smoothing) for smoothing in smoothings(results)]
        cells = [f"{fmean(own):.3f} ({min(own):.3f} to {max(own):.3f})" for own in fits]
        lines.append([TITLES[method], *cells])
    features = rows_of(results, "confident_failures", kind="feature", label_smoothing=smoothings(results)[0])
    areas = []
    for method in dict.fromkeys(row["method"] for row in features):
        for feature in dict.fromkeys(row["feature"] for row in features):
            own = [row for row in features if (row["method"], row["feature"]) == (method, feature)]
            cells = [figure(fmean(row[kind] for row in own)) for kind in ("stubborn", "sycophantic", "hard")]
            areas.append([TITLES[method].replace("**", ""), feature.replace("_", " "), *cells])
    heads = ["AUROC of a feature's score at finding failures", "", "from memory", "lies on request", "two hops"]
    prr_heads = [f"label smoothing {smoothing:g}" for smoothing in smoothings(results)]
    return "\n\n".join([table(["PRR (range over models and fits)", *prr_heads], lines), table(heads, areas)])


def activations(results: Results) -> str:
    """The planted activations."""
    rows = rows_of(results, "planted_summary")
    cases = list(dict.fromkeys((row["labels"], row["spurious"]) for row in rows))
    lines = []
    for column in dict.fromkeys(row["column"] for row in rows):
        found = [planted_row(results, column, *case) for case in cases]
        lines.append([TITLES[column], *(f"{row['prr']:.3f} ± {row['prr_std']:.3f}" for row in found)])
    heads = ["PRR (± over seeds)", *(f"{labels} labels{', spurious cue' if cue else ''}" for labels, cue in cases)]
    recovered = rows_of(results, "planted_recovery")
    worst = max(row["worst_relative_error"] for row in recovered)
    note = f"Planted logistic coefficients come back within {100 * worst:.1f} % ({len(recovered)} seeds)."
    return f"{table(heads, lines)}\n\n{note}"


def overhead(results: Results) -> str:
    """What recording costs."""
    lines = [
        [
            TITLES[row["head"]].replace("**", ""),
            f"{100 * row['share']:.2f} % ({' to '.join(f'{100 * end:.2f}' for end in row['share_interval'])})",
            spread(row["wall_ratio"], row["wall_ratio_interval"]),
            f"{row['kilobytes']:.0f} kB",
            row["offline_forward_passes"],
        ]
        for row in rows_of(results, "overhead")
    ]
    heads = [
        "Head",
        "Inside our hooks and processor",
        "Wall time, recorded / plain (95 %)",
        "Memory",
        "Forward passes to score offline",
    ]
    return table(heads, lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "": summary,
    "smollm2": smollm2,
    "labels": budgets,
    "transfer": transfer,
    "failures": failures,
    "activations": activations,
    "overhead": overhead,
    "goals": goals,
}


def label_curves(results: Results) -> dict[str, list[list[float]]]:
    """Labels, PRR and its spread over fit sets, of the methods in the plot, on human questions."""
    return {
        method: [
            [labels, row["prr"], row["prr_std"]]
            for labels in label_numbers(results, "xquad")
            if (row := smollm2_row(results, "xquad", method, labels))
        ]
        for method in CURVES
    }


def draw_labels(figures: Mapping[str, Sequence[Sequence[float]]]) -> "Figure":
    """PRR over the number of labels, one line a method."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6, 3.6), layout="constrained")
    axes = drawn.subplots()
    for number, (method, points) in enumerate(figures.items()):
        labels, prr, spreads = zip(*points, strict=True)
        axes.errorbar(labels, prr, spreads, marker="o", capsize=3, color=f"C{number}", label=method)
    axes.set_xscale("log", base=2)
    axes.set_xticks(labels, map(str, labels))
    axes.set_xlabel("labelled answers")
    axes.set_ylabel("PRR on unseen answers (XQuAD)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return drawn


PLOTS = {"docs/assets/feature-gaps-labels.png": Plot(label_curves, draw_labels)}


def rows_of(results: Results, part: str, **fields: Any) -> list[Row]:
    """The rows of a part with these fields."""
    return [
        row
        for row in results["rows"]
        if row["part"] == part and all(row.get(key) == value for key, value in fields.items())
    ]


def one_row(results: Results, part: str, **fields: Any) -> Row:
    """The only row of that kind."""
    (row,) = rows_of(results, part, **fields)
    return row


def smollm2_row(results: Results, task: str, method: str, labels: int) -> Row | None:
    """The test figures of a method; None where it was not measured with so many labels."""
    rows = rows_of(results, "smollm2", task=task, method=method, labels=labels)
    return next((row for row in rows if "prr" in row), None)


def planted_row(results: Results, column: str, labels: int, spurious: float) -> Row:
    """Mean and spread over seeds of a column of the planted activations."""
    return one_row(results, "planted_summary", column=column, labels=labels, spurious=spurious)


def smoothings(results: Results) -> list[float]:
    """Label smoothings of the failing models; the bars are about the first."""
    return list(dict.fromkeys(row["label_smoothing"] for row in rows_of(results, "confident_failures")))


def failing_methods(results: Results) -> list[str]:
    """Methods that were measured on the planted failures."""
    return list(dict.fromkeys(row["method"] for row in rows_of(results, "confident_failures", kind="method")))


def failing_fits(results: Results, method: str, smoothing: float) -> list[float]:
    """PRR of every seed and fit on the planted failures."""
    found = {"kind": "method", "method": method, "label_smoothing": smoothing}
    return [fit for row in rows_of(results, "confident_failures", **found) for fit in row["prr_fits"]]


def failing_prr(results: Results, method: str) -> float:
    """Mean PRR over seeds and fits on the planted failures, of the models that the bars are about."""
    return fmean(failing_fits(results, method, smoothings(results)[0]))


def label_numbers(results: Results, task: str) -> list[int]:
    """Numbers of labels, rising."""
    return sorted({row["labels"] for row in rows_of(results, "smollm2", task=task) if "labels" in row})


def main_labels(results: Results) -> int:
    """The number of labels with which every method was measured."""
    return one_row(results, "smollm2", task="xquad", kind="calibration")["labels"]


def shares(values: Mapping[str, float]) -> str:
    """Shares by name, in percent."""
    return ", ".join(f"{name.replace('_', ' ')} {100 * value:.0f} %" for name, value in values.items())


def figure(value: float) -> str:
    """A figure without an interval."""
    return f"{value:.3f}"
