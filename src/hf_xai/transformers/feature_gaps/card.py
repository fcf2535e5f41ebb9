"""What goes to the Hub beside a head's numbers: its card, and the file that ``custom_generate`` runs."""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard

from hf_xai.hub import render_card
from hf_xai.hub.files import write_text
from hf_xai.transformers.feature_gaps.report import FeatureGapReport

if TYPE_CHECKING:
    from hf_xai.transformers.feature_gaps.modeling import FeatureGapHead

TEMPLATE = "feature_gap"
PAPER_URL = "https://arxiv.org/abs/2510.02671"
CUSTOM_GENERATE = "custom_generate"


def head_card(head: "FeatureGapHead", repo_id: str | None = None, with_custom_generate: bool = False) -> ModelCard:
    """The card of a head, from its config and the report of its fit.

    Args:
        head: The head.
        repo_id: Repository that it is loaded from; a folder if None.
        with_custom_generate: Whether ``generate`` can be given that repository as its ``custom_generate``.
    """
    config, base = head.config, head.config.base_model_name_or_path
    tags = ["feature-gaps", "uncertainty-quantification", *([CUSTOM_GENERATE] if with_custom_generate else [])]
    metadata = {
        "base_model": base if base and not Path(base).exists() else None,  # the Hub accepts ids alone
        "pipeline_tag": "question-answering",
        "tags": tags,
    }
    return render_card(
        TEMPLATE,
        metadata,
        config=config.to_dict(),
        report=config.report,
        tables=FeatureGapReport.of(head).tables(),
        repo_id=repo_id,
        with_custom_generate=with_custom_generate,
        paper_url=PAPER_URL,
        size=sum(tensor.numel() * tensor.element_size() for tensor in head.state_dict().values()),
    )


def write_custom_generate(folder: Path) -> None:
    """Writes ``custom_generate/`` into a folder in the layout of a Hub repository."""
    (folder / CUSTOM_GENERATE).mkdir(exist_ok=True)
    for name in ("generate.py", "requirements.txt"):
        source = files("hf_xai.transformers.feature_gaps") / CUSTOM_GENERATE / name
        write_text(folder / CUSTOM_GENERATE / name, source.read_text(encoding="utf-8"))
