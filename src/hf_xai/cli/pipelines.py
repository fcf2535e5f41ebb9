"""Pipelines as the verbs take them: a folder or Hub id to load, and arguments of the call as KEY=VALUE."""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_xai.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def load_pipeline(model: str, dtype: Dtype = "auto") -> "DiffusionPipeline":
    """Loads a pipeline, onto the accelerator if there is one, without its progress bars.

    Args:
        model: Folder with a ``model_index.json``, or id of a Hub repository.
        dtype: ``"auto"`` is bfloat16 on an accelerator and float32 on a CPU.

    Raises:
        ConfigError: If there is no such pipeline or it can't be read.
        MissingDependencyError: If a library that the pipeline needs is missing.
    """
    folder = Path(model)
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise ConfigError(f"The folder {model!r} is no diffusers pipeline: it has no model_index.json.")
    if not folder.is_dir() and (folder.is_absolute() or model.startswith(".") or model.count("/") > 1):
        raise ConfigError(f"There is no folder {model!r}.")
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if dtype == "auto":
        dtype = "float32" if device is None or device.type == "cpu" else "bfloat16"
    with _quiet_hosts():
        try:
            from diffusers import DiffusionPipeline

            pipe = DiffusionPipeline.from_pretrained(model, dtype=getattr(torch, dtype))
        except ImportError as error:
            reason = f"Loading {model!r} needs a library that is missing: {error}"
            raise MissingDependencyError(f"{reason} pip install 'hf-xai[diffusers]'") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"Can't load a diffusers pipeline from {model!r}: {error}") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def call_arguments(settings: Sequence[str], pipe: Any = None, prompts: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of a pipeline's call from ``KEY=VALUE`` settings, whose values are JSON or else plain text.

    Args:
        settings: As typed: ``height=32``, ``guidance_scale=3.5``, ``negative_prompt=blurry`` ...
        pipe: Where given, it is checked that a pipeline that wants a prompt gets one.
        prompts: Prompts that come beside the settings; they are not put into the result.

    Raises:
        ConfigError: If a setting has no ``=``, or the prompt is missing.
    """
    call = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--call takes KEY=VALUE, such as --call height=512; got {setting!r}.")
        call[key] = _value(value)
    if pipe is not None and not prompts and not any(key.startswith("prompt") for key in call):
        parameter = inspect.signature(type(pipe).__call__).parameters.get("prompt")
        if parameter is not None:
            raise ConfigError(f"{type(pipe).__name__} needs a prompt: give one or more, each with --prompt.")
    return call


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def _quiet_hosts() -> Iterator[None]:
    """Loading without progress bars and remarks of diffusers and transformers, which then are as they were."""
    import diffusers.utils.logging as of_diffusers
    import transformers.utils.logging as of_transformers

    with ExitStack() as undo:
        for logs in (of_diffusers, of_transformers):
            undo.callback(logs.set_verbosity, logs.get_verbosity())
            logs.set_verbosity_error()
            if logs.is_progress_bar_enabled():
                logs.disable_progress_bar()
                undo.callback(logs.enable_progress_bar)
        yield
