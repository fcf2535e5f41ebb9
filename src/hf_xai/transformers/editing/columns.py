"""Which prompts a stage edits: one column of keys for each, and which of them share one optimised change."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hf_xai.errors import DataError
from hf_xai.transformers.editing.config import EditorConfig
from hf_xai.transformers.editing.requests import EditRequest, fill
from hf_xai.transformers.editing.tokens import EncodedPrompt, FactToken, PromptEncoder

PromptKind = Literal["own", "multi_hop", "forward"]


@dataclass(frozen=True)
class Column:
    """One prompt of a request, with its new answer.

    Attributes:
        kind: Whether it is the request's own prompt, or a multi-hop or forward one.
        request: Number of the request.
        prompts: The plain prompt, then the same in each context template.
        essence: The essence prompt, where the prompt has a subject and there is an essence prompt.
        text, answer: The plain prompt and the new answer, for reports.
    """

    kind: PromptKind
    request: int
    prompts: tuple[EncodedPrompt, ...]
    essence: EncodedPrompt | None
    text: str
    answer: str


@dataclass(frozen=True)
class Group:
    """Columns that share one optimised change."""

    columns: tuple[Column, ...]

    @property
    def prompts(self) -> tuple[EncodedPrompt, ...]:
        """All prompts of all its columns."""
        return tuple(prompt for column in self.columns for prompt in column.prompts)

    @property
    def essence(self) -> EncodedPrompt | None:
        return self.columns[0].essence


class ColumnEncoder:
    """Turns requests into columns.

    Args:
        encoder: Of the model's tokenizer.
        config: The editor's.
        templates: Context templates, without the plain ``"{}"``.
    """

    def __init__(self, encoder: PromptEncoder, config: EditorConfig, templates: Sequence[str]) -> None:
        self.encoder, self.config, self.templates = encoder, config, ("{}", *templates)

    def columns(
        self, number: int, request: EditRequest, kinds: Sequence[PromptKind], fact_token: FactToken
    ) -> list[Column]:
        """The columns of one request, of the asked kinds, in the order own, multi-hop, forward."""
        prompts: list[tuple[PromptKind, str, str | None, str]] = []
        if "own" in kinds:
            prompts.append(("own", request.prompt, request.subject, request.target))
        if "multi_hop" in kinds:
            prompts += [("multi_hop", prompt, None, request.target) for prompt in request.multi_hop_prompts]
        if "forward" in kinds:
            prompts += [("forward", prompt, request.subject, answer) for prompt, answer in request.forward_prompts]
        return [self._column(number, fact_token, *prompt) for prompt in prompts]

    def _column(
        self, number: int, fact_token: FactToken, kind: PromptKind, prompt: str, subject: str | None, answer: str
    ) -> Column:
        encoded = tuple(
            self.encoder.encode(prompt, subject=subject, target=answer, fact_token=fact_token, template=template)
            for template in self.templates
        )
        essence = None
        if subject is not None and self.config.essence_prompt is not None and self.config.kl_factor > 0:
            essence = self.encoder.encode(self.config.essence_prompt, subject=subject, fact_token=fact_token)
        text = prompt if subject is None else fill(prompt, subject)
        return Column(kind, number, encoded, essence, text, answer.strip())


def check_lengths(prompts: Iterable[tuple[str, EncodedPrompt]], limit: int | None) -> None:
    """Refuses prompts, each given with its text, that the model has no positions for."""
    for text, prompt in prompts:
        if limit is not None and len(prompt.input_ids) > limit:
            raise DataError(f"The prompt {text!r} has {len(prompt.input_ids)} tokens; the model takes {limit}.")
