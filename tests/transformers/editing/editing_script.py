"""Edits on the processes that torchrun started, and compares with one process: ``torchrun ... FOLDER``."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_xai.errors import ConflictingEditsError
from hf_xai.transformers.editing.few_shot import FewShotPrompts
from hf_xai.transformers.editing.locating import locate
from hf_xai.transformers.editing.targets import TargetProblem
from tests.distributed.leaving import leave
from tests.transformers.editing.quick_edits import BO, FEW, KA, QI, TOKENIZER, assert_same_edit, configs, editor_of


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    requests = [KA, BO, QI]
    for name in ("ace", "memit", "alphaedit"):
        config = replace(configs(**(FEW | {"context_templates": 2}))[name], batch_size=1)
        editor = editor_of(config)
        alone = editor.edit(requests)
        shared = editor.edit(requests, accelerator=accelerator)
        assert_same_edit(shared, alone, 0)
        assert shared.config == alone.config
        for key, keys in alone.past_keys.items():
            assert torch.equal(shared.past_keys[key], keys)

        resumed = folder / name
        assert_same_edit(editor.edit(requests, accelerator=accelerator, resume_dir=resumed), alone, 0)
        with pytest.MonkeyPatch.context() as patch:  # nothing is left to optimise, on one process or two
            patch.setattr(TargetProblem, "solve", None)
            assert_same_edit(editor.edit(requests, resume_dir=resumed), alone, 0)
        accelerator.wait_for_everyone()

    prompts = [request.text for request in requests]
    report = editor.locate(prompts, batch_size=1)
    shared_report = locate(editor.model, TOKENIZER, prompts, batch_size=1, accelerator=accelerator)
    for name, column in report.columns.items():
        np.testing.assert_array_equal(shared_report.columns[name], column)
    settings = {"few_shot": FewShotPrompts.plain(), "batch_size": 1, "edit": alone}
    measured = editor.evaluate(requests, **settings)
    assert editor.evaluate(requests, accelerator=accelerator, **settings).to_dict() == measured.to_dict()

    one = editor_of(configs(**FEW)["rome"])  # nothing for one of the processes to do
    assert_same_edit(one.edit([KA], accelerator=accelerator), one.edit([KA]), 0)
    with pytest.raises(ConflictingEditsError):  # on every process, so that none waits for another
        one.edit([KA, replace(KA, target="short")], accelerator=accelerator)
    accelerator.wait_for_everyone()
    print(f"process {accelerator.process_index}: all checks passed")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
