import copy
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from transformers import LlamaConfig, LlamaForCausalLM

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, TokenizerError
from hf_xai.transformers.editing.locate_report import LocateReport
from hf_xai.transformers.editing.locating import locate
from hf_xai.transformers.editing.tokens import PromptEncoder
from tests.tiny.causal_lms import VOCABULARY, tiny_causal_lm, tiny_chat_tokenizer
from tests.tiny.traces import module_trace
from tests.transformers.editing.every_host import EVERY_HOST
from tests.transformers.editing.reference_attribution import Reference

TOKENIZER = tiny_chat_tokenizer()
PROMPTS = ["Question: is it so?", "Answer the passage", "Tell"]
SCORES = ("value_score_block", "value_score_sum", "attention_score", "query_score", "attention_query_score")


def tokens(prompt: str) -> list[int]:
    return list(PromptEncoder(TOKENIZER).encode(prompt, fact_token="last").input_ids)


def assert_same(one: LocateReport, other: LocateReport, tolerance: float = 1e-5) -> None:
    for name in SCORES:
        assert abs(one.columns[name] - other.columns[name]).max() <= tolerance, name
    assert one.targets == other.targets
    assert (one.query_layers, one.value_layers) == (other.query_layers, other.value_layers)


@pytest.mark.parametrize("name", EVERY_HOST)
def test_query_scores_are_autograd_through_the_value_neurons_on_the_frozen_path(name: str) -> None:
    report = locate(tiny_causal_lm(name), TOKENIZER, PROMPTS[1:2], top_neurons=6, candidates=60)
    reference = Reference(tiny_causal_lm(name), name, tokens(PROMPTS[1]))
    expected = sum(reference.carried(layer, neuron) for layer, neuron in report.value_neurons[0].tolist())
    size = expected.abs().max()
    assert abs(torch.tensor(report.columns["query_score"][0]) - expected[2::2]).max() < 2e-4 * size
    assert abs(torch.tensor(report.columns["attention_query_score"][0]) - expected[1::2]).max() < 2e-4 * size


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi"])
def test_query_neurons_are_scored_as_parts_of_their_layers_are(name: str) -> None:
    report = locate(tiny_causal_lm(name), TOKENIZER, PROMPTS[:1], top_neurons=5)
    reference = Reference(tiny_causal_lm(name), name, tokens(PROMPTS[0]))
    slopes = [reference.slopes(layer, neuron) for layer, neuron in report.value_neurons[0].tolist()]
    expected = {
        (layer, neuron): float(
            sum(slope[2 + 2 * layer] for slope in slopes)
            @ (reference.coefficients[layer][neuron] * reference.vector(layer, neuron))
        )
        for layer in range(4)
        for neuron in range(reference.width(layer))
    }
    best = sorted(expected, key=lambda place: -expected[place])[:5]
    assert [tuple(place) for place in report.query_neurons[0].tolist()] == best
    assert report.query_scores[0] == pytest.approx([expected[place] for place in best], rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gptj"])
def test_share_form_is_the_formula_of_the_released_notebooks(name: str) -> None:
    report = locate(
        tiny_causal_lm(name), TOKENIZER, PROMPTS[:1], top_neurons=4, query_key="up", normalize="share", candidates=99
    )
    reference = Reference(tiny_causal_lm(name), name, tokens(PROMPTS[0]))
    expected, parallel = torch.zeros(4).double(), reference.names.parallel
    for (layer, neuron), increase in zip(report.value_neurons[0].tolist(), report.value_scores[0], strict=True):
        key = reference.matrix(layer, "up")[neuron]
        norm = reference.part(layer, "input_norm")
        key = key * (norm.weight.detach().double() + reference.names.plus_one)
        if not reference.names.rms:
            key = key - key.mean()
        read = reference.parts()[: 1 + 2 * layer + (not parallel)]
        products = torch.stack([part @ key for part in read]).detach()
        if products.sum().abs() > 1e-3 * products.abs().sum():
            shares = products / products.sum() * increase
            for before in range(layer):
                expected[before] += shares[2 + 2 * before]
    found = torch.tensor(report.columns["query_score"][0])
    assert abs(found - expected).max() < 1e-3 * max(1, float(expected.abs().max()))


def planted() -> LlamaForCausalLM:
    """Neuron (0, 7) writes channel 1, which (1, 3) alone reads; it writes channel 2, which answers with token 50."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    rest = slice(5, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings[:, 0] = 2.0
        embeddings[:, rest] = 0.2 * torch.randn(VOCABULARY, 11, generator=generator)
        head[:, rest] = 0.2 * torch.randn(VOCABULARY, 11, generator=generator)
        head[50, 2] = 4.0
        for layer in model.model.layers:
            for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
                weight[:, rest] = 0.3 * torch.randn(8, 11, generator=generator)
            layer.mlp.down_proj.weight[rest] = 0.1 * torch.randn(11, 8, generator=generator)
        first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
        for mlp, neuron, reads, writes in ((first, 7, 0, 1), (second, 3, 1, 2)):
            mlp.gate_proj.weight[neuron], mlp.up_proj.weight[neuron] = 0.0, 0.0
            mlp.gate_proj.weight[neuron, reads] = mlp.up_proj.weight[neuron, reads] = 1.0
            mlp.down_proj.weight[:, neuron] = 0.0
            mlp.down_proj.weight[writes, neuron] = 1.0
    return model


@pytest.mark.parametrize("normalize", ["none", "share"])
@pytest.mark.parametrize("query_key", ["linearized", "up", "gate"])
def test_a_planted_circuit_is_found(query_key: str, normalize: str) -> None:
    report = locate(
        planted(), TOKENIZER, PROMPTS, top_neurons=1, method="exact", query_key=query_key, normalize=normalize
    )
    assert set(report.targets) == {TOKENIZER.decode([50])}
    assert [one[:2] for one in report.top_neurons] == [(1, 3)]
    assert [one[:2] for one in report.top_query_neurons] == [(0, 7)]
    assert report.top_neurons[0].num_prompts == len(PROMPTS)
    assert (report.query_layers, report.value_layers) == ((0,), (1,))
    assert report.num_dropped == 0


def test_the_column_of_a_neuron_is_no_key_of_it() -> None:
    report = locate(planted(), TOKENIZER, PROMPTS, top_neurons=1, query_key="down", normalize="share")
    assert [one[:2] for one in report.top_query_neurons] != [(0, 7)]
    assert report.num_dropped == len(PROMPTS)  # nothing writes along what (1, 3) itself writes


def test_without_its_query_neuron_the_value_neuron_is_silent() -> None:
    model, fired = planted(), []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: fired.append(args[0][0, -1, 3]))
    ids = torch.tensor([tokens(PROMPTS[0])])
    with torch.no_grad():
        model(ids)
        model.model.layers[0].mlp.down_proj.weight[:, 7] = 0.0
        model(ids)
    assert fired[0] > 0.1
    assert fired[1] == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_numbering_the_neurons_otherwise_numbers_the_scores_otherwise(name: str) -> None:
    model, order = tiny_causal_lm(name), torch.randperm(64, generator=torch.Generator().manual_seed(3))
    order = torch.cat([order, torch.arange(64, 128)]) if name == "gpt2" else order
    plain = locate(model, TOKENIZER, PROMPTS, method="exact", top_neurons=9)
    with torch.no_grad():
        if name == "gpt2":
            mlp = model.transformer.h[1].mlp
            mlp.c_fc.weight.copy_(mlp.c_fc.weight[:, order])
            mlp.c_fc.bias.copy_(mlp.c_fc.bias[order])
            mlp.c_proj.weight.copy_(mlp.c_proj.weight[order])
        else:
            mlp = model.model.layers[1].mlp
            for matrix in (mlp.gate_proj, mlp.up_proj):
                matrix.weight.copy_(matrix.weight[order])
            mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])
    permuted = locate(model, TOKENIZER, PROMPTS, method="exact", top_neurons=9)
    assert_same(plain, permuted, 2e-4)
    for mine, theirs in ((plain.value_neurons, permuted.value_neurons), (plain.query_neurons, permuted.query_neurons)):
        renamed = [
            [(layer, int(order[neuron]) if layer == 1 else neuron) for layer, neuron in row] for row in theirs.tolist()
        ]
        assert renamed == [[tuple(one) for one in row] for row in mine.tolist()]


@pytest.mark.parametrize("name", EVERY_HOST)
def test_padding_and_batches_make_no_difference_and_the_model_is_as_before(name: str) -> None:
    model, tokenizer = tiny_causal_lm(name), tiny_chat_tokenizer()
    model.train()
    model.get_input_embeddings().eval()
    modes, trace = [module.training for module in model.modules()], module_trace(model)
    weights = copy.deepcopy(model.state_dict())
    together = locate(model, tokenizer, PROMPTS, candidates=40)
    assert [module.training for module in model.modules()] == modes
    assert module_trace(model) == trace
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    tokenizer.padding_side = "right"
    assert_same(together, locate(model.eval(), tokenizer, PROMPTS, candidates=40, batch_size=1), 2e-4)
    alone = [locate(model, tokenizer, [prompt], candidates=40) for prompt in PROMPTS]
    for row, one in enumerate(alone):
        assert abs(one.columns["query_score"][0] - together.columns["query_score"][row]).max() < 2e-4


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon", "gpt2"])
def test_bfloat16_models_score_much_like_float32_ones(name: str) -> None:
    model = tiny_causal_lm(name)
    targets = locate(model, TOKENIZER, PROMPTS, candidates=60).targets
    given = {"targets": [f" {one.strip() or one}" for one in targets], "skip_wrong": False, "candidates": 60}
    exact, rounded = (locate(one, TOKENIZER, PROMPTS, **given) for one in (model, tiny_causal_lm(name).bfloat16()))
    for column in SCORES[:3]:
        size = abs(exact.columns[column]).max()
        assert abs(exact.columns[column] - rounded.columns[column]).max() < 0.1 * size, column


def test_two_stages_find_the_best_neurons_at_a_twentieth_of_the_cost() -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    exact = locate(model, TOKENIZER, PROMPTS, method="exact")
    fast = locate(model, TOKENIZER, PROMPTS, candidates=300)
    assert exact.num_neurons == 8192
    assert exact.num_read_outs == 8192 + 5 + 4 + 2 * 4  # each neuron, states, bases, and gradients as two
    assert fast.num_read_outs == 300 + 5 + 4 + 2 * 4
    assert 20 * fast.num_read_outs <= exact.num_read_outs
    assert fast.recall_of(exact) >= 0.95
    assert exact.recall_of(exact) == 1


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon"])
def test_scores_of_heads_are_those_of_what_they_add(name: str) -> None:
    report = locate(tiny_causal_lm(name), TOKENIZER, PROMPTS[:1], attention_heads=True)
    assert report.attention_head_scores.shape == (4, 4)
    reference = Reference(tiny_causal_lm(name), name, tokens(PROMPTS[0]))
    assert locate(tiny_causal_lm(name), TOKENIZER, PROMPTS[:1]).attention_head_scores is None
    out = {"llama": "o_proj", "gemma2": "o_proj", "gpt2": "c_proj", "falcon": "dense"}[name]
    attention = reference.blocks[2].get_submodule(
        {"llama": "self_attn", "gemma2": "self_attn", "gpt2": "attn", "falcon": "self_attention"}[name]
    )
    seen = []
    hook = attention.get_submodule(out).register_forward_pre_hook(lambda _, args: seen.append(args[0][0, -1]))
    with torch.no_grad():
        reference.model(torch.tensor([tokens(PROMPTS[0])]))
    hook.remove()
    weight = attention.get_submodule(out).weight.detach()
    weight = weight.T if name == "gpt2" else weight
    added = weight[:, 8:16] @ seen[0].reshape(-1)[8:16]
    if name == "gemma2":
        added = reference.normalized(attention_norm := reference.part(2, "attention"), added, weight @ seen[0])
        assert attention_norm is not None
    before = reference.states[2]
    expected = reference.log_prob_of(before + added) - reference.log_prob_of(before)
    assert report.heads[0, 2, 1] == pytest.approx(float(expected), abs=1e-4)


def test_prompts_answered_otherwise_are_skipped_and_counted() -> None:
    prompts, answer = ["Tell ", "Say ", "Ask "], TOKENIZER.decode([50])
    some = locate(planted(), TOKENIZER, prompts, [answer, "~", answer], batch_size=2)
    assert some.prompts == (0, 2)
    assert some.num_skipped == 1
    every = locate(planted(), TOKENIZER, prompts, [answer, "~", answer], skip_wrong=False)
    assert every.prompts == (0, 1, 2)
    assert every.num_skipped == 0
    assert every.targets == (answer, "~", answer)
    assert abs(some.columns["query_score"] - every.columns["query_score"][[0, 2]]).max() < 1e-6
    assert every.log_probs[1] < every.log_probs[0]
    with pytest.raises(DataError, match="answers none of the 3 prompts with its target"):
        locate(planted(), TOKENIZER, prompts, ["~"] * 3)


def test_the_first_token_beyond_the_prompt_is_scored() -> None:
    answer = TOKENIZER.decode([50])
    report = locate(planted(), TOKENIZER, ["Tell ", "Tell"], [f"{answer}bc", f"{answer}bc"], skip_wrong=False)
    space = TOKENIZER.decode([TOKENIZER.convert_tokens_to_ids("▁")])  # put in front where the prompt ends without
    assert report.targets == (answer, space)
    joined = locate(planted(), TOKENIZER, ["Passage"], [": x"], skip_wrong=False)
    assert joined.targets == (space,)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_offloaded_models_give_the_same_scores(name: str) -> None:
    expected = locate(tiny_causal_lm(name), TOKENIZER, PROMPTS, candidates=40)
    model = tiny_causal_lm(name)
    cpu_offload(model, execution_device="cpu")
    assert next(model.parameters()).is_meta
    assert_same(expected, locate(model, TOKENIZER, PROMPTS, candidates=40))
    assert next(model.parameters()).is_meta


def test_a_finished_run_is_read_back_and_another_one_refused(tmp_path: Path) -> None:
    model, calls = tiny_causal_lm("llama"), []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    first = locate(model, TOKENIZER, PROMPTS, resume_dir=tmp_path, batch_size=2)
    assert len(calls) == 2
    assert_same(first, locate(model, TOKENIZER, PROMPTS, resume_dir=tmp_path, batch_size=2))
    assert len(calls) == 2
    with pytest.raises(ArtifactMismatchError):
        locate(model, TOKENIZER, PROMPTS, resume_dir=tmp_path, batch_size=2, query_key="up")
    with pytest.raises(ArtifactMismatchError):
        locate(tiny_causal_lm("llama", seed=1), TOKENIZER, PROMPTS, resume_dir=tmp_path, batch_size=2)


class SlowTokenizer:
    is_fast = False


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prompts": []}, DataError, "prompts must be a list of texts"),
        ({"prompts": "Tell"}, DataError, "prompts must be a list of texts"),
        ({"targets": ["a"]}, DataError, "targets must be one text for each of 3 prompts"),
        ({"method": "fast"}, ConfigError, "method must be two_stage or exact, got 'fast'"),
        ({"normalize": "sum"}, ConfigError, "normalize must be none or share"),
        ({"rank_by": "mean"}, ConfigError, "rank_by must be block or sum"),
        ({"query_key": "k"}, ConfigError, "query_key must be one of"),
        ({"top_neurons": 0}, ConfigError, "top_neurons must be an integer >= 1"),
        ({"candidates": 5}, ConfigError, "candidates=5 must be at least top_neurons=30"),
        ({"n_query": 3, "n_value": 2}, ConfigError, "more than the 4 layers"),
        ({"tokenizer": SlowTokenizer()}, TokenizerError, "fast tokenizer"),
    ],
)
def test_what_can_not_be_done_is_refused_before_the_model_runs(changes: dict, error: type, words: str) -> None:
    model = tiny_causal_lm("llama")
    model.forward = None  # type: ignore[method-assign]
    arguments = {"tokenizer": TOKENIZER, "prompts": PROMPTS} | changes
    with pytest.raises(error, match=words):
        locate(model, **arguments)


def test_a_batch_without_a_right_answer_fits_to_the_others() -> None:
    prompts, answer = ["Tell ", "Say ", "Ask ", "Read "], TOKENIZER.decode([50])
    report = locate(
        planted(), TOKENIZER, prompts, [answer, "~", "~", "~"], batch_size=2, attention_heads=True, candidates=30
    )
    assert report.prompts == (0,)
    assert report.num_skipped == 3
    assert report.num_read_outs > 0
