import sys
from io import StringIO
from typing import Any

import pytest
import torch
from transformers import TextStreamer

from hf_xai.errors import ConfigError
from hf_xai.transformers.feature_gaps.generation import feature_gap_generate, generate_with_feature_gap
from hf_xai.transformers.feature_gaps.streaming import ConfidenceStreamer
from tests.tiny.causal_lms import PAD, tiny_chat_tokenizer
from tests.transformers.feature_gaps.generations import NEW_TOKENS, prompts, talker
from tests.transformers.feature_gaps.heads import ALL_PROBABILITIES, random_head

TOKENIZER = tiny_chat_tokenizer()
Pieces = list[tuple[str, list[float], bool]]


def collected(**settings: Any) -> tuple[Pieces, ConfidenceStreamer]:
    pieces: Pieces = []
    return pieces, ConfidenceStreamer(TOKENIZER, on_text=lambda *piece: pieces.append(piece), **settings)


def streamed_text(sequences: torch.Tensor, start: int, **settings: Any) -> str:
    return TOKENIZER.decode(sequences[0, start:], **settings)


@pytest.mark.parametrize("probabilities", [(), ALL_PROBABILITIES], ids=["gaps", "with_probabilities"])
@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("way", ["function", "attached"])
def test_text_and_confidences_are_those_of_the_finished_answer(
    way: str, skip_prompt: bool, probabilities: Any
) -> None:
    model, given = talker("llama"), prompts((9,))
    head = random_head(model, probabilities=probabilities)
    pieces, streamer = collected(skip_prompt=skip_prompt)
    arguments = {**given.inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**arguments, custom_generate=feature_gap_generate, feature_gap=head)
    if way == "function":
        sequences = generate_with_feature_gap(model, head, **arguments, streamer=streamer).sequences
    else:
        with head.attach(model) as recorder:
            streamer.recorder = recorder
            sequences = model.generate(**arguments, streamer=streamer)
    assert torch.equal(sequences, expected.sequences)
    assert "".join(text for text, _, _ in pieces) == streamed_text(sequences, given.length if skip_prompt else 0)
    confidences = [value for _, values, _ in pieces for value in values]
    assert confidences == pytest.approx(expected.token_confidence[0].tolist(), abs=1e-5)
    assert [end for _, _, end in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_confidence_comes_with_the_piece_that_its_token_ends_in() -> None:
    model, given = talker("llama"), prompts((9,))
    pieces, streamer = collected(skip_prompt=True)
    sequences = generate_with_feature_gap(
        model, random_head(model), **given.inputs, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=streamer
    ).sequences
    answer = sequences[0, given.length :].tolist()
    ends = [len(TOKENIZER.decode(answer[: count + 1])) for count in range(len(answer))]
    told, start = 0, 0
    for text, values, end in pieces:
        told += len(text)
        inside = [place for place in ends if start < place <= told]
        assert len(values) == len(inside) or end
        start = told
    assert len(pieces) > 3


def test_tokens_without_a_text_of_their_own_are_not_lost() -> None:
    model, given = talker("llama"), prompts((9,))
    model.generation_config.eos_token_id = PAD
    pieces, streamer = collected(skip_prompt=True, skip_special_tokens=True)
    forced = {"forced_eos_token_id": 2}
    outputs = generate_with_feature_gap(
        model, random_head(model), **given.inputs, max_new_tokens=4, do_sample=False, streamer=streamer, **forced
    )
    assert sum(len(values) for _, values, _ in pieces) == outputs.num_tokens[0] == 4
    assert "".join(text for text, _, _ in pieces) == streamed_text(
        outputs.sequences, given.length, skip_special_tokens=True
    )


def test_one_streamer_serves_one_answer_after_another() -> None:
    model = talker("llama")
    head = random_head(model)
    pieces, streamer = collected(skip_prompt=True)
    for lengths in ((9,), (14,), (5,)):
        given = prompts(lengths)
        pieces.clear()
        outputs = generate_with_feature_gap(
            model, head, **given.inputs, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=streamer
        )
        found = [value for _, values, _ in pieces for value in values]
        assert found == pytest.approx(outputs.token_confidence[0].tolist(), abs=1e-5)


def test_several_tokens_at_once_as_from_an_assistant() -> None:
    model, assistant = talker("llama"), talker("llama")  # the same weights: every draft is right
    head, given = random_head(model, probabilities=ALL_PROBABILITIES), prompts((9,))
    pieces, streamer = collected(skip_prompt=True)
    outputs = generate_with_feature_gap(
        model,
        head,
        **given.inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        streamer=streamer,
        assistant_model=assistant,
    )
    found = [value for _, values, _ in pieces for value in values]
    assert found == pytest.approx(outputs.token_confidence[0].tolist(), abs=1e-5)
    assert "".join(text for text, _, _ in pieces) == streamed_text(outputs.sequences, given.length)


def test_a_plain_streamer_streams_as_without_a_head(capsys) -> None:
    model, given = talker("llama"), prompts((9,))
    arguments = {**given.inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    model.generate(**arguments, streamer=TextStreamer(TOKENIZER))
    expected = capsys.readouterr().out
    generate_with_feature_gap(model, random_head(model), **arguments, streamer=TextStreamer(TOKENIZER))
    assert capsys.readouterr().out == expected


def test_confidences_are_printed_in_brackets_where_there_are_no_colours(capsys) -> None:
    model, given = talker("llama"), prompts((9,))
    outputs = generate_with_feature_gap(
        model,
        random_head(model),
        **given.inputs,
        max_new_tokens=3,
        do_sample=False,
        streamer=ConfidenceStreamer(TOKENIZER, skip_prompt=True),
    )
    printed = capsys.readouterr().out
    assert f"[{outputs.token_confidence[0, 0]:.2f}]" in printed
    assert "\x1b[" not in printed
    assert printed.endswith("\n")


def test_a_terminal_gets_colours(monkeypatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    streamer = ConfidenceStreamer(TOKENIZER)
    streamer.on_text("good ", [0.9], False)
    streamer.on_text("bad", [0.1, 0.2], True)
    printed = sys.stdout.getvalue()
    assert "\x1b[32mgood " in printed
    assert "\x1b[31mbad" in printed
    assert "0.9" not in printed


def test_a_streamer_without_a_recorder_says_what_to_do() -> None:
    model, given = talker("llama"), prompts((9,))
    _, streamer = collected()
    # generate puts the prompt into the streamer, and then hands it to no callable.
    with pytest.raises(ConfigError, match="give it to generate_with_feature_gap"):
        model.generate(
            **given.inputs, streamer=streamer, custom_generate=feature_gap_generate, feature_gap=random_head(model)
        )


def test_batches_and_beams_are_refused() -> None:
    model = talker("llama")
    _, streamer = collected()
    with pytest.raises(ValueError, match="batch size 1"):
        generate_with_feature_gap(
            model, random_head(model), **prompts().inputs, max_new_tokens=2, do_sample=False, streamer=streamer
        )
    with pytest.raises(ConfigError, match="streamer can't be used with beam search"):
        generate_with_feature_gap(
            model, random_head(model), **prompts((9,)).inputs, max_new_tokens=2, num_beams=2, streamer=streamer
        )
    with pytest.raises(ConfigError, match="model drafts for itself"):
        generate_with_feature_gap(
            model,
            random_head(model),
            **prompts((9,)).inputs,
            max_new_tokens=2,
            assistant_early_exit=2,
            streamer=streamer,
        )
