"""What a Feature-Gap head says about itself: the figures of its fit, and how it does on answers that it has scored."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_xai.errors import DataError
from hf_xai.metrics import expected_calibration_error, reliability_curve, risk_coverage_curve
from hf_xai.plotting import axes_to_draw_on
from hf_xai.transformers.feature_gaps.scored_answers import ScoredAnswers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead

Table = list[list[str]]

HEAD, ORACLE, RANDOM = "head", "oracle", "random order"
_BINS = 10  # of the reliability plot; hundreds of answers don't fill the 15 of the ECE evenly


@dataclass(frozen=True)
class FeatureGapReport:
    """The figures of a head's fit, and of answers that it has scored since.

    Print it, draw it with :meth:`plot` and :meth:`plot_reliability`, or take the numbers of :meth:`to_dict`.

    Attributes:
        base_model: Name of the model that the head was fitted on, or its type.
        fit: Figures of the fit, ``config.report`` of the head; empty where it was not fitted here.
        threshold: Smallest confidence of an accepted answer, or None.
        target_risk: Error rate that the threshold was asked to assure, or None.
        calibrated: Whether the head calibrates its confidence.
        scored: The scored answers, or None.
    """

    base_model: str
    fit: Mapping[str, Any]
    threshold: float | None = None
    target_risk: float | None = None
    calibrated: bool = False
    scored: ScoredAnswers | None = None

    @classmethod
    def of(cls, head: "FeatureGapHead", rows: Iterable[Mapping[str, Any]] | None = None) -> "FeatureGapReport":
        """The report of a head.

        Args:
            head: A fitted head.
            rows: Answers that it has scored, as the pipeline gives them, with ``correctness`` (1, 0 or -1).
        """
        config = head.config
        return cls(
            base_model=config.base_model_name_or_path or config.base_model_type or "an unknown model",
            fit=config.report or {},
            threshold=config.threshold,
            target_risk=config.target_risk,
            calibrated=bool(len(head.calibration_x)),
            scored=None if rows is None else ScoredAnswers.of(rows),
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON-ready values; NaN is None."""
        figures = {
            "base_model": self.base_model,
            "threshold": self.threshold,
            "calibrated": self.calibrated,
            "fit": dict(self.fit),
            "scored": None if self.scored is None else self.scored.figures(),
        }
        return json.loads(json.dumps(figures), parse_constant=lambda name: None)

    def tables(self) -> dict[str, Table]:
        """The figures as tables of texts by their captions, the first row of each the heads."""
        found = {
            "Ranking of the answers in the fit (cross-validated)": self._ranking_table(),
            "Features and readings": self._readings_table(),
            "Calibration in the fit (cross-validated)": self._calibration_table(),
            "Scored answers": self._scored_table(),
        }
        return {caption: table for caption, table in found.items() if len(table) > 1}

    def __str__(self) -> str:
        lines = [f"Feature-Gap head on {self.base_model}"]
        rows = self.fit.get("rows")
        if rows:
            lines.append(
                f"Fitted on {rows['used']} of {rows['given']} answers, {rows['correct']} correct and {rows['wrong']} "
                f"wrong ({rows['not_attempted']} not attempted)."
            )
        lines += [str(self.fit[name]) for name in ("reason", "verdict") if self.fit.get(name)]
        if self.target_risk is not None:
            lines.append(self._threshold_line(self.target_risk))
        for caption, table in self.tables().items():
            lines += ["", caption, *_aligned(table)]
        return "\n".join(lines)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the risk of the scored answers against the share that is kept; without any, the PRRs of the fit.

        The lower a curve, the better: the oracle rejects every wrong answer first, a random order keeps the error rate
        that it has. Needs matplotlib.

        Args:
            ax: Where to draw; a new figure by default.

        Raises:
            DataError: If there is nothing to draw.
        """
        if self.scored is None:
            return self._plot_fit(ax)
        scored = self._scored_with_both()
        ax = axes_to_draw_on(ax, (7, 4.5))
        curves = {HEAD: scored.confidence, **scored.baselines}
        for name, scores in curves.items():
            curve = risk_coverage_curve(scores, scored.labels)
            width, style = (2.2, "-") if name == HEAD else (1.1, "--")
            ax.plot(curve.coverage, curve.risk, label=name.replace("_", " "), linewidth=width, linestyle=style)
        oracle = risk_coverage_curve(scored.labels, scored.labels)
        ax.plot(oracle.coverage, oracle.risk, label=ORACLE, color="0.55", linestyle=":")
        ax.axhline(1 - scored.labels.mean(), label=RANDOM, color="0.55", linewidth=1)
        if self.threshold is not None:
            kept = float((scored.confidence >= self.threshold).mean())
            ax.axvline(kept, color="0.2", linewidth=1, linestyle="-.", label=f"threshold {self.threshold:.2f}")
        ax.set(
            xlim=(0, 1), ylim=(0, None), xlabel="share of answers kept (coverage)", ylabel="share of them wrong (risk)"
        )
        ax.set_title(f"Risk against coverage, {len(scored.labels)} answers", fontsize="medium")
        ax.legend(fontsize="small")
        return ax

    def plot_reliability(self, ax: "Axes | None" = None) -> "Axes":
        """Draws accuracy against confidence in ten bins, before and after calibration; on the diagonal is right.

        Args:
            ax: Where to draw; a new figure by default.

        Raises:
            DataError: If there are no scored answers of known correctness.
        """
        scored = self._scored_with_both()
        ax = axes_to_draw_on(ax, (5, 4.5))
        ax.plot((0, 1), (0, 1), color="0.55", linewidth=1, linestyle=":", label="as stated")
        curves = {"as given": scored.confidence}
        if self.calibrated and scored.uncalibrated is not None:
            curves = {"before calibration": scored.uncalibrated, "after calibration": scored.confidence}
        for marker, (name, confidence) in zip("os", curves.items(), strict=False):
            curve = reliability_curve(confidence, scored.labels, _BINS)
            error = expected_calibration_error(confidence, scored.labels)
            filled = curve.counts > 0
            label = f"{name} (ECE {error:.3f})"
            ax.plot(curve.confidence[filled], curve.accuracy[filled], marker=marker, label=label)
        ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="share correct")
        ax.set_title(f"Reliability, {len(scored.labels)} answers", fontsize="medium")
        ax.legend(fontsize="small")
        return ax

    def _scored_with_both(self) -> ScoredAnswers:
        if self.scored is None or not self.scored.has_both:
            raise DataError("A plot needs scored answers, correct and wrong ones: FeatureGapReport.of(head, rows).")
        return self.scored

    def _plot_fit(self, ax: "Axes | None") -> "Axes":
        names, figures = zip(*self._ranked(), strict=True) if self._ranked() else ((), ())
        if not names:
            raise DataError("There is nothing to draw: the head has no report of its fit, and no answers are scored.")
        ax = axes_to_draw_on(ax, (7, 0.8 + 0.35 * len(names)))
        colours = ["C0" if name.startswith(HEAD) else "0.7" for name in names]
        ax.barh(
            [name.replace("_", " ") for name in names],
            [one["prr"] for one in figures],
            xerr=[one.get("prr_se", 0.0) for one in figures],
            color=colours,
        )
        ax.invert_yaxis()
        ax.axvline(0, color="0.2", linewidth=1)
        ax.set_xlabel("PRR, cross-validated, with standard error (1 is perfect, 0 is random)")
        ax.set_title("What ranks the answers of the fit", fontsize="medium")
        return ax

    def _ranked(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The head and everything that it was compared with, best first."""
        if "cross_validated" not in self.fit:
            return []
        head = (f"{HEAD} ({self.fit.get('scorer', 'gaps')})", self.fit["cross_validated"])
        others = [item for item in self.fit.get("others", {}).items() if "prr" in item[1]]
        return sorted([head, *others], key=lambda item: -item[1]["prr"])

    def _ranking_table(self) -> Table:
        rows = [
            [name.replace("_", " "), _pm(one, "prr"), _pm(one, "auroc"), _signed(one.get("ahead"))]
            for name, one in self._ranked()
        ]
        fit = self.fit.get("fit")
        if fit:
            rows.append(["head on the rows it was fitted to", _number(fit["prr"]), _number(fit["auroc"]), ""])
        left_out = {name: one["missing"] for name, one in self.fit.get("others", {}).items() if "missing" in one}
        rows += [[name.replace("_", " "), "", "", f"not known for {count} rows"] for name, count in left_out.items()]
        return [["", "PRR", "AUROC", "PRR ahead of the head"], *rows]

    def _readings_table(self) -> Table:
        alone = self.fit.get("features", {})
        rows = [
            [
                one["feature"].replace("_", " "),
                str(one["layer"]),
                "+" if one.get("sign", 1) > 0 else "-",
                _number(one.get("fit_prr", one.get("validation_prr"))),
                _pm(alone.get(one["feature"], {}), "prr"),
            ]
            for one in self.fit.get("readings", [])
        ]
        return [["", "layer", "sign", "PRR in the fit", "PRR alone, cross-validated"], *rows]

    def _calibration_table(self) -> Table:
        figures = self.fit.get("cross_validated", {})
        rows = [
            [name, _number(figures[key]), _number(figures[f"{key}_isotonic"])]
            for name, key in (("ECE", "ece"), ("Brier score", "brier"))
            if key in figures
        ]
        return [["", "without calibration", "with isotonic calibration"], *rows]

    def _scored_table(self) -> Table:
        if self.scored is None:
            return [[]]
        figures = self.scored.figures()
        counts = f"{figures['used']} of {figures['answers']}"
        rows = [
            ["answers with known confidence and correctness", counts],
            ["answers not accepted", str(figures["abstained"])],
            ["accuracy", _number(figures["accuracy"])],
            ["mean confidence", _number(figures["mean_confidence"])],
            ["PRR", _number(figures["prr"])],
            ["AUROC", _number(figures["auroc"])],
            ["ECE", _number(figures["ece"])],
            ["Brier score", _number(figures["brier"])],
        ]
        if self.calibrated and self.scored.has_both:
            rows.append(["ECE before calibration", _number(figures["ece_before_calibration"])])
        rows += [
            [f"PRR of {name.replace('_', ' ')}", _number(one["prr"])] for name, one in figures["baselines"].items()
        ]
        return [["", "value"], *rows]

    def _threshold_line(self, risk: float) -> str:
        if self.threshold is None:
            return f"No threshold of the confidence assures an error rate of at most {risk:.1%} on so many answers."
        return (
            f"Of the answers with a confidence of {self.threshold:.3f} or more, at most {risk:.1%} are wrong, with "
            "95 % confidence over the answers of the fit."
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


def _pm(figures: Mapping[str, Any], name: str) -> str:
    if name not in figures:
        return ""
    spread = figures.get(f"{name}_se")
    return _number(figures[name]) if spread is None else f"{figures[name]:.3f} ± {spread:.3f}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *numbers in table:
        cells = [first.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
