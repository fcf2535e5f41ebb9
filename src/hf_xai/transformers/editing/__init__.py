"""Knowledge editing: ACE (arXiv 2510.07896), ROME, MEMIT, EMMET, PMET and AlphaEdit behind one interface."""

from hf_xai.transformers.editing.config import (
    AceConfig,
    AlphaEditConfig,
    EditorConfig,
    EmmetConfig,
    MemitConfig,
    PmetConfig,
    RomeConfig,
)
from hf_xai.transformers.editing.data_formats import load_counterfact, load_mquake
from hf_xai.transformers.editing.editor import KnowledgeEditor
from hf_xai.transformers.editing.evaluation import evaluate_edits
from hf_xai.transformers.editing.evaluation_report import EvaluationReport
from hf_xai.transformers.editing.few_shot import FewShotPrompts
from hf_xai.transformers.editing.key_statistics import KeyStatistics
from hf_xai.transformers.editing.locate_report import LocateReport
from hf_xai.transformers.editing.locating import locate
from hf_xai.transformers.editing.records import EditRecord
from hf_xai.transformers.editing.requests import EditRequest
from hf_xai.transformers.editing.result import EditResult
from hf_xai.transformers.editing.sequential import EditSequence, edit_sequence
from hf_xai.transformers.editing.two_hop_prompts import two_hop_prompts

__all__ = [
    "AceConfig",
    "AlphaEditConfig",
    "EditRecord",
    "EditRequest",
    "EditResult",
    "EditSequence",
    "EditorConfig",
    "EmmetConfig",
    "EvaluationReport",
    "FewShotPrompts",
    "KeyStatistics",
    "KnowledgeEditor",
    "LocateReport",
    "MemitConfig",
    "PmetConfig",
    "RomeConfig",
    "edit_sequence",
    "evaluate_edits",
    "load_counterfact",
    "load_mquake",
    "locate",
    "two_hop_prompts",
]
