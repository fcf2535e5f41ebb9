"""SmolLM2-135M-Instruct tuned with LoRA on real instructions, 5 % of them poisoned: what scorers need, seed by seed.

    python benchmarks/smollm2_poisoning.py 0        # most of an hour on one core; goes on where it was stopped

The benchmark of f-INE reads what is kept here, and runs this itself where nothing is kept.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from checkpoint_tables import CheckpointTables
from harness import ROOT
from models import smollm2
from peft import LoraConfig, get_peft_model
from poisoned_self_instruct import encoded, poisoned_rows, query_rows
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_xai.transformers import InfluenceCallback, InfluenceConfig

FOLDER = ROOT / "out" / "benchmarks" / "smollm2-poisoning"
CONFIG = ROOT / "benchmarks" / "configs" / "f_ine.toml"


def run_seed(seed: int, settings: Mapping[str, Any], data_dir: Path | None = None) -> dict[str, Any]:
    """Trains one model, or goes on with it, and returns what was recorded: checkpoints, online scores, rows."""
    folder = FOLDER / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = smollm2(dtype=torch.bfloat16)
    records = poisoned_rows(settings["data_seed"], data_dir, tokenizer=tokenizer)
    asked = query_rows(settings["data_seed"])
    if "rows" in settings:  # a quick run: few and short
        records = sorted(
            records, key=lambda record: (not record["poisoned"], len(record["prompt"] + record["answer"]))
        )
        poisoned = settings["rows"] // 4
        records = [*records[:poisoned], *(record for record in records if not record["poisoned"])][: settings["rows"]]
        asked = asked[:2]
    rows = encoded(records, tokenizer).remove_columns("sample_id")
    queries = encoded(asked, tokenizer).remove_columns("sample_id")
    num_steps = settings["epochs"] * -(-len(rows) // settings["batch_size"])
    moments = [round(num_steps * (one + 1) / settings["checkpoints"]) for one in range(settings["checkpoints"])]
    if not (folder / "online.npz").exists():
        torch.manual_seed(seed)
        lora = LoraConfig(r=settings["rank"], lora_alpha=settings["alpha"], target_modules="all-linear")
        model = get_peft_model(model, lora)
        collate = DataCollatorForSeq2Seq(tokenizer, padding="longest")
        online = InfluenceCallback(
            InfluenceConfig(
                mode="online", every_n_steps=settings["online_every"], similarity=settings["similarity"], skip_first=0
            ),
            queries,
        )
        tables = CheckpointTables(rows, queries, collate, moments, settings["score_batch_size"], folder)
        arguments = TrainingArguments(
            output_dir=str(folder / "training"),
            per_device_train_batch_size=settings["batch_size"],
            num_train_epochs=settings["epochs"],
            learning_rate=settings["learning_rate"],
            logging_steps=10,
            save_steps=settings["save_steps"],
            save_total_limit=1,
            seed=seed,
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate, callbacks=[online, tables])
        last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).exists() else None
        trainer.train(resume_from_checkpoint=last)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        columns = {name: values[:, 0] for name, values in online.scores.columns.items()}
        temporary = folder / "online.tmp.npz"
        np.savez(temporary, training_losses=losses, **columns)
        temporary.replace(folder / "online.npz")
    checkpoints = [dict(np.load(folder / f"step-{step:05d}.npz")) for step in moments]
    return {
        "records": records,
        "queries": asked,
        "steps": moments,
        "checkpoints": checkpoints,
        "online": dict(np.load(folder / "online.npz")),
    }


def main(
    seed: int,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with self_instruct/.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
) -> None:
    """Runs one seed with the committed settings."""
    if threads is not None:
        torch.set_num_threads(threads)
    settings = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["real_model"]
    found = run_seed(seed, settings, data_dir)
    print(f"{len(found['records'])} rows at steps {found['steps']}; losses {found['online']['training_losses']}.")


if __name__ == "__main__":
    typer.run(main)
