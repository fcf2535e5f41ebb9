"""The rules of the house that no other test would notice being broken."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_xai
from hf_xai.methods import METHODS, methods_table, public_names

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hf_xai"
HOST_ROOMS = ("diffusers", "transformers", "torch_geometric", "sklearn")
SHARED_ROOMS = ("activations", "distributed", "gradients", "hub", "metrics")
HOST_LIBRARIES = {*HOST_ROOMS, "datasets", "peft", "shap", "captum", "trl", "xgboost", "lightgbm", "matplotlib"}
# The one host library that a room of pure functions may build on.
MAY_IMPORT = {"metrics": {"sklearn"}}

HOMES = {
    "diffusers/hyca",
    "diffusers/concept_trak",
    "gradients/learned_weights",
    "transformers/f_ine",
    "transformers/feature_gaps",
    "transformers/editing",
    "torch_geometric/all_in",
    "sklearn/treegrad",
    "sklearn/grouping",
    "sklearn/nimo",
    "sklearn/fdfi",
    "transformers/timesliver",
    "transformers/vpc",
    "diffusers/fud",
    "transformers/attribution_robustness",
    "transformers/fragility",
    "transformers/embedding_norm_budget",
    "theory/transfer_kernels",
    "theory/feature_learning_scales",
}


def python(code: str) -> str:
    """What a fresh interpreter prints, with nothing imported that pytest brought along."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return run.stdout.strip()


def imports_at_import_time(tree: ast.AST) -> Iterator[str]:
    """Top-level packages that a module loads when it is imported: not those inside functions or TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from imports_at_import_time(ast.Module([branch], []))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_import_time(node)


def test_importing_the_package_loads_neither_torch_nor_a_host() -> None:
    loaded = python("import sys, hf_xai; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    assert not {"torch", "accelerate", "numpy", "huggingface_hub", *HOST_LIBRARIES}.intersection(loaded)


def test_importing_the_package_adds_few_modules() -> None:
    # What an import costs is what it loads; seconds depend on the machine.
    code = "import sys; before = set(sys.modules); import hf_xai; print(len(set(sys.modules) - before))"
    assert int(python(code)) < 100


@pytest.mark.parametrize("name", public_names())
def test_every_lazy_name_is_the_object_that_the_table_says(name: str) -> None:
    module, _, attribute = public_names()[name].partition(":")
    assert getattr(hf_xai, name) is getattr(import_module(module), attribute)
    assert name in dir(hf_xai)


def test_an_unknown_name_is_an_attribute_error_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'hf_xai' has no attribute 'enable_magic'"):
        _ = hf_xai.enable_magic


def test_the_table_holds_every_method_once() -> None:
    homes = [method.home for method in METHODS]
    assert sorted(homes) == sorted(HOMES)


def test_public_names_belong_to_one_method_each() -> None:
    assert len(public_names()) == sum(len(method.names) for method in METHODS)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_is_available_where_its_folder_exists(method) -> None:
    folder = SOURCE / method.home
    assert (folder / "__init__.py").is_file() == (method.status == "available")
    assert bool(method.names) == (method.status == "available")
    assert all(target.startswith("hf_xai.") for target in method.names.values())


def test_every_folder_of_a_host_room_is_a_method_of_the_table() -> None:
    folders = {
        f"{room}/{folder.name}"
        for room in (*HOST_ROOMS, "theory")
        for folder in (SOURCE / room).glob("[a-z]*")
        if (folder / "__init__.py").is_file()
    }
    assert folders <= HOMES


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_paper_can_be_looked_up(method) -> None:
    assert method.paper_url.startswith(("https://arxiv.org/abs/2", "https://openreview.net/forum?id="))


def test_the_readme_shows_the_table_of_methods() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("<!-- methods:begin -->")[2].partition("<!-- methods:end -->")[0]
    assert shown.strip() == methods_table()


@pytest.mark.parametrize("name", HOST_ROOMS)
def test_a_hosts_name_means_the_library_and_not_our_folder(name: str) -> None:
    spec = find_spec(name)
    # A library that is not installed has no spec; ours would have one if it were in the way.
    assert spec is None or not Path(spec.origin or "").is_relative_to(ROOT / "src")
    assert spec is None or "site-packages" in Path(spec.origin or "").parts


@pytest.mark.parametrize("room", [room for room in SHARED_ROOMS if (SOURCE / room).is_dir()])
def test_a_shared_room_loads_no_host_when_it_is_imported(room: str) -> None:
    forbidden = HOST_LIBRARIES - MAY_IMPORT.get(room, set())
    found = {
        f"{path.relative_to(SOURCE)}: {package}"
        for path in (SOURCE / room).rglob("*.py")
        for package in imports_at_import_time(ast.parse(path.read_text(encoding="utf-8")))
        if package in forbidden
    }
    assert not found


def test_the_check_for_imports_sees_through_blocks_but_not_into_functions() -> None:
    source = (
        "if TYPE_CHECKING:\n    import typed\nelse:\n    import fallback\n"
        "try:\n    import tried.deeply\nexcept ImportError:\n    pass\n"
        "class A:\n    from inside import x\n"
        "def f():\n    import later\n"
    )
    assert sorted(imports_at_import_time(ast.parse(source))) == ["fallback", "inside", "tried"]


def test_no_file_in_the_package_root_is_meant_to_be_run() -> None:
    # Python would put its folder first on the path, where `import diffusers` finds ours.
    assert not (SOURCE / "__main__.py").exists()
    assert not [path.name for path in SOURCE.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("folder", ["integrations", "tests"])
def test_folders_named_like_hosts_are_no_packages(folder: str) -> None:
    assert not list((ROOT / folder).rglob("__init__.py"))


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "misc", "common"}
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "integrations")]
    assert not [path for folder in folders for path in folder.rglob("*") if path.stem in drawers]
