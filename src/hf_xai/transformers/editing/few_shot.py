"""Examples that are put in front of a question, so that a base model answers it and stops."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_xai.errors import ConfigError

Examples = tuple[tuple[str, str], ...]

# Written for this library. MQuAKE (arXiv 2305.14795) puts 16 examples in front of a multi-hop question and 8 of the
# same relation in front of a single-hop one; figures to be compared with the paper's need its own.
MULTI_HOP_EXAMPLES: Examples = (
    ("What is the capital of the country where the Taj Mahal stands?", "New Delhi"),
    ("In which country was the author of Don Quixote born?", "Spain"),
    ("What language is spoken in the country whose capital is Vienna?", "German"),
    ("On which continent is the country that sumo wrestling comes from?", "Asia"),
    ("What is the currency of the country that Mount Fuji is in?", "Japanese yen"),
    ("In which city was the composer of The Four Seasons born?", "Venice"),
    ("What is the capital of the country where Nokia has its headquarters?", "Helsinki"),
    ("Of which country is the painter of The Starry Night a citizen?", "Netherlands"),
    ("On which continent is the country whose capital is Nairobi?", "Africa"),
    ("What is the official language of the country where the tango was created?", "Spanish"),
    ("Who created the detective whose assistant is Doctor Watson?", "Arthur Conan Doyle"),
    ("What is the capital of the country where Marie Curie was born?", "Warsaw"),
    ("Which sport is played by the team whose home is Camp Nou?", "association football"),
    ("In which city did the inventor of dynamite die?", "Sanremo"),
    ("What language did the author of War and Peace write in?", "Russian"),
    ("In which country does the river that flows through Cairo reach the sea?", "Egypt"),
)
SINGLE_HOP_EXAMPLES: Examples = (
    ("What is the capital of Peru?", "Lima"),
    ("Who is the author of Moby-Dick?", "Herman Melville"),
    ("Which continent is Vietnam located in?", "Asia"),
    ("What is the country of citizenship of Usain Bolt?", "Jamaica"),
    ("Which sport is the Stanley Cup associated with?", "ice hockey"),
    ("What language was The Little Prince written in?", "French"),
    ("Which city was Ludwig van Beethoven born in?", "Bonn"),
    ("Who founded the Ford Motor Company?", "Henry Ford"),
)


@dataclass(frozen=True)
class FewShotPrompts:
    r"""How questions are put: examples, one a line, then the question.

    ```python
    FewShotPrompts.plain()  # questions as they are, for prompts that the answer continues
    FewShotPrompts(  # reasoned answers
        multi_hop="Question: ...\nThoughts: ...\nAnswer: ...\n\n...",
        multi_hop_template="Question: {question}\nThoughts:",
        answer_after="Answer:",
    )
    ```

    Args:
        multi_hop: Examples in front of a multi-hop question, as pairs, which are written with ``multi_hop_template``,
            or as a text.
        single_hop: Examples in front of a hop that isn't edited, likewise.
        by_relation: Other examples by the id of the hop's relation, as in MQuAKE; ``single_hop`` for all others.
        multi_hop_template: The question with its frame; the answer is what follows.
        single_hop_template: The same of a single hop.
        answer_after: What stands in front of the answer to a multi-hop question where the model reasons first.
            The answer is the first line in any case.

    Raises:
        ConfigError: If a template lacks ``{question}``.
    """

    multi_hop: str | Examples = MULTI_HOP_EXAMPLES
    single_hop: str | Examples = SINGLE_HOP_EXAMPLES
    by_relation: Mapping[str, str | Examples] = field(default_factory=dict)
    multi_hop_template: str = "Q: {question} A:"
    single_hop_template: str = "Q: {question} A:"
    answer_after: str | None = None

    def __post_init__(self) -> None:
        for name in ("multi_hop_template", "single_hop_template"):
            if getattr(self, name).count("{question}") != 1:
                raise ConfigError(f"{name} must have {{question}} once, got {getattr(self, name)!r}.")

    @classmethod
    def plain(cls) -> "FewShotPrompts":
        """No examples and no frame."""
        return cls((), (), multi_hop_template="{question}", single_hop_template="{question}")

    def multi_hop_prompt(self, question: str) -> str:
        """A multi-hop question behind its examples."""
        return _behind(self.multi_hop, question, self.multi_hop_template)

    def single_hop_prompt(self, question: str, relation: str | None = None) -> str:
        """The question about one hop behind its examples."""
        examples = self.single_hop if relation is None else self.by_relation.get(relation, self.single_hop)
        return _behind(examples, question, self.single_hop_template)


def _behind(examples: str | Examples, question: str, template: str) -> str:
    framed = template.replace("{question}", question)
    if isinstance(examples, str):
        lines = [examples.rstrip("\n")] if examples.strip() else []
    else:
        lines = [f"{template.replace('{question}', asked)} {answer}" for asked, answer in examples]
    return "\n".join([*lines, framed])
