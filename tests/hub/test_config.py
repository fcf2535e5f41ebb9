import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hf_xai
from hf_xai.errors import ArtifactMismatchError, ConfigError, HubError
from hf_xai.hub import HubConfig
from tests.hub.configs import PlainConfig

FULL: dict[str, Any] = {
    "interval": 7,
    "name": "naïve | second",
    "labels": tuple(range(3000)),
    "pairs": (("a", 0.1), ("b", 1e-30)),
    "extra": {"nested": {"list": [1, None, True]}},
}


def saved(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_dict_starts_with_type_and_version_and_holds_every_field() -> None:
    content = PlainConfig(**FULL).to_dict()
    assert list(content) == ["type", "hf_xai_version", "interval", "name", "labels", "pairs", "extra"]
    assert (content["type"], content["hf_xai_version"]) == ("plain", hf_xai.__version__)
    assert content["pairs"] == [["a", 0.1], ["b", 1e-30]]


def test_saved_file_is_exactly_the_dict_and_loads_as_an_equal_config(tmp_path: Path) -> None:
    config = PlainConfig(**FULL)
    config.save_pretrained(tmp_path / "new" / "folder")
    assert saved(tmp_path / "new" / "folder") == config.to_dict()
    loaded = PlainConfig.from_pretrained(tmp_path / "new" / "folder")
    assert loaded == config
    assert isinstance(loaded.labels, tuple)
    assert isinstance(loaded.pairs[0], tuple)
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"config.json", "README.md"}


def test_numpy_numbers_are_saved_as_numbers() -> None:
    content = PlainConfig(interval=np.int64(3), pairs=(("a", np.float32(0.5)),)).to_dict()
    assert json.loads(json.dumps(content))["pairs"] == [["a", 0.5]]
    assert type(content["interval"]) is int


@pytest.mark.parametrize("value", [{1: "a"}, {"a": float("nan")}, {"a": {1, 2}}, {"a": Path("b")}])
def test_what_json_would_change_is_refused_before_anything_is_written(value: Any, tmp_path: Path) -> None:
    PlainConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^extra"):
        PlainConfig(extra=value).save_pretrained(tmp_path)
    assert saved(tmp_path) == PlainConfig().to_dict()


def test_unknown_keys_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"PlainConfig has no depth, width; it has interval") as caught:
        PlainConfig.from_dict({**PlainConfig().to_dict(), "width": 1, "depth": 2})
    assert "newer" not in str(caught.value)


def test_unknown_key_of_a_newer_version_names_both_versions() -> None:
    with pytest.raises(ConfigError, match=rf"depth.*written by hf_xai 999\.1, this is {hf_xai.__version__}"):
        PlainConfig.from_dict({**PlainConfig().to_dict(), "hf_xai_version": "999.1", "depth": 2})


def test_known_keys_of_another_version_load() -> None:
    assert PlainConfig.from_dict({"type": "plain", "hf_xai_version": "999.1", "interval": 2}).interval == 2


@pytest.mark.parametrize(
    ("content", "said"), [({"type": "caching"}, "type 'caching'"), ({"interval": 5}, "no 'type'"), ({}, "no 'type'")]
)
def test_another_type_or_none_is_a_mismatch_that_names_both(content: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtifactMismatchError, match=rf"{said}; PlainConfig reads the type 'plain'"):
        PlainConfig.from_dict(content)


def test_content_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="got list"):
        PlainConfig.from_pretrained(tmp_path)


def test_broken_json_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "plain"')
    with pytest.raises(ConfigError, match=rf"{tmp_path.name}.*not valid JSON"):
        PlainConfig.from_pretrained(tmp_path)


def test_loaded_values_are_validated() -> None:
    with pytest.raises(ConfigError, match="interval must be >= 1"):
        PlainConfig.from_dict({"type": "plain", "interval": 0})


def test_changes_on_loading_win_and_are_validated(tmp_path: Path) -> None:
    PlainConfig(interval=5, name="kept").save_pretrained(tmp_path)
    assert PlainConfig.from_pretrained(tmp_path, interval=7) == PlainConfig(interval=7, name="kept")
    with pytest.raises(ConfigError, match="interval must be >= 1"):
        PlainConfig.from_pretrained(tmp_path, interval=0)
    with pytest.raises(ConfigError, match="PlainConfig has no intervals; it has interval"):
        PlainConfig.from_pretrained(tmp_path, intervals=7)


def test_folder_without_config_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no config\.json in the folder .*{tmp_path.name}"):
        PlainConfig.from_pretrained(tmp_path)


def test_path_of_a_file_is_refused(tmp_path: Path) -> None:
    PlainConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        PlainConfig.from_pretrained(tmp_path / "config.json")


def test_absent_path_that_is_no_repository_id_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"from '\./no/such/folder' \(no folder .*: not a valid"):
        PlainConfig.from_pretrained("./no/such/folder")


def test_empty_cache_without_network_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"config\.json from 'someone/config'.*cache has no copy"):
        PlainConfig.from_pretrained("someone/config", cache_dir=tmp_path, local_files_only=True)


def test_card_is_written_once_and_then_left_alone(tmp_path: Path) -> None:
    PlainConfig().save_pretrained(tmp_path)
    assert "# PlainConfig" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine")
    PlainConfig(interval=6).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert saved(tmp_path)["interval"] == 6


def test_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PlainConfig(name="old").save_pretrained(tmp_path)

    def full_disk(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        PlainConfig(name="new").save_pretrained(tmp_path)
    assert saved(tmp_path)["name"] == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "README.md"}


def test_config_of_the_mixins_signature_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="saves itself"):
        PlainConfig().save_pretrained(tmp_path, config={"interval": 9})


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda config: pickle.loads(pickle.dumps(config)), dataclasses.replace],
    ids=["deepcopy", "copy", "pickle", "replace"],
)
def test_copies_are_equal_and_hold_nothing_but_fields(copied: Any) -> None:
    config = PlainConfig(**FULL)
    assert copied(config) == config
    assert set(vars(copied(config))) == {field.name for field in dataclasses.fields(config)}


def test_replaced_or_changed_field_is_what_is_saved(tmp_path: Path) -> None:
    changed = dataclasses.replace(PlainConfig(interval=5), interval=7)
    changed.name = "later"
    changed.save_pretrained(tmp_path)
    assert (saved(tmp_path)["interval"], saved(tmp_path)["name"]) == (7, "later")


def test_every_setting_has_a_line_of_its_own_and_a_long_list_only_one(tmp_path: Path) -> None:
    PlainConfig(**FULL).save_pretrained(tmp_path)
    lines = (tmp_path / "config.json").read_text().splitlines()
    settings = [line.split('"')[1] for line in lines if line.startswith('  "')]
    assert settings == list(PlainConfig().to_dict())
    assert len(lines) < 20


def test_subclass_without_a_type_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a type"):
        type("Nameless", (HubConfig,), {})


def test_tags_of_one_class_do_not_reach_another() -> None:
    tags = ["mine"]

    class One(HubConfig, type="one", tags=tags):
        pass

    assert tags == ["mine"]
    assert "mine" not in PlainConfig().generate_model_card().data.tags
