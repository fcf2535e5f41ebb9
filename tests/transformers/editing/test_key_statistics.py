import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from hf_xai.attachment import attach, detach
from hf_xai.errors import ArtifactMismatchError, ConfigError, DataError, UnsupportedModelError
from hf_xai.hub import weights_fingerprint
from hf_xai.transformers.editing import statistics_collection
from hf_xai.transformers.editing.architecture import decoder_architecture
from hf_xai.transformers.editing.key_statistics import KeyStatistics
from hf_xai.transformers.editing.statistics_collection import MomentSums
from hf_xai.transformers.editing.statistics_parts import PartialSums
from tests.distributed.launcher import Launcher
from tests.hub.hub_server import HubServer, run_with_hub
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer
from tests.tiny.traces import module_trace
from tests.transformers.editing.every_host import EVERY_HOST
from tests.transformers.editing.statistics_texts import keys_one_by_one, texts

LINES = texts(13)
NAME = "model.layers.1.mlp.down_proj"


def collect(model: Any = "llama", lines: Any = None, layers: Any = (1,), **settings: Any) -> KeyStatistics:
    model = tiny_causal_lm(model) if isinstance(model, str) else model
    return KeyStatistics.from_dataset(
        model, tiny_chat_tokenizer(), LINES if lines is None else lines, layers, **settings
    )


def assert_close(found: KeyStatistics, expected: KeyStatistics, relative: float = 1e-6) -> None:
    assert list(found) == list(expected)
    for name, moment in expected.items():
        tolerance = relative * float(moment.matrix.abs().max())
        torch.testing.assert_close(found[name].matrix, moment.matrix, rtol=0, atol=tolerance)


@pytest.mark.distributed
def test_two_processes_give_what_one_gives(launch: Launcher, tmp_path: Path) -> None:
    printed = launch("tests/transformers/editing/statistics_script.py", tmp_path)
    assert printed.count("all checks passed") == 2


@pytest.mark.parametrize("name", EVERY_HOST)
def test_the_moments_are_those_of_one_plain_pass_for_each_text(name: str) -> None:
    model, tokenizer = tiny_causal_lm(name), tiny_chat_tokenizer()
    found = collect(model, layers=[3, 0], batch_size=3, sequence_length=9)
    layers = decoder_architecture(model).layers
    assert list(found) == [layers[index].feed_forward_out_name for index in (0, 3)]
    for index in (0, 3):
        keys = keys_one_by_one(model, tokenizer, LINES, index, length=9)
        moment = found[layers[index].feed_forward_out_name]
        expected = keys @ keys.T / keys.shape[1]
        np.testing.assert_allclose(moment.matrix, expected, rtol=0, atol=1e-6 * abs(expected).max())
        assert (moment.matrix.dtype, moment.num_tokens) == (torch.float64, keys.shape[1])
        assert torch.equal(moment.matrix, moment.matrix.T)


def test_attention_has_statistics_too() -> None:
    model = tiny_causal_lm("gpt2")
    found = collect(model, layers=[2], modules=("attention", "feed_forward"))
    assert {name: moment.size for name, moment in found.items()} == {
        "transformer.h.2.mlp.c_proj": 128,
        "transformer.h.2.attn.c_proj": 32,
    }
    assert list(collect(model, layers=None)) == [f"transformer.h.{index}.mlp.c_proj" for index in range(4)]


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_order_and_batch_size_make_no_difference(batch_size: int) -> None:
    expected = collect(layers=[0, 2])
    order = np.random.default_rng(batch_size).permutation(len(LINES))
    assert_close(collect(lines=[LINES[index] for index in order], layers=[0, 2], batch_size=batch_size), expected)


def test_the_side_of_the_padding_and_a_pad_token_make_no_difference() -> None:
    expected = collect()
    for side in ("left", "right"):
        tokenizer = tiny_chat_tokenizer()
        tokenizer.padding_side = side
        found = KeyStatistics.from_dataset(tiny_causal_lm("llama"), tokenizer, LINES, [1], batch_size=50)
        assert_close(found, expected, 1e-7)
        assert found.num_tokens == sum(len(ids) for ids in tokenizer(LINES)["input_ids"])


def test_wide_modules_are_summed_by_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = collect(modules=("feed_forward", "attention"))
    monkeypatch.setattr(statistics_collection, "_ROWS", 7)
    assert_close(collect(modules=("feed_forward", "attention")), expected)
    monkeypatch.setattr(statistics_collection, "DOUBLE_CHANNELS", 40)
    found = collect(modules=("feed_forward", "attention"))
    assert {moment.size: moment.stored.dtype for moment in found.values()} == {64: torch.float32, 32: torch.float64}
    assert_close(found, expected)


class Largest(TorchDispatchMode):
    """Counts the tensors of at least so many numbers that are made."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.count += isinstance(output, torch.Tensor) and output.numel() >= self.numbers
        return output


@pytest.mark.parametrize("double_channels", [0, 8192])
def test_a_sum_takes_no_second_matrix(double_channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_collection, "DOUBLE_CHANNELS", double_channels)
    monkeypatch.setattr(statistics_collection, "_ROWS", 16)
    sums = MomentSums({"a": 64})
    with Largest(64 * 64) as largest:
        for _ in range(3):
            sums.add("a", torch.ones(5, 64))
    assert largest.count == 1
    assert float(sums.pop("a")[2, 60]) == 15


def test_products_are_exact_under_autocast_and_low_precision() -> None:
    keys = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    sums = MomentSums({"a": 6})
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sums.add("a", keys.reshape(2, 100, 6))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    expected = keys.double().T @ keys.double()
    torch.testing.assert_close(sums.pop("a"), expected, rtol=0, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    model = tiny_causal_lm("llama").to(dtype)
    found = collect(model)
    assert found.record["model"]["dtype"] == str(dtype).removeprefix("torch.")
    keys = keys_one_by_one(model, tiny_chat_tokenizer(), LINES, 1)
    relative = 1e-10 if dtype == torch.float64 else 2e-2  # batches round half precision in another way
    expected = keys @ keys.T / keys.shape[1]
    np.testing.assert_allclose(found[NAME].matrix, expected, rtol=0, atol=relative * abs(expected).max())
    found.check_fits(decoder_architecture(tiny_causal_lm("llama")))  # the signs of the weights are the same


@pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload", "device_map"])
def test_offloaded_models(kind: str, tmp_path: Path) -> None:
    expected, model = collect(layers=[0, 1]), tiny_causal_lm("llama")
    if kind == "cpu_offload":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif kind == "disk_offload":
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        layers = {f"model.layers.{index}": "disk" if index in (1, 2) else "cpu" for index in range(4)}
        dispatch_model(model, {**device_map, **layers}, main_device="cpu", offload_dir=str(tmp_path))
    metas = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert metas
    found = collect(model, layers=[0, 1])
    assert_close(found, expected)
    assert found.fingerprint == expected.fingerprint
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == metas
    found.check_fits(decoder_architecture(model))


@pytest.mark.parametrize("ending", ["success", "not finite"])
def test_the_model_is_left_as_it_was(ending: str) -> None:
    model = tiny_causal_lm("falcon").train()
    model.transformer.h[2].mlp.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    if ending == "not finite":
        model.transformer.h[0].mlp.dense_h_to_4h.weight.data[0, 0] = float("nan")
    before = module_trace(model)
    if ending == "success":
        collect(model)
    else:
        with pytest.raises(DataError, match=r"inputs of transformer\.h\.1\.mlp\.dense_4h_to_h are not finite"):
            collect(model)
    assert module_trace(model) == before
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_dropout_is_off() -> None:
    model = tiny_causal_lm("gpt2").train()
    assert model.transformer.drop.p > 0
    assert_close(collect(model), collect("gpt2"))
    assert model.transformer.drop.training


def test_layers_beyond_the_last_one_do_not_run() -> None:
    model = tiny_causal_lm("gpt2")
    calls: list[int] = []
    for index, block in enumerate(model.transformer.h):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    collect(model, lines=LINES[:1], layers=[1])
    assert calls == [0, 1]


def test_few_tokens_are_damped_when_they_are_used() -> None:
    found = collect(lines=["short"], damping=1e-2)
    assert found.num_tokens < 64
    with pytest.warns(UserWarning, match=f"comes from {found.num_tokens} tokens"):
        solved = found[NAME].solve(torch.ones(64, 1))
    assert solved.isfinite().all()
    assert found[NAME].damping == 1e-2


def test_a_module_that_sees_some_tokens_twice_is_refused() -> None:
    model = tiny_causal_lm("llama")
    block = model.model.layers[0]
    block.mlp.register_forward_hook(lambda module, args, output: (output, module.down_proj(torch.zeros(1, 64)))[0])
    with pytest.raises(UnsupportedModelError, match=r"every token once; .* model\.layers\.0\.mlp\.down_proj \d+ were"):
        collect(model, layers=[0, 1])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layers": [4]}, r"layers must be different numbers from 0 to 3, got \[4\]"),
        ({"layers": [-1]}, "from 0 to 3"),
        ({"layers": []}, "from 0 to 3"),
        ({"layers": [1, 1]}, "different numbers"),
        ({"modules": ("mlp",)}, "modules must be some of 'feed_forward', 'attention'"),
        ({"modules": "attention"}, "modules"),
        ({"batch_size": 0}, "batch_size"),
        ({"damping": -1.0}, "damping"),
        ({"sequence_length": 0}, "sequence_length"),
    ],
)
def test_settings_are_checked_before_the_first_pass(settings: dict[str, Any], said: str) -> None:
    model = tiny_causal_lm("llama")
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ConfigError, match=said):
        collect(model, **settings)


def test_an_edited_model_is_refused_until_its_edits_are_reverted() -> None:
    model = tiny_causal_lm("llama")
    attach(model, "knowledge_edits", ExitStack())
    with pytest.raises(ConfigError, match="revert them first"):
        collect(model)
    detach(model, "knowledge_edits")
    assert len(collect(model)) == 1


def test_data_is_checked_before_the_first_pass() -> None:
    model = tiny_causal_lm("llama")
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(DataError, match="empty"):
        collect(model, lines=[])
    with pytest.raises(DataError, match="no 'text'"):
        collect(model, lines=[{"body": "a"}])
    model.resize_token_embeddings(20)
    with pytest.raises(DataError, match=r"the model knows 0 to 19; is it its own\?"):
        collect(model)


def test_a_sequence_is_no_longer_than_the_model_has_positions() -> None:
    model = tiny_causal_lm("gpt2")
    model.config.max_position_embeddings = 8
    found = collect(model)
    assert found.record["data"]["sequence_length"] == 8


class Stopped(Exception):
    pass


def test_an_interrupted_collection_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = collect()
    write, writes = PartialSums.write, []

    def stopping(self: PartialSums, *args: Any) -> None:
        write(self, *args)
        writes.append(args[1])
        if len(writes) == 3:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(statistics_collection, "SAVE_SECONDS", 0.0)
        patch.setattr(PartialSums, "write", stopping)
        with pytest.raises(Stopped):
            collect(cache_dir=tmp_path, batch_size=1)
    [parts] = tmp_path.iterdir()
    (parts / "part-torn.safetensors").write_bytes(b"half a file")
    others = torch.tensor([index for index in range(len(LINES)) if index not in writes[-1]])
    save_file({"sequences": others}, parts / "part-other.safetensors", metadata={"fingerprint": "other"})
    [mine] = [path for path in parts.glob("part-*") if len(path.stem) > 20]
    shutil.copy(mine, parts / "part-zcopy.safetensors")  # the same sequences once more
    ran: list[int] = []
    model = tiny_causal_lm("llama")
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: ran.append(args[0].numel()))
    found = collect(model, cache_dir=tmp_path, batch_size=4)
    assert_close(found, expected)
    done = load_file(tmp_path / f"key_statistics-{found.fingerprint[:16]}" / f"moment-{NAME}.safetensors")
    assert torch.equal(done["second_moment"], found[NAME].matrix)
    lengths = [len(ids) for ids in tiny_chat_tokenizer()(LINES)["input_ids"]]
    assert sum(ran) == sum(lengths) - sum(lengths[index] for index in writes[-1]) > 0
    assert not parts.exists()


def test_a_finished_collection_is_read_back_without_a_pass(tmp_path: Path) -> None:
    first = collect(cache_dir=tmp_path)
    model = tiny_causal_lm("llama")
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    again = collect(model, cache_dir=tmp_path, damping=1e-3, batch_size=1)
    assert torch.equal(again[NAME].matrix, first[NAME].matrix)
    assert again[NAME].damping == again.record["damping"] == 1e-3
    assert again.record["data"] == first.record["data"]


def test_the_cache_of_another_run_is_never_used(tmp_path: Path) -> None:
    first = collect(cache_dir=tmp_path)
    other = tiny_causal_lm("llama", seed=1)
    eps = tiny_causal_lm("llama")
    eps.config.rms_norm_eps = 1e-3
    found = [
        collect(other, cache_dir=tmp_path),
        collect(eps, cache_dir=tmp_path),
        collect(tiny_causal_lm("llama").to(torch.bfloat16), cache_dir=tmp_path),
        collect(layers=[0], cache_dir=tmp_path),
        collect(lines=LINES[1:], cache_dir=tmp_path),
        collect(max_tokens=50, cache_dir=tmp_path),
        collect(modules=("attention",), cache_dir=tmp_path),
    ]
    assert len({first.fingerprint, *(statistics.fingerprint for statistics in found)}) == 8
    assert len(list(tmp_path.iterdir())) == 8
    folder = tmp_path / f"key_statistics-{first.fingerprint[:16]}"
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / f"key_statistics-{found[0].fingerprint[:16]}", folder)
    with pytest.raises(ArtifactMismatchError, match="statistics of another run; delete it"):
        collect(cache_dir=tmp_path)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(ConfigError, match="holds no key statistics; move it away"):
        collect(cache_dir=tmp_path)


def test_statistics_of_another_model_are_refused() -> None:
    found = collect(layers=[0, 1])
    model = tiny_causal_lm("llama")
    found.check_fits(decoder_architecture(model), [NAME])
    with pytest.raises(
        ArtifactMismatchError, match=r"no statistics of model\.layers\.3\.mlp\.down_proj, but of model"
    ):
        found.check_fits(decoder_architecture(model), [NAME, "model.layers.3.mlp.down_proj"])
    with pytest.raises(ArtifactMismatchError, match=r"LlamaForCausalLM, with a module .*; GPT2LMHeadModel has none"):
        found.check_fits(decoder_architecture(tiny_causal_lm("gpt2")))
    wide = type(model)(type(model.config)(**{**model.config.to_dict(), "intermediate_size": 48}))
    with pytest.raises(ArtifactMismatchError, match=r"are \(64, 64\), its inputs have 48 .*: \(48, 48\) are needed"):
        found.check_fits(decoder_architecture(wide))
    deeper = tiny_causal_lm("llama")
    deeper.model.layers[2].mlp.up_proj.weight.data.neg_()  # no key of the two layers depends on it
    found.check_fits(decoder_architecture(deeper))
    deeper.model.layers[0].mlp.up_proj.weight.data.neg_()
    with pytest.raises(ArtifactMismatchError, match=r"other weights in model\.layers\.0: of an unnamed model"):
        found.check_fits(decoder_architecture(deeper))
    found.check_fits(decoder_architecture(deeper), weights=False)
    wide_conv = collect("gpt2")
    wide_conv.check_fits(decoder_architecture(tiny_causal_lm("gpt2")))


def test_save_and_load_give_the_same(tmp_path: Path) -> None:
    found = collect(layers=[0, 1], damping=1e-3)
    found.save_pretrained(tmp_path, card_fields={"dataset": "made up"})
    loaded = KeyStatistics.from_pretrained(tmp_path)
    assert (loaded.record, loaded.fingerprint) == (found.record, found.fingerprint)
    for name, moment in found.items():
        assert torch.equal(loaded[name].matrix, moment.matrix)
        assert (loaded[name].num_tokens, loaded[name].damping) == (moment.num_tokens, 1e-3)
        assert loaded[name] is loaded[name]  # factorised once
    assert NAME in loaded
    assert "lm_head" not in loaded
    with pytest.raises(KeyError):
        loaded["lm_head"]
    assert KeyStatistics.from_pretrained(tmp_path, damping=0.5)[NAME].damping == 0.5
    card = (tmp_path / "README.md").read_text()
    for part in (
        f"| `{NAME}` | 1 | 64 x 64 |",
        "(made up)",
        "Few tokens",
        "2 output matrices see",
        "library_name: hf-xai",
    ):
        assert part in card, part
    collect(layers=[2]).save_pretrained(tmp_path)  # what it replaces is gone
    assert list(KeyStatistics.from_pretrained(tmp_path)) == ["model.layers.2.mlp.down_proj"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_local_path_stays_private(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    model.config._name_or_path = "/home/someone/secret/my-model"
    collect(model).save_pretrained(tmp_path)
    said = (tmp_path / "README.md").read_text() + (tmp_path / "statistics.json").read_text()
    assert "my-model" in said
    assert "someone" not in said


def damage(folder: Path, how: str) -> None:
    path, described = folder / f"moment-{NAME}.safetensors", folder / "statistics.json"
    matrix = load_file(path)["second_moment"]
    fingerprint = json.loads(described.read_text())["fingerprint"]
    changed = {"nan": torch.full_like(matrix, float("nan")), "shape": matrix[:5, :5].contiguous(), "other": matrix}
    if how == "asymmetric":
        matrix[3, 5] += 1.0
        changed[how] = matrix
    if how in changed:
        save_file({"second_moment": changed[how]}, path, {"fingerprint": "x" if how == "other" else fingerprint})
    elif how == "torn":
        path.write_bytes(path.read_bytes()[:100])
    elif how == "absent":
        path.unlink()
    elif how == "tampered":
        described.write_text(described.read_text().replace('"layer": 1', '"layer": 0'))
    elif how == "type":
        described.write_text(described.read_text().replace("key_statistics", "hyca"))
    elif how == "json":
        described.write_text("{")
    elif how == "keys":
        described.write_text('{"type": "key_statistics"}')
    else:
        described.unlink()


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("nan", ArtifactMismatchError, "must be finite"),
        ("asymmetric", ArtifactMismatchError, "must be symmetric"),
        ("shape", ArtifactMismatchError, r"must be \(64, 64\), it is \(5, 5\)"),
        ("other", ArtifactMismatchError, "belongs to other statistics"),
        ("torn", ArtifactMismatchError, "damaged"),
        ("absent", ConfigError, "There is no moment-"),
        ("tampered", ArtifactMismatchError, "has been changed"),
        ("type", ArtifactMismatchError, "has the type 'hyca'"),
        ("json", ConfigError, "not valid JSON"),
        ("keys", ConfigError, "lacks 'model'"),
        ("no record", ConfigError, "holds no key statistics"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, how: str, error: type[Exception], said: str) -> None:
    collect().save_pretrained(tmp_path)
    damage(tmp_path, how)
    with pytest.raises(error, match=said):
        KeyStatistics.from_pretrained(tmp_path)[NAME].solve(torch.ones(64))


HUB = """
import torch
from huggingface_hub import HfApi, ModelCard
from hf_xai.errors import HfXaiError
from hf_xai.transformers.editing.key_statistics import KeyStatistics
from tests.tiny.causal_lms import tiny_causal_lm, tiny_chat_tokenizer

model = tiny_causal_lm("llama")
model.config._name_or_path = "a/model"
both = KeyStatistics.from_dataset(model, tiny_chat_tokenizer(), ["Keep the answer short."], [0, 1])
address = both.push_to_hub("statistics", private=True, card_fields={"dataset": "a/corpus", "license": "mit"})
loaded = KeyStatistics.from_pretrained("tester/statistics")
assert loaded.record == both.record
for name in both:
    assert torch.equal(loaded[name].matrix, both[name].matrix)
card = ModelCard.load("tester/statistics")
assert (card.data.base_model, card.data.datasets, card.data.license) == ("a/model", ["a/corpus"], "mit"), card.data
assert 'from_pretrained("tester/statistics")' in card.text and "# Key statistics of a/model" in card.text, card.text
one = KeyStatistics.from_dataset(model, tiny_chat_tokenizer(), ["Keep the answer short."], [1])
one.push_to_hub("tester/statistics")
assert sorted(HfApi().list_repo_files("tester/statistics")) == [
    ".gitattributes", "README.md", "moment-model.layers.1.mlp.down_proj.safetensors", "statistics.json"
]
assert len(KeyStatistics.from_pretrained("tester/statistics")) == 1
assert len(KeyStatistics.from_pretrained("tester/statistics", revision=address.rpartition("/")[2])) == 2
for call in (
    lambda: KeyStatistics.from_pretrained("tester/absent"),
    lambda: one.push_to_hub("someone/statistics"),
):
    try:
        call()
    except HfXaiError as error:
        print(type(error).__name__, error)
"""


def test_statistics_travel_through_the_hub(hub_server: HubServer) -> None:
    done = run_with_hub(hub_server, HUB)
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip().splitlines()
    assert said[0].startswith(
        "ConfigError Can't load key statistics from 'tester/absent' (no folder of that name here)"
    )
    assert said[1].startswith("ConfigError Can't push key statistics to 'someone/statistics': no token, or one that")
    assert len(said) == 2


def test_offloading_does_not_change_the_fingerprint_of_the_weights() -> None:
    model = tiny_causal_lm("llama")
    expected = weights_fingerprint(model.model.layers[0])
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError):
        weights_fingerprint(model.model.layers[0])
    assert collect(model, layers=[0]).record["model"]["weights"]["model.layers.0"] == expected
