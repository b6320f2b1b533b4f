"""Does verify notice when a policy or the engine is wrong? python -m benchmarks.mutation

Faults are put, one at a time, into the policies of architectures of different kinds (a column cut as a row, a fused weight in
another layout, KV heads counted wrong, an attribute forgotten, a weight left whole, ...) and into the engine that runs them (a
bias added by every rank, gradients not summed, a cut in another place, a value that does not cross it, wrong random streams).
Each must be refused when the model is planned, or make verify fail. What passes is a survivor: either verify has a hole, or the
policy says something that it need not say. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.coverage import ENVIRONMENT, ROOT

SUPPORT = ROOT / "tests" / "support"
ARCHITECTURES = [
    ("causal", "gpt2"),
    ("causal", "llama"),
    ("causal", "olmo2"),
    ("causal", "phi3"),
    ("causal", "gpt_neox"),
    ("causal", "bloom"),
    ("causal", "falcon"),
    ("causal", "mixtral"),
    ("causal", "gpt_oss"),
    ("causal", "deepseek_v3"),
    ("causal", "mamba2"),
    ("causal", "qwen3_5_text"),
    ("masked", "bert"),
    ("seq2seq", "t5"),
    ("seq2seq", "bart"),
]
# Where the default config leaves out what the policy has words for.
CONFIGS: dict[str, dict[str, Any]] = {"falcon": {"alibi": True, "bias": True}}


@dataclass(frozen=True)
class Fault:
    """kind: what was done. where: to what. policy: the wrong one; None where ``sabotage`` names what breaks the engine."""

    kind: str
    where: str
    policy: Any = None
    sabotage: str = ""
    settings: tuple[tuple[str, Any], ...] = (("tp", 2),)


@dataclass(frozen=True)
class Verdict:
    architecture: str
    kind: str
    where: str
    caught: bool
    by: str
    seconds: float


# -- faults in policies


def policy_faults(policy: Any, used: set[str]) -> Iterator[Fault]:
    """Args: used: names of the regions that the architecture has."""
    content = policy.model_dump(mode="json")
    # What follows the ratio of heads to KV heads shows where ranks share a KV head.
    units = [unit for part in (content, *content["regions"].values()) for unit in part["units"].values()]
    shared = (("tp", 4),) if any(unit["per"] for unit in units) else (("tp", 2),)
    for name, region in content["regions"].items():
        if name in used:
            for kind, where, changed in region_faults(region):
                changes = {"regions": {**content["regions"], name: changed}}
                yield from made(policy, kind, f"{name}: {where}", changes, shared if kind == "missing set" else (("tp", 2),))
    for unit, rule in content["units"].items():
        sharers = [one["count"] for one in content["units"].values() if one["per"] == unit]
        if sharers:
            units = {**content["units"], unit: {**rule, "count": sharers[0]}}
            yield from made(policy, "wrong group size", unit, {"units": units}, shared)
    vocabulary = content["vocabulary"]
    for kind, what in (("head not split by vocabulary", "heads"), ("dropped tie", "embeddings")):
        for module in vocabulary[what]:
            rest = [other for other in vocabulary[what] if other != module]
            yield from made(policy, kind, module, {"vocabulary": {**vocabulary, what: rest}})


def region_faults(region: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    columns, rows = region["columns"], region["rows"]
    for column, parts in columns.items():
        if rows and len(parts) == 1:
            row = next(iter(rows))
            swapped_columns = {**{name: value for name, value in columns.items() if name != column}, row: rows[row]}
            swapped_rows = {**{name: value for name, value in rows.items() if name != row}, column: parts}
            yield "column for row", f"{column} and {row}", {**region, "columns": swapped_columns, "rows": swapped_rows}
        if len(parts) > 1:
            wrong = parts[::-1] if parts[::-1] != parts else parts[:1]
            yield "wrong fused layout", column, {**region, "columns": {**columns, column: wrong}}
        if len(columns) > 1:
            left = {name: value for name, value in columns.items() if name != column}
            yield "replicate instead of split", column, {**region, "columns": left}
    for kind in ("set", "cut", "norms", "inner", "arguments"):
        for entry in region[kind]:
            left = {name: value for name, value in region[kind].items() if name != entry}
            yield f"missing {kind}", entry, {**region, kind: left}
    for kind in ("sum", "once", "inputs"):
        for entry in region[kind] if kind != "inputs" or len(region[kind]) > 1 else ():
            yield f"missing {kind}", entry, {**region, kind: [other for other in region[kind] if other != entry]}


def made(policy: Any, kind: str, where: str, changes: dict[str, Any], settings: Any = (("tp", 2),)) -> Iterator[Fault]:
    """The fault, unless the schema refuses it. What is no longer cut counts as whole on purpose, or it would be too easy."""
    content = policy.model_dump(mode="json") | changes
    if kind.startswith(("replicate", "missing cut", "missing norms", "missing inner")):
        name = where.partition(": ")[2].removeprefix("maybe ")
        content["replicate"] = {**content["replicate"], f"maybe {name}": "fault"}
    try:
        yield Fault(kind, where, type(policy)(**content).model_copy(update={"origin": policy.origin}), settings=settings)
    except ValueError:
        return


# -- faults in the engine


def engine_faults(plan: Any, cut_plan: Any, has_dropout: bool) -> Iterator[Fault]:
    """Those that touch something in this architecture.

    Args:
        plan: for two tensor-parallel ranks. cut_plan: for two pipeline stages.
    """
    parameters = {tensor.name for tensor in plan.parameters}
    if any(f"{row}.bias" in parameters for region in plan.regions if region.leave == "rows" for row in region.rows):
        yield Fault("bias added twice", "rows", sabotage="row_bias_on_every_rank")
    if any(tensor.partial for tensor in plan.parameters):
        yield Fault("missing gradient sync", "uncut parameters of regions", sabotage="gradients_of_norms_not_summed")
    two_stages = (("pp", 2),)
    if any(len(cut_plan.holders(tensor)) > 1 for tensor in cut_plan.parameters):
        yield Fault("missing gradient sync", "parameters of two stages", None, "tied_gradients_not_summed", two_stages)
    yield Fault("carried value forgotten", "the last one", None, "a_carried_value_is_forgotten", two_stages)
    yield Fault("wrong cut", "one block later", None, "a_block_runs_on_the_wrong_stage", two_stages)
    if has_dropout:
        yield Fault(
            "random stream swapped", "sharded for shared", None, "same_masks_on_all_ranks", (("tp", 2), ("dropout", 0.1))
        )


# -- running them


def subject_of(task: str, kind: str) -> Any:
    from transformers import AutoConfig

    from oslo_engine.tiny.subject import find_subject

    return find_subject(AutoConfig.for_model(kind, **CONFIGS[kind]) if kind in CONFIGS else kind, task)


def all_faults(task: str, kind: str) -> list[Fault]:
    from oslo_engine.policy.registry import find_policy
    from oslo_engine.tiny.sizes import Sizes
    from oslo_engine.verify.planned import plan_of

    policy = find_policy(None, kind)
    subject = subject_of(task, kind).shrunk(Sizes(), num_blocks=3)
    plan, cut_plan = plan_of(subject, policy, tp=2, pp=1), plan_of(subject, policy, tp=1, pp=2)
    wrong = policy_faults(policy, {region.name for region in plan.regions})
    read = attributes_read(subject)
    faults = [fault for fault in wrong if changes_the_plan(fault, policy, subject, read)]
    return [*faults, *engine_faults(plan, cut_plan, takes_dropout(task, kind))]


def attributes_read(subject: Any) -> set[tuple[str, str]]:
    """(module, attribute) that the model looks at when it is trained and generates, with any attention.

    A policy also serves others of its family, and older versions of Transformers, that look at more.
    """
    import torch

    from oslo_engine.tiny.batches import Shape, make_batch

    read: set[tuple[str, str]] = set()
    for attention in ("eager", "sdpa"):
        try:
            model = subject.build(lambda cls, config, **more: cls._from_config(config, **more), attn_implementation=attention)
        except Exception:  # it may have only one
            continue
        batch = make_batch(model.config, Shape(2, 9, 7), micro_batch_size=1, seed=0, model=model)
        for name, module in model.named_modules():
            module.__class__ = _watching(type(module), name, read)
        model(**batch).loss.backward()
        if model.can_generate():
            with torch.no_grad():
                model.eval().generate(
                    batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=3, pad_token_id=0
                )
    return read


def _watching(cls: type, name: str, read: set[tuple[str, str]]) -> type:
    def look_up(self: Any, attribute: str) -> Any:
        read.add((name, attribute))
        return cls.__getattribute__(self, attribute)

    return type(cls.__name__, (cls,), {"__getattribute__": look_up, "__module__": cls.__module__})


def changes_the_plan(fault: Fault, policy: Any, subject: Any, read: set[tuple[str, str]]) -> bool:
    """Whether a wrong policy makes another plan for this architecture, in what it looks at: it may be wrong about the rest."""
    from oslo_engine.errors import OsloError
    from oslo_engine.verify.planned import plan_of

    tp = dict(fault.settings)["tp"]
    try:
        plan, wrong = plan_of(subject, policy, tp=tp, pp=1), plan_of(subject, fault.policy, tp=tp, pp=1)
    except OsloError:
        return True
    if fault.kind == "missing set":
        left = {each[:2] for region in wrong.regions for each in region.attributes}
        gone = {each[:2] for region in plan.regions for each in region.attributes} - left
        return any("." in path or (module, path) in read for module, path in gone)
    return any(getattr(wrong, part) != getattr(plan, part) for part in ("tensors", "regions", "embeddings", "heads"))


def takes_dropout(task: str, kind: str) -> bool:
    from oslo_engine.errors import OsloError
    from oslo_engine.tiny.sizes import Sizes

    try:
        subject_of(task, kind).shrunk(Sizes(), num_blocks=2, dropout=0.1)
    except OsloError:
        return False
    return True


def judge(task: str, kind: str, fault: Fault, timeout_s: float) -> Verdict:
    from oslo_engine import verify
    from oslo_engine.errors import OsloError

    started = time.monotonic()

    def verdict(caught: bool, by: str) -> Verdict:
        return Verdict(f"{task}/{kind}", fault.kind, fault.where, caught, by, round(time.monotonic() - started, 1))

    subject = subject_of(task, kind)
    model: Any = subject.config if kind in CONFIGS else kind
    if fault.sabotage:
        sys.path.insert(0, str(SUPPORT)) if str(SUPPORT) not in sys.path else None
        from sabotage import saboteur

        model = saboteur(fault.sabotage, subject.load_class(), subject.config)
    ways = [dict(fault.settings)]
    if fault.kind == "missing arguments":
        ways.append({**ways[0], "dropout": 0.1})  # with eager attention, which takes other arguments
    for settings in ways:
        try:
            report = verify(model, task=None if fault.sabotage else task, policy=fault.policy, timeout_s=timeout_s, **settings)
        except OsloError as error:
            # A refusal notices a wrong policy; it says nothing about a broken engine.
            return verdict(not fault.sabotage, f"refused: {' '.join(str(error).split())[:120]}")
        if not report.ok:
            failed = [row.name for row in report.rows if row.verdict == "fail"]
            return verdict(True, ", ".join(failed[:3]) or "an error in the ranks")
    return verdict(False, "survived")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="model types; by default those of the list")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs side by side")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one run")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    chosen = [pair for pair in ARCHITECTURES if not options.only or pair[1] in options.only]
    work = [(task, kind, fault) for task, kind in chosen for fault in all_faults(task, kind)]

    def one(job: tuple[str, str, Fault]) -> Verdict:
        found = judge(*job, options.timeout)
        sign = "caught" if found.caught else "SURVIVED"
        print(f"{sign}  {found.architecture}  {found.kind}, {found.where}: {found.by} ({found.seconds} s)", flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(one, work))
    caught = sum(found.caught for found in verdicts)
    print(
        f"{caught} of {len(verdicts)} faults caught ({100 * caught / max(len(verdicts), 1):.1f} %), {len(chosen)} architectures"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(found) for found in verdicts], indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if caught == len(verdicts) else 1)


if __name__ == "__main__":
    main()
