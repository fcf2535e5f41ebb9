"""f-INE: which training rows shaped a model, as a hypothesis test, from one training run (arXiv 2510.10510)."""

from hf_xai.transformers.f_ine.callback import InfluenceCallback
from hf_xai.transformers.f_ine.config import InfluenceConfig
from hf_xai.transformers.f_ine.observations import Observations
from hf_xai.transformers.f_ine.saved_checkpoints import score_checkpoints
from hf_xai.transformers.f_ine.scores import InfluenceScores
from hf_xai.transformers.f_ine.token_influence import TokenInfluence, token_influence
from hf_xai.transformers.f_ine.trainer import InfluenceTrainerMixin, attach_influence, detach_influence

__all__ = [
    "InfluenceCallback",
    "InfluenceConfig",
    "InfluenceScores",
    "InfluenceTrainerMixin",
    "Observations",
    "TokenInfluence",
    "attach_influence",
    "detach_influence",
    "score_checkpoints",
    "token_influence",
]
