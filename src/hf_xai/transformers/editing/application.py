"""Edits on a live model: added to its weights or to its outputs, and taken away again in any order, bit for bit.

What is applied is kept on the bare model itself, under the attachment contract: a CPU copy of each weight that was
touched, and the changes in the order in which they came. A weight is always written from its copy, never changed back
by subtraction, which would not give the same bits.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_xai.activations import unwrap_model
from hf_xai.attachment import attach, attached_state, detach, is_attached
from hf_xai.errors import AlreadyEnabledError, NotEnabledError, UnsupportedModelError
from hf_xai.transformers.editing.low_rank import LowRankDelta, edited_outputs
from hf_xai.transformers.editing.weight_access import can_be_merged, execution_device, matrix_module

ATTACHMENT = "knowledge_edits"


@dataclass(frozen=True)
class _Edit:
    """The changes of one edit, by name of the module: those added to weights, and those added to outputs."""

    merged: Mapping[str, LowRankDelta]
    hooked: Mapping[str, LowRankDelta]


@dataclass
class _AppliedEdits:
    """What is on a model: the edits by their keys in order of application, and what undoes them."""

    copies: dict[str, Tensor] = field(default_factory=dict)
    edits: dict[str, _Edit] = field(default_factory=dict)
    suspended: set[str] = field(default_factory=set)
    hooks: ExitStack = field(default_factory=ExitStack)

    def active(self) -> list[_Edit]:
        return [edit for key, edit in self.edits.items() if key not in self.suspended]


def apply_edit(
    model: nn.Module, key: str, deltas: Mapping[str, LowRankDelta], *, merge: bool = True
) -> dict[str, float]:
    """Applies one edit beside those that are applied already.

    Args:
        model: The model, alone or wrapped.
        key: What the edit is known by.
        deltas: Change of each module, by its name in the bare model.
        merge: Whether to add the changes to the weights where that can be done; else hooks add them to the outputs.

    Returns:
        For each weight of less than 32 bits what rounding took from the change,
        ``||round(W + D) - (W + D)|| / ||D||``, of all edits that are applied together.

    Raises:
        AlreadyEnabledError: If it is applied already.
        ArtifactMismatchError: If the model has no such module.
        UnsupportedModelError: If hooks are needed, and the model is compiled: it would not run them.
    """
    bare = unwrap_model(model)
    if edit_is_applied(bare, key):
        raise AlreadyEnabledError(f"This edit is already applied to this {type(bare).__name__}; revert it first.")
    modules = {name: matrix_module(bare, name) for name in deltas}
    merged = {name: deltas[name] for name in deltas if merge and can_be_merged(bare, modules[name])}
    hooked = {name: deltas[name].to(execution_device(modules[name])) for name in deltas if name not in merged}
    if hooked and hasattr(model, "_orig_mod"):
        raise UnsupportedModelError(
            f"A compiled model doesn't run hooks that are set later, and {next(iter(hooked))} needs one (offloaded, "
            "quantised or shared weights, or merge=False): apply the edit first, then compile."
        )
    if not is_attached(bare, ATTACHMENT):
        undo, fresh, reference = ExitStack(), _AppliedEdits(), weakref.ref(bare)  # no cycle: the model holds the stack
        undo.callback(lambda: _restore(cast(nn.Module, reference()), fresh))
        attach(bare, ATTACHMENT, undo, fresh)
    state: _AppliedEdits = attached_state(bare, ATTACHMENT)
    state.edits[key] = _Edit(merged, hooked)
    try:
        for name in merged:
            if name not in state.copies:
                state.copies[name] = _weight(modules[name]).detach().to("cpu", copy=True)
        _set_hooks(bare, state)
        return _write(bare, state, tuple(merged))
    except BaseException:
        remove_edit(bare, key)
        raise


def applied_edits(model: nn.Module) -> tuple[str, ...]:
    """Fingerprints of the edits on a model, in the order of their application."""
    bare = unwrap_model(model)
    return tuple(attached_state(bare, ATTACHMENT).edits) if is_attached(bare, ATTACHMENT) else ()


def edit_is_applied(model: nn.Module, key: str) -> bool:
    """Whether the edit is on this model."""
    bare = unwrap_model(model)
    return is_attached(bare, ATTACHMENT) and key in attached_state(bare, ATTACHMENT).edits


def remove_edit(model: nn.Module, key: str) -> None:
    """Takes one edit away; the others stay as if it had never been there.

    Raises:
        NotEnabledError: If it is not applied.
        UnsupportedModelError: If a weight has been offloaded since it was edited.
    """
    bare = unwrap_model(model)
    state = _state_with(bare, key)
    _check_present(bare, state)
    edit = state.edits.pop(key)
    state.suspended.discard(key)
    names = tuple(name for name in edit.merged if name in state.copies)
    _write(bare, state, names)
    for name in names:
        if not any(name in other.merged for other in state.edits.values()):
            del state.copies[name]
    _set_hooks(bare, state)
    if not state.edits:
        detach(bare, ATTACHMENT)


def remove_all_edits(model: nn.Module) -> None:
    """Takes every edit off a model, also those whose results are lost; does nothing where there is none."""
    bare = unwrap_model(model)
    if is_attached(bare, ATTACHMENT):
        _check_present(bare, attached_state(bare, ATTACHMENT))
        detach(bare, ATTACHMENT)


def keep_edit(model: nn.Module, key: str) -> None:
    """Makes an applied edit part of the weights: it can't be taken away any more.

    Raises:
        NotEnabledError: If it is not applied.
        UnsupportedModelError: If a part of it is a hook, and not in the weights.
    """
    bare = unwrap_model(model)
    state = _state_with(bare, key)
    _check_present(bare, state)
    edit = state.edits[key]
    if edit.hooked:
        raise UnsupportedModelError(
            f"The weight of {next(iter(edit.hooked))} can't be changed for good: offloaded, quantised or shared, "
            "or the edit was applied with merge=False. Export it with to_peft() or save_pretrained() instead."
        )
    for name, delta in edit.merged.items():
        copy, module = state.copies[name], matrix_module(bare, name)
        state.copies[name] = _edited(copy, [delta], module).to(copy.dtype).cpu()
    remove_edit(bare, key)


@contextmanager
def without_edit(model: nn.Module, key: str) -> Iterator[None]:
    """Runs a block as if an edit were not applied; afterwards it is, in the place in the order that it had."""
    bare = unwrap_model(model)
    state = _state_with(bare, key)
    _check_present(bare, state)
    names = tuple(state.edits[key].merged)
    state.suspended.add(key)
    try:
        _set_hooks(bare, state)
        _write(bare, state, names)
        yield
    finally:
        if key in state.edits:
            state.suspended.discard(key)
            _set_hooks(bare, state)
            _write(bare, state, names)


def original_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that edits have changed as they were before, by name of the module, on the CPU."""
    bare = unwrap_model(model)
    return dict(attached_state(bare, ATTACHMENT).copies) if is_attached(bare, ATTACHMENT) else {}


def _state_with(bare: nn.Module, key: str) -> _AppliedEdits:
    if not edit_is_applied(bare, key):
        raise NotEnabledError(f"This edit is not applied to this {type(bare).__name__}.")
    return cast(_AppliedEdits, attached_state(bare, ATTACHMENT))


def _check_present(bare: nn.Module, state: _AppliedEdits) -> None:
    away = [name for name in state.copies if _weight(matrix_module(bare, name)).is_meta]
    if away:
        raise UnsupportedModelError(
            f"The weight of {away[0]} was offloaded after the edit was applied, so it can't be written back; fetch it "
            "first (accelerate.hooks.remove_hook_from_submodules), or apply edits after offloading."
        )


def _restore(bare: nn.Module, state: _AppliedEdits) -> None:
    state.hooks.close()
    state.edits.clear()
    _write(bare, state, tuple(state.copies))


def _set_hooks(bare: nn.Module, state: _AppliedEdits) -> None:
    """Sets the hooks of all active edits anew, so that their order is that of application."""
    state.hooks.close()
    with ExitStack() as hooks:
        for edit in state.active():
            for name, delta in edit.hooked.items():  # of the module itself: a hold on the model would be a cycle
                hooks.enter_context(edited_outputs(bare.get_submodule(name), {"": delta}))
        state.hooks = hooks.pop_all()


@torch.no_grad()
def _write(bare: nn.Module, state: _AppliedEdits, names: Sequence[str]) -> dict[str, float]:
    """Writes weights from their copies and the active edits; returns what was lost in rounding."""
    errors = {}
    for name in names:
        module, copy = matrix_module(bare, name), state.copies[name]
        weight = _weight(module)
        deltas = [edit.merged[name] for edit in state.active() if name in edit.merged]
        if not deltas:
            weight.copy_(copy)
            continue
        exact = _edited(copy, deltas, module)
        weight.copy_(exact)
        if weight.itemsize < 4:
            size = (exact - copy.to(exact)).norm()
            errors[name] = float((weight.to(exact) - exact).norm() / size) if size > 0 else 0.0
    return errors


def _edited(copy: Tensor, deltas: Sequence[LowRankDelta], module: nn.Module) -> Tensor:
    """The copy of a weight plus changes, one after the other, in float32 (or float64) where the weight lies."""
    device = _weight(module).device
    total = copy.to(device, torch.promote_types(copy.dtype, torch.float32))
    for delta in deltas:
        placed = delta.to("cpu" if device.type == "mps" else device)  # which has no float64
        dense = (placed.b.double() @ placed.a.double()).to(total.dtype).to(device)
        total = total + (dense.T if isinstance(module, Conv1D) else dense)
    return total


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight)
