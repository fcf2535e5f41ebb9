"""What a run leaves behind while it goes on: kept beside its checkpoints, so that a resumed run goes on recording."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from hf_xai.errors import ArtifactMismatchError

STATE_FILE = "influence_state.safetensors"


@dataclass
class Recording:
    """Scalars of a run, the same for all processes once they are merged.

    Attributes:
        visits: Optimizer steps that each row took part in, ``(rows,)``.
        checkpoints: Step, learning rate, products ``(rows, Q)``, losses ``(rows,)`` and, for self-influence, products
            with noise batches ``(batches, rows)`` of each scored moment.
        steps: Step, learning rate, rows ``(R,)``, z-values and products ``(R, Q)`` of each online step.
        draws: Step, signals with and without each group ``(groups, Q)`` of each step of mode ``"subset"``.
        num_dropped: Visits whose products were no finite numbers.
        ids: Ids by position where they were met in a stream; None for a dataset with a length.
    """

    visits: NDArray[np.int64]
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    draws: list[dict[str, Any]] = field(default_factory=list)
    num_dropped: int = 0
    ids: list[Any] | None = None

    def seen_by(self, positions: NDArray[np.int64], num_rows: int) -> "Recording":
        """What was seen, with rows at other positions: those of the run as a whole."""
        visits = np.zeros(num_rows, dtype=np.int64)
        visits[positions] = self.visits
        steps = [{**entry, "rows": positions[entry["rows"]]} for entry in self.steps]
        return Recording(visits, self.checkpoints, steps, self.draws, self.num_dropped)

    def save(self, folder: Path, fingerprint: str) -> None:
        """Writes ``influence_state.safetensors`` into ``folder``, whole or not at all."""
        tensors = {"visits": torch.from_numpy(self.visits.copy()), "num_dropped": torch.tensor(self.num_dropped)}
        for kind in ("checkpoints", "steps", "draws"):
            for number, entry in enumerate(getattr(self, kind)):
                for name, value in entry.items():
                    tensors[f"{kind}/{number:06d}/{name}"] = torch.from_numpy(np.array(value))
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{STATE_FILE}.{os.getpid()}.tmp"
        try:
            save_file(tensors, temporary, metadata={"fingerprint": fingerprint, "ids": json.dumps(self.ids)})
            temporary.replace(folder / STATE_FILE)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path, fingerprint: str) -> "Recording":
        """Reads what `save` wrote.

        Raises:
            ArtifactMismatchError: If it was recorded with other settings, rows or queries; it says which.
        """
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            metadata = file.metadata() or {}
            saved = metadata.get("fingerprint", "{}")
            if saved != fingerprint:
                there, here = json.loads(saved), json.loads(fingerprint)
                differing = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
                raise ArtifactMismatchError(
                    f"The influence recorded in {str(folder)!r} is of another run; {', '.join(differing)} differ. "
                    "Resume with the same settings, or start afresh."
                )
            found = cls(
                visits=file.get_tensor("visits").numpy(),
                num_dropped=int(file.get_tensor("num_dropped")),
                ids=json.loads(metadata.get("ids", "null")),
            )
            entries: dict[str, dict[str, Any]] = {}
            for key in sorted(file.keys()):
                if "/" in key:
                    place, _, name = key.rpartition("/")
                    value = file.get_tensor(key).numpy()
                    entries.setdefault(place, {})[name] = value if value.ndim else value.item()
            for place in sorted(entries):
                getattr(found, place.partition("/")[0]).append(entries[place])
        return found
