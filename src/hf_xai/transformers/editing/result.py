"""The result of an edit: a low-rank change of a few matrices that can be applied, taken back, exported and shared."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from hf_xai.activations import unwrap_model
from hf_xai.errors import AlreadyEnabledError, ArtifactMismatchError, ConfigError
from hf_xai.transformers.editing import application
from hf_xai.transformers.editing.answers import AnswerChange, AnswerDiff, check_prompts, greedy_answers
from hf_xai.transformers.editing.base_model import BaseModel
from hf_xai.transformers.editing.config import EditorConfig
from hf_xai.transformers.editing.low_rank import LowRankDelta, add_deltas, compress
from hf_xai.transformers.editing.peft_export import active_adapter, to_peft
from hf_xai.transformers.editing.requests import EditRequest, check_requests
from hf_xai.transformers.editing.saved_edits import push_edit, read_edit, write_edit
from hf_xai.transformers.editing.weight_access import matrix_module

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

MAX_MERGE_ERROR = 0.1  # share of a change that rounding may take before we warn (ours)


@dataclass(eq=False)
class EditResult:
    r"""What `KnowledgeEditor.edit` found: $\Delta = B A$ for a few matrices; the model is as it was until `apply`.

    ```python
    result = editor.edit(requests)
    with result.applied():  # or apply() and revert()
        model.generate(...)
    result.save_pretrained("edit")  # the folder is an adapter that plain PEFT loads, too
    ```

    Args:
        config: Settings of the editor.
        requests: What was asked for.
        deltas: Change of each module, by its name in the bare model; kept in float32 on the CPU.
        base: The model that it was made for.
        report: Figures of the edit, as JSON can hold them; a number that is not finite becomes None.
        past_keys: Keys of the edited facts, ``(N, n)`` by module, where the editor keeps them (AlphaEdit).
        model: The live model that methods work on unless given another; not saved.
        parts: Fingerprints of the results that it is the sum of, by default its own; not saved.

    Attributes:
        merge_error: Of the last `apply`: for each weight of less than 32 bits the share of the change that rounding
            took, ``||round(W + D) - (W + D)|| / ||D||``.
    """

    config: EditorConfig
    requests: tuple[EditRequest, ...]
    deltas: Mapping[str, LowRankDelta]
    base: BaseModel
    report: Mapping[str, Any] = field(default_factory=dict)
    past_keys: Mapping[str, Tensor] = field(default_factory=dict)
    model: nn.Module | None = None
    parts: tuple[str, ...] = ()
    merge_error: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.requests = tuple(self.requests)
        if not self.deltas or set(self.deltas) != set(self.base.modules):
            raise ConfigError(
                f"deltas must name the modules of base, got {sorted(self.deltas)} and {sorted(self.base.modules)}."
            )
        self.deltas = {
            name: _stored(name, delta, self.base.modules[name].shape) for name, delta in self.deltas.items()
        }
        self.past_keys = {name: keys.detach().cpu() for name, keys in self.past_keys.items()}
        self.fingerprint = _digest(self.deltas)
        self.parts = self.parts or (self.fingerprint,)

    @property
    def is_applied(self) -> bool:
        """Whether ``model`` has the edit on it, also if another copy of this result applied it."""
        return self.model is not None and application.edit_is_applied(self.model, self.fingerprint)

    def apply(self, model: nn.Module | None = None, *, merge: bool = True, check_weights: bool = True) -> Self:
        """Applies the edit, beside others that are applied; each can be reverted in any order.

        Weights that are offloaded, quantised or shared are left alone: a forward hook does the same.

        Args:
            model: The model, alone or wrapped (PEFT, ``torch.compile``, data parallel); None for the result's own,
                which it is from now on.
            merge: False leaves every weight alone, as where rounding would take too much of the change.
            check_weights: False applies the edit to other weights of the same sizes, as after a fine-tuning.

        Raises:
            AlreadyEnabledError: If it is applied already, or in the model as an active adapter.
            ArtifactMismatchError: If the edit was made for another model; it says what differs.
        """
        model = self._fitting(model, check_weights)
        adapter = active_adapter(unwrap_model(model), self.deltas)
        if adapter is not None:
            raise AlreadyEnabledError(f"The edit is in the model as the active adapter {adapter!r} already.")
        self.merge_error = application.apply_edit(model, self.fingerprint, self.deltas, merge=merge)
        self.model = model
        lost = {name: error for name, error in self.merge_error.items() if not error <= MAX_MERGE_ERROR}
        if lost:
            name, error = max(lost.items(), key=lambda item: item[1])
            warnings.warn(
                f"Rounding to {matrix_module(unwrap_model(model), name).weight.dtype} takes {error:.0%} of the "
                f"change of {name}: apply(merge=False) or to_peft() keep it apart from the weights, in float32.",
                stacklevel=2,
            )
        return self

    def revert(self, model: nn.Module | None = None) -> Self:
        """Takes the edit away: each weight that no other edit touches is bit for bit what it was.

        What was trained into the touched weights meanwhile is lost.

        Raises:
            NotEnabledError: If the edit is not applied.
        """
        application.remove_edit(self._live(model), self.fingerprint)
        return self

    @contextmanager
    def applied(
        self, model: nn.Module | None = None, *, merge: bool = True, check_weights: bool = True
    ) -> Iterator[nn.Module]:
        """Applies the edit for a block, whatever happens in it; as `apply`."""
        self.apply(model, merge=merge, check_weights=check_weights)
        live = self._live(model)
        try:
            yield live
        finally:
            if application.edit_is_applied(live, self.fingerprint):
                application.remove_edit(live, self.fingerprint)

    def merge(self, model: nn.Module | None = None, *, check_weights: bool = True) -> nn.Module:
        """Makes the edit part of the weights and returns the model; it can't be reverted any more.

        Raises:
            UnsupportedModelError: If a weight is offloaded, quantised or shared.
        """
        live = self._live(model)
        with (
            nullcontext()
            if application.edit_is_applied(live, self.fingerprint)
            else self.applied(live, check_weights=check_weights)
        ):
            application.keep_edit(live, self.fingerprint)  # after which there is nothing to revert
        return live

    def to_peft(
        self, model: nn.Module | None = None, adapter_name: str = "default", *, check_weights: bool = True
    ) -> "PeftModel":
        """Puts the edit into the model as an active LoRA adapter, with a scaling of 1, beside those that it has.

        `disable_adapter`, `merge_and_unload`, `unload` and the other methods of PEFT then work as ever.

        Raises:
            AlreadyEnabledError: If the edit is applied, and would count twice, or the adapter's name is taken.
            ArtifactMismatchError: If the edit was made for another model.
            MissingDependencyError: If PEFT is missing.
        """
        model = self._fitting(model, check_weights)
        if application.edit_is_applied(model, self.fingerprint):
            raise AlreadyEnabledError("The edit is applied, and would count twice with an adapter: revert() it first.")
        return to_peft(model, self.deltas, self.base, adapter_name)

    def diff(
        self,
        prompts: Iterable[str] | None,
        tokenizer: "PreTrainedTokenizerBase",
        model: nn.Module | None = None,
        *,
        max_new_tokens: int = 8,
        batch_size: int = 8,
    ) -> AnswerDiff:
        """The model's greedy answers without and with the edit; afterwards it is applied or not, as before.

        Args:
            prompts: What to ask; None for the prompts of the requests.
            tokenizer: The model's.
            model: As of `apply`.
            max_new_tokens: Length of an answer, at most.
            batch_size: Prompts in a batch.
        """
        texts = check_prompts([request.text for request in self.requests] if prompts is None else prompts)
        live, settings = self._live(model), {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
        on = application.edit_is_applied(live, self.fingerprint)
        with application.without_edit(live, self.fingerprint) if on else nullcontext():
            before = greedy_answers(live, tokenizer, texts, **settings)
        with nullcontext() if on else self.applied(live):
            after = greedy_answers(live, tokenizer, texts, **settings)
        return AnswerDiff(tuple(map(AnswerChange, texts, before, after)))

    def save_pretrained(self, save_directory: str | Path, *, repo_id: str | None = None) -> None:
        """Writes a PEFT adapter with ``edit.json`` and a card; other files of the folder stay.

        Args:
            save_directory: Folder, created if needed. It is written whole or not at all.
            repo_id: Repository that the card tells to load.

        Raises:
            MissingDependencyError: If PEFT is missing.
        """
        write_edit(self._content(), self.deltas, self.past_keys, Path(save_directory), repo_id=repo_id)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload knowledge edit",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Pushes what `save_pretrained` writes as a model repository, and returns the address of the commit.

        The texts of the requests are published with it.

        Raises:
            ConfigError: If the token is missing or refused, or the repository can't be written.
            HubError: If the Hub can't be reached.
        """
        return push_edit(
            self._content(),
            self.deltas,
            self.past_keys,
            repo_id,
            commit_message=commit_message,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )

    @classmethod
    def from_pretrained(
        cls, folder_or_repo: str | Path, model: nn.Module | None = None, *, check_weights: bool = True, **download: Any
    ) -> Self:
        """Loads an edit from a folder or the Hub; it is not applied.

        Args:
            folder_or_repo: Folder, or id of a model repository.
            model: The model to apply it to.
            check_weights: As of `apply`.
            download: ``revision``, ``token``, ``cache_dir``, ``force_download`` and ``local_files_only`` of the Hub.

        Raises:
            ConfigError: If the folder, repository, revision or a file is absent or can't be read.
            ArtifactMismatchError: If its files don't belong together, or the edit was made for another model.
            HubError: If the Hub can't be reached and the cache has no copy.
        """
        content, deltas, past_keys = read_edit(folder_or_repo, **download)
        try:
            result = cls(
                config=EditorConfig.from_dict(content["config"]),
                requests=tuple(EditRequest.from_dict(entry) for entry in content["requests"]),
                deltas=deltas,
                base=BaseModel.from_dict(content["base"]),
                report=content["report"],
                past_keys=past_keys,
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"The edit.json of {str(folder_or_repo)!r} can't be read: {error!r}.") from error
        if result.fingerprint != content["deltas_fingerprint"]:
            raise ArtifactMismatchError(
                f"The edit.json of {str(folder_or_repo)!r} is of another edit than its adapter: the fingerprints of "
                "the changes differ. Save the edit again."
            )
        if model is not None:
            result.model = result._fitting(model, check_weights)
        return result

    def __add__(self, other: "EditResult") -> "EditResult":
        """One edit that does what both do; of the settings, those of the first are kept, and all in the report.

        Raises:
            ConflictingEditsError: If they answer one prompt in two ways.
            ArtifactMismatchError: If they were made for different models.
        """
        if not isinstance(other, EditResult):
            return NotImplemented
        if not self.base.is_same(other.base):
            raise ArtifactMismatchError("Only edits of the same model can be added, these were made for two.")
        names = list(dict.fromkeys([*self.deltas, *other.deltas]))
        pairs = {name: [part.deltas[name] for part in (self, other) if name in part.deltas] for name in names}
        keys = dict.fromkeys([*self.past_keys, *other.past_keys])
        return EditResult(
            config=self.config,
            requests=tuple(check_requests([*self.requests, *other.requests])),
            deltas={name: add_deltas(found) for name, found in pairs.items()},
            base=replace(self.base, modules={**other.base.modules, **self.base.modules}),
            report={"parts": [{"config": part.config.to_dict(), **part.report} for part in (self, other)]},
            past_keys={
                name: torch.cat([part.past_keys[name] for part in (self, other) if name in part.past_keys], 1)
                for name in keys
            },
            model=self.model if self.model is not None else other.model,
            parts=(*self.parts, *other.parts),
        )

    def compress(self, max_rank: int) -> "EditResult":
        """The nearest edit of at most this rank; ``report["compression"]`` says what share of each change it drops.

        Args:
            max_rank: Rank of each module's change, >= 1.
        """
        if max_rank < 1:
            raise ConfigError(f"max_rank must be an integer >= 1, got {max_rank!r}.")
        found = {name: compress(delta, max_rank) for name, delta in self.deltas.items()}
        dropped = {name: energy for name, (_, energy) in found.items()}
        return replace(
            self,
            deltas={name: delta for name, (delta, _) in found.items()},
            report={**self.report, "compression": {"max_rank": max_rank, "dropped_energy": dropped}},
            parts=(),
        )

    def size_bytes(self) -> int:
        """Memory of the changes, in float32."""
        return sum(4 * (delta.b.numel() + delta.a.numel()) for delta in self.deltas.values())

    def relative_norms(self) -> dict[str, float | None]:
        """Norm of each change over that of the weight before any edit; None where its values couldn't be read."""
        norms = {name: module.weight_norm for name, module in self.base.modules.items()}
        return {name: delta.norm() / norm if (norm := norms[name]) else None for name, delta in self.deltas.items()}

    def __repr__(self) -> str:
        ranks = sorted({delta.rank for delta in self.deltas.values()})
        of = f" of {self.base.name_or_path}" if self.base.name_or_path else ""
        return (
            f"EditResult({type(self.config).__name__}, {len(self.requests)} requests, {len(self.deltas)} modules{of}, "
            f"rank {'-'.join(map(str, dict.fromkeys([ranks[0], ranks[-1]])))}, applied={self.is_applied})"
        )

    def _live(self, model: nn.Module | None) -> nn.Module:
        live = self.model if model is None else model
        if live is None:
            raise ConfigError("The result has no model: give model=, as after from_pretrained(folder) without one.")
        return live

    def _fitting(self, model: nn.Module | None, check_weights: bool) -> nn.Module:
        """The model, checked; the values of the result's own were checked before."""
        live = self._live(model)
        known = self.model is not None and unwrap_model(self.model) is unwrap_model(live)
        self.base.check_fits(live, weights=check_weights and not known)
        return live

    def _content(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "requests": self.requests,
            "base": self.base,
            "report": self.report,
            "fingerprint": self.fingerprint,
        }


def _stored(name: str, delta: LowRankDelta, shape: tuple[int, int]) -> LowRankDelta:
    if delta.shape != shape:
        raise ConfigError(f"The delta of {name!r} must have the shape {shape} of its weight, got {delta.shape}.")
    if not (delta.b.isfinite().all() and delta.a.isfinite().all()):
        raise ConfigError(f"The delta of {name!r} must be finite; it holds NaN or infinity.")
    b, a = (part.detach().to("cpu", torch.float32).contiguous() for part in (delta.b, delta.a))
    if not delta.rank:  # an adapter has at least rank 1
        b, a = b.new_zeros(shape[0], 1), a.new_zeros(1, shape[1])
    return LowRankDelta(b, a)


def _digest(deltas: Mapping[str, LowRankDelta]) -> str:
    digest = hashlib.sha256()
    for name, delta in sorted(deltas.items()):
        digest.update(f"{name} {delta.shape} {delta.rank}\n".encode())
        digest.update(delta.b.numpy().tobytes())
        digest.update(delta.a.numpy().tobytes())
    return digest.hexdigest()
