"""Fingerprints of a model's config and weights, so that an artefact can tell the model that it was made for."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_xai.errors import UnsupportedModelError
from hf_xai.hub.json_values import to_json

if TYPE_CHECKING:
    import torch

_SAMPLES = 4096
_SPREAD = 2654435761  # a prime near 2^32 / golden ratio (Knuth): multiples of it modulo n lie spread over 0 .. n - 1


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256 of a model's config, the same for every order of its keys.

    Keys that start with an underscore (``_class_name``, ``_diffusers_version``, ``_name_or_path``) are left out at
    every depth: they say where a config comes from, not what the model is.

    Raises:
        ConfigError: If a value can't be written as JSON; its text might differ from run to run.
    """
    text = json.dumps(_public(to_json(config, "config")), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def weights_fingerprint(module: "torch.nn.Module") -> str:
    """SHA-256 of a model's parameter names, their shapes and the signs of up to 4096 fixed entries of each.

    Only signs, because a sign survives every cast between floating dtypes, where a rounded value may fall on either
    side of its step: a model calibrated in float32 is recognised in bfloat16, on any device. Another training or a
    full fine-tuning changes many signs, even a small edit of one layer some. A change that keeps every sign, such as a
    scaling, is not seen, nor are buffers. Quantised weights have other shapes or dtypes and so another fingerprint;
    their integers are compared exactly.

    Args:
        module: The bare model, not a wrapper such as DistributedDataParallel; ``torch.compile`` makes no difference.

    Raises:
        UnsupportedModelError: If a parameter lies on the meta device, as under disk or CPU offload; its name is given.
    """
    digest = hashlib.sha256()
    parameters = {
        name.replace("_orig_mod.", ""): parameter  # the wrapper of torch.compile
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    for name, parameter in sorted(parameters.items()):
        if parameter.is_meta:
            raise UnsupportedModelError(
                f"The parameter {name} holds no values (meta device); take the fingerprint before enabling offload."
            )
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(_sampled_bytes(parameter.detach()))
    return digest.hexdigest()


def _sampled_bytes(values: "torch.Tensor") -> bytes:
    import torch

    if values.is_complex():
        values = torch.view_as_real(values)
    count = values.numel()
    flat = values.reshape(-1)
    if count > _SAMPLES:
        flat = flat[(torch.arange(_SAMPLES) * _SPREAD % count).to(flat.device)]
    exact = flat.signbit() if flat.is_floating_point() else flat
    return exact.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items() if not key.startswith("_")}
    return [_public(item) for item in value] if isinstance(value, list) else value
