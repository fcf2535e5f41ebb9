"""Causal language models as the verbs take them: a folder or Hub id to load with its tokenizer."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_xai.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def load_language_model(
    model: str, dtype: Dtype = "auto", device: str = "auto", gguf_file: str | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Loads a causal language model and its tokenizer, without progress bars.

    Args:
        model: Folder with a ``config.json``, or id of a Hub repository.
        dtype: ``"auto"`` is the dtype that the model was saved in, but float32 on a CPU.
        device: ``"auto"`` is the accelerator if there is one; otherwise a torch device, such as ``"cpu"``.
        gguf_file: Name of a GGUF file in the folder or repository, which holds model and tokenizer.

    Raises:
        ConfigError: If there is no such model or device, or the model can't be read.
        MissingDependencyError: If a library that the model needs is missing.
    """
    folder = Path(model)
    wanted = gguf_file or "config.json"
    if folder.is_dir() and not (folder / wanted).is_file():
        raise ConfigError(f"The folder {model!r} is no language model: it has no {wanted}.")
    if not folder.is_dir() and (folder.is_absolute() or model.startswith(".") or model.count("/") > 1):
        raise ConfigError(f"There is no folder {model!r}.")
    import torch

    where = _device(device)
    precision: Any = dtype if dtype != "auto" else "auto" if where.type != "cpu" else "float32"
    options = {"gguf_file": gguf_file} if gguf_file else {}
    with quiet_transformers():
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model, **options)
            loaded = AutoModelForCausalLM.from_pretrained(
                model, dtype=precision if precision == "auto" else getattr(torch, precision), **options
            )
        except ImportError as error:
            reason = f"Loading {model!r} needs a library that is missing: {error}"
            raise MissingDependencyError(f"{reason} pip install 'hf-xai[transformers]'") from error
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]  # then transformers lists every class that it knows
            raise ConfigError(f"Can't load a causal language model from {model!r}: {reason}") from error
    return loaded.to(where).eval(), tokenizer


def _device(device: str) -> Any:
    import torch

    if device == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"--device {device!r} can't be used: {str(error).splitlines()[0]}") from None
    return chosen


@contextmanager
def quiet_transformers(*, progress_bars: bool = False) -> Iterator[None]:
    """A block without remarks and, by default, progress bars of transformers, which then are as they were."""
    from transformers.utils import logging

    with ExitStack() as undo:
        undo.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if not progress_bars and logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            undo.callback(logging.enable_progress_bar)
        yield
