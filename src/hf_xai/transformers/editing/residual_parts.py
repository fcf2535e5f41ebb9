"""What the residual stream of a decoder is the sum of at one position of each prompt, checked to be that sum."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hf_xai.activations import read_inputs, read_outputs
from hf_xai.errors import UnsupportedModelError
from hf_xai.transformers.editing.architecture import DecoderArchitecture, EditableLayer
from hf_xai.transformers.editing.frozen_norm import FrozenNorm, frozen_norm
from hf_xai.transformers.editing.replay import at_positions, first_tensor, run_decoder
from hf_xai.transformers.editing.subkeys import input_name
from hf_xai.transformers.editing.tokens import PromptBatch
from hf_xai.transformers.editing.weight_access import execution_device

_ROUNDINGS = 8  # of the numbers that are added, in their dtype


@dataclass(frozen=True)
class LayerParts:
    """One layer in a forward pass, at one position of each prompt; float32 but for ``inputs``.

    Attributes:
        before: $h^{l-1}$, the residual stream that enters, ``(prompts, hidden_size)``.
        after: $h^l$, the one that leaves.
        feed_forward: $F^l$, what the feed-forward part adds, after the norm of its output where there is one.
        coefficients: $m^l$ of the neurons, ``(prompts, intermediate_size)``.
        heads: What goes into the output matrix of the attention, ``(prompts, channels)``.
        inputs: $x^l$, what the feed-forward part reads, as the layer computed it.
        parallel: Whether it reads what enters, and not the sum of that and the attention.
        input_norm: The norm in front of the feed-forward part, frozen; None where there is none (OLMo-2).
        output_norm: The norm of the feed-forward output, frozen; None where there is none.
        attention_norm: The same of the attention.
    """

    before: Tensor
    after: Tensor
    feed_forward: Tensor
    coefficients: Tensor
    heads: Tensor
    inputs: Tensor
    parallel: bool
    input_norm: FrozenNorm | None
    output_norm: FrozenNorm | None
    attention_norm: FrozenNorm | None

    @property
    def base(self) -> Tensor:
        """The residual stream just before the feed-forward part is added."""
        return self.after - self.feed_forward

    @property
    def attention(self) -> Tensor:
        """$A^l$, what the attention adds."""
        return self.base - self.before


@dataclass(frozen=True)
class ResidualParts:
    """A forward pass at one position of each prompt.

    Attributes:
        layers: First to last.
        final_norm: The norm before the head, frozen at what leaves the last layer.
    """

    layers: tuple[LayerParts, ...]
    final_norm: FrozenNorm

    @property
    def states(self) -> Tensor:
        """$h^0$ to $h^L$, ``(prompts, layers + 1, hidden_size)``."""
        return torch.stack([self.layers[0].before, *(layer.after for layer in self.layers)], 1)

    @property
    def bases(self) -> Tensor:
        """The residual stream before each feed-forward part is added, ``(prompts, layers, hidden_size)``."""
        return torch.stack([layer.base for layer in self.layers], 1)

    @property
    def parts(self) -> Tensor:
        """$h^0, A^1, F^1, A^2, F^2, ...$, which $h^L$ is the sum of, ``(prompts, 2 layers + 1, hidden_size)``."""
        added = [part for layer in self.layers for part in (layer.attention, layer.feed_forward)]
        return torch.stack([self.layers[0].before, *added], 1)

    def __getitem__(self, prompts: Tensor) -> "ResidualParts":
        """The prompts of these numbers."""
        return ResidualParts(tuple(_of_prompts(layer, prompts) for layer in self.layers), self.final_norm.at(prompts))


def read_residual_parts(architecture: DecoderArchitecture, batch: PromptBatch) -> ResidualParts:
    """Runs the decoder once and takes it apart at the positions of the batch.

    Where norms stand and what adds up to what is found in the values themselves, so that sequential and parallel
    blocks, norms before or after the parts, and none at all are told apart without the name of an architecture.

    Args:
        architecture: The model, in evaluation mode.
        batch: The prompts.

    Returns:
        The parts, on the device of the head.

    Raises:
        UnsupportedModelError: If a layer does not add up to what enters, an attention and a feed-forward part.
    """
    reading = _Reading(architecture, batch.positions)
    read = read_inputs(architecture.model, reading.read, reading.keep_input)
    with torch.no_grad(), read, read_outputs(architecture.model, reading.written, reading.keep_output):
        run_decoder(architecture, batch)
    layers = tuple(reading.parts_of(layer) for layer in architecture.layers)
    final = reading.inputs[reading.final_norm]
    entering = [*(layer.before for layer in layers[1:]), final.float()]
    for layer, parts, state in zip(architecture.layers, layers, entering, strict=True):
        if not torch.equal(parts.after, state):
            raise UnsupportedModelError(f"{layer.block_name} returns one thing and what follows it reads another.")
    return ResidualParts(layers, frozen_norm(architecture.final_norm, final))


class _Reading:
    """What the modules of the layers are given and return, at one position of each prompt."""

    def __init__(self, architecture: DecoderArchitecture, positions: Tensor) -> None:
        self.model, self.positions = architecture.model, positions
        self.hidden_size, self.device = architecture.hidden_size, read_out_device(architecture)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        names = {id(module): name for name, module in self.model.named_modules()}
        self.final_norm = names[id(architecture.final_norm)]
        self.read, self.written = [self.final_norm], []
        for layer in architecture.layers:
            self.read += [layer.block_name, input_name(layer), layer.feed_forward_out_name, layer.attention_out_name]
            self.read += self._norms(layer)
            self.written += [layer.block_name, layer.feed_forward_out_name, layer.attention_out_name]
            self.written += self._children(layer)

    def keep_input(self, name: str, value: Tensor) -> None:
        # Copies: Falcon adds the attention to the output of its MLP in place.
        self.inputs[name] = at_positions(value, self.positions).to(self.device)

    def keep_output(self, name: str, value: Any) -> None:
        value = first_tensor(value)
        if isinstance(value, Tensor) and value.shape[-1] == self.hidden_size:
            self.outputs[name] = at_positions(value, self.positions).to(self.device)

    def parts_of(self, layer: EditableLayer) -> LayerParts:
        before, after = self.inputs[layer.block_name], self.outputs[layer.block_name]
        feed_forward, output_norm = self._added(layer, layer.feed_forward_out_name)
        attention, attention_norm = self._added(layer, layer.attention_out_name)
        base = after.float() - feed_forward.float()
        size = before.float().abs() + attention.float().abs() + feed_forward.float().abs() + after.float().abs()
        allowed = _ROUNDINGS * torch.finfo(after.dtype).eps * size
        if not bool(((base - before.float() - attention.float()).abs() <= allowed).all()):
            raise UnsupportedModelError(
                f"{layer.block_name} ({type(layer.block).__name__}) returns something else than the sum of what "
                "enters it and its attention's and feed-forward part's output, each as it is or after one norm."
            )
        parallel, input_norm = self._input_of(layer, base, allowed)
        return LayerParts(
            before=before.float(),
            after=after.float(),
            feed_forward=feed_forward.float(),
            coefficients=self.inputs[layer.feed_forward_out_name].float(),
            heads=self.inputs[layer.attention_out_name].float(),
            inputs=self.inputs[input_name(layer)],
            parallel=parallel,
            input_norm=input_norm,
            output_norm=output_norm,
            attention_norm=attention_norm,
        )

    def _added(self, layer: EditableLayer, name: str) -> tuple[Tensor, FrozenNorm | None]:
        """What a matrix adds to the residual stream, and the norm that its output goes through first."""
        output = self.outputs[name]
        for norm in self._norms(layer):
            if torch.equal(self.inputs[norm], output):
                return self.outputs[norm], frozen_norm(self.model.get_submodule(norm), output)
        return output, None

    def _input_of(self, layer: EditableLayer, base: Tensor, allowed: Tensor) -> tuple[bool, FrozenNorm | None]:
        """Whether the feed-forward part reads what enters the layer, and through which norm."""
        inputs, before = self.inputs[input_name(layer)], self.inputs[layer.block_name]
        norm = next((name for name in self._norms(layer) if torch.equal(self.outputs[name], inputs)), None)
        source = inputs if norm is None else self.inputs[norm]
        frozen = None if norm is None else frozen_norm(self.model.get_submodule(norm), source)
        if torch.equal(source, before):
            return True, frozen
        if bool(((source.float() - base).abs() <= allowed).all()):
            return False, frozen
        raise UnsupportedModelError(
            f"The feed-forward part of {layer.block_name} ({type(layer.block).__name__}) reads neither what enters "
            "the layer nor the sum of that and the attention, as it is or after one norm."
        )

    def _children(self, layer: EditableLayer) -> list[str]:
        return [f"{layer.block_name}.{name}" for name, _ in layer.block.named_children()]

    def _norms(self, layer: EditableLayer) -> list[str]:
        names = self._children(layer)
        return [name for name in names if "norm" in type(self.model.get_submodule(name)).__name__.lower()]


def read_out_device(architecture: DecoderArchitecture) -> torch.device:
    """Where logits are computed."""
    return execution_device(architecture.head)


def _of_prompts(layer: LayerParts, prompts: Tensor) -> LayerParts:
    changes: dict[str, Any] = {}
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, Tensor | FrozenNorm):
            changes[field.name] = value[prompts] if isinstance(value, Tensor) else value.at(prompts)
    return replace(layer, **changes)
