"""Keys of the edited matrices and what the model gives at them now, over all context templates."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_xai.activations import read_inputs, read_outputs
from hf_xai.transformers.editing.architecture import DecoderArchitecture
from hf_xai.transformers.editing.columns import Column
from hf_xai.transformers.editing.replay import at_positions, first_tensor, input_device, run_decoder
from hf_xai.transformers.editing.tokens import PromptEncoder


@dataclass(frozen=True)
class Measured:
    """Rows of one module for some columns, float32 on the CPU.

    Attributes:
        rows: One for each column and template, plain prompts first, ``(columns, templates, channels)``.
    """

    rows: Tensor

    @property
    def plain(self) -> Tensor:
        """Of the plain prompts, ``(channels, columns)``."""
        return self.rows[:, 0].T

    def mean(self, grouped: bool) -> Tensor:
        """Mean over the templates, ``(channels, columns)``.

        Args:
            grouped: Whether the plain prompt weighs as much as all others together [MEMIT and those after it]; else
                all weigh the same [ROME].
        """
        num_templates = self.rows.shape[1]
        if not grouped or num_templates == 1:
            return self.rows.mean(1).T
        return (self.rows[:, 0] / 2 + self.rows[:, 1:].mean(1) / 2).T


@torch.no_grad()
def measure(
    architecture: DecoderArchitecture,
    encoder: PromptEncoder,
    columns: Sequence[Column],
    *,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    batch_size: int = 64,
) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Reads named modules' inputs and outputs at the edited position of each column's prompts.

    Args:
        architecture: The model.
        encoder: Of its tokenizer.
        columns: What to read; all have the same number of templates.
        inputs: Modules to read the inputs of: the keys.
        outputs: Modules to read the outputs of.
        batch_size: Prompts of a forward pass.

    Returns:
        Inputs and outputs by module name.
    """
    prompts = [prompt for column in columns for prompt in column.prompts]
    # One after another by length: short prompts are not padded to the longest of all.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].input_ids))
    found: dict[tuple[str, str], list[Tensor]] = {}
    positions = torch.zeros(0)

    def keep(kind: str, name: str, tensor: Tensor) -> None:
        rows = at_positions(first_tensor(tensor), positions)
        found.setdefault((kind, name), []).append(rows.float().cpu())

    with ExitStack() as hooks:
        model = architecture.model
        hooks.enter_context(read_inputs(model, inputs, lambda name, tensor: keep("in", name, tensor)))
        hooks.enter_context(read_outputs(model, outputs, lambda name, tensor: keep("out", name, tensor)))
        for start in range(0, len(prompts), batch_size):
            batch = encoder.batch(
                [prompts[index] for index in order[start : start + batch_size]], input_device(architecture)
            )
            positions = batch.positions
            run_decoder(architecture, batch)

    back = torch.empty(len(prompts), dtype=torch.long)
    back[torch.tensor(order)] = torch.arange(len(prompts))

    def joined(kind: str, names: Sequence[str]) -> dict[str, Measured]:
        rows = {name: torch.cat(found[kind, name])[back] for name in names}
        return {name: Measured(value.reshape(len(columns), -1, value.shape[-1])) for name, value in rows.items()}

    return joined("in", inputs), joined("out", outputs)
