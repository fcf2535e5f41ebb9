"""The influence of each training row on each query: ranked, compared between runs, drawn, saved and pushed."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_xai.errors import DataError
from hf_xai.metrics import recall_at
from hf_xai.transformers.f_ine import hub_scores, score_comparison, score_plots, score_summary, score_tables
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.observations import Observations, sample_id_array
from hf_xai.transformers.f_ine.row_scores import RowScores, checked_names
from hf_xai.transformers.f_ine.score_columns import NUM_RESAMPLES, score_columns

if TYPE_CHECKING:
    from datasets import Dataset
    from matplotlib.axes import Axes


class InfluenceScores(RowScores):
    r"""Influence of training rows on queries in one run, as f-INE measures it (arXiv 2510.10510).

    A score is $\mu$: how many standard deviations of the training's own noise a row moves a query's loss.
    **$\mu > 0$: training on the row lowers the query's loss (a proponent); $\mu < 0$: it raises it (an opponent).**
    Scores are those of one run and its queries. `from_observations` makes them from the products of a run.

    Args:
        sample_ids: Integers or strings, unique, ``(rows,)``; int64 or strings inside.
        query_names: Name of each query, unique, ``(queries,)``.
        columns: What is known of each row and query, each ``(rows, queries)``, float64 inside, NaN where unknown:

            - ``mu_step``: influence of the row in one step.
            - ``mu_run``: ``mu_step`` times the square root of ``visits``, a bound for nearly equal steps [paper].
            - ``mu_low``, ``mu_high``: 90 % interval **of mu_step**; `interval` scales it for ``mu_run``.
            - ``n_obs``: number of checkpoints, or of visits in mode ``"online"``. They follow one another in a run
              and resemble one another, so this is not the effective size of the sample; it is smaller.
            - ``mean_effect``, ``noise_sd``: numerator and denominator of $\mu$, in the unit of the products.
            - ``visits``: number of optimizer steps that the row took part in.
            - ``tracin``: sum over the checkpoints of learning rate times product, to compare with.

            More columns are kept and saved.
        config: Settings that the scores were made with.
        observations: The products at each checkpoint, if they were kept.
        losses: Mean loss of each row over the checkpoints, ``(rows,)``, if known.
        provenance: What the scores are of, as JSON can hold it: ``base_model``, ``base_model_revision``,
            ``weights_fingerprint``, ``dataset``, ``dataset_fingerprint``, ``num_rows``, ``seed``, ``batch_size``,
            ``num_steps``, ``versions``.
        num_dropped: Rows left out because a product was not finite.

    Raises:
        DataError: If ids or names are not unique, or shapes do not fit.
    """

    @classmethod
    def from_observations(
        cls,
        observations: Observations,
        config: InfluenceConfig,
        *,
        sample_ids: Any,
        query_names: Sequence[str],
        batch_size: int,
        visits: ArrayLike,
        control: ArrayLike | None = None,
        cross: ArrayLike | None = None,
        num_resamples: int = NUM_RESAMPLES,
        losses: ArrayLike | None = None,
        provenance: Mapping[str, Any] | None = None,
        num_dropped: int = 0,
    ) -> "InfluenceScores":
        """Scores from the products of mode ``"checkpoint"``, with the estimator and control of the config.

        Args:
            observations: Products of all rows with all queries, of 3 checkpoints at least after ``skip_first``; with
                ``self_influence`` the squared norms of the rows' gradients, ``(checkpoints, rows, 1)``.
            config: Settings. Observations before step ``skip_first`` are left out of every column; None leaves out
                none here: who records them knows the warm-up.
            sample_ids: As for the class.
            query_names: As for the class.
            batch_size: Rows in an optimizer step of the run, over all processes and accumulated batches. Noise is
                that of batches of ``config.noise_batch_size`` rows, or of this many where it is None.
            visits: Optimizer steps that each row took part in, one for all or ``(rows,)``. A row with none has a
                ``mu_step``, what a step would do, and no ``mu_run``.
            control: Products of the auxiliary model, the shape of those of the run; needed by
                ``control="auxiliary"``, refused without.
            cross: Products of each row with the mean gradient of the noise batches, ``(checkpoints, batches,
                rows)``; needed by ``self_influence``, refused without.
            num_resamples: Resamples of the checkpoints for the 90 % intervals, in blocks of neighbours; 0 leaves the
                intervals unknown. 200 [our choice]. For every estimator but ``"gaussian"`` each one costs as much as
                the scores themselves, about 0.2 s for 4,000 rows and a query.
            losses: As for the class.
            provenance: As for the class; ``batch_size`` and ``estimator`` are filled in.
            num_dropped: As for the class.

        Raises:
            ConfigError: If the config's mode or what is given beside it does not fit.
            DataError: If shapes do not fit, or too few checkpoints are left.
        """
        ids, names = sample_id_array(sample_ids), checked_names(query_names)
        if observations.products.shape[1:] != (len(ids), len(names)):
            raise DataError(
                f"observations must be of {len(ids)} rows and {len(names)} queries, "
                f"got {observations.products.shape[1:]}."
            )
        columns = score_columns(
            observations, config, batch_size, visits, control=control, cross=cross, num_resamples=num_resamples
        )
        return cls(
            sample_ids=ids,
            query_names=names,
            columns=columns,
            config=config,
            observations=observations if config.save_observations else None,
            losses=None if losses is None else np.asarray(losses, dtype=np.float64),
            provenance={"batch_size": int(batch_size), "estimator": config.estimator, **(provenance or {})},
            num_dropped=num_dropped,
        )

    def to_dataset(self, include_columns: Sequence[str] = (), dataset: "Dataset | None" = None) -> "Dataset":
        """One line for each row and query; see :func:`~hf_xai.transformers.f_ine.score_tables.scores_table`."""
        return score_tables.scores_table(self, include_columns, dataset)

    def compare(
        self,
        other: "InfluenceScores",
        *,
        fraction: float | None = None,
        k: int | None = None,
        query: str | None = None,
        column: str = "mu_run",
    ) -> dict[str, float]:
        """Agreement with another run on the rows that both have, matched by sample id.

        Args, returns and errors are those of :meth:`consistency`.
        """
        return score_comparison.agreement([self, other], query, fraction=fraction, k=k, column=column)

    @staticmethod
    def consistency(
        runs: Sequence["InfluenceScores"],
        *,
        fraction: float | None = None,
        k: int | None = None,
        query: str | None = None,
        column: str = "mu_run",
    ) -> dict[str, float]:
        """Agreement of two or more runs; see :func:`~hf_xai.transformers.f_ine.score_comparison.agreement`."""
        return score_comparison.agreement(runs, query, fraction=fraction, k=k, column=column)

    def recall_at(
        self,
        flags: Any,
        fraction: float | None = None,
        *,
        k: int | None = None,
        query: str | None = None,
        column: str = "mu_run",
    ) -> float:
        """Share of the flagged rows that are among the top rows: of the poison, say, that a reader would find.

        Args:
            flags: As for :meth:`flagged`.
            fraction: Share of the rows that is read, by the largest scores; 0.2, the paper's, where neither it nor
                ``k`` is given.
            k: Number of rows that are read, in place of ``fraction``.
            query: Name of the query; None where there is one alone.
            column: What is ranked; rows without a score come last.

        Raises:
            DataError: If no row is flagged, or flags do not fit the rows.
        """
        values = self.scores(query, column)
        last = np.where(np.isfinite(values), values, -np.inf)
        return recall_at(last, self.flagged(flags), fraction=fraction, k=k)

    def summary(self, k: int = 5) -> dict[str, Any]:
        """Figures as JSON can hold them, with the ``k`` strongest rows of each query by id; unknown ones are None."""
        return score_summary.summarise(self, k)

    def __str__(self) -> str:
        return score_summary.describe(self)

    def plot(self, query: str | None = None, k: int = 20, ax: "Axes | None" = None, **options: Any) -> "Axes":
        """Ranked bars with intervals; see :func:`~hf_xai.transformers.f_ine.score_plots.plot_ranked`."""
        return score_plots.plot_ranked(self, query, k, ax, **options)

    def plot_against_loss(self, query: str | None = None, ax: "Axes | None" = None, **options: Any) -> "Axes":
        """Scores against losses; see :func:`~hf_xai.transformers.f_ine.score_plots.plot_against_loss`."""
        return score_plots.plot_against_loss(self, query, ax, **options)

    def plot_comparison(
        self, other: "InfluenceScores", query: str | None = None, ax: "Axes | None" = None, **options: Any
    ) -> "Axes":
        """Two runs; see :func:`~hf_xai.transformers.f_ine.score_plots.plot_comparison`."""
        return score_plots.plot_comparison(self, other, query, ax, **options)

    def plot_course(self, sample_ids: Sequence[Any], query: str | None = None, ax: "Axes | None" = None) -> "Axes":
        """Rows over the run; see :func:`~hf_xai.transformers.f_ine.score_plots.plot_course`."""
        return score_plots.plot_course(self, sample_ids, query, ax)

    def plot_tradeoff(self, sample_id: Any, query: str | None = None, ax: "Axes | None" = None) -> "Axes":
        """A row's trade-off curve; see :func:`~hf_xai.transformers.f_ine.score_plots.plot_tradeoff`."""
        return score_plots.plot_tradeoff(self, sample_id, query, ax)

    def check_dataset(self, dataset: Any) -> None:
        """Warns if the scores were made of another dataset than this one.

        Args:
            dataset: A ``datasets.Dataset``, or a fingerprint.

        Warns:
            UserWarning: If the fingerprints differ; both are named. ``datasets`` gives the same rows another one
                after another preparation.
        """
        here = dataset if isinstance(dataset, str) else getattr(dataset, "_fingerprint", None)
        there = self.provenance.get("dataset_fingerprint")
        if here is not None and there is not None and here != there:
            message = f"The scores are of a dataset with the fingerprint {there}, this one has {here}: other rows, or "
            warnings.warn(f"{message}the same ones prepared in another way.", UserWarning, stacklevel=2)

    def save_pretrained(
        self, save_directory: str | Path, *, include_columns: Sequence[str] = (), dataset: "Dataset | None" = None
    ) -> None:
        """Writes the scores, their config and a card; see :func:`~hf_xai.transformers.f_ine.hub_scores.write_scores`.

        Args:
            save_directory: Folder, created if needed; scores that it holds are replaced.
            include_columns: Columns of the training dataset to write beside the scores; none by default.
            dataset: The training dataset.
        """
        hub_scores.write_scores(self, save_directory, include_columns=include_columns, dataset=dataset)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Pushes the scores as a dataset repository; no text of the training data unless its columns are named.

        Args:
            repo_id: Repository, created if needed; without a namespace, in the user's own.
            options: ``include_columns``, ``dataset``, ``commit_message``, ``private``, ``token``, ``revision`` and
                ``create_pr``; see :func:`~hf_xai.transformers.f_ine.hub_scores.push_scores`.

        Returns:
            The address of the commit.
        """
        return hub_scores.push_scores(self, repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_repo: str | Path,
        *,
        dataset: Any = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> "InfluenceScores":
        """Loads scores from a folder or a dataset repository of the Hub.

        Args:
            folder_or_repo: Folder, or id of a dataset repository.
            dataset: The training dataset, to be warned if the scores are of another one.
            revision: Branch, tag or commit.
            token: Token for the Hub; None takes that of the environment or login.
            cache_dir: Cache folder; None takes the Hub's.
            force_download: Whether to download again what the cache holds.
            local_files_only: Whether to look into the cache only.

        Raises:
            ConfigError: If the folder, repository, revision or a file is absent or not readable.
            ArtifactMismatchError: If it holds no influence scores, or its files do not fit one another.
            HubError: If the Hub can't be reached and the cache has no copy.
        """
        fields = hub_scores.read_scores(
            folder_or_repo,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
        )
        scores = cls(**fields)
        if dataset is not None:
            scores.check_dataset(dataset)
        return scores
