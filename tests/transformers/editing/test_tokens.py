"""Where prompts, subjects and answers are among the tokens, for tokenizers that make it hard to find them."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_xai.errors import DataError, SubjectNotFoundError, TokenizerError
from hf_xai.transformers.editing.tokens import EncodedPrompt, PromptEncoder, spaced
from tests.tiny.causal_lms import tiny_chat_tokenizer
from tests.transformers.editing.bigram_models import word_tokenizer

WORDS = ["The", "capital", "of", "France", "is", "Rome", "New", "York", ":", ",", "city", "river"]
MERGED = ["Ġcapital", "Ġof", "ĠFrance", "Ġis", "ĠRome", "ĠNew", "ĠYork", "The", "York", "Rome"]


def byte_level(trim_offsets: bool = True, bos: bool = False) -> PreTrainedTokenizerFast:
    """As of GPT-2 or Llama 3: the space belongs to the word after it, and a letter beyond ASCII is several tokens."""
    pieces = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in MERGED:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    tokenizer.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>")


def llama_like(prepend_scheme: str = "first") -> PreTrainedTokenizerFast:
    """A space is put in front of the text, and a beginning-of-sequence token before it."""
    pieces = ["<s>", "<unk>", *("▁" + word for word in WORDS), "▁", *map(chr, range(33, 127))]
    scores = [(piece, 0.0 if piece[0] == "<" else -2.0 if len(piece) > 1 else -9.0) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>", pad_token="<unk>")


TOKENIZERS = {
    "byte level": byte_level(),
    "byte level with spaces in its offsets": byte_level(trim_offsets=False),
    "byte level with BOS": byte_level(bos=True),
    "Llama": llama_like(),
    "Llama, always": llama_like("always"),
    "words with BOS and EOS": word_tokenizer(["<pad>", "<s>", "</s>", "<unk>", *WORDS], bos=True),
    "characters": tiny_chat_tokenizer(),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int] | tuple[int, ...]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()


@every_tokenizer
@pytest.mark.parametrize("target", ["Rome", " Rome", "New York"])
def test_the_answer_is_predicted_token_by_token_behind_the_prompt(
    tokenizer: PreTrainedTokenizerFast, target: str
) -> None:
    found = PromptEncoder(tokenizer).encode("The capital of {} is", subject="France", target=target)
    whole = tokenizer(f"The capital of France is {target.strip()}")["input_ids"]
    if "</s>" in tokenizer.get_vocab() and whole[-1] == tokenizer.eos_token_id:
        whole = whole[:-1]
    assert list(found.input_ids) == whole[:-1]  # one beginning-of-sequence token, none in front of the answer
    assert [*found.input_ids, found.target_ids[-1]] == whole
    assert found.target_ids == tuple(whole[place + 1] for place in found.predicting)
    assert found.predicting == tuple(range(len(whole) - len(found.target_ids) - 1, len(whole) - 1))
    assert text_of(tokenizer, found.target_ids) == target.strip()
    assert text_of(tokenizer, whole[: found.predicting[0] + 1]) == "The capital of France is"


@every_tokenizer
@pytest.mark.parametrize("subject", ["France", "New York"])
@pytest.mark.parametrize("prompt", ["The capital of {} is", "{} is", "The city, {}, is", "The capital of {}"])
def test_the_edited_position_is_the_last_token_of_the_subject(
    tokenizer: PreTrainedTokenizerFast, prompt: str, subject: str
) -> None:
    encoder = PromptEncoder(tokenizer)
    found = encoder.encode(prompt, subject=subject, target="Rome")
    up_to = prompt[: prompt.index("{}")] + subject
    said = text_of(tokenizer, found.input_ids[: found.position + 1]).replace(" ,", ",")
    assert said == up_to
    assert text_of(tokenizer, found.input_ids[found.position : found.position + 1])
    assert encoder.encode(prompt, subject=subject).position == found.position


@every_tokenizer
def test_of_two_occurrences_the_one_in_the_place_of_the_braces_is_taken(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer)
    first = encoder.encode("{} : The capital of France is", subject="France", target="Rome")
    second = encoder.encode("France : The capital of {} is", subject="France", target="Rome")
    assert first.input_ids == second.input_ids
    assert first.position < second.position
    assert first.input_ids[second.position] in first.input_ids[: first.position + 1] or len(WORDS) > 0
    before = text_of(tokenizer, first.input_ids[: first.position + 1])
    assert before == "France"


@every_tokenizer
def test_the_last_token_of_the_prompt_is_taken_where_asked_or_where_there_is_no_subject(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    encoder = PromptEncoder(tokenizer)
    for found in (
        encoder.encode("The capital of {} is", subject="France", target="Rome", fact_token="last"),
        encoder.encode("The capital of France is", target="New York"),
    ):
        assert found.position == found.predicting[0]
    alone = encoder.encode("The capital of France is")
    assert (alone.position, alone.predicting, alone.target_ids) == (len(alone.input_ids) - 1, (), ())
    assert text_of(tokenizer, alone.input_ids) == "The capital of France is"


@every_tokenizer
def test_a_context_template_shifts_everything_with_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder, template = PromptEncoder(tokenizer), "The river of France is {0} : {}"
    found = encoder.encode("The capital of {} is", subject="France", target="Rome", template=template)
    plain = encoder.encode("The capital of {} is", subject="France", target="Rome")
    assert found.target_ids == plain.target_ids
    assert found.predicting[0] - found.position == plain.predicting[0] - plain.position
    assert found.position > plain.position
    assert found.input_ids[found.position] == plain.input_ids[plain.position]


@pytest.mark.parametrize("name", ["byte level", "characters", "Llama"])
def test_a_subject_with_letters_of_several_bytes_or_tokens_ends_where_its_characters_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = PromptEncoder(tokenizer)
    subject = "Besançon" if name == "byte level" else "Besancon"
    subject += "é" if name == "byte level" else ""
    found = encoder.encode("The capital of {} is", subject=subject, target="Rome")
    assert text_of(tokenizer, found.input_ids[: found.position + 1]) == f"The capital of {subject}"


def test_a_prompt_that_ends_with_white_space_gets_no_second_one() -> None:
    assert spaced("The capital is", "Rome") == spaced("The capital is", " Rome") == " Rome"
    assert spaced("The capital is ", " Rome") == spaced("The capital is\n", "Rome") == "Rome"
    tokenizer = TOKENIZERS["byte level"]
    encoder = PromptEncoder(tokenizer)
    with_space = encoder.encode("The capital of {} is ", subject="France", target="Rome")
    without = encoder.encode("The capital of {} is", subject="France", target="Rome")
    assert with_space == without  # the space is a part of the answer's first token
    assert with_space.target_ids == (tokenizer.convert_tokens_to_ids("ĠRome"),)


def test_a_subject_without_a_token_of_its_own_and_an_empty_prompt_are_refused() -> None:
    encoder = PromptEncoder(TOKENIZERS["characters"])
    with pytest.raises(SubjectNotFoundError, match="stands for the subject ' '"):
        PromptEncoder(TOKENIZERS["words with BOS and EOS"]).encode("The {} of", subject=" ", target="Rome")
    with pytest.raises(DataError, match="has no token of its own"):
        encoder.encode("", target="x")
    with pytest.raises(DataError, match="has no token"):
        PromptEncoder(TOKENIZERS["words with BOS and EOS"]).encode("The", target="")


def test_batches_are_padded_on_the_right_whatever_side_the_tokenizer_pads() -> None:
    for side in ("left", "right"):
        tokenizer = tiny_chat_tokenizer()
        tokenizer.padding_side = side
        encoder = PromptEncoder(tokenizer)
        prompts = [EncodedPrompt((1, 7, 8, 9), 2), EncodedPrompt((1, 7), 1)]
        batch = encoder.batch(prompts)
        assert batch.input_ids.tolist() == [[1, 7, 8, 9], [1, 7, 0, 0]]
        assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
        assert torch.equal(batch.positions, torch.tensor([2, 1]))
        assert tokenizer.padding_side == side


def test_a_tokenizer_without_a_padding_token_is_left_as_it_is() -> None:
    tokenizer = byte_level()
    assert tokenizer.pad_token_id is None
    batch = PromptEncoder(tokenizer).batch([EncodedPrompt((5, 6), 0), EncodedPrompt((5,), 0)])
    assert batch.attention_mask.tolist() == [[1, 1], [1, 0]]
    assert tokenizer.pad_token_id is None


def test_a_slow_tokenizer_is_refused_with_what_to_do() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(TokenizerError, match="Slow can't say.*use_fast=True"):
        PromptEncoder(Slow())  # type: ignore[arg-type]


def test_a_tokenizer_without_a_limit_or_with_a_short_one_cuts_nothing_off() -> None:
    tokenizer = tiny_chat_tokenizer()
    tokenizer.model_max_length = 4
    found = PromptEncoder(tokenizer).encode("The capital of {} is", subject="France", target="Rome")
    assert text_of(tokenizer, found.target_ids) == "Rome"
