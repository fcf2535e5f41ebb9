"""f-INE: which training rows shaped a model, as a hypothesis test, from one training run (arXiv 2510.10510)."""

from hf_xai.transformers.f_ine.callback import InfluenceCallback
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.estimators import estimate_mu
from hf_xai.transformers.f_ine.null_band import false_alarms, null_band
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.replace_influence import replace_influence
from hf_xai.transformers.f_ine.saved_checkpoints import score_checkpoints
from hf_xai.transformers.f_ine.scores import InfluenceScores
from hf_xai.transformers.f_ine.token_influence import TokenInfluence, token_influence
from hf_xai.transformers.f_ine.tradeoff import TradeoffCurve, gaussian_tradeoff, tradeoff_curve
from hf_xai.transformers.f_ine.trainer import InfluenceTrainerMixin, attach_influence, detach_influence

__all__ = [
    "InfluenceCallback",
    "InfluenceConfig",
    "InfluenceScores",
    "InfluenceTrainerMixin",
    "Observations",
    "TokenInfluence",
    "TradeoffCurve",
    "attach_influence",
    "detach_influence",
    "estimate_mu",
    "false_alarms",
    "gaussian_tradeoff",
    "null_band",
    "replace_influence",
    "score_checkpoints",
    "token_influence",
    "tradeoff_curve",
]
