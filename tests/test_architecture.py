"""What the source must look like: layers, no circles, light imports, no model's name in engine code, no overlong files.

Each rule is a function of a source tree that returns what breaks it. It is applied to ours, and to small trees that break it.
"""

from __future__ import annotations

from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

from source_tree import PACKAGE, code_texts, engine_imports, imports, modules, words

ROOT = Path(__file__).parent.parent

# A module imports from its own layer and from those above it in this list.
LAYERS = [
    {"errors", "topology"},
    {"data"},
    {"kernels"},
    {"shards"},
    {"policy"},
    {"plan"},
    {"comm"},
    {"layers"},
    {"rewrite"},
    {"fusion"},
    {"pipeline"},
    {"generation"},
    {"footprint"},
    {"placement"},
    {"checkpoint"},
    {"integrations"},
    {"tiny"},
    {"derive"},
    {"deploy"},
    {"planning"},
    {"assemble", "construct", "deployed", "methods"},
    {"api", "verify"},
    {"serve"},
    {"cli"},
]
# Imported in the functions that need them. Kernels are the exception: their modules are themselves imported when needed.
HEAVY = (
    "accelerate",
    "datasets",
    "deepspeed",
    "fastapi",
    "matplotlib",
    "peft",
    "pyarrow",
    "transformers.models",
    "triton",
    "uvicorn",
)
# Model types that are words of this trade.
EVERYDAY = {
    "align",
    "bark",
    "beam",
    "canary",
    "clip",
    "ctrl",
    "encoder-decoder",
    "funnel",
    "informer",
    "minimax",
    "radio",
    "splinter",
}
MAX_LINES = 600


def layer_of(module: str) -> int | None:
    """Position in LAYERS; None for the package itself and for what has no place yet."""
    part = module.split(".")[1] if "." in module else None
    return next((position for position, names in enumerate(LAYERS) if part in names), None)


def modules_without_a_layer(root: Path) -> list[str]:
    return [name for name in modules(root) if name != PACKAGE and layer_of(name) is None]


def imports_of_later_layers(root: Path) -> list[str]:
    """Names of the package itself count too: they are looked up in the last layers."""
    found = []
    for name, targets in engine_imports(root).items():
        for target, statement in targets:
            own, other = layer_of(name), layer_of(target)
            if own is not None and statement.target != f"{PACKAGE}.__version__" and (other is None or other > own):
                found.append(str(statement))
    return found


def circles(root: Path) -> list[str]:
    try:
        TopologicalSorter({name: {target for target, _ in found} for name, found in engine_imports(root).items()}).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def relative_imports(root: Path) -> list[str]:
    return [str(found) for file in modules(root).values() for found in imports(file) if found.target.startswith(".")]


def heavy_imports(root: Path) -> list[str]:
    files = [file for name, file in modules(root).items() if not name.startswith(f"{PACKAGE}.kernels.")]
    at_module_level = [found for file in files for found in imports(file) if found.at_module_level]
    return [str(found) for found in at_module_level if f"{found.target}.".startswith(tuple(f"{name}." for name in HEAVY))]


def architecture_names(root: Path) -> set[str]:
    """Model types that our policies serve, and those of Transformers that are long or odd enough to mean nothing else."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names = {name for file in (root / "policies").glob("*.yaml") for name in yaml.safe_load(file.read_text()).get("models", ())}
    names |= {name for name in CONFIG_MAPPING_NAMES if len(name) >= 4}
    return names - EVERYDAY


def architectures_in_engine_code(root: Path) -> list[str]:
    by_first_word: dict[str, list[list[str]]] = {}
    for name in architecture_names(root):
        by_first_word.setdefault(words(name)[0], []).append(words(name))
    found = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        for line, text in [(1, file.stem), *code_texts(file)]:
            said = words(text)
            for start, word in enumerate(said):
                for name in by_first_word.get(word, ()):
                    if said[start : start + len(name)] == name:
                        found.append(f"{file}:{line} says {'_'.join(name)}: {text[:80]!r}")
    return found


def overlong_files(root: Path) -> list[str]:
    folders = (PACKAGE, "kernels", "policies", "tests", "benchmarks", "examples")
    lengths = {file: len(file.read_text().splitlines()) for folder in folders for file in (root / folder).rglob("*.py")}
    return [f"{file} has {length} lines" for file, length in lengths.items() if length > MAX_LINES]


def shapeless_names(root: Path) -> list[str]:
    """Modules named after no idea."""
    return [name for name in modules(root) if set(words(name)) & {"util", "utils", "helper", "helpers", "common", "misc"}]


# Each rule with a tree that breaks it, and a word of the complaint.
RULES: list[tuple[Callable[[Path], list[str]], dict[str, str], str]] = [
    (modules_without_a_layer, {"oslo_engine/novel/thing.py": ""}, "oslo_engine.novel.thing"),
    (
        imports_of_later_layers,
        {"oslo_engine/plan/a.py": "from oslo_engine.comm import b", "oslo_engine/comm/b.py": ""},
        "comm.b",
    ),
    (imports_of_later_layers, {"oslo_engine/shards.py": "def f():\n    import oslo_engine.plan"}, "shards.py:2"),
    (imports_of_later_layers, {"oslo_engine/layers/a.py": "from oslo_engine import parallelize"}, "parallelize"),
    (
        circles,
        {
            "oslo_engine/plan/a.py": "from oslo_engine.plan.b import x",
            "oslo_engine/plan/b.py": "def f():\n    from oslo_engine.plan import a",
        },
        "oslo_engine.plan.a <- oslo_engine.plan.b",
    ),
    (relative_imports, {"oslo_engine/plan/a.py": "from .b import x"}, ".b.x"),
    (heavy_imports, {"oslo_engine/comm/a.py": "try:\n    import triton.language\nexcept ImportError:\n    pass"}, "triton"),
    (heavy_imports, {"oslo_engine/comm/a.py": "from transformers.models.auto import x"}, "transformers.models"),
    (architectures_in_engine_code, {"oslo_engine/plan/a.py": "x = 'the mamba'"}, "mamba"),
    (architectures_in_engine_code, {"oslo_engine/plan/a.py": "def load(GPT2Config): ..."}, "gpt2"),
    (architectures_in_engine_code, {"oslo_engine/plan/a.py": "from transformers import GPTNeoXModel as M"}, "gpt_neo"),
    (architectures_in_engine_code, {"oslo_engine/plan/a.py": "if f'{kind}-odd_one': ..."}, "odd_one"),
    (overlong_files, {"tests/unit/a.py": "x = 1\n" * (MAX_LINES + 1)}, "601 lines"),
    (shapeless_names, {"oslo_engine/plan/utils.py": ""}, "oslo_engine.plan.utils"),
]

ACCEPTED = {
    "oslo_engine/__init__.py": "",
    "oslo_engine/api.py": "from oslo_engine.plan.a import x\nfrom oslo_engine import __version__",
    "oslo_engine/plan/__init__.py": "",
    "oslo_engine/plan/a.py": '"""As in GPT2."""\nfrom typing import TYPE_CHECKING\n'
    "if TYPE_CHECKING:\n    from oslo_engine import api\n"
    "def clip_beam(is_encoder_decoder):  # llama\n    import transformers.models\n",
    "kernels/softmax.py": "import triton",
    "policies/odd.yaml": "models: [odd_one]",
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES), ids=lambda rule: rule.__name__)
def test_source_has_no(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(("rule", "files", "complaint"), RULES, ids=[f"{rule.__name__}-{word}" for rule, _, word in RULES])
def test_rule_finds(rule: Callable[[Path], list[str]], files: dict[str, str], complaint: str, tmp_path: Path) -> None:
    write_tree(tmp_path, ACCEPTED)
    assert rule(tmp_path) == []
    write_tree(tmp_path, files)
    assert len(rule(tmp_path)) == 1
    assert complaint in rule(tmp_path)[0]


def test_engine_has_modules_of_most_layers() -> None:
    """Or the rules above would hold for an empty tree."""
    assert len({layer_of(name) for name in modules(ROOT)}) > len(LAYERS) / 2
