"""HyCa on two processes, in one start of the launcher: steps, pictures and calibration are those of one process."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from hf_xai.diffusers import calibrate_hyca, hyca_enabled, hyca_summary
from hf_xai.distributed import map_dataset
from tests.distributed.leaving import leave
from tests.tiny.diffusers import by_name

TINY = by_name("flux-kontext-cfg4")
FLUX = by_name("flux")
STEPS = 10


def sample_rows(pipe, rows: list[int]) -> dict[str, torch.Tensor]:
    """One picture a row, its noise from the row's number, and the full steps that it took."""
    latents, steps = [], []
    for row in rows:
        latents.append(TINY.sample(pipe, steps=STEPS, seed=row)[0])
        steps.append(torch.tensor(hyca_summary(pipe).denoisers[0].branches[1].full_steps))
    return {"latents": torch.stack(latents), "full_steps": torch.stack(steps)}


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    pipe = TINY.build(0)
    with hyca_enabled(pipe, interval=3):
        shared = map_dataset(lambda rows: sample_rows(pipe, rows), range(5), accelerator=accelerator)
        alone = map_dataset(lambda rows: sample_rows(pipe, rows), range(5))
    assert torch.equal(shared["latents"], alone["latents"])
    assert shared["full_steps"].tolist() == [[0, 1, 2, 5, 8, 9]] * 5

    flux = FLUX.build(0)
    call = {key: value for key, value in FLUX.call().items() if key not in ("prompt", "output_type")}
    settings = {"num_inference_steps": STEPS, "interval": 3, "call_kwargs": call, "seed": 1}
    prompts = ["a photo of a cat", "blurry", "a photo of a dog"]
    single = calibrate_hyca(flux, prompts, **settings)
    for resume_dir in (None, folder / "probes"):
        double = calibrate_hyca(flux, prompts, accelerator=accelerator, resume_dir=resume_dir, **settings)
        assert (double.labels, double.assignment) == (single.labels, single.assignment)
        assert double.probe["criterion"] == single.probe["criterion"]
    assert gather_object([double.assignment]) == [single.assignment] * 2
    if accelerator.is_main_process:
        sys.stdout.write("all checks passed\n")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
