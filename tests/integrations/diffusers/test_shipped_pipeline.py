"""The pipeline that we ship is what its card says, and the snippets of README and docs run on it."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from safetensors import safe_open

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "integrations" / "diffusers" / "flux-tiny-fashion"
CALL = {"height": 32, "width": 32, "max_sequence_length": 12}


def test_the_folder_is_a_complete_small_flux_pipeline() -> None:
    pipe = FluxPipeline.from_pretrained(FOLDER)
    assert isinstance(pipe.transformer, FluxTransformer2DModel)
    assert isinstance(pipe.vae, AutoencoderKL)
    assert len(pipe.transformer.transformer_blocks) + len(pipe.transformer.single_transformer_blocks) >= 12
    assert pipe.vae_scale_factor == 2
    assert pipe.scheduler.config.shift == 3.0
    files = [FOLDER / "model_index.json", *(path for name in pipe.components for path in FOLDER.glob(f"{name}/*"))]
    assert 9_000_000 < sum(path.stat().st_size for path in files) < 10_000_000


def test_weights_are_saved_in_half_precision() -> None:
    dtypes = set()
    for path in FOLDER.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            dtypes |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {"F16"}


def test_prompts_draw_different_articles_on_64_image_tokens() -> None:
    pipe = FluxPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    prompts = ["a photo of a sneaker", "a photo of a pair of trousers"]
    generators = [torch.Generator().manual_seed(0) for _ in prompts]
    call = CALL | {"num_inference_steps": 12, "output_type": "latent", "generator": generators}
    latents = pipe(prompts, **call).images
    assert latents.shape == (2, 64, 16)
    assert (latents[0] - latents[1]).norm() > 0.3 * latents[0].norm()


def test_the_card_is_the_one_that_code_writes() -> None:
    spec = importlib.util.spec_from_file_location("write_card", FOLDER / "write_card.py")
    assert spec is not None
    assert spec.loader is not None
    write_card = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_card)
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == write_card.render()


def test_the_training_log_ends_where_the_settings_say() -> None:
    log = json.loads((FOLDER / "training_log.json").read_text(encoding="utf-8"))
    assert log["loss"][-1]["step"] == log["settings"]["flow_steps"]
    assert log["loss"][-1]["loss"] < log["loss"][0]["loss"]


@pytest.mark.parametrize("page", ["docs/diffusers/hyca.md", "integrations/diffusers/README.md"])
def test_snippets_that_use_the_shipped_pipeline_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "integrations").symlink_to(ROOT / "integrations")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    source = "\n".join(blocks)
    assert "flux-tiny-fashion" in source
    exec(compile(source, page, "exec"), {})
