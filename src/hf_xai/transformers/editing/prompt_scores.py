"""The scores of one batch of prompts: a forward pass, read-outs, and the keys of the best neurons."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_xai.errors import ConfigError, UnsupportedModelError
from hf_xai.transformers.editing.architecture import DecoderArchitecture
from hf_xai.transformers.editing.attribution import (
    FrozenReadOut,
    LayerNeurons,
    carried,
    exact_scores,
    read_parts,
    rescored,
    share_weights,
)
from hf_xai.transformers.editing.readout import ReadOut
from hf_xai.transformers.editing.replay import input_device
from hf_xai.transformers.editing.residual_parts import ResidualParts, read_residual_parts
from hf_xai.transformers.editing.subkeys import subkeys, weight_of
from hf_xai.transformers.editing.tokens import EncodedPrompt, PromptEncoder
from hf_xai.transformers.editing.weight_access import matrix_shape


@dataclass(frozen=True)
class ScoreSettings:
    """What is computed for a prompt; see `locate`."""

    top_neurons: int = 30
    method: str = "two_stage"
    query_key: Any = "linearized"
    normalize: str = "none"
    candidates: int = 2048
    skip_wrong: bool = True
    attention_heads: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (("method", ("two_stage", "exact")), ("normalize", ("none", "share"))):
            if getattr(self, name) not in accepted:
                raise ConfigError(f"{name} must be {' or '.join(accepted)}, got {getattr(self, name)!r}.")
        for name in ("top_neurons", "candidates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}.")
        if self.method == "two_stage" and self.candidates < self.top_neurons:
            raise ConfigError(f"candidates={self.candidates} must be at least top_neurons={self.top_neurons}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class PromptRow(Protocol):
    """A prompt that ends with its last token, and the number of the answer's first one, or -1."""

    @property
    def prompt(self) -> EncodedPrompt: ...

    @property
    def target(self) -> int: ...


@dataclass(frozen=True)
class ValueNeurons:
    """The best value neurons of each prompt: layers, numbers in it and scores, ``(prompts, neurons)`` each."""

    layers: Tensor
    numbers: Tensor
    scores: Tensor


class PromptScorer:
    """Turns a batch of prompts into their scores, one row of each tensor to a prompt.

    Args:
        architecture: The model, in evaluation mode when it is called.
        encoder: Pads the prompts.
        settings: What is computed.
    """

    def __init__(self, architecture: DecoderArchitecture, encoder: PromptEncoder, settings: ScoreSettings) -> None:
        self.architecture, self.encoder, self.settings = architecture, encoder, settings
        self.widths = [matrix_shape(layer.feed_forward_out)[1] for layer in architecture.layers]
        self.num_heads = 0
        if settings.attention_heads:
            self.num_heads = architecture.model.config.get_text_config(decoder=True).num_attention_heads
            for layer in architecture.layers:
                if matrix_shape(layer.attention_out)[1] % self.num_heads:
                    raise UnsupportedModelError(f"{layer.attention_out_name} does not read {self.num_heads} heads.")

    @cached_property
    def read_out(self) -> ReadOut:
        return ReadOut(self.architecture)

    @property
    def num_neurons(self) -> int:
        return sum(self.widths)

    def __call__(self, rows: Sequence[PromptRow]) -> dict[str, Tensor]:
        """Scores of the rows; zeros for those that are skipped."""
        batch = self.encoder.batch([row.prompt for row in rows], input_device(self.architecture))
        parts = read_residual_parts(self.architecture, batch)
        states = parts.states
        own = self.read_out.from_normalized(parts.final_norm(states[:, -1])).argmax(-1).to(states.device)
        targets = torch.tensor([row.target for row in rows], device=states.device)
        targets = torch.where(targets < 0, own, targets)
        correct = own == targets
        kept = correct if self.settings.skip_wrong else torch.ones_like(correct)
        chosen = kept.nonzero()[:, 0]
        found = self._scores(parts[chosen], targets[chosen]) if len(chosen) else self._nothing(states.device)
        table = {name: column.new_zeros(len(rows), *column.shape[1:]) for name, column in found.items()}
        for name, column in found.items():
            table[name][chosen] = column
        return table | {"kept": kept, "correct": correct, "target": targets}

    def _scores(self, parts: ResidualParts, targets: Tensor) -> dict[str, Tensor]:
        norm, head = parts.final_norm, self.read_out
        read_out = FrozenReadOut(norm, head.from_normalized, targets, head.weight.shape[0])
        states, bases = parts.states, parts.bases
        count, num_layers = bases.shape[:2]
        state_log_probs = _log_probs(read_out, states)
        base_log_probs = _log_probs(read_out, bases)
        prompts = torch.arange(count, device=bases.device)
        gradients = read_out.gradients(bases.flatten(0, 1), prompts.repeat_interleave(num_layers)).view_as(bases)
        layers = self._neurons(parts)
        scores, exact = self._neuron_scores(read_out, bases, base_log_probs, gradients, layers)
        best = self._best(scores.masked_fill(~exact, -torch.inf), scores)
        columns = {
            "value_block": state_log_probs[:, 1:] - base_log_probs,
            "value_sum": torch.stack([some.sum(-1) for some in scores.split(self.widths, 1)], 1),
            "attention": base_log_probs - state_log_probs[:, :-1],
            "log_prob": state_log_probs[:, -1],
            **_ranking("value", best),
            **self._queries(parts, layers, best, gradients),
        }
        if self.num_heads:
            columns["heads"] = self._heads(read_out, parts, state_log_probs)
        return columns | {"read_outs": torch.full_like(prompts, read_out.num_read_outs // count)}

    def _neurons(self, parts: ResidualParts) -> list[LayerNeurons]:
        # Views of the weights; only of an offloaded model these are copies, as much as its feed-forward matrices.
        pairs = zip(self.architecture.layers, parts.layers, strict=True)
        return [
            LayerNeurons(values.coefficients, weight_of(layer.feed_forward_out), values.output_norm)
            for layer, values in pairs
        ]

    def _neuron_scores(
        self,
        read_out: FrozenReadOut,
        bases: Tensor,
        base_log_probs: Tensor,
        gradients: Tensor,
        layers: Sequence[LayerNeurons],
    ) -> tuple[Tensor, Tensor]:
        """Scores of all neurons and which are exact, ``(prompts, neurons)``."""
        if self.settings.method == "exact":
            found = [
                exact_scores(read_out, bases[:, index], base_log_probs[:, index], neurons)
                for index, neurons in enumerate(layers)
            ]
            scores = torch.cat(found, 1)
            return scores, torch.ones_like(scores, dtype=torch.bool)
        first_order = torch.cat(
            [neurons.inner_products(gradients[:, index]) for index, neurons in enumerate(layers)], 1
        )
        return rescored(read_out, bases, base_log_probs, layers, first_order, self.settings.candidates)

    def _best(self, ranked: Tensor, scores: Tensor) -> ValueNeurons:
        places = ranked.topk(min(self.settings.top_neurons, ranked.shape[1]), dim=1).indices
        ends = torch.tensor(self.widths, device=places.device).cumsum(0)
        layers = torch.bucketize(places, ends, right=True)
        starts = ends - torch.tensor(self.widths, device=places.device)
        return ValueNeurons(layers, places - starts[layers], scores.gather(1, places))

    def _queries(
        self, parts: ResidualParts, layers: Sequence[LayerNeurons], best: ValueNeurons, gradients: Tensor
    ) -> dict[str, Tensor]:
        """Query scores of every layer's parts and neurons, by way of the best value neurons."""
        keys, slopes = self._keys(parts, layers, best, gradients)
        parallel = torch.tensor([layer.parallel for layer in parts.layers], device=keys.device)
        read = read_parts(best.layers, parallel)
        products = carried(parts.parts, keys, read)
        weights, dropped = slopes, torch.zeros_like(best.layers, dtype=torch.bool)
        if self.settings.normalize == "share":
            factors, dropped = share_weights(products)
            weights = factors * best.scores
        scores = (weights[..., None] * products).sum(1)
        neurons = []
        for index, layer in enumerate(layers):
            reading = weights * (best.layers > index)
            neurons.append(layer.inner_products((reading[..., None] * keys).sum(1)))
        ranked = torch.cat(neurons, 1)
        return {
            "query": scores[:, 2::2],
            "attention_query": scores[:, 1::2],
            "dropped": dropped.sum(1),
            **_ranking("query", self._best(ranked, ranked)),
        }

    def _keys(
        self, parts: ResidualParts, layers: Sequence[LayerNeurons], best: ValueNeurons, gradients: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys of the value neurons as directions of the residual stream, and what their coefficients are worth.

        Returns:
            Keys ``(prompts, neurons, hidden_size)`` and the change of the answer's log-probability with each
            coefficient, ``(prompts, neurons)``.
        """
        keys = gradients.new_zeros(*best.layers.shape, gradients.shape[-1])
        slopes = gradients.new_zeros(best.layers.shape)
        for index, (layer, values) in enumerate(zip(self.architecture.layers, parts.layers, strict=True)):
            prompts, places = (best.layers == index).nonzero(as_tuple=True)
            if not len(prompts):
                continue
            numbers = best.numbers[prompts, places]
            found = subkeys(layer, self.settings.query_key, values.inputs[prompts], numbers)
            keys[prompts, places] = (
                found if values.input_norm is None else values.input_norm.at(prompts).transposed(found)
            )
            slopes[prompts, places] = (layers[index].vectors(prompts, numbers) * gradients[prompts, index]).sum(-1)
        return keys, slopes

    def _heads(self, read_out: FrozenReadOut, parts: ResidualParts, state_log_probs: Tensor) -> Tensor:
        """Value score of each attention head, ``(prompts, layers, heads)``."""
        scores = []
        for index, (layer, values) in enumerate(zip(self.architecture.layers, parts.layers, strict=True)):
            weight = weight_of(layer.attention_out).to(values.heads.device).float().unflatten(1, (self.num_heads, -1))
            added = torch.einsum("phc,dhc->phd", values.heads.unflatten(1, (self.num_heads, -1)), weight)
            prompts = torch.arange(len(added), device=added.device).repeat_interleave(self.num_heads)
            added = added.flatten(0, 1)
            if values.attention_norm is not None:
                added = values.attention_norm.at(prompts).linear(added)
            found = read_out.log_probs(values.before[prompts] + added, prompts).unflatten(0, (-1, self.num_heads))
            scores.append(found - state_log_probs[:, index, None])
        return torch.stack(scores, 1)

    def _nothing(self, device: torch.device) -> dict[str, Tensor]:
        """Columns without rows, of the shapes that ``_scores`` gives."""
        layers, best = len(self.widths), min(self.settings.top_neurons, self.num_neurons)
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("value_block", "value_sum", "attention", "query", "attention_query"), (layers,)
        )
        sizes |= {"log_prob": (), "value_scores": (best,), "query_scores": (best,)}
        if self.num_heads:
            sizes["heads"] = (layers, self.num_heads)
        whole: dict[str, tuple[int, ...]] = {"value_neurons": (best, 2), "query_neurons": (best, 2)}
        whole |= {"dropped": (), "read_outs": ()}
        floats = {name: torch.zeros(0, *size, device=device) for name, size in sizes.items()}
        return floats | {name: torch.zeros(0, *size, dtype=torch.long, device=device) for name, size in whole.items()}


def _log_probs(read_out: FrozenReadOut, states: Tensor) -> Tensor:
    prompts = torch.arange(len(states), device=states.device).repeat_interleave(states.shape[1])
    return read_out.log_probs(states.flatten(0, 1), prompts).view(states.shape[:2])


def _ranking(name: str, best: ValueNeurons) -> dict[str, Tensor]:
    return {f"{name}_neurons": torch.stack([best.layers, best.numbers], -1), f"{name}_scores": best.scores}
