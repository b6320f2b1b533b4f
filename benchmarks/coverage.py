"""Every text architecture of the installed Transformers, at every layout: python -m benchmarks.coverage

Each is split over real processes with tiny random weights and compared with the unsplit model by ``oslo_engine.verify``:
logits, loss, every gradient, three optimizer steps, generation from left-padded prompts, checkpoint round trips.

The results are written after every run, so that an interrupted sweep goes on where it was. A result is kept as long as its
policy and the versions of torch and Transformers are what they were; ``--again`` runs everything anew (after a change to the
engine). Written: policies/coverage.json, which ``oslo-engine policy list`` shows, and docs/coverage.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "policies" / "coverage.json"
PAGE = ROOT / "docs" / "coverage.md"
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 x pp2": {"tp": 2, "pp": 2},
    "tp3": {"tp": 3},
    "tp4, 2 KV heads": {"tp": 4, "kv_heads": 2},
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Result:
    """How one architecture fared at one layout.

    status: "pass"; "refused" with the reason, before anything ran; "fail" with the check and the figure.
    key: what the result depends on.
    """

    status: str
    reason: str
    seconds: float
    key: str


def run(task: str, model_type: str, layout: str, key: str, policy: Any, timeout_s: float) -> Result:
    """Prove one; for an architecture that groups no heads, the same layout without that size."""
    from oslo_engine import verify
    from oslo_engine.errors import OsloError

    started = time.monotonic()

    def result(status: str, reason: str = "") -> Result:
        return Result(status, reason, round(time.monotonic() - started, 1), key)

    settings: dict[str, Any] = dict(LAYOUTS[layout])
    while True:
        try:
            return _judged(verify(model_type, task=task, policy=policy, timeout_s=timeout_s, **settings), result)
        except OsloError as error:
            if "no size for kv_heads" not in error.what or settings.pop("kv_heads", None) is None:
                return result("refused", one_line(error))


def _judged(report: Any, result: Any) -> Result:
    if report.ok:
        return result("pass")
    worst = next((row for row in report.rows if row.verdict == "fail"), None)
    told = f"{worst.name}: {worst.figure} {worst.detail}" if worst else ""
    error = next(iter(report.errors.values()), "").strip().split("\n")
    return result("fail", " | ".join(part for part in (told, error[-1] if error else "") if part)[:400])


def one_line(error: Exception) -> str:
    return " ".join(str(error).replace(f"{ROOT}/", "").split())[:400]


def key_of(policy: Any) -> str:
    """What a result depends on besides the engine."""
    import torch
    import transformers

    from oslo_engine.checkpoint.policy_hash import hash_of_policy

    text = json.dumps([hash_of_policy(policy), torch.__version__, transformers.__version__])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class Results:
    """The file with all results."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, Lock()
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.found: dict[str, dict[str, dict[str, Any]]] = content.get("results", {})

    def known(self, name: str, layout: str, key: str) -> bool:
        return self.found.get(name, {}).get(layout, {}).get("key") == key

    def put(self, name: str, layout: str, result: dict[str, Any]) -> None:
        with self._lock:
            self.found.setdefault(name, {})[layout] = result
            self.write()

    def write(self) -> None:
        import torch
        import transformers

        versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__.partition("+")[0],
            "python": platform.python_version(),
        }
        content = {"versions": versions, "results": dict(sorted(self.found.items()))}
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)


# -- the page


def page(found: dict[str, dict[str, dict[str, Any]]], policies: dict[str, Any], versions: dict[str, str]) -> str:
    lines = [
        "# Which architectures work",
        "",
        "Every causal, masked and sequence-to-sequence model type of Transformers, tiny and with random weights, split over",
        "real processes and compared with the unsplit model: logits, loss, every gradient, three optimizer steps, generation,",
        f"checkpoints. Written by `make coverage`, with {', '.join(f'{name} {value}' for name, value in versions.items())}.",
        "",
        "| | " + " | ".join(LAYOUTS) + " |",
        "|---|" + "---|" * len(LAYOUTS),
    ]
    for status in ("pass", "refused", "fail"):
        counts = [sum(one.get(layout, {}).get("status") == status for one in found.values()) for layout in LAYOUTS]
        if any(counts):
            lines.append(f"| {status} | " + " | ".join(map(str, counts)) + " |")
    for task in dict.fromkeys(name.partition("/")[0] for name in found):
        lines += ["", f"## {task}", "", "| model type | policy | " + " | ".join(LAYOUTS) + " |"]
        lines.append("|---|---|" + "---|" * len(LAYOUTS))
        for name, one in found.items():
            kind = name.partition("/")[2]
            if name.startswith(f"{task}/"):
                policy = policies[kind].name if kind in policies else ""
                cells = [one.get(layout, {}).get("status", "") for layout in LAYOUTS]
                lines.append(f"| {kind} | {policy} | " + " | ".join(cells) + " |")
    reasons = [
        f"* **{name}**, {layout}: {result['status']}: {result['reason']}"
        for name, one in found.items()
        for layout, result in one.items()
        if result["status"] != "pass"
    ]
    return "\n".join([*lines, *(["", "## Why not", "", *reasons] if reasons else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="task/model_type, a model type or a policy; by default all")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="comma-separated beginnings")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs side by side")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one run")
    parser.add_argument("--again", action="store_true", help="also run what has a result")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the results")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    from oslo_engine.policy.registry import policies_by_model_type
    from oslo_engine.tiny.architectures import architectures

    policies = policies_by_model_type()
    results = Results(options.output)
    layouts = [layout for layout in LAYOUTS if any(layout.startswith(start) for start in options.layouts.split(","))]
    jobs = []
    for task, kind in architectures():
        name = f"{task}/{kind}"
        policy = policies.get(kind)
        if options.only and not {name, kind, policy and policy.name} & set(options.only):
            continue
        for layout in layouts:
            if policy is None:
                if not options.only:
                    results.put(name, layout, asdict(Result("refused", f"no policy serves model type {kind!r}", 0.0, "")))
                continue
            key = key_of(policy)
            if options.again or not results.known(name, layout, key):
                jobs.append((task, kind, layout, key, policy))

    def one(job: Any) -> None:
        task, kind, layout, key, policy = job
        result = run(task, kind, layout, key, policy, options.timeout)
        results.put(f"{task}/{kind}", layout, asdict(result))
        print(f"{task}/{kind} {layout}: {result.status} {result.reason} ({result.seconds} s)", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, jobs))
    results.write()
    if options.output == RESULTS:
        versions = json.loads(RESULTS.read_text(encoding="utf-8"))["versions"]
        PAGE.write_text(page(results.found, policies, versions), encoding="utf-8")
    counts = Counter(result["status"] for one in results.found.values() for result in one.values())
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    sys.exit(1 if counts["fail"] else 0)


if __name__ == "__main__":
    main()
