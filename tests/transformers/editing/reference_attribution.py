"""The scores of `locate` for one prompt, neuron by neuron in float64 from a host's own names: slow and obvious."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Names:
    """Where a host keeps what: names of modules, ``block`` of the layers, the others within a layer."""

    blocks: str
    final_norm: str
    attention: str  # the module whose output is added to the residual stream
    up: str
    down: str
    gate: str | None = None
    input_norm: str | None = None
    output_norm: str | None = None
    parallel: bool = False
    rms: bool = True
    plus_one: bool = False


_LLAMA = Names(
    "model.layers",
    "model.norm",
    attention="self_attn",
    up="mlp.up_proj",
    down="mlp.down_proj",
    gate="mlp.gate_proj",
    input_norm="post_attention_layernorm",
)
_GEMMA = Names(
    "model.layers",
    "model.norm",
    attention="post_attention_layernorm",
    up="mlp.up_proj",
    down="mlp.down_proj",
    gate="mlp.gate_proj",
    input_norm="pre_feedforward_layernorm",
    output_norm="post_feedforward_layernorm",
    plus_one=True,
)
_PARALLEL = {"rms": False, "parallel": True}
HOSTS = {
    "llama": _LLAMA,
    "qwen3": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": Names(
        "model.layers",
        "model.norm",
        attention="post_attention_layernorm",
        up="mlp.up_proj",
        down="mlp.down_proj",
        gate="mlp.gate_proj",
        output_norm="post_feedforward_layernorm",
    ),
    "gpt2": Names(
        "transformer.h",
        "transformer.ln_f",
        attention="attn",
        up="mlp.c_fc",
        down="mlp.c_proj",
        input_norm="ln_2",
        rms=False,
    ),
    "gptj": Names(
        "transformer.h",
        "transformer.ln_f",
        attention="attn",
        up="mlp.fc_in",
        down="mlp.fc_out",
        input_norm="ln_1",
        **_PARALLEL,
    ),
    "gpt_neox": Names(
        "gpt_neox.layers",
        "gpt_neox.final_layer_norm",
        attention="attention",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        input_norm="post_attention_layernorm",
        **_PARALLEL,
    ),
    "phi": Names(
        "model.layers",
        "model.final_layernorm",
        attention="self_attn",
        up="mlp.fc1",
        down="mlp.fc2",
        input_norm="input_layernorm",
        **_PARALLEL,
    ),
    "opt": Names(
        "model.decoder.layers",
        "model.decoder.final_layer_norm",
        attention="self_attn",
        up="fc1",
        down="fc2",
        input_norm="final_layer_norm",
        rms=False,
    ),
    "falcon": Names(
        "transformer.h",
        "transformer.ln_f",
        attention="self_attention",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        input_norm="input_layernorm",
        **_PARALLEL,
    ),
    "falcon_new": Names(
        "transformer.h",
        "transformer.ln_f",
        attention="self_attention",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        input_norm="ln_mlp",
        **_PARALLEL,
    ),
}


class Reference:
    """One prompt of one model, in float64 from the first layer's input and the attentions' outputs on."""

    def __init__(self, model: PreTrainedModel, name: str, input_ids: list[int], target: int | None = None) -> None:
        self.model, self.names = model.double().eval(), HOSTS[name]
        self.blocks = list(model.get_submodule(self.names.blocks))
        attentions, starts = [], []

        def after_attention(module: nn.Module, args: Any, output: Any) -> None:
            attentions.append((output[0] if isinstance(output, tuple) else output)[0, -1].clone())

        hooks = [self.part(layer, "attention").register_forward_hook(after_attention) for layer in range(len(self))]
        hooks.append(
            self.blocks[0].register_forward_pre_hook(
                lambda module, args, kwargs: starts.append((args[0] if args else kwargs["hidden_states"])[0, -1]),
                with_kwargs=True,
            )
        )
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([input_ids]), use_cache=False).logits[0, -1]
        for hook in hooks:
            hook.remove()
        self.target = int(logits.argmax()) if target is None else target
        self.log_prob = float(logits.log_softmax(-1)[self.target])
        self.attentions, self.states, self.bases = attentions, [starts[0]], []
        self.coefficients, self.inputs, self.input_sources, self.outputs, self.added = [], [], [], [], []
        for layer, attention in enumerate(attentions):
            before = self.states[-1]
            self.bases.append(before + attention)
            source = before if self.names.parallel else before + attention
            self.input_sources.append(source)
            inputs = self.normalized(self.part(layer, "input_norm"), source, source)
            self.inputs.append(inputs)
            m = torch.stack([self.coefficient(layer, neuron, inputs) for neuron in range(self.width(layer))])
            output = self.matrix(layer, "down") @ m + self.bias(layer, "down")
            added = self.normalized(self.part(layer, "output_norm"), output, output)
            self.coefficients.append(m)
            self.outputs.append(output)
            self.added.append(added)
            self.states.append(self.bases[-1] + added)

    def __len__(self) -> int:
        return len(self.blocks)

    def part(self, layer: int, kind: str) -> nn.Module | None:
        path = getattr(self.names, kind)
        return None if path is None else self.blocks[layer].get_submodule(path)

    def matrix(self, layer: int, kind: str) -> Tensor:
        module = self.part(layer, kind)
        return (module.weight.T if isinstance(module, Conv1D) else module.weight).detach()

    def bias(self, layer: int, kind: str) -> Tensor:
        bias = getattr(self.part(layer, kind), "bias", None)
        return torch.zeros(1, dtype=torch.float64) if bias is None else bias.detach()

    def width(self, layer: int) -> int:
        return self.matrix(layer, "up").shape[0]

    def coefficient(self, layer: int, neuron: int, inputs: Tensor) -> Tensor:
        bias = self.bias(layer, "up").expand(self.width(layer))[neuron]
        up = self.matrix(layer, "up")[neuron] @ inputs + bias
        if self.names.gate is None:
            return self._activation()(up)
        return self._activation()(self.matrix(layer, "gate")[neuron] @ inputs) * up

    def normalized(self, norm: nn.Module | None, states: Tensor, frozen_at: Tensor) -> Tensor:
        """A norm by its formula, with the scale that it has at other states."""
        if norm is None:
            return states
        eps = next(getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name))
        weight = norm.weight.detach() + (1 if self.names.plus_one else 0)
        if self.names.rms:
            return weight * states / (frozen_at.square().mean() + eps).sqrt()
        return weight * (states - states.mean()) / (frozen_at.var(correction=0) + eps).sqrt() + norm.bias.detach()

    def vector(self, layer: int, neuron: int) -> Tensor:
        column = self.matrix(layer, "down")[:, neuron]
        return self.normalized(self.part(layer, "output_norm"), column, self.outputs[layer])

    def log_prob_of(self, state: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        norm = self.model.get_submodule(self.names.final_norm)
        logits = head.weight.detach() @ self.normalized(norm, state, self.states[-1])
        if head.bias is not None:
            logits = logits + head.bias.detach()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = cap * (logits / cap).tanh()
        return logits.log_softmax(-1)[self.target]

    def value_scores(self, layer: int) -> Tensor:
        """The rise by each neuron of a layer alone, ``(neurons,)``."""
        base, m = self.bases[layer], self.coefficients[layer]
        before = self.log_prob_of(base)
        return torch.stack(
            [
                self.log_prob_of(base + m[neuron] * self.vector(layer, neuron)) - before
                for neuron in range(self.width(layer))
            ]
        )

    def parts(self) -> list[Tensor]:
        added = [part for pair in zip(self.attentions, self.added, strict=True) for part in pair]
        return [self.states[0], *added]

    def carried(self, layer: int, neuron: int) -> Tensor:
        """What each part carries to the answer through one value neuron, ``(parts,)``."""
        pairs = zip(self.slopes(layer, neuron), self.parts(), strict=True)
        return torch.stack([slope @ part for slope, part in pairs]).detach()

    def slopes(self, layer: int, neuron: int) -> list[Tensor]:
        """Autograd of the answer's log-probability by each part, on the path through one value neuron alone.

        All scales of norms are those of the forward pass.
        """
        parts = [part.detach().clone().requires_grad_() for part in self.parts()]
        source = torch.stack(parts[: 1 + 2 * layer + (0 if self.names.parallel else 1)]).sum(0)
        inputs = self.normalized(self.part(layer, "input_norm"), source, self.input_sources[layer])
        change = self.coefficient(layer, neuron, inputs) - self.coefficients[layer][neuron]
        log_prob = self.log_prob_of(self.bases[layer] + change * self.vector(layer, neuron))
        gradients = torch.autograd.grad(log_prob, parts, allow_unused=True)
        return [
            torch.zeros_like(part) if gradient is None else gradient
            for gradient, part in zip(gradients, parts, strict=True)
        ]

    def subkey(self, layer: int, neuron: int) -> Tensor:
        """Gradient of a coefficient by the feed-forward input, by the product rule."""
        x = self.inputs[layer]
        up, bias = self.matrix(layer, "up")[neuron], self.bias(layer, "up").expand(self.width(layer))[neuron]
        if self.names.gate is None:
            return _slope(self._activation(), up @ x + bias) * up
        gate = self.matrix(layer, "gate")[neuron]
        act = self._activation()
        return _slope(act, gate @ x) * (up @ x) * gate + act(gate @ x) * up

    def _activation(self) -> Any:
        config = self.model.config
        names = ("hidden_activation", "activation_function", "hidden_act", "activation")
        return ACT2FN[next(getattr(config, name) for name in names if getattr(config, name, None))]


def _slope(activation: Any, value: Tensor, step: float = 1e-6) -> Tensor:
    return (activation(value + step) - activation(value - step)) / (2 * step)
