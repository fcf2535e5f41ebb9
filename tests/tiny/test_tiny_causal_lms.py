import pytest
import torch

from tests.tiny.causal_lms import (
    ANSWER_ENDS,
    BOS,
    CAUSAL_LMS,
    EOS,
    PAD,
    SPECIALS,
    VOCABULARY,
    tiny_causal_lm,
    tiny_chat_tokenizer,
)

TEXT = "Passage:\nAnna put 3 hats in the box {not} there.\n\nRead the passage!  Question: Where?\tAnswer:"


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_a_seed_gives_one_model_that_listens_to_its_prompt(name: str) -> None:
    model = tiny_causal_lm(name)
    same, other = tiny_causal_lm(name).state_dict(), tiny_causal_lm(name, seed=1).state_dict()
    assert all(torch.equal(value, same[key]) for key, value in model.state_dict().items())
    assert not any(torch.equal(value, other[key]) for key, value in model.state_dict().items() if value.dim() == 2)
    first, second = torch.randint(6, VOCABULARY, (2, 1, 20), generator=torch.Generator().manual_seed(0))
    answers = [model.generate(ids, max_new_tokens=8, do_sample=False)[0, 20:].tolist() for ids in (first, second)]
    assert answers[0] != answers[1]
    assert model.config.vocab_size == VOCABULARY
    assert (model.config.pad_token_id, model.config.eos_token_id) == (PAD, EOS)


def test_the_tokenizer_gives_ascii_text_back_in_fewer_tokens_than_letters() -> None:
    tokenizer = tiny_chat_tokenizer()
    text = TEXT.replace("\t", " ")
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == BOS
    assert tokenizer.decode(ids[1:]) == text
    assert len(ids) < 0.75 * len(text)
    assert len(tokenizer) == VOCABULARY
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIALS] == list(range(len(SPECIALS)))
    assert [tokenizer.decode([token]) for token in ANSWER_ENDS[1:]] == ["\n", ".", "!", "?", ";"]


def test_special_tokens_on_top_of_the_template_would_be_two() -> None:
    tokenizer = tiny_chat_tokenizer()
    message = [{"role": "user", "content": "Who?"}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert text == "<s><user>Who?</s><model>"
    assert tokenizer(text)["input_ids"][:2] == [BOS, BOS]
    assert tokenizer(text, add_special_tokens=False)["input_ids"].count(BOS) == 1
    assert tiny_chat_tokenizer(chat_template=False).chat_template is None
