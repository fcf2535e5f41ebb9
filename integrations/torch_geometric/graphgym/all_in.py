"""ALL-IN for GraphGym: copy this file into custom_graphgym/network/ and run a configuration such as all_in.yaml.

python main.py --cfg all_in.yaml

It registers the network `all_in`, an encoder with GraphGym's own head, and for GraphGym's design space the node
encoder `AllIn` and the layer `allinconv`, which stock `gnn` networks take:

python main.py --cfg all_in.yaml model.type gnn dataset.node_encoder True dataset.node_encoder_name AllIn \
    dataset.node_encoder_bn False gnn.layer_type allinconv gnn.stage_type skipsum

GraphGym needs yacs to make a model, and pytorch-lightning for its own train().
"""

from typing import Any

import torch
from torch_geometric.graphgym import register
from torch_geometric.graphgym.config import cfg
from torch_geometric.graphgym.init import init_weights
from yacs.config import CfgNode

from hf_xai.torch_geometric import AllInConv, AllInEncoder, CovarianceOperators


@register.register_config("all_in")
def add_settings(cfg: CfgNode) -> None:
    """The group `all_in`; width, depth and dropout are `gnn.dim_inner`, `gnn.layers_mp` and `gnn.dropout`."""
    cfg.all_in = CfgNode()
    cfg.all_in.projection_dim = 64
    cfg.all_in.num_propagations = 2
    cfg.all_in.pe_dim = 0  # width of batch.pe
    cfg.all_in.seed = 0
    cfg.all_in.num_projections = 8  # averaged in the evaluation of graphs
    cfg.all_in.pretrained = ""  # folder or Hub id of an AllInEncoder, whose own settings then hold
    cfg.all_in.freeze = False


# GraphGym has made its cfg while it was imported, before a custom module can register anything.
if "all_in" not in cfg:
    add_settings(cfg)


def projection_seed(training: bool) -> int | None:
    """A head for nodes or edges must always see one projection; graphs may see a new one in every training step."""
    return None if training and cfg.dataset.task == "graph" else cfg.all_in.seed


@register.register_network("all_in")
class AllInNetwork(torch.nn.Module):
    """An `AllInEncoder`, trained from scratch or pretrained, and the head of GraphGym that `gnn.head` names."""

    def __init__(self, dim_in: int, dim_out: int, **kwargs: Any) -> None:
        super().__init__()
        if cfg.all_in.pretrained:
            self.encoder = AllInEncoder.from_pretrained(cfg.all_in.pretrained)
        else:
            self.encoder = AllInEncoder(
                hidden_channels=cfg.gnn.dim_inner,
                num_layers=cfg.gnn.layers_mp,
                dropout=float(cfg.gnn.dropout),
                projection_dim=cfg.all_in.projection_dim,
                num_propagations=cfg.all_in.num_propagations,
                pe_dim=cfg.all_in.pe_dim,
                seed=cfg.all_in.seed,
            )
        self.encoder.requires_grad_(not cfg.all_in.freeze)
        self.post_mp = register.head_dict[cfg.gnn.head](dim_in=self.encoder.out_channels, dim_out=dim_out)
        self.post_mp.apply(init_weights)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training or cfg.dataset.task != "graph":
            return self.predict(batch, projection_seed(self.training))
        seeds = range(cfg.all_in.seed, cfg.all_in.seed + cfg.all_in.num_projections)
        predictions, labels = zip(*(self.predict(batch, seed) for seed in seeds), strict=True)
        return torch.stack(predictions).mean(dim=0), labels[0]

    def predict(self, batch: Any, seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        batch, pe = batch.clone(), batch.get("pe") if self.encoder.config.pe_dim else None  # heads write into it
        batch.x = self.encoder(batch.x, batch.edge_index, batch.batch, batch.edge_weight, pe=pe, seed=seed)
        return self.post_mp(batch)


@register.register_node_encoder("AllIn")
class AllInNodeEncoder(torch.nn.Module):
    """Projects the features to `gnn.dim_inner` columns and leaves the covariances' factors for `allinconv`."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        self.operators = CovarianceOperators(emb_dim, cfg.all_in.num_propagations)

    def forward(self, batch: Any) -> Any:
        batch.x, batch.allin_factors = self.operators(
            batch.x, batch.edge_index, batch.batch, batch.edge_weight, seed=projection_seed(self.training)
        )
        return batch


@register.register_layer("allinconv")
class AllInLayer(torch.nn.Module):
    """An `AllInConv`, whose operators are mixed to one width; needs the node encoder `AllIn`."""

    def __init__(self, layer_config: Any, **kwargs: Any) -> None:
        super().__init__()
        num_operators = cfg.all_in.num_propagations + 3
        self.conv = AllInConv(layer_config.dim_in, layer_config.dim_out, num_operators)
        self.mix = torch.nn.Linear(
            num_operators * layer_config.dim_out, layer_config.dim_out, bias=layer_config.has_bias
        )

    def forward(self, batch: Any) -> Any:
        if "allin_factors" not in batch:
            raise ValueError("The layer allinconv needs dataset.node_encoder True, dataset.node_encoder_name AllIn.")
        states = self.conv(batch.x, batch.edge_index, batch.allin_factors, batch.edge_weight, batch.batch)
        batch.x = self.mix(states.relu())
        return batch
