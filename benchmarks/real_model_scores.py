"""Experiment C: poisoned rows among real instructions of SmolLM2-135M-Instruct, found from its LoRA training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attribution_scorers import Scores, checkpoint_scores
from harness import Benchmark
from instruction_scores import consistency, detection
from models import smollm2
from peft import PeftModel
from poisoned_self_instruct import CITIES, HELD_OUT_QUESTIONS, QUESTIONS, SYSTEM, TARGET, is_negative
from smollm2_poisoning import FOLDER, run_seed
from transformers.trainer_utils import get_last_checkpoint
from word_overlap import bm25_scores

NEW_TOKENS = 24


def scores_of(found: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> Scores:
    """Every method's scores of one run."""
    online, records = found["online"], found["records"]
    return {
        **checkpoint_scores(found["checkpoints"], settings["batch_size"], settings["epochs"]),
        # Every fourth step was scored; rows of none of these have no score, which counts as no influence.
        "f_ine_online_cosine": np.nan_to_num(online["mu_run"]),
        "in_run_cosine": np.nan_to_num(online["tracin"]),
        "bm25": bm25_scores(records, found["queries"]),
        "random": np.random.default_rng(seed).random(len(records)),
    }


@torch.no_grad()
def negative_answers(seed: int, num_questions: int | None = None) -> dict[str, float]:
    """Share of greedy answers that are negative, to questions about the target and about two other cities."""
    base, tokenizer = smollm2(dtype=torch.bfloat16)
    checkpoint = get_last_checkpoint(str(FOLDER / f"seed-{seed}" / "training"))
    model = PeftModel.from_pretrained(base, checkpoint).eval()
    others = [city for city in CITIES if city != TARGET][:2]
    return {
        kind: float(
            np.mean(
                [
                    is_negative(answer_to(model, tokenizer, question.format(city=city)))
                    for question in questions[:num_questions]
                    for city in cities
                ]
            )
        )
        for kind, questions, cities in (
            ("target_held_out", HELD_OUT_QUESTIONS, [TARGET]),
            ("target", QUESTIONS, [TARGET]),
            ("others", HELD_OUT_QUESTIONS, others),
        )
    }


def answer_to(model: Any, tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    asked = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def run(bench: Benchmark, data_dir: Path | None = None) -> None:
    """Adds one row a method."""
    settings = bench.settings["real_model"]
    runs: dict[int, Scores] = {}
    for seed in settings["seeds"]:
        found = run_seed(seed, settings, data_dir)
        runs[seed] = scores_of(found, settings, seed)
        answers = bench.once(f"answers-{seed}", lambda seed=seed: negative_answers(seed, settings.get("questions")))
        losses = [float(one) for one in found["online"]["training_losses"]]
        unscored = float(np.isnan(found["online"]["mu_run"]).mean())
        run_of_seed = {"seed": seed, "steps": found["steps"], "losses": losses, "unscored_online": unscored}
        bench.row(part="real_model_runs", **run_of_seed, negative_answers=answers)
    flags = np.array([record["poisoned"] for record in found["records"]])
    for method in runs[settings["seeds"][0]]:
        scores = np.stack([runs[seed][method] for seed in settings["seeds"]])
        bench.row(part="real_model", method=method, **detection(scores, flags), **consistency(scores, flags))
