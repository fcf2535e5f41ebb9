"""Forward passes of the decoder, and their upper part again from a recorded input: the frozen prefix runs once."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_xai.transformers.editing.architecture import DecoderArchitecture
from hf_xai.transformers.editing.tokens import PromptBatch
from hf_xai.transformers.editing.weight_access import execution_device


@dataclass(frozen=True)
class Replay:
    """The layers from one on, with the arguments that the decoder called them with (ours).

    While a vector at layer ``start`` is optimised, nothing below it changes; so a step runs ``L - start`` layers.

    Attributes:
        blocks: The layers, first to last.
        hidden: Input of the first, ``(prompts, tokens, hidden_size)``.
        calls: Further positional and keyword arguments of each.
    """

    blocks: tuple[nn.Module, ...]
    hidden: Tensor
    calls: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]

    @classmethod
    def record(cls, architecture: DecoderArchitecture, batch: PromptBatch, start: int) -> "Replay":
        """Runs the decoder once and keeps what the layers from ``start`` on are called with."""
        blocks = tuple(layer.block for layer in architecture.layers[start:])
        calls: dict[int, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[id(module)] = args, dict(kwargs)

        with ExitStack() as hooks, torch.no_grad():
            for block in blocks:
                hooks.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
            run_decoder(architecture, batch)
        hidden = _hidden_argument(calls[id(blocks[0])])
        return cls(blocks, hidden, tuple(_without_hidden(calls[id(block)]) for block in blocks))

    def run(self) -> Tensor:
        """The output of the last layer, ``(prompts, tokens, hidden_size)``, under whatever hooks there are now."""
        hidden = self.hidden
        for block, (args, kwargs) in zip(self.blocks, self.calls, strict=True):
            hidden = first_tensor(block(hidden, *args, **kwargs))
        return hidden


def run_decoder(architecture: DecoderArchitecture, batch: PromptBatch) -> None:
    """One pass of the decoder without its head; what it computes is read by hooks."""
    architecture.decoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)


def first_tensor(output: Any) -> Tensor:
    """What a module returns, or the first of a tuple (Falcon's layers)."""
    return output[0] if isinstance(output, tuple) else output


def at_positions(tensor: Tensor, positions: Tensor) -> Tensor:
    """Rows ``(prompts, channels)`` at one position each, of ``(prompts, tokens, channels)`` or its flat form (OPT)."""
    rows = tensor.reshape(len(positions), -1, tensor.shape[-1])
    return rows[torch.arange(len(positions), device=rows.device), positions.to(rows.device)]


def add_at_positions(tensor: Tensor, positions: Tensor, change: Tensor) -> Tensor:
    """A new tensor with ``change``, ``(prompts, channels)``, added at one position of each prompt."""
    rows = tensor.reshape(len(positions), -1, tensor.shape[-1])
    index = (torch.arange(len(positions), device=rows.device), positions.to(rows.device))
    return rows.index_put(index, change.to(rows), accumulate=True).reshape(tensor.shape)


def input_device(architecture: DecoderArchitecture) -> torch.device:
    """Where token ids belong: with the embeddings; offloaded ones fetch them."""
    return execution_device(architecture.model.get_input_embeddings())


def _hidden_argument(call: tuple[Sequence[Any], Mapping[str, Any]]) -> Tensor:
    args, kwargs = call
    return args[0] if args else kwargs["hidden_states"]


def _without_hidden(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    args, kwargs = call
    return args[1:], {name: value for name, value in kwargs.items() if args or name != "hidden_states"}
