import pytest
import torch

from hf_xai.transformers.editing.architecture import DecoderArchitecture, decoder_architecture
from hf_xai.transformers.editing.attribution import (
    FrozenReadOut,
    LayerNeurons,
    carried,
    exact_scores,
    read_parts,
    rescored,
    share_weights,
)
from hf_xai.transformers.editing.readout import ReadOut
from hf_xai.transformers.editing.residual_parts import ResidualParts, read_residual_parts
from hf_xai.transformers.editing.subkeys import weight_of
from hf_xai.transformers.editing.tokens import PromptBatch
from tests.tiny.causal_lms import VOCABULARY, tiny_causal_lm
from tests.transformers.editing.every_host import EVERY_HOST
from tests.transformers.editing.reference_attribution import Reference

PROMPTS = ([1, 40, 41, 42, 7], [1, 9, 60])


class Taken:
    """Two prompts of a tiny model taken apart, with the read-out of one token each."""

    def __init__(self, name: str) -> None:
        self.model = tiny_causal_lm(name)
        self.architecture: DecoderArchitecture = decoder_architecture(self.model)
        ids, mask = torch.tensor([PROMPTS[0], [*PROMPTS[1], 0, 0]]), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
        self.parts: ResidualParts = read_residual_parts(
            self.architecture, PromptBatch(ids, mask, torch.tensor([4, 2]))
        )
        head = ReadOut(self.architecture)
        logits = head.from_normalized(self.parts.final_norm(self.parts.states[:, -1]))
        self.targets = logits.argmax(-1)
        self.read_out = FrozenReadOut(self.parts.final_norm, head.from_normalized, self.targets, VOCABULARY)
        self.prompts = torch.arange(2)

    def neurons(self, layer: int) -> LayerNeurons:
        values = self.parts.layers[layer]
        return LayerNeurons(
            values.coefficients, weight_of(self.architecture.layers[layer].feed_forward_out), values.output_norm
        )


@pytest.mark.parametrize("name", EVERY_HOST)
def test_block_scores_and_the_first_state_add_up_to_the_models_log_probability(name: str) -> None:
    taken = Taken(name)
    states, bases, prompts = taken.parts.states, taken.parts.bases, taken.prompts
    total = taken.read_out.log_probs(states[:, 0], prompts)
    for layer in range(4):
        base = taken.read_out.log_probs(bases[:, layer], prompts)
        total = total + (base - taken.read_out.log_probs(states[:, layer], prompts))
        total = total + (taken.read_out.log_probs(states[:, layer + 1], prompts) - base)
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            logits = taken.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        assert int(logits.argmax()) == taken.targets[row]
        assert float(total[row]) == pytest.approx(float(logits.log_softmax(-1).max()), abs=2e-5)


@pytest.mark.parametrize("name", EVERY_HOST)
def test_exact_scores_are_those_of_one_neuron_after_the_other(name: str) -> None:
    taken = Taken(name)
    reference = Reference(tiny_causal_lm(name), name, PROMPTS[1])
    for layer in (0, 3):
        expected = reference.value_scores(layer)
        base = taken.parts.bases[:, layer]
        log_probs = taken.read_out.log_probs(base, taken.prompts)
        scores = exact_scores(taken.read_out, base, log_probs, taken.neurons(layer))
        torch.testing.assert_close(scores[1], expected.float(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_first_order_scores_are_the_limit_of_small_coefficients(name: str) -> None:
    taken, small = Taken(name), 1e-2
    neurons, base = taken.neurons(2), taken.parts.bases[:, 2]
    gradients = taken.read_out.gradients(base, taken.prompts)
    first_order = neurons.inner_products(gradients)
    shrunk = LayerNeurons(small * neurons.coefficients, neurons.columns, neurons.output_norm)
    log_probs = taken.read_out.log_probs(base, taken.prompts)
    limit = exact_scores(taken.read_out, base, log_probs, shrunk) / small
    torch.testing.assert_close(first_order, limit, rtol=2e-2, atol=3e-3)


def test_chunks_make_no_difference() -> None:
    taken = Taken("gemma2")
    base, neurons = taken.parts.bases[:, 1], taken.neurons(1)
    log_probs = taken.read_out.log_probs(base, taken.prompts)
    whole = exact_scores(taken.read_out, base, log_probs, neurons)
    gradients = taken.read_out.gradients(base, taken.prompts)
    for rows in (1, 5):
        taken.read_out.rows_at_once = rows
        torch.testing.assert_close(exact_scores(taken.read_out, base, log_probs, neurons), whole)
        torch.testing.assert_close(taken.read_out.gradients(base, taken.prompts), gradients)


def test_candidates_are_scored_exactly_and_the_others_to_first_order() -> None:
    taken = Taken("llama")
    layers, bases = [taken.neurons(layer) for layer in range(4)], taken.parts.bases
    log_probs = torch.stack([taken.read_out.log_probs(bases[:, layer], taken.prompts) for layer in range(4)], 1)
    exact = torch.cat(
        [exact_scores(taken.read_out, bases[:, layer], log_probs[:, layer], layers[layer]) for layer in range(4)], 1
    )
    first_order = torch.cat(
        [layers[layer].inner_products(taken.read_out.gradients(bases[:, layer], taken.prompts)) for layer in range(4)],
        1,
    )
    before = taken.read_out.num_read_outs
    scores, is_exact = rescored(taken.read_out, bases, log_probs, layers, first_order, candidates=20)
    assert taken.read_out.num_read_outs - before == 2 * 20
    assert is_exact.sum(1).tolist() == [20, 20]
    for row in range(2):
        assert first_order[row][is_exact[row]].min() >= first_order[row][~is_exact[row]].max()
    torch.testing.assert_close(scores[is_exact], exact[is_exact], rtol=1e-4, atol=1e-5)
    assert torch.equal(scores[~is_exact], first_order[~is_exact])


def test_what_a_layer_reads_is_all_before_it_and_its_own_attention_unless_parallel() -> None:
    sequential = read_parts(torch.tensor([0, 2]), torch.tensor([False] * 3))
    assert sequential.int().tolist() == [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
    parallel = read_parts(torch.tensor([[0, 2]]), torch.tensor([True] * 3))
    assert parallel.int().tolist() == [[[1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]]]


def test_shares_sum_to_one_and_neurons_whose_sum_vanishes_are_dropped() -> None:
    parts = torch.tensor([[[1.0, 0], [0, 2], [3, 0]]])
    keys = torch.tensor([[[1.0, 1], [1, -2], [0, 0]]])
    read = torch.tensor([[[True, True, True], [True, True, True], [True, True, False]]])
    products = carried(parts, keys, read)
    assert products.tolist() == [[[1, 2, 3], [1, -4, 3], [0, 0, 0]]]
    weights, dropped = share_weights(products)
    assert dropped.tolist() == [[False, True, True]]  # 1 - 4 + 3 = 0, and a key that reads nothing
    assert (weights[..., None] * products).sum(-1).tolist() == [[pytest.approx(1), 0, 0]]


def test_the_guard_of_shares_is_a_thousandth_of_the_sum_of_sizes() -> None:
    products = torch.tensor([[1.0, -0.997], [1.0, -0.999]])
    assert share_weights(products)[1].tolist() == [False, True]
    assert share_weights(products, guard=0.0)[1].tolist() == [False, False]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_inner_products_are_those_of_contributions(name: str) -> None:
    taken = Taken(name)
    neurons, directions = taken.neurons(1), torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    prompts, numbers = torch.tensor([0, 1, 1]), torch.tensor([5, 5, 63])
    expected = (neurons.contributions(prompts, numbers) * directions[prompts]).sum(-1)
    torch.testing.assert_close(neurons.inner_products(directions)[prompts, numbers], expected, rtol=1e-4, atol=1e-5)
