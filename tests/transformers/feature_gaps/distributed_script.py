"""Fits and scores on the processes that torchrun started, and compares with one process."""

import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_xai.errors import DataError
from hf_xai.transformers import FeatureGapConfig, fit_feature_gap
from tests.distributed.leaving import leave
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.transformers.feature_gaps.questions import questions

CONFIG = FeatureGapConfig(max_new_tokens=4, folds=2, direction="pca")


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    model, tokenizer, rows = tiny_causal_lm("llama"), tiny_chat_tokenizer(), questions(21)
    labels = [(7 * index // 3) % 2 for index in range(21)]
    settings = {"config": CONFIG, "labels": labels, "verbose": False, "batch_size": 4}
    shared = fit_feature_gap(model, tokenizer, rows, accelerator=accelerator, resume_dir=folder / "states", **settings)
    alone = fit_feature_gap(model, tokenizer, rows, **settings)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(shared.state_dict()[name], value, rtol=0, atol=0)
    assert shared.config.report == alone.config.report

    answered = [{**record, "answer": "Rome." if index % 2 else "By the sea"} for index, record in enumerate(rows)]
    both = shared.score(model, tokenizer, answered, accelerator=accelerator, batch_size=4)
    one = shared.score(model, tokenizer, answered, batch_size=4)
    torch.testing.assert_close(both.confidence, one.confidence, rtol=0, atol=0)

    with pytest.raises(DataError, match="21 correct, 0 wrong"):  # on every process, so that none waits for another
        fit_feature_gap(model, tokenizer, rows, accelerator=accelerator, **(settings | {"labels": [1] * 21}))
    accelerator.wait_for_everyone()
    accelerator.print("all checks passed")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
