"""A sample of the coverage sweep that has every word of the schema in it, on real ranks. ``make coverage`` is the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import oslo_engine as oslo
from oslo_engine.policy.registry import find_policy
from oslo_engine.policy.schema import Policy, Region

SAMPLE: list[tuple[str, str, dict[str, Any]]] = [
    ("causal", "falcon", {"tp": 2}),
    ("causal", "bloom", {"tp": 3}),
    ("causal", "codegen", {"tp": 2}),
    ("causal", "phi3", {"tp": 4, "kv_heads": 2}),
    ("causal", "olmo2", {"tp": 4, "kv_heads": 2}),
    ("causal", "gpt_oss", {"tp": 2, "pp": 2}),
    ("causal", "mixtral", {"tp": 2, "expert_split": "expert"}),
    ("causal", "deepseek_v3", {"tp": 2}),
    ("causal", "mamba", {"tp": 2, "pp": 2}),
    ("causal", "bamba", {"tp": 3}),
    ("causal", "kimi_linear", {"tp": 2}),
    ("masked", "deberta-v2", {"tp": 2}),
    ("masked", "albert", {"pp": 2}),
    ("seq2seq", "bart", {"tp": 2, "pp": 2}),
    ("seq2seq", "switch_transformers", {"tp": 2}),
]


@pytest.mark.parametrize(("task", "kind", "settings"), SAMPLE, ids=[f"{kind}-{settings}" for _, kind, settings in SAMPLE])
def test_sample_passes(task: str, kind: str, settings: dict[str, Any]) -> None:
    report = oslo.verify(kind, task=task, **settings)
    assert report.ok, str(report)


def test_the_sample_has_every_word_of_the_schema() -> None:
    policies = [find_policy(None, kind) for _, kind, _ in SAMPLE]
    regions = [region for policy in policies for region in policy.regions.values()]
    rare = {"sum", "when"}  # shown by tests/ranks/test_regions.py alone
    for name, field in Region.model_fields.items():
        default = field.get_default(call_default_factory=True)
        assert name in rare or any(getattr(region, name) != default for region in regions), f"no region has {name}"
    for name in ("units", "vocabulary", "replicate", "not_with"):
        assert any(getattr(policy, name) != Policy.model_fields[name].get_default() for policy in policies), name


def test_results_are_of_policies_that_are_there() -> None:
    file = Path(__file__).parent.parent.parent / "policies" / "coverage.json"
    results = json.loads(file.read_text())["results"]
    for name, layouts in results.items():
        for layout, result in layouts.items():
            assert result["status"] in ("pass", "refused", "fail"), (name, layout)
            assert result["status"] == "pass" or result["reason"], (name, layout)
