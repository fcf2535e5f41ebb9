"""Plugs into graph models of PyTorch Geometric."""

from hf_xai.errors import MissingDependencyError

try:
    import accelerate as _accelerate  # noqa: F401
    import sklearn as _sklearn  # noqa: F401
    import torch as _torch  # noqa: F401
    import torch_geometric as _torch_geometric  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(f"hf_xai.torch_geometric needs {error.name}: pip install 'hf-xai[graph]'") from error

from hf_xai.torch_geometric.all_in import (
    AddAllInProjection,
    AllInConfig,
    AllInConv,
    AllInEncoder,
    AllInExplainer,
    AllInExplanation,
    AllInTransferHead,
    CovarianceOperators,
    GraphSource,
    PretrainingResult,
    TrainingFreeConfig,
    TrainingFreeEncoder,
    TransferConfig,
    explain_prediction,
    pretrain,
)

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
