from tests.gradients.stores import DatasetHubHandler
from tests.hub.hub_server import HubServer, run_with_hub

HUB = """
from pathlib import Path
import torch
from huggingface_hub import DatasetCard, HfApi
from hf_xai.errors import HfXaiError
from hf_xai.gradients.projections import make_projection
from hf_xai.gradients.store import GradientStore
from tests.gradients.stores import FINGERPRINTS, create, features

shapes = {"weight": (40, 50)}
projection = make_projection("sjlt", shapes, 6)
store = GradientStore.create("store", projection=projection, fingerprints=FINGERPRINTS, shard_rows=3)
store.append(features(list(range(8))), range(8))
address = store.push_to_hub("tester/store", private=True, card_fields={"base_model": "a/b", "method": "TRAK"})
opened = GradientStore.from_pretrained("tester/store")
assert (len(opened), opened.config) == (8, store.config), opened
assert torch.equal(opened.read(range(8)), features(list(range(8))))
rows = {"weight": torch.randn(2, 40, 50)}
assert torch.equal(opened.projection()(rows), projection(rows))
card = DatasetCard.load("tester/store")
assert card.data.library_name == "hf-xai" and "hf-xai" in card.data.tags, card.data
assert card.data.viewer is False
for part in ('from_pretrained("tester/store")', "TRAK of a/b", "8 rows of 6 numbers in float32, 3 files", "`m0`"):
    assert part in card.text, card.text

# another store takes the place of the first: no shard of the first stays
small = create(Path("small"), shard_rows=100)
small.append(features([1, 2]), [1, 2])
small.push_to_hub("store")
assert sorted(HfApi().list_repo_files("tester/store", repo_type="dataset")) == [
    ".gitattributes", "README.md", "config.json", "features-00000-00000.safetensors"
]
assert len(GradientStore.from_pretrained("tester/store")) == 2
assert len(GradientStore.from_pretrained("tester/store", revision=address.rpartition("/")[2])) == 8
for call in (
    lambda: GradientStore.from_pretrained("tester/absent"),
    lambda: GradientStore.from_pretrained("tester/store", revision="v9"),
    lambda: store.push_to_hub("someone/store"),
    lambda: create(Path("empty")).push_to_hub("tester/empty"),
):
    try:
        call()
    except HfXaiError as error:
        print(type(error).__name__, error)
"""


def test_a_store_travels_through_the_hub(hub_server: HubServer) -> None:
    hub_server.RequestHandlerClass = DatasetHubHandler
    done = run_with_hub(hub_server, HUB)
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip().splitlines()
    assert said[0].startswith("ConfigError Can't load a gradient store from 'tester/absent' (no folder of that name h")
    assert said[0].endswith("no such repository, or a private one and no token for it.")
    assert said[1].endswith("the repository has no such revision.")
    assert said[2].startswith("ConfigError Can't push the gradient store to 'someone/store': no token, or one that")
    assert said[3].startswith("DataError The store 'empty' has no rows to push.")
    assert len(said) == 4
    assert list(hub_server.repositories) == ["tester/store"]
