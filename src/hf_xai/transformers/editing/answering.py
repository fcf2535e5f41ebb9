"""How probable a model finds given answers, and what it answers itself: batched, on any number of processes.

Every distinct prompt is run once, the long ones first, so that a batch holds prompts of nearly one length and a batch
that doesn't fit the memory fails at once.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_xai.activations import evaluation_mode, unwrap_model
from hf_xai.distributed import map_dataset
from hf_xai.errors import DataError, UnsupportedModelError
from hf_xai.hub import config_fingerprint
from hf_xai.transformers.editing.tokens import EncodedPrompt, PromptEncoder

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

PromptAndAnswer = tuple[str, str]
_NO_TOKEN = -1


@dataclass(frozen=True)
class Loop:
    """How the loops over prompts run, as `map_dataset` takes it."""

    batch_size: int = 16
    accelerator: "Accelerator | None" = None
    resume_dir: Path | None = None
    fingerprint: str | None = None

    def map(self, function: Any, rows: Sequence[Any], name: str, about: Any) -> dict[str, Tensor]:
        """Maps a function over rows; ``about`` is what else makes the loop ``name`` the same in a ``resume_dir``."""
        resume_dir = None if self.resume_dir is None else self.resume_dir / name
        return map_dataset(
            function,
            rows,
            accelerator=self.accelerator,
            batch_size=self.batch_size,
            resume_dir=resume_dir,
            fingerprint=None if resume_dir is None else config_fingerprint({"model": self.fingerprint, "rows": about}),
            description=f"Editing, {name}",
        )


class AnsweringModel:
    """A causal language model that is asked about answers.

    Args:
        model: On any devices, alone or wrapped; edits that are merged or set as hooks count.
        tokenizer: A fast one; its padding side doesn't matter.

    Raises:
        UnsupportedModelError: If the model isn't one of transformers that generates.
        TokenizerError: If the tokenizer is slow.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: "PreTrainedTokenizerBase") -> None:
        bare = unwrap_model(model)
        if not isinstance(bare, PreTrainedModel) or not bare.can_generate():
            raise UnsupportedModelError(f"model must be a causal language model, got {type(model).__name__}.")
        self.model: Any = bare
        self.encoder = PromptEncoder(tokenizer)
        self._keeps_logits = "logits_to_keep" in inspect.signature(bare.forward).parameters
        self.window: int | None = getattr(bare.config.get_text_config(), "max_position_embeddings", None)

    def num_answer_tokens(self, prompt: str, answer: str) -> int:
        """Tokens of an answer behind a prompt."""
        return len(self._with_answer(prompt, answer).target_ids)

    def check_window(self, prompt: str, max_new_tokens: int) -> None:
        """Refuses a prompt that leaves no room for an answer.

        Raises:
            DataError: If the model can't read so many tokens.
        """
        if self.window is not None:
            num_tokens = len(self.encoder.encode(prompt.rstrip(" ")).input_ids) + max_new_tokens
            if num_tokens > self.window:
                raise DataError(
                    f"The model reads {self.window} tokens at most; {prompt[-80:]!r} and an answer have {num_tokens}."
                )

    def log_probabilities(self, pairs: Sequence[PromptAndAnswer], loop: Loop) -> dict[PromptAndAnswer, float]:
        """Mean log-probability per token of given answers, in nats, with teacher forcing; float32.

        Args:
            pairs: Prompts and answers; repeated ones count once.
            loop: How to run.

        Raises:
            DataError: If an answer has no token.
        """
        distinct = list(dict.fromkeys(pairs))
        if not distinct:
            return {}
        encoded = {pair: self._with_answer(*pair) for pair in distinct}
        distinct.sort(key=lambda pair: -len(encoded[pair].input_ids))
        rows = [encoded[pair] for pair in distinct]
        about = [[list(row.input_ids), list(row.target_ids)] for row in rows]
        with evaluation_mode(self.model):
            found = loop.map(self._measure, rows, "probabilities", about)["log_prob"]
        return dict(zip(distinct, found.tolist(), strict=True))

    def greedy_answers(self, prompts: Sequence[str], max_new_tokens: int, loop: Loop) -> dict[str, str]:
        """What the model goes on with, greedily and up to an end of sequence; settings of its own don't count.

        Args:
            prompts: Repeated ones count once.
            max_new_tokens: Tokens of an answer.
            loop: How to run.
        """
        distinct = list(dict.fromkeys(prompts))
        if not distinct:
            return {}
        encoded = {prompt: self.encoder.encode(prompt.rstrip(" ")).input_ids for prompt in distinct}
        distinct.sort(key=lambda prompt: -len(encoded[prompt]))
        rows = [encoded[prompt] for prompt in distinct]
        about = [max_new_tokens, [list(row) for row in rows]]
        with evaluation_mode(self.model), _plain_generation(self.model, self.encoder.pad_id):
            found = loop.map(lambda batch: self._generate(batch, max_new_tokens), rows, "answers", about)["tokens"]
        tokens = [[token for token in row if token != _NO_TOKEN] for row in found.tolist()]
        texts = self.encoder.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return dict(zip(distinct, texts, strict=True))

    def probe(self, pairs: Sequence[PromptAndAnswer], batch_size: int) -> list[float]:
        """Numbers by which any edit of the model shows, also one that is a hook; measured on this process alone.

        Beside the answers' log-probabilities, which a successful edit brings close to 0, the means over the
        vocabulary.
        """
        rows = [self._with_answer(*pair) for pair in pairs]
        with evaluation_mode(self.model):
            parts = [self._measure(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
        return [number for part in parts for name in ("log_prob", "of_all") for number in part[name].tolist()]

    def weight_sums(self) -> list[int]:
        """Exact sums of all weights' bit patterns, the same on every device; 0 for one that is offloaded."""
        return [0 if weight.is_meta else _bit_sum(weight.detach()) for weight in self.model.parameters()]

    def _with_answer(self, prompt: str, answer: str) -> EncodedPrompt:
        # A space at the prompt's end is the beginning of the answer's first token.
        return self.encoder.encode(prompt.rstrip(" "), target=answer.strip())

    @torch.no_grad()
    def _measure(self, rows: list[EncodedPrompt]) -> dict[str, Tensor]:
        batch = self.encoder.batch(rows, self._device())
        length = batch.input_ids.shape[1]
        first = min(row.predicting[0] for row in rows)
        keep = {"logits_to_keep": length - first} if self._keeps_logits else {}
        logits = self.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **keep
        ).logits[:, first - length :]
        means, of_all = [], []
        for row, of_row in zip(rows, logits, strict=True):
            places = torch.tensor(row.predicting, device=logits.device) - first
            targets = torch.tensor(row.target_ids, device=logits.device)
            log_probs = of_row[places].float().log_softmax(dim=-1)
            means.append(log_probs.gather(1, targets[:, None]).mean())
            of_all.append(log_probs.mean())
        return {"log_prob": torch.stack(means), "of_all": torch.stack(of_all)}

    @torch.no_grad()
    def _generate(self, rows: list[tuple[int, ...]], max_new_tokens: int) -> dict[str, Tensor]:
        length = max(map(len, rows))
        ids = torch.full((len(rows), length), self.encoder.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(rows):  # on the left: all answers begin in one column
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        device = self._device()
        written = self.model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens, do_sample=False
        )[:, length:]
        tokens = torch.full((len(rows), max_new_tokens), _NO_TOKEN)
        tokens[:, : written.shape[1]] = written.cpu()
        return {"tokens": tokens}

    def _device(self) -> torch.device:
        device = self.model.get_input_embeddings().weight.device
        return torch.device("cpu") if device.type == "meta" else device  # hooks of an offloaded model move them on


def _bit_sum(weight: Tensor) -> int:
    """A sum of integers doesn't depend on the order of its terms, as one of floats does."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(weight.contiguous().view(integers[weight.element_size()]).sum(dtype=torch.int64))


@contextmanager
def _plain_generation(model: Any, pad_id: int) -> Iterator[None]:
    """Greedy search for a block, without the penalties and forced tokens that the model's own settings may hold."""
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=pad_id)
    try:
        yield
    finally:
        model.generation_config = own
