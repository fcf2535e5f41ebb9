"""Scores from saved checkpoints are those of the callback at the same steps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Trainer

from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError
from hf_xai.transformers.f_ine import InfluenceCallback, InfluenceConfig, InfluenceScores, score_checkpoints
from hf_xai.transformers.f_ine.saved_checkpoints import load_checkpoint, logged_learning_rate, run_state, weights_path
from tests.transformers.f_ine.trainer_runs import RATE, arguments, pad_rows, tiny_llama, token_rows

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

ROWS, QUERY = token_rows(), token_rows(3, seed=9, column=None)
CONFIG = InfluenceConfig(every_n_steps=2, sample_id_column="sample_id", save_observations=True)
BATCH = 8


def tied_llama(seed: int = 0) -> PreTrainedModel:
    return tiny_llama(seed, tied=True)


def with_adapter(seed: int = 0, rank: int = 2) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny_llama(), config)


class Run:
    """One watched training run and its checkpoints of steps 2, 4 and 6."""

    def __init__(self, folder: Path, make: Callable[[], Any], **changes: Any) -> None:
        self.make, self.model = make, make()
        self.callback = InfluenceCallback(CONFIG, QUERY, sample_ids=ROWS["sample_id"])
        options = {
            "num_train_epochs": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "save_only_model": True,
            **changes,
        }
        Trainer(
            self.model,
            arguments(folder, **options),
            train_dataset=ROWS,
            data_collator=pad_rows,
            callbacks=[self.callback],
        ).train()
        self.folders = [folder / f"checkpoint-{step}" for step in (2, 4, 6)]

    @property
    def scores(self) -> InfluenceScores:
        return self.callback.scores

    def score(self, model: Any = None, folders: Any = None, config: InfluenceConfig = CONFIG, **options: Any) -> Any:
        given = {"query": QUERY, "batch_size": BATCH, "rows": ROWS, **options}
        query, rows = given.pop("query"), given.pop("rows")
        model = self.make() if model is None else model
        return score_checkpoints(model, folders or self.folders, rows, query, pad_rows, config, **given)


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("tied"), tied_llama)


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("adapter"), with_adapter, learning_rate=RATE / 2)


@pytest.fixture(params=["tied_run", "adapter_run"])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.getfixturevalue(request.param)
    return found


def copied(run: Run, folder: Path) -> list[Path]:
    return [Path(shutil.copytree(source, folder / source.name)) for source in run.folders]


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_unchanged(model: torch.nn.Module, before: list[torch.Tensor]) -> None:
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_scores_are_those_of_the_callback(run: Run) -> None:
    model = run.make()
    before, training = weights(model), model.training
    found = run.score(model)
    assert found.sample_ids.tolist() == ROWS["sample_id"][:]
    assert found.observations.steps.tolist() == [2, 4, 6]
    np.testing.assert_allclose(found.observations.products, run.scores.observations.products, rtol=1e-5, atol=1e-6)
    for name, column in run.scores.columns.items():
        np.testing.assert_allclose(found.columns[name], column, rtol=1e-4, atol=1e-6, err_msg=name)
    assert_unchanged(model, before)
    assert model.training == training


def test_the_order_in_which_folders_are_given_does_not_matter(tied_run: Run) -> None:
    found = tied_run.score(folders=[str(folder) for folder in tied_run.folders[::-1]])
    assert found.observations.steps.tolist() == [2, 4, 6]


def test_weights_come_back_after_an_exception(run: Run) -> None:
    model = run.make()
    before = weights(model)
    calls = []

    def failing(model: torch.nn.Module, folder: Path) -> None:
        calls.append(folder)
        load_checkpoint(model, folder)
        if len(calls) == 2:
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        run.score(model, load=failing)
    assert_unchanged(model, before)


def test_a_resumed_call_does_not_score_finished_batches_again(tied_run: Run, tmp_path: Path) -> None:
    first = tied_run.score(resume_dir=tmp_path)
    rows_seen = []

    class Watched:
        column_names, _fingerprint = ROWS.column_names, ROWS._fingerprint

        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, int):
                rows_seen.append(index)
            return ROWS[index]

    again = tied_run.score(resume_dir=tmp_path, rows=Watched())
    assert rows_seen == []
    np.testing.assert_array_equal(first.columns["mu_run"], again.columns["mu_run"])


def test_another_query_does_not_take_up_finished_batches(tied_run: Run, tmp_path: Path) -> None:
    tied_run.score(resume_dir=tmp_path)
    with pytest.raises(ArtifactMismatchError, match="belongs to another run"):
        tied_run.score(resume_dir=tmp_path, query=token_rows(3, seed=10, column=None))


def test_learning_rates_are_those_logged_last(tied_run: Run, tmp_path: Path) -> None:
    state = run_state(tied_run.folders[0])
    assert logged_learning_rate(state) == RATE
    assert logged_learning_rate({**state, "log_history": []}) is None
    folders = copied(tied_run, tmp_path)
    for folder in folders:
        (folder / "trainer_state.json").write_text(json.dumps({**run_state(folder), "log_history": []}))
    found = tied_run.score(folders=folders)
    assert np.isnan(found.columns["tracin"]).all()
    np.testing.assert_allclose(found.columns["mu_step"], tied_run.scores.columns["mu_step"], rtol=1e-4)


def test_shards_are_loaded_by_their_index(tied_run: Run, tmp_path: Path) -> None:
    folders = copied(tied_run, tmp_path)
    for folder in folders:
        whole = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(whole)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({name: whole[name] for name in part}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = tied_run.score(folders=folders)
    np.testing.assert_allclose(found.columns["mu_run"], tied_run.scores.columns["mu_run"], rtol=1e-4)


def test_fewer_than_three_checkpoints_are_refused(tied_run: Run) -> None:
    with pytest.raises(ConfigError, match="3 checkpoints at least, got 2"):
        tied_run.score(folders=tied_run.folders[:2])


def test_checkpoints_of_one_step_are_refused(tied_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both of step 2"):
        tied_run.score(folders=[*tied_run.folders, *copied(tied_run, tmp_path)])


def test_a_folder_that_is_no_checkpoint_is_refused(tied_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trainer_state.json"):
        tied_run.score(folders=[*tied_run.folders, tmp_path])


def test_a_checkpoint_without_weights_is_refused_before_any_work(run: Run, tmp_path: Path) -> None:
    folders = copied(run, tmp_path)
    for file in folders[-1].glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match="holds no weights that fit: expected .*model.safetensors"):
        run.score(folders=folders, query=[])


def test_weights_of_another_model_are_refused(tied_run: Run) -> None:
    class Wider(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.more = tied_llama(), torch.nn.Linear(2, 2)

    with pytest.raises(ConfigError, match="is of another model: .* is missing"):
        load_checkpoint(Wider(), tied_run.folders[0])
    with pytest.raises(ConfigError, match="is of another model"):
        load_checkpoint(torch.nn.Linear(2, 2), tied_run.folders[0])


def test_weights_of_other_shapes_are_refused(run: Run, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)[0]
    file = weights_path(run.make(), folder)
    save_file({name: value[..., :1].contiguous() for name, value in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="is of another model"):
        load_checkpoint(run.make(), folder)


def test_an_adapter_that_lacks_layers_is_refused(adapter_run: Run, tmp_path: Path) -> None:
    folder = copied(adapter_run, tmp_path)[0]
    file = folder / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "q_proj" not in name}, file)
    with pytest.raises(ConfigError, match="q_proj.* is missing"):
        load_checkpoint(adapter_run.make(), folder)


def test_visits_may_be_given(tied_run: Run) -> None:
    by_epochs = tied_run.score()
    assert (by_epochs.columns["visits"] == 2).all()
    times = np.arange(1, 25)
    given = tied_run.score(visits=times)
    assert given.columns["visits"][:, 0].tolist() == times.tolist()
    np.testing.assert_allclose(
        given.columns["mu_run"], np.sqrt(times)[:, None] * by_epochs.columns["mu_step"], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"config": InfluenceConfig(mode="online")}, ConfigError, "mode='checkpoint'"),
        ({"config": InfluenceConfig(control="auxiliary")}, ConfigError, "use InfluenceCallback"),
        ({"query": None}, ConfigError, "query_dataset"),
        ({"visits": [1, 2]}, DataError, "one for each of 24 rows"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tied_run: Run, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tied_run.score(**changes)


def test_self_influence_is_that_of_the_callback_s_formula(tied_run: Run) -> None:
    config = InfluenceConfig(self_influence=True, num_noise_batches=4, sample_id_column="sample_id")
    found = tied_run.score(config=config, query=None)
    assert found.query_names == ("self",)
    assert (found.columns["mu_step"] > 0).all()
