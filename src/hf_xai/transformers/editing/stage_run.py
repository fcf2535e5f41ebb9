"""Runs the stages of an edit one after another; each sees the model with the changes of those before."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_xai.distributed import map_dataset
from hf_xai.transformers.editing.architecture import DecoderArchitecture
from hf_xai.transformers.editing.columns import Column, Group
from hf_xai.transformers.editing.config import (
    AceConfig,
    AlphaEditConfig,
    EditorConfig,
    EmmetConfig,
    MemitConfig,
    RomeConfig,
    needs_null_space,
)
from hf_xai.transformers.editing.keys import Measured, measure
from hf_xai.transformers.editing.low_rank import LowRankDelta, add_deltas, edited_outputs
from hf_xai.transformers.editing.readout import ReadOut
from hf_xai.transformers.editing.solvers import (
    Moment,
    alphaedit_update,
    emmet_update,
    memit_update,
    rome_update,
)
from hf_xai.transformers.editing.stages import Stage, groups_of
from hf_xai.transformers.editing.targets import TargetProblem
from hf_xai.transformers.editing.tokens import PromptEncoder

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(kw_only=True)
class StageRun:
    """One edit under way.

    Attributes:
        earlier: Changes that the edit comes on top of, without being part of it.
        deltas: The edit's own, so far.
        past_keys: Keys of earlier edits, ``(N, p)`` by module, for AlphaEdit.
        records: Of each stage, for the report.
    """

    architecture: DecoderArchitecture
    encoder: PromptEncoder
    readout: ReadOut
    config: EditorConfig
    moments: Mapping[str, Moment]
    earlier: Mapping[str, LowRankDelta]
    past_keys: dict[str, Tensor]
    accelerator: "Accelerator | None" = None
    resume_dir: Path | None = None
    model_fingerprint: str = ""
    deltas: dict[str, LowRankDelta] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)

    def run(self, stage: Stage, columns: Sequence[Column]) -> None:
        """Optimises the targets of a stage, then writes them into its layers from the first to the last."""
        started = time.perf_counter()
        groups = groups_of(columns, self.config.share_delta)
        columns = [column for group in groups for column in group.columns]
        last = self.architecture.layers[stage.layers[-1]]
        sites = stage.site_names(last)
        targets = self._targets(stage, groups, sites)
        target_seconds = time.perf_counter() - started
        written = sites if stage.edits_attention else sites[:1]
        of_group = torch.tensor([place for place, group in enumerate(groups) for _ in group.columns])
        _, now = self._measure(columns, outputs=written)
        wanted = {
            site: self._values(now[site]) + targets["changes"][of_group, number].T
            for number, site in enumerate(written)
        }
        residuals = []
        for index, divisor in zip(stage.layers, stage.divisors, strict=True):
            layer = self.architecture.layers[index]
            modules = [layer.feed_forward_out_name, layer.attention_out_name][: len(written)]
            keys, now = self._measure(columns, inputs=modules, outputs=written)
            for module, site in zip(modules, written, strict=True):
                residual = wanted[site] - self._values(now[site])
                delta = self._update(module, keys[module], residual / divisor)
                self.deltas[module] = add_deltas([self.deltas[module], delta]) if module in self.deltas else delta
                if site == written[0]:
                    residuals.append(float(residual.norm(dim=0).mean()))
        _, now = self._measure(columns, outputs=written[:1])
        residuals.append(float((wanted[written[0]] - self._values(now[written[0]])).norm(dim=0).mean()))
        self.records.append(
            {
                "stage": stage.name,
                "layers": list(stage.layers),
                "site": written[0],
                "columns": len(columns),
                "targets": len(groups),
                "mean_loss": float(targets["loss"].mean()),
                "mean_probability": float(targets["probability"].mean()),
                "least_probability": float(targets["probability"].min()),
                "mean_steps": float(targets["steps"].mean()),
                "residual_norms": residuals,
                "target_seconds": target_seconds,
                "seconds": time.perf_counter() - started,
            }
        )

    def keys_to_keep(self, columns: Sequence[Column]) -> dict[str, Tensor]:
        """This edit's keys for AlphaEdit's later ones, read on the edited model [code]; other editors keep none."""
        if not needs_null_space(self.config) or not columns:
            return {}
        keys, _ = self._measure(columns, inputs=list(self.deltas))
        return {name: self._keys(value) for name, value in keys.items()}

    def _targets(self, stage: Stage, groups: Sequence[Group], sites: tuple[str, ...]) -> dict[str, Tensor]:
        problem = TargetProblem(
            architecture=self.architecture,
            encoder=self.encoder,
            readout=self.readout,
            layer=stage.layers[-1],
            sites=sites,
            config=self.config,
            pmet_rule=stage.optimizes_attention,
        )
        with self._in_place():
            return map_dataset(
                problem.solve,
                groups,
                accelerator=self.accelerator,
                batch_size=self.config.batch_size,
                resume_dir=None if self.resume_dir is None else self.resume_dir / f"{len(self.records)}-{stage.name}",
                fingerprint=self._fingerprint(stage, groups),
                description=f"{self.config.editor} targets ({stage.name})",
            )

    def _measure(
        self, columns: Sequence[Column], inputs: Sequence[str] = (), outputs: Sequence[str] = ()
    ) -> tuple[dict[str, Measured], dict[str, Measured]]:
        with self._in_place():
            return measure(self.architecture, self.encoder, columns, inputs=inputs, outputs=outputs)

    def _in_place(self) -> ExitStack:
        """A block in which the model runs with the earlier changes and this edit's."""
        with ExitStack() as context:
            context.enter_context(edited_outputs(self.architecture.model, self.earlier))
            context.enter_context(edited_outputs(self.architecture.model, self.deltas))
            return context.pop_all()

    @property
    def _is_rome(self) -> bool:
        return isinstance(self.config, RomeConfig)

    def _keys(self, measured: Measured) -> Tensor:
        return measured.mean(grouped=not self._is_rome)

    def _values(self, measured: Measured) -> Tensor:
        """What a site gives now: at the mean key where the closed form is exact there, else on the plain prompt."""
        exact = isinstance(self.config, EmmetConfig) or (self._is_rome and self._uniform)
        return self._keys(measured) if exact else measured.plain

    @property
    def _uniform(self) -> bool:
        return bool(getattr(self.config, "uniform_keys", True))

    def _update(self, module: str, keys: Measured, residuals: Tensor) -> LowRankDelta:
        config, moment = self.config, self.moments[module]
        mean = self._keys(keys)
        if isinstance(config, RomeConfig):
            return rome_update(mean if config.uniform_keys else keys.plain, residuals, moment, direction_keys=mean)
        if isinstance(config, EmmetConfig):
            return emmet_update(mean, residuals, moment)
        if needs_null_space(config):
            assert isinstance(config, AlphaEditConfig | AceConfig)
            directions = moment.small_directions(
                threshold=None if config.nullspace_energy is not None else config.nullspace_threshold,
                energy=config.nullspace_energy,
            )
            return alphaedit_update(mean, residuals, directions, config.l2, self.past_keys.get(module))
        assert isinstance(config, MemitConfig | AceConfig)
        return memit_update(mean, residuals, moment, config.mom2_update_weight)

    def _fingerprint(self, stage: Stage, groups: Sequence[Group]) -> str | None:
        """Everything that decides a target: the request itself, never a number that two may share."""
        if self.resume_dir is None:
            return None
        digest = hashlib.sha256(repr((self.model_fingerprint, self.config.to_dict(), stage, groups)).encode())
        for changes in (self.earlier, self.deltas):
            for name in sorted(changes):
                for part in (changes[name].b, changes[name].a):
                    digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()
