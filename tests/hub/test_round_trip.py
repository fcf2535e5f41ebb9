import json

import pytest

from tests.hub.hub_server import USER, HubServer, run_with_hub

PUSH_AND_LOAD = """
from pathlib import Path
from huggingface_hub import ModelCard, ModelHubMixin
from tests.hub.configs import PROBE, CachingConfig

first = CachingConfig(interval=4, labels=tuple(range(500)), probe=PROBE)
assert isinstance(first, ModelHubMixin)
address = first.push_to_hub("tester/caching", commit_message="first")
loaded = CachingConfig.from_pretrained("tester/caching")
assert loaded == first, loaded
assert type(loaded.labels) is tuple

card = ModelCard.load("tester/caching")
assert card.data.base_model == PROBE["base_model"], card.data
assert card.data.library_name == "hf-xai"
assert 'pipe.enable_hyca("tester/caching")' in card.text

second = CachingConfig(interval=9)
second.save_pretrained(Path("folder") / "caching", push_to_hub=True)  # repository named like the folder
assert CachingConfig.from_pretrained("tester/caching") == second
old = address.rpartition("/")[2]
assert CachingConfig.from_pretrained("tester/caching", revision=old) == first
assert CachingConfig.from_pretrained("tester/caching", revision=old, interval=6).interval == 6
assert 'pipe.enable_hyca("tester/caching")' in ModelCard.load("tester/caching").text  # the full id, also then
print(old)
"""

LARGE_FILE = """
import numpy as np
from huggingface_hub import HfApi, hf_hub_download, list_repo_files, snapshot_download
from pathlib import Path
from safetensors.numpy import load_file, save_file
from tests.hub.configs import PlainConfig

folder = Path("artefact")
PlainConfig(interval=3).save_pretrained(folder)
tensors = {"directions": np.arange(3_000_000, dtype=np.float32)}
save_file(tensors, folder / "model.safetensors")
api = HfApi()
api.create_repo("tester/artefact", private=True)
api.upload_folder(repo_id="tester/artefact", folder_path=folder)
assert set(list_repo_files("tester/artefact")) == {".gitattributes", "README.md", "config.json", "model.safetensors"}
read = load_file(hf_hub_download("tester/artefact", "model.safetensors"))
assert (read["directions"] == tensors["directions"]).all()
assert PlainConfig.from_pretrained(snapshot_download("tester/artefact")).interval == 3
info = api.model_info("tester/artefact")
assert (info.private, info.library_name) == (True, "hf-xai")
same = api.upload_folder(repo_id="tester/artefact", folder_path=folder)
assert same.oid == info.sha, "unchanged files made a commit"
"""

EXPECT_ERROR = """
import sys
from hf_xai.errors import HfXaiError
from tests.hub.configs import CachingConfig, PlainConfig

try:
    eval(sys.argv[1])
except HfXaiError as error:
    print(type(error).__name__, error)
"""


def run(server: HubServer, script: str, *args: str, **options: str | None) -> str:
    done = run_with_hub(server, script, *args, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pushed_config_and_card_load_by_id_and_at_a_revision(hub_server: HubServer) -> None:
    first_commit = run(hub_server, PUSH_AND_LOAD)
    repository = hub_server.repositories[f"{USER}/caching"]
    assert len(repository.commits) == 3  # the empty repository, then two pushes
    files = repository.commits[first_commit]
    assert set(files) == {".gitattributes", "README.md", "config.json"}
    content = json.loads(files["config.json"].content)
    assert (content["type"], content["interval"], content["labels"]) == ("caching", 4, list(range(500)))
    assert content["probe"]["criterion"] == {"tf1": 0.0125, "bdf2": 0.5}
    assert ("POST", "/api/validate-yaml") in hub_server.requests


def test_large_files_travel_through_lfs(hub_server: HubServer) -> None:
    run(hub_server, LARGE_FILE)
    uploads = [method for method, path in hub_server.requests if path.startswith("/lfs/")]
    assert uploads == ["PUT", "POST"]  # once, and verified; the second push finds it present
    [stored] = [file for file in hub_server.repositories[f"{USER}/artefact"].commits.popitem()[1].values() if file.lfs]
    assert len(stored.content) > 12_000_000


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (
            "'tester/absent'",
            "ConfigError Can't load config.json from 'tester/absent' (no folder of that name here): no such",
        ),
        (
            "'someone/secret'",
            "from 'someone/secret' (no folder of that name here): no such repository, or a private one",
        ),
        (
            "'tester/empty'",
            "config.json from 'tester/empty' (no folder of that name here): the repository has no such file.",
        ),
        (
            "'tester/empty', revision='v9'",
            "'tester/empty' at revision 'v9' (no folder of that name here): the repository has no such revision.",
        ),
        ("'tester/empty', token='hf_wrong'", "no token, or one that the Hub refuses. Invalid credentials"),
        (
            "'tester/other'",
            "ArtifactMismatchError The config has the type 'caching'; PlainConfig reads the type 'plain'",
        ),
    ],
    ids=["absent", "private", "no_config", "no_revision", "bad_token", "other_type"],
)
def test_what_cannot_be_loaded_is_named_in_one_sentence(hub_server: HubServer, load: str, said: str) -> None:
    hub_server.create("someone/secret", private=True)
    hub_server.create("tester/empty")
    other = hub_server.create("tester/other")
    files = next(iter(other.commits.values()))
    file = files[".gitattributes"]
    files["config.json"] = type(file)(b'{"type": "caching"}', lfs=False)
    assert said in run(hub_server, EXPECT_ERROR, f"PlainConfig.from_pretrained({load})")


@pytest.mark.parametrize("token", ["hf_for_tests_only", None])
def test_private_config_loads_only_for_its_owner(hub_server: HubServer, token: str | None) -> None:
    run(hub_server, EXPECT_ERROR, "PlainConfig().push_to_hub('tester/secret', private=True)")
    assert hub_server.repositories["tester/secret"].private
    said = run(hub_server, EXPECT_ERROR, "print(PlainConfig.from_pretrained('tester/secret').interval)", token=token)
    assert said.startswith("5" if token else "ConfigError Can't load config.json from 'tester/secret'")


@pytest.mark.parametrize(
    ("push", "token", "said"),
    [
        (
            "'tester/new'",
            "hf_wrong",
            "ConfigError Can't push PlainConfig to 'tester/new': no token, or one that the Hub refuses.",
        ),
        ("'new'", "hf_wrong", "ConfigError Can't push PlainConfig to 'new': no token, or one that the Hub refuses."),
        ("'tester/new'", None, "'tester/new': no token, or one that the Hub refuses."),
        ("'new'", None, "ConfigError Can't push PlainConfig to 'new': no token; log in with `hf auth login`"),
        (
            "'someone/new'",
            "hf_for_tests_only",
            "ConfigError Can't push PlainConfig to 'someone/new': no token, or one that the Hub refuses. You don't",
        ),
        (
            "'not//valid'",
            "hf_for_tests_only",
            "ConfigError Can't push PlainConfig to 'not//valid': not a valid repository id.",
        ),
    ],
    ids=["bad_token", "bad_token_short_id", "no_token", "no_token_short_id", "not_mine", "bad_id"],
)
def test_refused_push_is_one_sentence_and_leaves_no_repository(
    hub_server: HubServer, push: str, token: str | None, said: str
) -> None:
    assert said in run(hub_server, EXPECT_ERROR, f"PlainConfig().push_to_hub({push})", token=token)
    assert hub_server.repositories == {}


def test_card_that_cannot_be_rendered_leaves_no_repository(hub_server: HubServer) -> None:
    push = "CachingConfig(probe={'base_model': 'a/b'}).push_to_hub('tester/new')"
    assert "ConfigError The card 'hyca' needs a field" in run(hub_server, EXPECT_ERROR, push)
    assert hub_server.repositories == {}


def test_hub_that_does_not_answer_is_one_sentence(hub_server: HubServer) -> None:
    hub_server.shutdown()
    hub_server.server_close()
    said = run(hub_server, EXPECT_ERROR, "PlainConfig().push_to_hub('tester/new')")
    assert said == (
        f"HubError Can't push PlainConfig to 'tester/new': the Hub can't be reached at {hub_server.endpoint}."
    )
