"""The names that users may rely on, and that looking at them costs nothing until they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import oslo_engine

OURS = {
    "BatchError",
    "CallCancelledError",
    "CheckpointError",
    "Deployment",
    "DeploymentError",
    "GradScaler",
    "FusionTargetError",
    "GradientError",
    "NotHereError",
    "DataError",
    "DatasetBlender",
    "DatasetForCausalLM",
    "DatasetPreprocessor",
    "DistributedProxySampler",
    "FlatteningCollator",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "InfiniteDataLoader",
    "MissingDependencyError",
    "OsloError",
    "PipelineError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "QueueFullError",
    "ShardedLogitsError",
    "SpanCorruptionCollator",
    "Topology",
    "TopologyError",
    "UnsupportedError",
    "WorkerDied",
    "WorkerHungError",
    "clip_grad_norm_",
    "deparallelize",
    "gather_logits",
    "load_training",
    "parallelize",
    "plan",
    "record_timeline",
    "save_training",
    "verify",
}
PARALLEL_METHODS = {"from_pretrained_with_parallel", "from_config_with_parallel"}
# Defined in modelling files only: one for each way a class can be named after its model.
MODEL_PARTS = {
    "GPT2MLP": "gpt2",
    "GPT2Attention": "gpt2",
    "GPTNeoMLP": "gpt_neo",
    "GPTNeoXMLP": "gpt_neox",
    "T5LayerNorm": "t5",
    "MT5LayerNorm": "mt5",
    "LlamaRMSNorm": "llama",
    "Qwen2MLP": "qwen2",
    "Qwen2MoeMLP": "qwen2_moe",
    "BertSelfAttention": "bert",
    "DebertaV2Layer": "deberta_v2",
    "PixtralAttention": "pixtral",
    "Speech2TextAttention": "speech_to_text",
}


def in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_public_names_are_these() -> None:
    assert set(oslo_engine.__all__) == OURS
    assert dir(oslo_engine) == sorted({*OURS, "__version__"})


@pytest.mark.parametrize("name", sorted(OURS))
def test_public_name_is_found_where_type_checkers_find_it(name: str) -> None:
    tree = ast.parse(Path(oslo_engine.__file__).read_text())
    statements = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("oslo_engine.")
    ]
    home = next(node.module for node in statements for alias in node.names if alias.name == name)
    assert getattr(oslo_engine, name) is getattr(sys.modules[home], name)


def test_every_error_type_is_public() -> None:
    from oslo_engine import errors

    types = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.OsloError)}
    assert types == {name for name in OURS if name.endswith("Error")} | {"WorkerDied"}


def test_import_loads_no_heavy_package() -> None:
    loaded = in_new_process("import oslo_engine, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    assert "oslo_engine" in loaded
    assert not {"torch", "transformers", "numpy", "yaml", "pydantic", "triton", "typer", "rich"} & set(loaded)


@pytest.mark.parametrize(
    "use", ["oslo_engine.Topology(tp=2)", "oslo_engine.errors.OsloError", "oslo_engine.policies", "dir(oslo_engine)"]
)
def test_light_names_load_no_heavy_package(use: str) -> None:
    assert in_new_process(f"import oslo_engine, sys; {use}; print({{'torch', 'transformers'}} & set(sys.modules))") == "set()"


def test_submodule_is_imported_without_asking_transformers() -> None:
    code = "from oslo_engine import topology; import sys; print(topology.__name__, 'transformers' in sys.modules)"
    assert in_new_process(code) == "oslo_engine.topology False"


def test_verify_stays_the_function_when_its_module_is_imported() -> None:
    import oslo_engine.verify  # binds the submodule in an ordinary package

    assert callable(oslo_engine.verify)
    assert oslo_engine.verify is sys.modules["oslo_engine.verify"].verify


def test_subpackage_does_not_hide_a_public_name_of_transformers() -> None:
    import transformers

    import oslo_engine.pipeline  # as above

    own = {entry.stem for entry in Path(oslo_engine.__file__).parent.iterdir() if not entry.name.startswith("_")} - OURS
    public = {name for name in own if not isinstance(getattr(transformers, name, oslo_engine), ModuleType)}
    assert public == {"pipeline"}
    assert oslo_engine.pipeline is transformers.pipeline


def test_transformers_names_are_those_of_transformers() -> None:
    import transformers

    for name in ("GPT2Config", "AutoConfig", "AutoTokenizer", "TrainingArguments", "set_seed", "logging"):
        assert getattr(oslo_engine, name) is getattr(transformers, name)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "BertModel", "PreTrainedModel"])
def test_model_classes_come_with_the_methods(name: str) -> None:
    import transformers

    ours, theirs = getattr(oslo_engine, name), getattr(transformers, name)
    assert issubclass(ours, theirs)
    assert PARALLEL_METHODS | {"gpu_modules", "save_pretrained_with_parallel"} <= set(dir(ours))


@pytest.mark.parametrize("name", ["AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"])
def test_auto_classes_come_with_the_constructors(name: str) -> None:
    assert set(dir(getattr(oslo_engine, name))) >= PARALLEL_METHODS


@pytest.mark.parametrize(("name", "folder"), MODEL_PARTS.items())
def test_part_of_a_model_is_found_by_the_model_s_name(name: str, folder: str) -> None:
    assert getattr(oslo_engine, name).__module__ == f"transformers.models.{folder}.modeling_{folder}"


def test_finding_a_part_loads_only_its_own_modelling_file() -> None:
    code = "import oslo_engine as o, sys; o.GPTNeoXMLP; print(*(m for m in sys.modules if '.modeling_gpt' in m))"
    assert in_new_process(code) == "transformers.models.gpt_neox.modeling_gpt_neox"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("parallelise", "did you mean parallelize"),
        ("GPT2LMHeadModl", "did you mean GPT2LMHeadModel"),
        ("set_sed", "did you mean set_seed"),
        ("GPT2Nothing", "'GPT2Nothing'"),
        ("zzyzx", "nothing there has a similar name"),
    ],
)
def test_unknown_name_is_an_attribute_error_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(oslo_engine, name)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", ["utils", "models", "trainer", "__wrapped__", "_name_of_ours"])
def test_submodules_and_private_names_of_transformers_are_not_ours(name: str) -> None:
    assert not hasattr(oslo_engine, name)
    with pytest.raises(ImportError):
        exec(f"from oslo_engine import {name}")
