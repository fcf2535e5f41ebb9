"""What SmolLM2-135M-Instruct answers to two sets of questions, and the hidden states of its answers; no scores yet.

    python benchmarks/smollm2_answers.py xquad        # about an hour on one core; goes on where it was stopped

The benchmark of Feature-Gaps reads what is kept here, and runs this itself where nothing is kept.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from contextual_qa import templated_questions, xquad_questions
from harness import ROOT
from models import smollm2

from hf_xai.transformers import AnswerStates, FeatureGapConfig, extract_answer_states

FOLDER = ROOT / "out" / "benchmarks" / "smollm2-answers"
CONFIG = ROOT / "benchmarks" / "configs" / "feature_gaps.toml"
DTYPE = torch.bfloat16  # of the model; states are pooled in float32
BATCH_SIZE = 8


def questions(task: str, settings: Mapping[str, Any], data_dir: Path | None = None) -> list[dict[str, Any]]:
    """The records of a task, always in the same order."""
    if task == "xquad":
        return xquad_questions(data_dir)
    return templated_questions(settings["rows"], settings["seed"])


def answer_states(
    task: str, settings: Mapping[str, Any], data_dir: Path | None = None
) -> tuple[AnswerStates, list[dict[str, Any]]]:
    """Measurements on the answers to a task's questions, and the records that they belong to."""
    records = questions(task, settings, data_dir)
    model, tokenizer = smollm2(dtype=DTYPE)
    states, kept = extract_answer_states(
        model,
        tokenizer,
        records,
        FeatureGapConfig(max_new_tokens=settings["max_new_tokens"]),
        batch_size=BATCH_SIZE,
        resume_dir=FOLDER / f"{task}-{len(records)}",
        num_samples=settings["num_samples"],
    )
    return states, [records[row] for row in kept]


def main(
    task: Annotated[str, typer.Argument(help="xquad or templated.")],
    data_dir: Annotated[Path | None, typer.Option(help="Folder with xquad/xquad.en.json.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
) -> None:
    """Runs the extraction of one task with the committed settings."""
    if threads is not None:
        torch.set_num_threads(threads)
    settings = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["answers"]
    states, records = answer_states(task, settings[task], data_dir)
    print(f"{len(records)} answers, {len(states.layers)} layers of {states.last.shape[2]} channels.")


if __name__ == "__main__":
    typer.run(main)
