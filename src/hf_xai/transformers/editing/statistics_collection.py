r"""Sums of $k k^\top$ over a corpus: one forward pass of every sequence, one reduce of all processes at the end."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor, nn

from hf_xai.activations import evaluation_mode, read_inputs
from hf_xai.distributed.processes import Processes
from hf_xai.errors import DataError, UnsupportedModelError
from hf_xai.transformers.editing.statistics_parts import PartialSums
from hf_xai.transformers.editing.token_sequences import TokenSequences

if TYPE_CHECKING:
    from accelerate import Accelerator

    from hf_xai.transformers.editing.architecture import DecoderArchitecture

DOUBLE_CHANNELS = 8192
"""Up to this many channels sums are float64, beyond float32, for half the memory."""

SAVE_SECONDS = 300.0
"""What a killed collection loses at most, with a ``cache_dir`` (our choice)."""

_ROWS = 1024  # of a sum that are worked on at once: more would need another matrix of its size


class MomentSums:
    r"""Sums of $k k^\top$, one for each module, on the device of its keys; what is below the diagonal is left out.

    Args:
        sizes: Channels of each module's keys.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.counts = dict.fromkeys(sizes, 0)
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, inputs: Tensor) -> None:
        """Adds the keys of some tokens.

        Args:
            name: A module.
            inputs: What it is given, ``(..., channels)``. Products are float32 without TF32 (float64 for float64
                keys), sums as ``sum_dtype`` says.

        Raises:
            DataError: If a key is not finite.
        """
        size = self.sizes[name]
        keys = inputs.detach().reshape(-1, size)
        keys = keys if keys.dtype == torch.float64 else keys.float()
        if not bool(keys.isfinite().all()):
            raise DataError(
                f"The inputs of {name} are not finite (NaN or infinite) in {inputs.dtype}; a model that overflows in "
                "float16 may do well in bfloat16 or float32."
            )
        if name not in self._sums:
            dtype = torch.float32 if keys.device.type == "mps" else sum_dtype(size)  # which has no float64
            self._sums[name] = torch.zeros(size, size, dtype=dtype, device=keys.device)
        sums = self._sums[name]
        keys = keys.to(sums.device)
        with _exact_products(keys.device.type):
            for start in range(0, size, _ROWS):
                block, rows = sums[start : start + _ROWS, start:], keys[:, start : start + _ROWS]
                if keys.dtype == block.dtype:
                    block.addmm_(rows.T, keys[:, start:])
                else:
                    block += rows.T @ keys[:, start:]
        self.counts[name] += len(keys)

    def parts(self) -> dict[str, Tensor]:
        """A copy of each sum on the CPU, as far as there is one."""
        return {name: sums.to("cpu", sum_dtype(self.sizes[name]), copy=True) for name, sums in self._sums.items()}

    def pop(self, name: str) -> Tensor:
        """The sum of a module on the CPU, ``(channels, channels)``; the device forgets it."""
        size = self.sizes[name]
        sums = self._sums.pop(name, None)
        return torch.zeros(size, size, dtype=sum_dtype(size)) if sums is None else sums.to("cpu", sum_dtype(size))


def sum_dtype(size: int) -> torch.dtype:
    """The dtype in which the second moment of this many channels is summed up and stored."""
    return torch.float64 if size <= DOUBLE_CHANNELS else torch.float32


def collect_moments(
    architecture: "DecoderArchitecture",
    sequences: TokenSequences,
    sizes: Mapping[str, int],
    *,
    batch_tokens: int,
    accelerator: "Accelerator | None" = None,
    partial: PartialSums | None = None,
    description: str = "Collecting key statistics",
) -> dict[str, Tensor]:
    r"""The mean of $k k^\top$ over all tokens, for the inputs of each module.

    Sequences are dealt to the processes, which meet before the first and after the last one. The model runs as in
    evaluation, without its head, and where nothing of it is offloaded only up to the last of the modules.

    Args:
        architecture: The model; the same on every process.
        sequences: What it reads; the same on every process.
        sizes: Channels of the inputs of each module, by its name in the model.
        batch_tokens: Tokens of a batch.
        accelerator: The processes that share the work; None for this one.
        partial: Where each process keeps its sums, and what an earlier run has left.
        description: Label of the progress bar, which the main process alone shows.

    Returns:
        ``(channels, channels)`` on the CPU, the same on every process.

    Raises:
        DataError: If a key is not finite.
        UnsupportedModelError: If a module does not see every token once.
    """
    processes = Processes(accelerator)
    earlier: list[tuple[Path, list[int]]] = []
    with processes.together():
        if partial is not None and processes.is_main:
            earlier = partial.open()
    earlier = processes.exchange(earlier)[0]
    held = {index for _, indices in earlier for index in indices}
    missing = sequences.longest_first(index for index in range(len(sequences)) if index not in held)
    share = missing[processes.index :: processes.count]
    sums = MomentSums(sizes)
    with processes.together():
        bar = tqdm(
            total=int(sequences.lengths[share].sum()), desc=description, unit="token", disable=not processes.is_main
        )
        with bar:
            _run_share(architecture, sequences, share, batch_tokens, sums, partial, bar)
    totals: dict[str, Tensor] = {}
    with processes.together():
        for name in sizes:
            totals[name] = sums.pop(name)
            for path, _ in earlier[processes.index :: processes.count]:
                PartialSums.add_to(totals[name], path, name)
    for total in totals.values():
        _reduce(total, accelerator)
        total /= sequences.num_tokens
        _mirror(total)
    return totals


def _run_share(
    architecture: "DecoderArchitecture",
    sequences: TokenSequences,
    share: Sequence[int],
    batch_tokens: int,
    sums: MomentSums,
    partial: PartialSums | None,
    bar: Any,
) -> None:
    """Runs the sequences of this process, and keeps the sums now and then."""
    done: list[int] = []
    saved, tokens = time.monotonic(), 0
    device = _input_device(architecture.model)
    with _reading(architecture, sums) as run:
        for indices, input_ids in sequences.batches(share, batch_tokens):
            run(input_ids.to(device))
            tokens += input_ids.numel()
            odd = [f"{name} {count}" for name, count in sums.counts.items() if count != tokens]
            if odd:
                raise UnsupportedModelError(
                    f"Each module must see every token once; of {tokens} tokens {', '.join(odd)} were seen."
                )
            done += indices
            bar.update(input_ids.numel())
            if partial is not None and time.monotonic() - saved >= SAVE_SECONDS:
                partial.write(sums.parts(), done)
                saved = time.monotonic()


class _AllRead(Exception):
    """Ends a forward pass of which nothing more is wanted."""


@contextmanager
def _reading(architecture: "DecoderArchitecture", sums: MomentSums) -> Iterator[Any]:
    """Gives a function that runs the decoder on a batch and adds the keys."""
    model, decoder = architecture.model, architecture.decoder
    stops = not any(hasattr(module, "_hf_hook") for module in model.modules())  # which clears up after the module
    seen: set[str] = set()

    def on_input(name: str, inputs: Tensor) -> None:
        sums.add(name, inputs)
        seen.add(name)
        if stops and len(seen) == len(sums.sizes):
            raise _AllRead

    def run(input_ids: Tensor) -> None:
        seen.clear()
        with suppress(_AllRead):
            decoder(input_ids=input_ids, use_cache=False)

    with evaluation_mode(model), torch.no_grad(), read_inputs(model, list(sums.sizes), on_input):
        yield run


def _input_device(model: nn.Module) -> torch.device:
    device = cast(Any, model).get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device  # offloaded: accelerate moves what comes in


@contextmanager
def _exact_products(device_type: str) -> Iterator[None]:
    """Products of float32 in float32, whatever is set for the model: no autocast, no TF32, no bfloat16."""
    backends = (cast(Any, torch.backends.cuda).matmul, cast(Any, torch.backends.mkldnn).matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _reduce(total: Tensor, accelerator: "Accelerator | None") -> None:
    """Adds up the sums of all processes, in place and some rows at a time: a device never holds the whole twice."""
    if accelerator is None or accelerator.num_processes == 1:
        return
    for start in range(0, len(total), _ROWS):
        block = total[start : start + _ROWS, start:]
        block.copy_(accelerator.reduce(block.to(accelerator.device).contiguous(), reduction="sum"))


def _mirror(total: Tensor) -> None:
    """Fills in what is below the diagonal."""
    for start in range(0, len(total), _ROWS):
        end = start + _ROWS
        square = total[start:end, start:end]
        square.copy_(square.triu() + square.triu(1).T)
        total[end:, start:end] = total[start:end, end:].T
