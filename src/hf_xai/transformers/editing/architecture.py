"""Where a decoder's feed-forward and attention outputs are computed, found by structure and not by a model's name."""

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_xai.activations import unwrap_model
from hf_xai.errors import UnsupportedModelError

_FEED_FORWARD = ("mlp", "feed_forward", "ffn")
_FEED_FORWARD_OUT = ("down_proj", "c_proj", "fc_out", "dense_4h_to_h", "fc2", "w2")
_ATTENTION_OUT = ("o_proj", "out_proj", "c_proj", "dense")
_SCALES = ("residual_multiplier", "scale_depth")  # Granite, MiniCPM: the FFN is not added as it is


@dataclass(frozen=True)
class EditableLayer:
    """One decoder layer, and the two matrices that write into its residual stream.

    Attributes:
        index: Its number, from 0.
        block: The layer, named ``block_name`` in the model.
        feed_forward: What computes the coefficients of the neurons: the MLP, or the layer itself where the two
            matrices of the MLP lie in it (OPT).
        feed_forward_out: The ``Linear`` or ``Conv1D`` whose input are the coefficients ``(..., intermediate_size)``
            of the neurons and whose columns are their vectors: what editors rewrite.
        attention_out: The same of the attention; its input are the heads' outputs.
    """

    index: int
    block: nn.Module
    block_name: str
    feed_forward: nn.Module
    feed_forward_name: str
    feed_forward_out: nn.Module
    feed_forward_out_name: str
    attention_out: nn.Module
    attention_out_name: str

    @property
    def has_post_norm(self) -> bool:
        """Whether a norm stands between the MLP's output and the residual stream (Gemma 2 and 3, OLMo 2)."""
        return hasattr(self.block, "post_feedforward_layernorm")


@dataclass(frozen=True)
class DecoderArchitecture:
    """The layers of a causal language model and what reads the last one out.

    Attributes:
        model: The bare transformers model; names of modules are names in it.
        decoder: The module that holds the layers.
        layers: First to last.
        final_norm: The norm between the last layer and the head.
        head: The output embeddings, ``(vocabulary, hidden_size)``.
        hidden_size: Width of the residual stream.
    """

    model: PreTrainedModel
    decoder: nn.Module
    layers: tuple[EditableLayer, ...]
    final_norm: nn.Module
    head: nn.Linear
    hidden_size: int

    def __len__(self) -> int:
        return len(self.layers)


def output_matrix(module: nn.Module) -> Tensor:
    """The weight of a ``Linear`` or ``Conv1D`` as ``(out_features, in_features)``, a view; Conv1D has it (in, out)."""
    weight = cast(Tensor, module.weight)
    return weight.T if isinstance(module, Conv1D) else weight


def decoder_architecture(model: nn.Module, feed_forward_out: str | None = None) -> DecoderArchitecture:
    """Finds the layers, and in each the output matrices of MLP and attention.

    The decoder layers are the longest list of modules of one class. The output matrix of the MLP goes by one of the
    names that it has in transformers, or else is the only one whose output has ``hidden_size`` channels.

    Args:
        model: A decoder-only model of transformers with a language-modelling head, alone or wrapped.
        feed_forward_out: For other models the name of the output matrix, with ``{}`` for the layer's number:
            ``"model.layers.{}.mlp.down_proj"``.

    Raises:
        UnsupportedModelError: If a part can't be found for certain; it says what was looked for and what was found.
    """
    bare = unwrap_model(model)
    name, config = type(bare).__name__, getattr(bare, "config", None)
    if not isinstance(bare, PreTrainedModel) or config is None:
        raise UnsupportedModelError(f"model must be a PreTrainedModel of transformers, got {name}.")
    head = bare.get_output_embeddings()
    if config.is_encoder_decoder or not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"{name} is no decoder with a language-modelling head.")
    text = config.get_text_config(decoder=True)
    for scale in _SCALES:
        if getattr(text, scale, 1.0) not in (None, 1.0):
            raise UnsupportedModelError(f"{name} scales what its layers add ({scale}); it can't be edited yet.")
    blocks_name, blocks = _longest_module_list(bare)
    decoder_name = blocks_name.rpartition(".")[0]
    decoder = bare.get_submodule(decoder_name)
    names = {id(module): path for path, module in bare.named_modules()}
    hidden_size = head.in_features
    layers = tuple(
        _layer(index, block, names, hidden_size, feed_forward_out, bare) for index, block in enumerate(blocks)
    )
    return DecoderArchitecture(bare, decoder, layers, _final_norm(decoder, name), head, hidden_size)


def _longest_module_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    same = [(path, module) for path, module in lists if len({type(entry) for entry in module}) == 1]
    if not same:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers of one class.")
    return max(same, key=lambda entry: len(entry[1]))


def _final_norm(decoder: nn.Module, name: str) -> nn.Module:
    norms = [child for child in decoder.children() if "Norm" in type(child).__name__]
    if len(norms) != 1:
        found = ", ".join(f"{path} ({type(child).__name__})" for path, child in decoder.named_children())
        raise UnsupportedModelError(f"{name} must have one norm after its layers; its decoder holds {found}.")
    return norms[0]


def _layer(
    index: int, block: nn.Module, names: dict[int, str], hidden_size: int, template: str | None, model: nn.Module
) -> EditableLayer:
    if template is not None:
        path = template.format(index)
        out = dict(model.named_modules()).get(path)
        if not _is_matrix(out):
            raise UnsupportedModelError(f"{path!r} must be a Linear or Conv1D, found {type(out).__name__}.")
        feed_forward = model.get_submodule(path.rpartition(".")[0])
    else:
        feed_forward = next((getattr(block, path) for path in _FEED_FORWARD if hasattr(block, path)), block)
        out = _out_matrix(feed_forward, _FEED_FORWARD_OUT, hidden_size, f"the MLP of {names[id(block)]}")
    attention = next(
        (
            child
            for path, child in block.named_children()
            if "attn" in path or "attention" in path
            if not isinstance(child, nn.Dropout) and "norm" not in path
        ),
        None,
    )
    if attention is None:
        raise UnsupportedModelError(f"{names[id(block)]} ({type(block).__name__}) has no attention.")
    attention_out = _out_matrix(attention, _ATTENTION_OUT, hidden_size, f"the attention of {names[id(block)]}")
    return EditableLayer(
        index=index,
        block=block,
        block_name=names[id(block)],
        feed_forward=feed_forward,
        feed_forward_name=names[id(feed_forward)],
        feed_forward_out=cast(nn.Module, out),
        feed_forward_out_name=names[id(out)],
        attention_out=attention_out,
        attention_out_name=names[id(attention_out)],
    )


def _is_matrix(module: Any) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _out_matrix(holder: nn.Module, known: tuple[str, ...], hidden_size: int, what: str) -> nn.Module:
    matrices = {path: child for path, child in holder.named_children() if _is_matrix(child)}
    # Of the shape, not of the weight: that of an offloaded module is on the meta device, of a quantised one packed.
    writing = {path: child for path, child in matrices.items() if _out_features(child) == hidden_size}
    named = [child for path, child in writing.items() if path in known]
    if len(named) == 1:
        return named[0]
    if len(writing) == 1:
        return next(iter(writing.values()))
    found = ", ".join(f"{path} ({type(child).__name__})" for path, child in holder.named_children())
    raise UnsupportedModelError(
        f"Can't tell which matrix writes the output of {what}: looked in {type(holder).__name__} for a Linear or "
        f"Conv1D with {hidden_size} outputs named {', '.join(known)}, found {found or 'nothing'}. Experts and wrapped "
        "layers can't be edited."
    )


def _out_features(module: nn.Module) -> int:
    return module.nf if isinstance(module, Conv1D) else cast(int, module.out_features)
