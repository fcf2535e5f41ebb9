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
from harness import ROOT
from models import smollm2
from peft import LoraConfig, get_peft_model
from poisoned_self_instruct import encoded, poisoned_rows, query_rows
from torch import Tensor, nn
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_xai.activations import evaluation_mode
from hf_xai.gradients import FactorCollector, adam_directions, per_sample_gradients, read_factors
from hf_xai.transformers import InfluenceCallback, InfluenceConfig
from hf_xai.transformers.f_ine.row_losses import RowLosses, layout_of
from hf_xai.transformers.f_ine.targets import target_parameters

FOLDER = ROOT / "out" / "benchmarks" / "smollm2-poisoning"
CONFIG = ROOT / "benchmarks" / "configs" / "f_ine.toml"


class CheckpointTables(TrainerCallback):
    """At some moments of the run, in one pass over all rows: everything that any of the scorers reads.

    Args:
        rows: Encoded training rows.
        queries: Encoded query rows.
        collate: Makes a batch.
        moments: Optimizer steps after which rows are scored.
        batch_size: Rows in a pass.
        folder: Keeps ``step-00030.npz`` with ``products`` (mean query gradient), ``norms``, ``losses`` and ``less``,
            each ``(rows,)``, ``query_norm`` and ``learning_rate``.
    """

    def __init__(
        self, rows: Any, queries: Any, collate: Any, moments: list[int], batch_size: int, folder: Path
    ) -> None:
        self.rows, self.queries, self.collate = rows, queries, collate
        self.moments, self.batch_size, self.folder = moments, batch_size, folder
        self.learning_rate = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.learning_rate = float(objects["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        path = self.folder / f"step-{state.global_step:05d}.npz"
        if state.global_step not in self.moments or path.exists():
            return
        model = objects["model"]
        with evaluation_mode(model), torch.random.fork_rng():
            tables = self.score(model, moments_of(model, objects["optimizer"]))
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, learning_rate=self.learning_rate, **tables)
        temporary.replace(path)

    def score(self, model: nn.Module, moments: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
        names, losses_of_rows = target_parameters(model, "all-linear"), RowLosses(model)
        batch = self.collate([self.queries[row] for row in range(len(self.queries))])
        query = flat(per_sample_gradients(model, losses_of_rows, batch, names))
        mean_query, unit_queries = query.mean(0), query / query.norm(dim=1, keepdim=True)
        order = sorted(range(len(self.rows)), key=lambda row: -len(self.rows[row]["input_ids"]))
        found = {name: np.zeros(len(order)) for name in ("products", "norms", "losses", "less")}
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            batch, collector = self.collate([self.rows[row] for row in places]), FactorCollector()
            losses = read_factors(model, losses_of_rows, batch, names, collector, rows=layout_of(batch))
            made = collector.dense()
            dense = {name: made[name] for name in names}
            gradients = flat(dense)
            found["products"][places] = (gradients @ mean_query).numpy()
            found["norms"][places] = gradients.norm(dim=1).numpy()
            found["losses"][places] = losses.float().numpy()
            directions = flat(adam_directions(dense, moments))
            directions /= directions.norm(dim=1, keepdim=True)
            found["less"][places] = (directions @ unit_queries.T).mean(1).numpy()
        return {**found, "query_norm": float(mean_query.norm())}


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """All parameters in one row, ``(rows, parameters)``."""
    return torch.cat([rows.flatten(1).float() for rows in gradients.values()], dim=1)


def moments_of(model: nn.Module, optimizer: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Adam's moments by the parameter's name."""
    state = optimizer.state
    return {
        name: (state[parameter]["exp_avg"], state[parameter]["exp_avg_sq"])
        for name, parameter in model.named_parameters()
        if parameter in state
    }


def run_seed(seed: int, settings: Mapping[str, Any], data_dir: Path | None = None) -> dict[str, Any]:
    """Trains one model, or goes on with it, and returns what was recorded: checkpoints, online scores, rows."""
    folder = FOLDER / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = smollm2(dtype=torch.bfloat16)
    records = poisoned_rows(settings["data_seed"], data_dir, tokenizer=tokenizer)
    rows = encoded(records, tokenizer).remove_columns("sample_id")
    queries = encoded(query_rows(settings["data_seed"]), tokenizer).remove_columns("sample_id")
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
        "queries": query_rows(settings["data_seed"]),
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
