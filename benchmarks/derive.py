"""Can the machine do without our policies? python -m benchmarks.derive

For every architecture that has a committed policy, that policy is hidden and another one is derived from a tiny model, as
``oslo-engine policy derive`` does. The derived one is then proved like any other: ``oslo_engine.verify`` over real processes.

Figures: how many pass, how many are refused (and what could not be decided), how many fail; CPU seconds of deriving. Results
are written after every run, so that an interrupted benchmark goes on where it was; ``--again`` begins anew.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.coverage import ENVIRONMENT, LAYOUTS, ROOT, Results, one_line, run

OUTPUT = ROOT / "benchmarks" / "results" / "derive.json"
LIMIT_S = 30
_deriving = Lock()  # one at a time: it draws from torch's generator and measures its own time


def prove(task: str, kind: str, layout: str, timeout_s: float) -> dict[str, Any]:
    """Derive and verify one architecture: status, reason, CPU seconds of deriving, and what derive could not decide."""
    from oslo_engine.derive import derive
    from oslo_engine.errors import OsloError
    from oslo_engine.tiny.subject import find_subject

    with _deriving:
        started = time.thread_time()
        try:
            derived = derive(find_subject(kind, task))
        except Exception as error:  # anything but a refusal is a fault of derive's own; the others are tried all the same
            return {
                "status": "refused" if isinstance(error, OsloError) else "crashed",
                "reason": one_line(error),
                "derive_s": round(time.thread_time() - started, 1),
                "notes": [],
            }
        seconds = round(time.thread_time() - started, 1)
    result = run(task, kind, layout, "", derived.policy, timeout_s)
    return {"status": result.status, "reason": result.reason, "derive_s": seconds, "notes": list(derived.notes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="task/model_type or a model type; by default all that have a policy")
    parser.add_argument("--layout", choices=LAYOUTS, default="tp2")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs side by side")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one run of verify")
    parser.add_argument("--again", action="store_true", help="also run what has a result")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file of the results")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    import torch

    from oslo_engine.policy.registry import policies_by_model_type
    from oslo_engine.tiny.architectures import architectures

    torch.set_num_threads(1)
    policies = policies_by_model_type()
    results = Results(options.output)
    jobs = [
        (task, kind)
        for task, kind in architectures()
        if kind in policies
        and (not options.only or {kind, f"{task}/{kind}"} & set(options.only))
        and (options.again or options.layout not in results.found.get(f"{task}/{kind}", {}))
    ]

    def one(job: tuple[str, str]) -> None:
        task, kind = job
        result = prove(task, kind, options.layout, options.timeout)
        results.put(f"{task}/{kind}", options.layout, result)
        print(f"{task}/{kind}: {result['status']} {result['reason']} (derived in {result['derive_s']} s)", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, jobs))
    found = [one[options.layout] for one in results.found.values() if options.layout in one]
    counts = Counter(one["status"] for one in found)
    seconds = [one["derive_s"] for one in found]
    print(
        f"{options.layout}: {', '.join(f'{count} {status}' for status, count in counts.most_common())} of {len(found)} "
        f"({counts['pass'] / len(found):.1%} pass); derive: median {statistics.median(seconds)} CPU s, "
        f"largest {max(seconds)}, {sum(value > LIMIT_S for value in seconds)} above {LIMIT_S}"
    )
    sys.exit(0 if counts["pass"] >= 0.9 * len(found) else 1)


if __name__ == "__main__":
    main()
