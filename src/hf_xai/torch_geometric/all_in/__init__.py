"""ALL-IN: one graph model for any feature width (arXiv 2605.04834)."""

from hf_xai.torch_geometric.all_in.config import AllInConfig, TransferConfig
from hf_xai.torch_geometric.all_in.conv import AllInConv
from hf_xai.torch_geometric.all_in.encoder import AllInEncoder
from hf_xai.torch_geometric.all_in.explainer import AllInExplainer
from hf_xai.torch_geometric.all_in.explanation import explain_prediction
from hf_xai.torch_geometric.all_in.explanation_report import AllInExplanation
from hf_xai.torch_geometric.all_in.operators import CovarianceOperators
from hf_xai.torch_geometric.all_in.pretraining import pretrain
from hf_xai.torch_geometric.all_in.pretraining_run import PretrainingResult
from hf_xai.torch_geometric.all_in.pretraining_sources import GraphSource
from hf_xai.torch_geometric.all_in.training_free import TrainingFreeConfig, TrainingFreeEncoder
from hf_xai.torch_geometric.all_in.transfer import AllInTransferHead
from hf_xai.torch_geometric.all_in.transforms import AddAllInProjection

__all__ = [
    "AddAllInProjection",
    "AllInConfig",
    "AllInConv",
    "AllInEncoder",
    "AllInExplainer",
    "AllInExplanation",
    "AllInTransferHead",
    "CovarianceOperators",
    "GraphSource",
    "PretrainingResult",
    "TrainingFreeConfig",
    "TrainingFreeEncoder",
    "TransferConfig",
    "explain_prediction",
    "pretrain",
]
