"""What importing the operators adds to the parsing of a DAG file, beside KubernetesPodOperator.

Each measurement is a fresh interpreter. The time of ``airflow.sdk``, which every DAG file imports anyway, is
not counted. Prints the best and the median of several runs, and fails above the limit.

    python benchmarks/import_time.py [--runs 7] [--limit-ms 60]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

LIMIT_MS = 60.0
"""Milliseconds that this package may add. Chosen: 0.2 % of a core where a file is parsed every 30 s."""
BASE = "from airflow.sdk import DAG, BaseOperator, BaseSensorOperator"
CASES = {
    "envscaler_airflow: EnvStageOperator, ScalingSensor": (
        "from envscaler_airflow import EnvStageOperator, ScalingSensor"
    ),
    "the same and spec_params": "from envscaler_airflow import EnvStageOperator, ScalingSensor, spec_params",
    "KubernetesPodOperator": (
        "from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator"
    ),
}
HEAVY = (
    "airflow.providers.amazon",
    "boto3",
    "botocore",
    "kubernetes",
    "numpy",
    "pandas",
    "torch",
    "sklearn",
    "zstandard",
    "fsspec",
    "envscaler_airflow.envspec.models",
    "envscaler_airflow.owner",
    "envscaler_airflow.backends",
)
"""Modules that a DAG file must not import."""
PROBE = """
import json, sys, time
{base}
before = set(sys.modules)
start = time.perf_counter()
try:
    {case}
except ImportError as err:
    print(json.dumps({{"missing": str(err)}}))
    raise SystemExit
spent = time.perf_counter() - start
print(json.dumps({{"ms": spent * 1000, "new": sorted(set(sys.modules) - before)}}))
"""


def measure(case: str, runs: int) -> tuple[list[float], list[str]] | str:
    """Milliseconds of each run and the modules that it imported; the reason when the import fails."""
    times, modules = [], []
    for _ in range(runs):
        code = PROBE.format(base=BASE, case=case)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        if "missing" in answer:
            return str(answer["missing"])
        times.append(answer["ms"])
        modules = answer["new"]
    return times, modules


def main() -> int:
    """Print each case; return 1 when this package is too slow or imports something heavy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--limit-ms", type=float, default=LIMIT_MS)
    args = parser.parse_args()
    failed = False
    for name, case in CASES.items():
        found = measure(case, args.runs)
        if isinstance(found, str):
            print(f"{name}: not measured ({found})")
            continue
        times, modules = found
        median = statistics.median(times)
        print(f"{name}: best {min(times):.1f} ms, median {median:.1f} ms, {len(modules)} modules")
        if "envscaler" not in case:
            continue
        heavy = [module for module in modules if module.startswith(HEAVY)]
        if heavy or median > args.limit_ms:
            failed = True
            print(f"  over: limit {args.limit_ms:g} ms; heavy modules: {heavy or 'none'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
