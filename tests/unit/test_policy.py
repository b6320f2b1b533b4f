"""Policy files: what is read, and that every mistake is named with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from oslo_engine.errors import PolicyError
from oslo_engine.policy.registry import find_policy, installed_names, policies_by_model_type, read_policy_file
from oslo_engine.policy.schema import Policy

GOOD = """\
models: [mine]
stacks: {decoder: layers.*}
units:
  head: num_attention_heads
regions:
  mlp:
    at: mlp
    columns: {up: feature}
    rows: {down: feature}
"""


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_policy_is_read_from_a_file(tmp_path: Path) -> None:
    policy = find_policy(write(tmp_path, GOOD), "anything")
    assert policy.name == "mine"
    assert policy.regions["mlp"].columns == {"up": ("feature",)}
    assert policy.regions["mlp"].inputs == ()
    assert policy.units["head"].count == "num_attention_heads"
    assert policy.where("regions", "mlp", "rows").endswith("mine.yaml:9")


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (8, GOOD.replace("columns", "colums"), "colums"),
        (9, GOOD.replace("{down: feature}", "[down]"), "rows"),
        (3, GOOD.replace("units:", "unit:"), "unit"),
        (1, GOOD.replace("[mine]", "[]"), "models"),
        (9, GOOD + "    set: {size: 'import os'}\n", "not an expression"),
    ],
)
def test_a_wrong_entry_is_named_with_file_and_line(tmp_path: Path, line: int, text: str, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        find_policy(write(tmp_path, text), "x")
    assert message in str(error.value)
    where = error.value.where or ""
    assert "mine.yaml:" in where
    assert abs(int(where.split("mine.yaml:")[1].split(" ")[0]) - line) <= 1


def test_all_wrong_entries_are_told_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("columns", "colums").replace("units", "unit").replace("[mine]", "[]")
    with pytest.raises(PolicyError) as error:
        find_policy(write(tmp_path, text), "x")
    told = str(error.value)
    assert all(part in told for part in ("mine.yaml:1 (models)", "mine.yaml:3 (unit)", "mine.yaml:8 (regions.mlp.colums)"))


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ("{at: mlp, rows: {down: feature}}", "needs columns, or parameters to cut"),
        ("{at: mlp, columns: {up: feature}}", "needs rows, or leave: scope"),
        ("{enter: columns, scope: mlp, columns: {up: feature}, rows: {down: feature}}", "say nothing where"),
        ("{enter: here, columns: {up: feature}, rows: {down: feature}}", "'scope' or 'columns'"),
        ("{columns: {up: feature}, rows: {down: feature}, units: {head: {count: 4, blocks: [1]}}}", "not an expression"),
    ],
)
def test_a_region_that_cannot_be_meant_is_refused(tmp_path: Path, region: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        find_policy(write(tmp_path, GOOD + f"  other: {region}\n"), "x")


def test_several_policies_can_be_extended_and_parts_are_no_policies(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    write(tmp_path, "regions:\n  experts: {leave: scope, cut: {up: feature}}\n", "_part.yaml")
    policy = find_policy(write(tmp_path, "extends: [base, _part]\nmodels: [child]\n", "child.yaml"), "x")
    assert list(policy.regions) == ["mlp", "experts"]
    assert policy.where("regions", "experts", "cut").endswith("_part.yaml:2")
    assert not any(name.startswith("_") for name in installed_names())


def test_an_unknown_key_is_told_with_what_may_stand_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"(?s)unknown key 'colums'.*expected: at, when, .*columns.*did you mean 'columns'"):
        find_policy(write(tmp_path, GOOD.replace("columns", "colums")), "x")
    with pytest.raises(PolicyError, match=r"(?s)unknown key 'pre'.*\(units.head.pre\).*expected: count, per, blocks"):
        find_policy(write(tmp_path, GOOD.replace("num_attention_heads", "{count: 4, pre: kv}")), "x")
    with pytest.raises(PolicyError, match="'models' is missing"):
        find_policy(write(tmp_path, GOOD.replace("models: [mine]\n", "")), "x")


@pytest.mark.parametrize("own", ["origin: here", "lines: {}"])
def test_a_file_cannot_say_what_the_loader_does(tmp_path: Path, own: str) -> None:
    with pytest.raises(PolicyError, match="unknown key"):
        find_policy(write(tmp_path, f"{GOOD}{own}\n"), "x")


def test_a_base_that_is_not_there_is_told_with_its_line_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"(?s)extends 'lama': no such policy.*mine\.yaml:2.*did you mean 'llama'"):
        find_policy(write(tmp_path, "models: [mine]\nextends: lama\n"), "x")


def test_a_file_with_faults_is_read_as_it_was_meant(tmp_path: Path) -> None:
    text = GOOD.replace("columns", "colums").replace("up: feature", "up: 'a ? b'") + "frobnicate: 1\n"
    reading = read_policy_file(write(tmp_path, text.replace("'a ? b'", "feature")))
    assert [fault.what for fault in reading.faults] == ["unknown key 'colums'", "unknown key 'frobnicate'"]
    assert reading.policy is not None
    assert reading.policy.regions["mlp"].columns == {"up": ("feature",)}
    assert read_policy_file(write(tmp_path, text)).policy is None  # the region has no columns left


def test_text_that_is_not_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"(?s)not YAML.*mine\.yaml:2.*hint: "):
        find_policy(write(tmp_path, "models: [a]\nstacks: {a: b: c}\n"), "x")
    with pytest.raises(PolicyError, match=r"(?s)keys with values.*got: nothing"):
        find_policy(write(tmp_path, "# to be written\n"), "x")


def test_a_key_may_not_stand_twice(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"(?s)stands twice.*mine\.yaml:10"):
        find_policy(write(tmp_path, GOOD + "models: [other]\n"), "x")


def test_extends_lays_one_policy_over_another(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    child = write(tmp_path, "extends: base\nmodels: [child]\nregions:\n  mlp:\n    rows: {out: feature}\n", "child.yaml")
    policy = find_policy(child, "x")
    assert policy.models == ("child",)
    assert policy.name == "child"
    assert policy.regions["mlp"].rows == {"down": ("feature",), "out": ("feature",)}
    assert policy.where("regions", "mlp", "rows", "out").endswith("child.yaml:5")
    assert policy.where("regions", "mlp", "columns", "up").endswith("base.yaml:8")


def test_null_takes_an_entry_away(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    text = "extends: base\nmodels: [child]\nregions:\n  mlp: null\n  other: {columns: {a: feature}, rows: {b: feature}}\n"
    assert list(find_policy(write(tmp_path, text, "child.yaml"), "x").regions) == ["other"]


def test_a_circle_of_extends_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends: b\nmodels: [a]\n", "a.yaml")
    file = write(tmp_path, "extends: a\nmodels: [b]\n", "b.yaml")
    with pytest.raises(PolicyError, match="b -> a -> b"):
        find_policy(file, "x")


def test_an_unknown_model_type_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"(?s)no policy serves model type 'gtp2'.*gpt2.*policy=PATH"):
        find_policy(None, "gtp2")


def test_an_unknown_name_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"(?s)no such policy.*one of: .*gpt2"):
        find_policy("nonsense", "gpt2")
    with pytest.raises(PolicyError, match="cannot be read"):
        find_policy(tmp_path / "none.yaml", "gpt2")


def test_every_installed_policy_is_valid_and_serves_its_own_models() -> None:
    served = policies_by_model_type()
    assert {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "bert", "roberta", "t5"} <= set(served)
    assert {policy.name for policy in served.values()} == set(installed_names())


def test_a_policy_object_is_taken_as_it_is() -> None:
    policy = policies_by_model_type()["gpt2"]
    assert find_policy(policy, "something else") is policy
    assert isinstance(policy, Policy)
