"""Cards of the encoder and of the head: every state they can be in renders, without a hole."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from torch_geometric.data import Data

import hf_xai
from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead, TrainingFreeEncoder

FIGURES = {"Accuracy on digits.": [["encoder", "accuracy"], ["pretrained", "0.9"]]}
RUN = {
    "sources": [{"data set": "wine", "nodes": 178}, {"data set": "KarateClub", "nodes": 34}],
    "figures": FIGURES,
    "made": "`python train.py`.",
    "versions": {"torch": "2.13.0", "torch_geometric": "2.8.1"},
}


def encoder(**settings: Any) -> AllInEncoder:
    return AllInEncoder(**({"hidden_channels": 4, "projection_dim": 8} | settings))


def graph(seed: int = 0, num_nodes: int = 20, label: int | None = None) -> Data:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, 3 * num_nodes), generator=generator)
    y = torch.arange(num_nodes) % 2 if label is None else torch.tensor([label])
    return Data(x=torch.randn(num_nodes, 5, generator=generator), edge_index=edges, y=y)


def labelled_graphs() -> list[Data]:
    return [graph(seed, num_nodes=6, label=seed % 2) for seed in range(8)]


def node_head(**settings: Any) -> AllInTransferHead:
    return AllInTransferHead(encoder(), num_projections=2, **settings)


def fitted_head(name: str) -> AllInTransferHead:
    graphs = labelled_graphs()
    if name == "nodes":
        return node_head().fit(graph())
    if name == "named features":
        return node_head().fit(graph(), feature_ids=list("abcde"))
    if name == "graphs":
        return node_head(task="graph").fit(graphs)
    if name == "values":
        for number, one in enumerate(graphs):
            one.y = torch.tensor([[0.5 * number]])
        return node_head(task="graph", objective="regression").fit(graphs)
    return AllInTransferHead(TrainingFreeEncoder(projection_dim=4), num_projections=1).fit(graph())


CARDS: dict[str, Callable[[], ModelCard]] = {
    "encoder": lambda: encoder().generate_model_card(),
    "pushed encoder": lambda: encoder().generate_model_card(repo_id="me/encoder"),
    "pretrained encoder": lambda: encoder(pe_dim=3).generate_model_card(**RUN),
    "encoder in the limit": lambda: encoder(projection=None).generate_model_card(figures=FIGURES),
    "encoder without covariances": lambda: encoder(covariance=False).generate_model_card(),
    "head": lambda: node_head().generate_model_card(),
    "graph head": lambda: node_head(task="graph").generate_model_card(),
    "head of nodes": lambda: fitted_head("nodes").generate_model_card(),
    "head of named features": lambda: fitted_head("named features").generate_model_card(),
    "head of graphs": lambda: fitted_head("graphs").generate_model_card(),
    "head of values": lambda: fitted_head("values").generate_model_card(),
    "training-free head": lambda: fitted_head("training-free").generate_model_card(),
    "head with figures": lambda: fitted_head("nodes").generate_model_card(
        figures=FIGURES, dataset="digits", made="By hand."
    ),
}


@cache
def card(name: str) -> ModelCard:
    return CARDS[name]()


@pytest.mark.parametrize("name", CARDS)
def test_no_card_has_placeholders_or_ragged_lines(name: str) -> None:
    text = str(card(name))
    assert not re.search(r"None|Unknown|undefined|More Information|[{}]", text)
    assert "\n\n\n" not in text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)
    assert not re.search(r"  +[^#\s]", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert text.count("```") == 2
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("name", CARDS)
def test_every_card_is_found_as_a_graph_model_and_says_when_not_to_use_it(name: str) -> None:
    found = card(name)
    assert found.data.to_dict()["library_name"] == "hf-xai"
    assert found.data.pipeline_tag == "graph-ml"
    assert {"hf-xai", "all-in", "graph-neural-network"} <= set(found.data.tags)
    assert "https://arxiv.org/abs/2605.04834" in found.text
    headings = re.findall(r"^## (.*)$", found.text, re.MULTILINE)
    assert [heading for heading in headings if heading != "Pretrained on"] == [
        "Use",
        "Measured",
        "When not to use it",
        "How it was made",
    ]


@pytest.mark.parametrize("name", CARDS)
def test_the_code_of_a_card_is_python_with_public_names(name: str) -> None:
    code = card(name).text.split("```")[1].removeprefix("python\n")
    compile(code, name, "exec")
    imported = re.search(r"from hf_xai.torch_geometric import (.*)", code)
    assert imported is not None
    assert all(hasattr(hf_xai.torch_geometric, public) for public in imported.group(1).split(", "))


def test_the_code_of_the_encoders_card_runs(tmp_path: Path) -> None:
    encoder().save_pretrained(tmp_path)
    code = ModelCard.load(tmp_path / "README.md").text.split("```")[1].removeprefix("python\n")
    data = graph()
    data.train_mask = torch.arange(20) < 12
    names = {"data": data}
    exec(code.replace("path/to/this/folder", str(tmp_path)), names)
    assert names["states"].shape == (20, 4)


@pytest.mark.parametrize("name", ["nodes", "graphs", "values", "training-free"])
def test_the_code_of_a_heads_card_runs(name: str, tmp_path: Path) -> None:
    head = fitted_head(name)
    head.save_pretrained(tmp_path)
    code = ModelCard.load(tmp_path / "README.md").text.split("```")[1].removeprefix("python\n")
    graphs = labelled_graphs()
    other = graph(3) if head.config.task == "node" else graphs
    exec(code.replace("path/to/this/folder", str(tmp_path)), {"data": graph(), "graphs": graphs, "other": other})


def test_a_card_that_knows_no_pretraining_says_so() -> None:
    assert "**Without a record of its pretraining:**" in card("encoder").text
    assert "No measurement is recorded" in card("encoder").text
    assert "no run is recorded" in card("encoder").text


def test_a_pretrained_encoders_card_holds_its_sources_figures_and_run() -> None:
    text = card("pretrained encoder").text
    assert "# Pretrained ALL-IN encoder\n" in text
    for words in (
        "| data set | nodes |\n|---|---|\n| wine | 178 |\n| KarateClub | 34 |\n",
        "**Accuracy on digits.**\n\n| encoder | accuracy |\n|---|---|\n| pretrained | 0.9 |\n",
        "`python train.py`. Versions: torch 2.13.0, torch_geometric 2.8.1.",
        'AddRandomWalkPE(walk_length=3, attr_name="pe")',
        "| `projection_dim` | `8` |",
    ):
        assert words in text
    assert "Without a record" not in text


def test_a_card_promises_no_covariances_where_there_are_none() -> None:
    assert "and their covariances take part" in card("encoder").text
    assert "projected to 8 columns, which alone take part" in card("encoder without covariances").text


def test_a_pushed_card_names_its_repository() -> None:
    assert 'AllInEncoder.from_pretrained("me/encoder")' in card("pushed encoder").text


def test_the_card_of_a_head_says_what_it_was_fitted_on() -> None:
    assert "**Not fitted:**" in card("head").text
    assert "head.fit(data, data.train_mask)" in card("head").text
    assert "which of 2 classes nodes belong to, from 5 features a node" in card("head of nodes").text
    assert "On the 20 rows of the fit" in card("head of nodes").text
    assert re.search(r"\| accuracy \| [01]\.\d{3} \|", card("head of nodes").text)
    assert "Predicts 1 value for graphs, from 5 features" in card("head of values").text
    assert re.search(r"\| mean squared error \| [\d.e-]+ \|", card("head of values").text)
    assert "head.predict(graphs)" in card("head of values").text
    assert "# ALL-IN head for nodes of digits\n" in card("head with figures").text


def test_the_card_of_a_head_warns_of_reordered_columns_unless_they_have_names() -> None:
    assert "a permutation may bring it to chance" in card("head of nodes").text
    assert "The head was fitted with names of the features" in card("head of named features").text
    assert "a permutation may" not in card("head of named features").text


def test_the_card_of_a_training_free_head_promises_no_learned_weights() -> None:
    text = card("training-free head").text
    assert "over features that nothing was learned for" in text
    assert "weights of the encoder" not in text
    assert "TrainingFreeEncoder" not in text
