"""The methods of this library, in one literal table: lazy names, README, docs and a test of completeness read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_SITES = {"arXiv": "https://arxiv.org/abs/", "OpenReview": "https://openreview.net/forum?id="}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of the library.

    Args:
        title: What people call it.
        paper: ``"arXiv:<id>"``, or ``"OpenReview:<id>"`` for a paper that is not on arXiv.
        purpose: The question that a user answers with it, in one line.
        home: Its folder under ``src/hf_xai``.
        status: ``"available"`` once it can be used, ``"planned"`` before.
        names: Public names, each with the ``"module:attribute"`` that it stands for.
    """

    title: str
    paper: str
    purpose: str
    home: str
    status: Literal["available", "planned"] = "planned"
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.home.rpartition("/")[2]

    @property
    def paper_url(self) -> str:
        site, _, identifier = self.paper.partition(":")
        return _SITES[site] + identifier


METHODS: tuple[Method, ...] = (
    Method(
        title="HyCa feature caching",
        paper="arXiv:2510.04188",
        purpose="Predict most denoiser passes of a diffusion pipeline instead of running them.",
        home="diffusers/hyca",
        status="available",
        names={
            "HyCaComparison": "hf_xai.diffusers:HyCaComparison",
            "HyCaConfig": "hf_xai.diffusers:HyCaConfig",
            "calibrate_hyca": "hf_xai.diffusers:calibrate_hyca",
            "compare_hyca": "hf_xai.diffusers:compare_hyca",
            "disable_hyca": "hf_xai.diffusers:disable_hyca",
            "enable_hyca": "hf_xai.diffusers:enable_hyca",
            "hyca_enabled": "hf_xai.diffusers:hyca_enabled",
            "hyca_refresh": "hf_xai.diffusers:hyca_refresh",
            "hyca_summary": "hf_xai.diffusers:hyca_summary",
        },
    ),
    Method(
        title="Concept-TRAK",
        paper="arXiv:2507.06547",
        purpose="Find the training images that taught a diffusion model a concept.",
        home="diffusers/concept_trak",
    ),
    Method(
        title="Learned parameter weights for attribution",
        paper="arXiv:2506.05647",
        purpose="Weight the layers in gradient-based data attribution, learned without labels.",
        home="gradients/learned_weights",
    ),
    Method(
        title="f-INE",
        paper="arXiv:2510.10510",
        purpose="Test which training rows shaped a model, with training randomness accounted for.",
        home="transformers/f_ine",
        status="available",
        names={
            "InfluenceCallback": "hf_xai.transformers:InfluenceCallback",
            "InfluenceConfig": "hf_xai.transformers:InfluenceConfig",
            "InfluenceScores": "hf_xai.transformers:InfluenceScores",
            "InfluenceTrainerMixin": "hf_xai.transformers:InfluenceTrainerMixin",
            "attach_influence": "hf_xai.transformers:attach_influence",
            "detach_influence": "hf_xai.transformers:detach_influence",
            "score_checkpoints": "hf_xai.transformers:score_checkpoints",
            "token_influence": "hf_xai.transformers:token_influence",
        },
    ),
    Method(
        title="Feature-Gaps",
        paper="arXiv:2510.02671",
        purpose="Say how far an answer drawn from a given context can be trusted, from one generation.",
        home="transformers/feature_gaps",
        status="available",
        names={
            "ConfidenceStreamer": "hf_xai.transformers:ConfidenceStreamer",
            "FeatureGapConfig": "hf_xai.transformers:FeatureGapConfig",
            "FeatureGapEvalCallback": "hf_xai.transformers:FeatureGapEvalCallback",
            "FeatureGapHead": "hf_xai.transformers:FeatureGapHead",
            "FeatureGapLogitsProcessor": "hf_xai.transformers:FeatureGapLogitsProcessor",
            "FeatureGapOutput": "hf_xai.transformers:FeatureGapOutput",
            "FeatureGapQAPipeline": "hf_xai.transformers:FeatureGapQAPipeline",
            "FeatureGapRecorder": "hf_xai.transformers:FeatureGapRecorder",
            "FeatureGapReport": "hf_xai.transformers:FeatureGapReport",
            "FeatureGapStoppingCriteria": "hf_xai.transformers:FeatureGapStoppingCriteria",
            "feature_gap_generate": "hf_xai.transformers:feature_gap_generate",
            "fit_feature_gap": "hf_xai.transformers:fit_feature_gap",
        },
    ),
    Method(
        title="ACE (with ROME, MEMIT, EMMET, PMET, AlphaEdit)",
        paper="arXiv:2510.07896",
        purpose="Change a fact in a language model, and what follows from it.",
        home="transformers/editing",
        status="available",
        names={
            "AceConfig": "hf_xai.transformers:AceConfig",
            "AlphaEditConfig": "hf_xai.transformers:AlphaEditConfig",
            "EditRecord": "hf_xai.transformers:EditRecord",
            "EditRequest": "hf_xai.transformers:EditRequest",
            "EditResult": "hf_xai.transformers:EditResult",
            "EditorConfig": "hf_xai.transformers:EditorConfig",
            "EmmetConfig": "hf_xai.transformers:EmmetConfig",
            "KeyStatistics": "hf_xai.transformers:KeyStatistics",
            "KnowledgeEditor": "hf_xai.transformers:KnowledgeEditor",
            "LocateReport": "hf_xai.transformers:LocateReport",
            "MemitConfig": "hf_xai.transformers:MemitConfig",
            "PmetConfig": "hf_xai.transformers:PmetConfig",
            "RomeConfig": "hf_xai.transformers:RomeConfig",
            "edit_sequence": "hf_xai.transformers:edit_sequence",
            "evaluate_edits": "hf_xai.transformers:evaluate_edits",
            "load_counterfact": "hf_xai.transformers:load_counterfact",
            "load_mquake": "hf_xai.transformers:load_mquake",
            "locate": "hf_xai.transformers:locate",
        },
    ),
    Method(
        title="ALL-IN",
        paper="arXiv:2605.04834",
        purpose="Use one graph model on graphs whose nodes have other features.",
        home="torch_geometric/all_in",
        status="available",
        names={
            "AddAllInProjection": "hf_xai.torch_geometric:AddAllInProjection",
            "AllInConfig": "hf_xai.torch_geometric:AllInConfig",
            "AllInConv": "hf_xai.torch_geometric:AllInConv",
            "AllInEncoder": "hf_xai.torch_geometric:AllInEncoder",
            "AllInExplainer": "hf_xai.torch_geometric:AllInExplainer",
            "AllInExplanation": "hf_xai.torch_geometric:AllInExplanation",
            "AllInTransferHead": "hf_xai.torch_geometric:AllInTransferHead",
            "CovarianceOperators": "hf_xai.torch_geometric:CovarianceOperators",
            "GraphSource": "hf_xai.torch_geometric:GraphSource",
            "TrainingFreeEncoder": "hf_xai.torch_geometric:TrainingFreeEncoder",
            "explain_prediction": "hf_xai.torch_geometric:explain_prediction",
            "pretrain": "hf_xai.torch_geometric:pretrain",
        },
    ),
    Method(
        title="TreeGrad, -Ranker, -Shap, TreeProb",
        paper="arXiv:2602.11623",
        purpose="Rank features and compute Shapley values of tree models, stable at any depth.",
        home="sklearn/treegrad",
    ),
    Method(
        title="Grouped explanations (AGREED)",
        paper="OpenReview:RClKXngVN8",
        purpose="Group features until explainers agree with one another.",
        home="sklearn/grouping",
    ),
    Method(
        title="NIMO",
        paper="arXiv:2506.05059",
        purpose="Keep readable regression coefficients and gain the accuracy of a network.",
        home="sklearn/nimo",
    ),
    Method(
        title="FDFI",
        paper="OpenReview:Fx8AtzGlTS",
        purpose="Measure the importance of correlated features, with confidence intervals.",
        home="sklearn/fdfi",
    ),
    Method(
        title="TimeSliver",
        paper="arXiv:2601.21289",
        purpose="Classify time series with an exact contribution of every segment.",
        home="transformers/timesliver",
    ),
    Method(
        title="VPC",
        paper="OpenReview:DtkIH5TKe6",
        purpose="Flag inputs from outside the training classes of an image classifier.",
        home="transformers/vpc",
    ),
    Method(
        title="FUD",
        paper="OpenReview:FF14TqjU3e",
        purpose="Measure how faithful saliency maps are, on inputs that a diffusion prior fills in.",
        home="diffusers/fud",
    ),
    Method(
        title="Attribution robustness audit",
        paper="arXiv:2508.03067",
        purpose="Find how far a model that names an image's generator survives tampering.",
        home="transformers/attribution_robustness",
    ),
    Method(
        title="Adversarial fragility",
        paper="arXiv:2406.16200",
        purpose="Tell whether small changes flip a classifier because of the data or of the network.",
        home="transformers/fragility",
    ),
    Method(
        title="Embedding norm budget",
        paper="arXiv:2511.06374",
        purpose="Stop the overfitting of rare embeddings after one epoch.",
        home="transformers/embedding_norm_budget",
    ),
    Method(
        title="Transfer kernels",
        paper="arXiv:2507.04448",
        purpose="Predict whether a source task will help a target task.",
        home="theory/transfer_kernels",
    ),
    Method(
        title="Feature-learning scales",
        paper="arXiv:2512.04165",
        purpose="Predict how many samples a network needs and which features emerge.",
        home="theory/feature_learning_scales",
    ),
)


def public_names() -> dict[str, str]:
    """Every public name of every method, with the ``"module:attribute"`` that it stands for."""
    return {name: target for method in METHODS for name, target in method.names.items()}


def methods_table() -> str:
    """The methods as a Markdown table, as the README shows it; no line end after the last row."""
    rows = [
        f"| {method.title} | {method.purpose} | [{method.paper.replace(':', ' ')}]({method.paper_url}) "
        f"| `{method.home}` | {method.status} |"
        for method in METHODS
    ]
    return "\n".join(["| Method | What it is for | Paper | Lives in | Status |", "|---|---|---|---|---|", *rows])
