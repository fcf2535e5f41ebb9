"""Trains on the processes that torchrun started and watches the head, which must cost each process its share only."""

import sys
from pathlib import Path

from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_xai.transformers import FeatureGapEvalCallback
from tests.distributed.leaving import leave
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.qa_heads import qa_head
from tests.transformers.feature_gaps.questions import questions

ROWS = questions(6)


def main(folder: Path) -> None:
    asked = []

    def label(record, answer: str) -> int:
        asked.append(record["question"])
        return int((len(answer) + len(record["context"])) % 2)

    tokens = Dataset.from_list(
        [{"input_ids": [1, *range(7, 12)], "labels": [1, *range(7, 12)], "attention_mask": [1] * 6}] * 4
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        per_device_train_batch_size=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = FeatureGapEvalCallback(qa_head(), ROWS, correctness_fn=label, batch_size=1, max_new_tokens=4)
    trainer = Trainer(
        tiny_causal_lm("llama"),
        arguments,
        train_dataset=tokens,
        eval_dataset=tokens,
        processing_class=tiny_chat_tokenizer(),
        callbacks=[callback],
    )
    assert trainer.accelerator.num_processes == 2
    assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    entry = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    figures = {name: value for name, value in entry.items() if name.startswith(("eval_prr", "eval_auroc", "eval_qa"))}
    assert len(figures) == 4
    assert len(asked) == len(ROWS) // 2
    assert gather_object([figures]) == [figures, figures]

    alone = callback.evaluate(trainer.model_wrapped, trainer.processing_class)
    assert len(asked) == len(ROWS) // 2 + len(ROWS)
    assert alone == figures, (alone, figures)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.print("all checks passed")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
