"""Second moments of the keys that a model's output matrices see on a corpus: what every editor weighs edits with."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import nn

from hf_xai.attachment import is_attached
from hf_xai.distributed.processes import Processes
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.transformers.editing.architecture import DecoderArchitecture, decoder_architecture
from hf_xai.transformers.editing.second_moment import SecondMoment, check_damping
from hf_xai.transformers.editing.statistics_collection import collect_moments
from hf_xai.transformers.editing.statistics_files import (
    RECORD,
    StoredMoments,
    download,
    push,
    read_record,
    statistics_card,
    write_statistics,
)
from hf_xai.transformers.editing.statistics_parts import PartialSums
from hf_xai.transformers.editing.statistics_record import (
    chosen_modules,
    describe_collection,
    module_sizes,
    record_fingerprint,
    weights_of_blocks,
)
from hf_xai.transformers.editing.token_sequences import TokenSequences, read_sequences

if TYPE_CHECKING:
    from accelerate import Accelerator
    from huggingface_hub import ModelCard
    from transformers import PreTrainedTokenizerBase

Part = Literal["feed_forward", "attention"]


class KeyStatistics(Mapping[str, SecondMoment]):
    """The :class:`SecondMoment` of the inputs of each output matrix, by the module's name in the bare model.

    ```python
    statistics = KeyStatistics.from_dataset(model, tokenizer, dataset, layers=[3, 4, 5], max_tokens=100_000)
    statistics.save_pretrained("statistics")
    statistics = KeyStatistics.from_pretrained("statistics")
    statistics["model.layers.3.mlp.down_proj"].solve(keys)
    ```

    Make them with ``from_dataset`` or ``from_pretrained``; the latter reads a matrix when it is first asked for.

    Args:
        moments: For each module.
        record: Of which model, data and settings they are; as ``describe_collection`` gives it.
    """

    def __init__(self, moments: Mapping[str, SecondMoment], record: Mapping[str, Any]) -> None:
        self._moments, self.record = moments, dict(record)

    def __getitem__(self, name: str) -> SecondMoment:
        return self._moments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._moments)

    def __len__(self) -> int:
        return len(self._moments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} modules, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Tokens that every moment is the mean of."""
        return int(self.record["num_tokens"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of model, tokens and modules."""
        return record_fingerprint(self.record)

    @classmethod
    def from_dataset(
        cls,
        model: nn.Module,
        tokenizer: "PreTrainedTokenizerBase",
        dataset: Iterable[Any],
        layers: Sequence[int] | None = None,
        *,
        modules: Sequence[Part] = ("feed_forward",),
        text_column: str = "text",
        max_tokens: int | None = None,
        sequence_length: int = 512,
        batch_size: int = 8,
        damping: float = 1e-4,
        feed_forward_out: str | None = None,
        accelerator: "Accelerator | None" = None,
        cache_dir: str | os.PathLike[str] | None = None,
        description: str = "Collecting key statistics",
    ) -> Self:
        r"""Collects $C = E[k k^\top]$ over all tokens of a corpus (ROME, arXiv 2202.05262; MEMIT, arXiv 2210.07229).

        A text is read by itself, so that neither the order of the texts nor the batch size nor the number of processes
        makes a difference; sequences of one length make a batch, so that nothing is padded. Each process tokenises the
        whole dataset and runs a share of the sequences. Sums are float64 up to 8192 channels, float32 beyond, of
        float32 products, on the device of the module.

        Args:
            model: A causal language model without edits, in any dtype; split over devices or offloaded, too.
            tokenizer: Its tokenizer.
            dataset: A ``datasets.Dataset`` or ``IterableDataset``, or a list of texts or of mappings.
            layers: Numbers of the layers, from 0; None for all, which takes N x N numbers each.
            modules: ``"feed_forward"`` for the output matrices of the MLPs, ``"attention"`` for those of attention.
            text_column: Where rows are mappings, the key of the text.
            max_tokens: Reading stops here; None for all. The references read 100,000 texts of Wikipedia.
            sequence_length: Tokens of the longest sequence, and at most as many as the model has positions; a longer
                text is cut. 512 is our choice.
            batch_size: Sequences of this length in a batch, of shorter ones accordingly more.
            damping: As in :class:`SecondMoment`.
            feed_forward_out: As in ``decoder_architecture``.
            accelerator: The processes that share the work; None for this one.
            cache_dir: Folder, seen by all processes, that keeps the result under a name made of model, data and
                settings: it is read back where it is there. An interrupted collection goes on where it was, up to five
                minutes before the end, with any number of processes.
            description: Label of the progress bar, which the main process alone shows.

        Raises:
            ConfigError: If an argument can't be what it is, differs between processes, or the model has edits.
            DataError: If the dataset has no text, or the keys are not finite.
            UnsupportedModelError: If the modules can't be found, or don't see every token once.
            ArtifactMismatchError: If what ``cache_dir`` holds under the name is something else.
        """
        processes = Processes(accelerator)
        with processes.together():
            _check_numbers(batch_size, damping)
            architecture = decoder_architecture(model, feed_forward_out)
            if is_attached(architecture.model, "knowledge_edits"):
                raise ConfigError("Key statistics are those of the model before its edits; revert them first.")
            names = chosen_modules(architecture, layers, modules)
            length = _usable_length(architecture, sequence_length)
            sequences = read_sequences(
                dataset, tokenizer, text_column=text_column, max_tokens=max_tokens, sequence_length=length
            )
            _check_vocabulary(architecture, sequences)
            record = describe_collection(architecture, names, sequences, dataset, damping, length)
        fingerprint = _same_everywhere(processes, record)

        def collect(partial: PartialSums | None = None) -> dict[str, SecondMoment]:
            totals = collect_moments(
                architecture,
                sequences,
                module_sizes(architecture, names),
                batch_tokens=batch_size * length,
                accelerator=accelerator,
                partial=partial,
                description=description,
            )
            return {name: SecondMoment(total, sequences.num_tokens, damping) for name, total in totals.items()}

        if cache_dir is None:
            return cls(collect(), record)
        folder = Path(cache_dir).expanduser() / f"key_statistics-{fingerprint[:16]}"
        if _is_finished(processes, folder):
            with processes.together():
                found = cls.from_pretrained(folder, damping=damping)
                if found.fingerprint != fingerprint:
                    raise ArtifactMismatchError(f"{str(folder)!r} holds the statistics of another run; delete it.")
            return found
        partial = PartialSums(folder.with_name(f"{folder.name}-parts"), fingerprint)
        found = cls(collect(partial), record)
        with processes.together():
            if processes.is_main:
                _save_whole(found, folder)
                partial.remove()
        return found

    def check_fits(
        self, architecture: DecoderArchitecture, names: Sequence[str] | None = None, *, weights: bool = True
    ) -> None:
        """Checks that these are statistics of this model.

        Args:
            architecture: The model.
            names: Modules that are going to be edited; None for those that there are statistics of.
            weights: Whether the weights are compared, too, up to the last of the layers that there are statistics of;
                not those that are on the meta device and have no values. An edited model is another one.

        Raises:
            ArtifactMismatchError: If not; it says what differs.
        """
        missing = [name for name in names or () if name not in self]
        if missing:
            raise ArtifactMismatchError(f"There are no statistics of {', '.join(missing)}, but of {', '.join(self)}.")
        present = dict(architecture.model.named_modules())
        for name, entry in self.record["modules"].items():
            size = entry["size"]
            if name not in present:
                raise ArtifactMismatchError(
                    f"The statistics are of {self.record['model']['class']}, with a module {name}; "
                    f"{type(architecture.model).__name__} has none."
                )
            found = module_sizes(architecture, [name])[name]
            if found != size:
                raise ArtifactMismatchError(
                    f"The statistics of {name} are ({size}, {size}), its inputs have {found} channels in this model: "
                    f"({found}, {found}) are needed."
                )
        if weights:
            here = weights_of_blocks(architecture, self.last_layer)
            there = self.record["model"]["weights"]
            other = [part for part, value in there.items() if value and here.get(part, "") not in (value, None)]
            if other:
                raise ArtifactMismatchError(
                    f"The statistics are of a model with other weights in {', '.join(other)}: of "
                    f"{self.record['model']['name'] or 'an unnamed model'}. Collect them from this one."
                )

    @property
    def last_layer(self) -> int:
        """The deepest layer that there are statistics of."""
        return max(int(entry["layer"]) for entry in self.record["modules"].values())

    def save_pretrained(self, save_directory: str | Path, *, card_fields: Mapping[str, Any] | None = None) -> None:
        """Writes one safetensors file for each module, ``statistics.json`` and a card.

        Args:
            save_directory: Folder, created if needed; statistics that it holds are replaced.
            card_fields: More fields for the card: ``repo_id``, ``dataset``, ``license``.
        """
        write_statistics(self, Path(save_directory), card_fields)

    @classmethod
    def from_pretrained(
        cls, folder_or_repo: str | Path, *, damping: float | None = None, **hub_arguments: Any
    ) -> Self:
        """Opens statistics; each matrix is read and checked when it is first asked for.

        Args:
            folder_or_repo: A folder, or the id of a model repository of the Hub.
            damping: As in :class:`SecondMoment`; None for that of the collection.
            hub_arguments: ``revision``, ``token``, ``cache_dir``, ``force_download`` and ``local_files_only``.

        Raises:
            ConfigError: If there is no such folder, repository, revision or file.
            ArtifactMismatchError: If it holds something else, a matrix of another run, or one that is damaged.
            HubError: If the Hub can't be reached and the cache has no copy.
        """
        folder = download(folder_or_repo, hub_arguments)
        record = read_record(folder, str(folder_or_repo))
        if damping is not None:
            check_damping(damping)
            record["damping"] = float(damping)
        return cls(StoredMoments(folder, record), record)

    def push_to_hub(self, repo_id: str, *, card_fields: Mapping[str, Any] | None = None, **hub_arguments: Any) -> str:
        """Pushes the statistics as a model repository with a card.

        Args:
            repo_id: Repository, created if needed; without a namespace, in the user's own.
            card_fields: More fields for the card: ``dataset``, ``license``.
            hub_arguments: ``token``, ``private``, ``revision``, ``commit_message``, ``create_pr``.

        Returns:
            The address of the commit.

        Raises:
            ConfigError: If the token is missing or refused, or the repository can't be written.
            HubError: If the Hub can't be reached.
        """
        return push(self, repo_id, card_fields, **hub_arguments)

    def generate_model_card(self, **fields: Any) -> "ModelCard":
        """The card, from the record; ``fields`` win over what that says."""
        return statistics_card(self.record, fields)


def _check_numbers(batch_size: int, damping: float) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigError(f"batch_size must be an integer >= 1, got {batch_size!r}.")
    check_damping(damping)


def _usable_length(architecture: DecoderArchitecture, sequence_length: int) -> int:
    config: Any = architecture.model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    return min(sequence_length, positions) if isinstance(positions, int) else sequence_length


def _check_vocabulary(architecture: DecoderArchitecture, sequences: TokenSequences) -> None:
    embeddings: Any = architecture.model.get_input_embeddings()
    known, largest = embeddings.num_embeddings, int(sequences.tokens.max())
    if largest >= known:
        raise DataError(f"The tokenizer gives the token {largest}, the model knows 0 to {known - 1}; is it its own?")


def _same_everywhere(processes: Processes, record: Mapping[str, Any]) -> str:
    found = processes.exchange(record_fingerprint(record))
    if len(set(found)) > 1:
        raise ConfigError(f"All processes must read the same dataset with the same model; got {', '.join(found)}.")
    return found[0]


def _is_finished(processes: Processes, folder: Path) -> bool:
    """Whether an earlier run has left all; the main process looks, so that all do the same."""
    finished = False
    with processes.together():
        if processes.is_main:
            finished = (folder / RECORD).is_file()
            if folder.exists() and not finished:
                raise ConfigError(f"{str(folder)!r} is there and holds no key statistics; move it away.")
    return bool(processes.exchange(finished)[0])


def _save_whole(statistics: KeyStatistics, folder: Path) -> None:
    """Writes the folder under another name and renames it: it is there as a whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as temporary:
        statistics.save_pretrained(Path(temporary) / "whole")
        (Path(temporary) / "whole").replace(folder)
