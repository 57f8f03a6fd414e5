"""Fleets of conversions in a bucket: by `zcrecord convert --jobs`, Dask and Ray, a worker of each killed in the middle.

The server is moto's, on this machine, and the seconds are from the start of the engine on: they say little, counts say
more. Engines that are not installed are left out. Ray (240 MB) is no package of the tests: install it in an environment
of its own that sees theirs by a `.pth` file, and run the benchmark there with RAY_USAGE_STATS_ENABLED=0.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings
from tools.moto_server import serving_moto
from tools.worker import ROOT, call_alone
from zcrecord.fleet import Job, Outcome, convert_one, plan, stamps

AREA = "fleet"
COMMAND = "zcrecord convert --jobs 2"
FLAG = "ZCRECORD_BENCH_KILLED"  # environment variable: a file that the worker that dies makes first
DIES = "00003.zcr"
MODELS = "s3://fleet/models"
TRUNCATED = 20  # one model of so many is


def write_models(folder: Path, count: int, kib: int = 256) -> list[str]:
    """Write distinct ONNX models, of which some are cut off; return the paths of those that are whole."""
    import onnx
    from onnx import helper, numpy_helper

    whole = []
    for number in range(count):
        values = np.random.default_rng(number).standard_normal((kib, 256)).astype(np.float32)
        weight = numpy_helper.from_array(values, f"layers.{number}.weight")
        node = helper.make_node("MatMul", ["x", weight.name], ["y"])
        ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", "m"]) for name in ("x", "y")]
        model = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:], [weight]), ir_version=9)
        path = folder / f"{number % 7}" / f"{number:05}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = model.SerializeToString()
        cut = number % TRUNCATED == TRUNCATED - 1
        path.write_bytes(data[: len(data) // 2] if cut else data)
        if not cut:
            whole.append(path.relative_to(folder).with_suffix(".zcr").as_posix())
    return whole


def convert_or_die(job: Job) -> Outcome:
    """Convert one model; of one job the first try ends its process when all is written but the index."""
    if job.dest.endswith(DIES) and FLAG in os.environ:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(os.environ[FLAG], os.O_CREAT | os.O_EXCL))
            vars(stamps)["metadata_of"] = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    return convert_one(job)


def run(settings: Settings) -> Iterator[Row]:
    """Yield a row of seconds for each engine, then the counts of all."""
    count = settings.pick(200, 6)
    whole = write_models(settings.folder / "models", count, settings.pick(256, 1))
    missing = other = refused = again = 0
    with serving_moto("fleet") as options:
        import s3fs

        fs = s3fs.S3FileSystem(**options)
        fs.put(f"{settings.folder}/models/", "fleet/models/", recursive=True)
        first: dict[str, str] = {}
        engines = {COMMAND: _with_command} if settings.quick else _engines()  # others start for seconds
        for name, engine in engines.items():
            dest, flag = f"s3://fleet/{name.split()[0]}", settings.folder / f"{name.split()[0]}-killed"
            states, seconds = engine(MODELS, dest, options, flag)
            assert flag.exists(), "no worker was killed, so nothing was tried"
            made = _digests(fs, dest)
            first = first or made
            missing += len(set(whole) - set(made))
            other += sum(made.get(path) != first[path] for path in first)
            refused += states.count("refused")
            again += engine(MODELS, dest, options, flag)[0].count("converted")
            work = f"{count} models of {settings.pick(256, 1)} KiB from S3 to S3 (moto), a worker killed: {name}"
            yield Row(AREA, work, "s", {OURS: seconds})
    where = f"{count} models, a worker killed on each of {', '.join(engines)}"
    accepted = abs(refused - (count - len(whole)) * len(engines))
    for what, found in (
        ("archives that are missing", missing),
        ("archives with other bytes", other),
        ("converted by a second run", again),
        ("truncated models not refused", accepted),
    ):
        yield Row(AREA, f"{where}: {what}", "", {OURS: found}, Promise("under", 1))


Engine = Callable[[str, str, dict[str, Any], Path], tuple[list[str], float]]


def _engines() -> dict[str, Engine]:
    out: dict[str, Engine] = {COMMAND: _with_command}
    for package, name in (("distributed", "Dask"), ("ray", "Ray")):
        if importlib.util.find_spec(package):
            out[name] = partial(_alone, f"tools.bench.fleet:with_{name.lower()}")
    return out


def _alone(target: str, source: str, dest: str, options: dict[str, Any], flag: Path) -> tuple[list[str], float]:
    done = call_alone(target, source=source, dest=dest, options=options, flag=str(flag))
    return done["states"], done["seconds"]


def _with_command(source: str, dest: str, options: dict[str, Any], flag: Path) -> tuple[list[str], float]:
    """Run the command, and kill one of its workers once there are some archives, unless that was done before."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    endpoint = options["client_kwargs"]["endpoint_url"]
    secret = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    environment = {**os.environ, **secret, "AWS_ENDPOINT_URL": endpoint, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zcrecord", "convert", "--jobs", "2", source, dest, "--json"]
    start = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if not flag.exists():
            fs = s3fs.S3FileSystem(**options, use_listings_cache=False)
            while len(fs.find(dest)) < 2 and process.poll() is None:
                time.sleep(0.01)
            os.kill(_worker_of(process.pid), signal.SIGKILL)
            flag.touch()
        report = json.loads(process.communicate()[0])
    assert not report["failed"], report["failed"]
    states = ["converted"] * report["converted"] + ["kept"] * report["kept"] + ["refused"] * len(report["refused"])
    return states, time.perf_counter() - start


def _worker_of(pid: int) -> int:
    """Return a worker of the command: the first child that runs conversions."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    workers = [c for c in children if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text(encoding="utf-8")]
    return int(workers[0])


def _digests(fs: Any, prefix: str) -> dict[str, str]:
    """Return the SHA-256 of every archive below a prefix, by its path from there."""
    fs.invalidate_cache()
    root = prefix.removeprefix("s3://")
    found = [path for path in fs.find(root) if path.endswith(".zcr")]
    return {path[len(root) + 1 :]: hashlib.sha256(fs.cat_file(path)).hexdigest() for path in found}


# -- in a process of its own -----------------------------------------------------------------------------------------


def _report(outcomes: Sequence[Outcome], start: float) -> dict[str, Any]:
    return {"states": [outcome.state for outcome in outcomes], "seconds": time.perf_counter() - start}


def with_dask(source: str, dest: str, options: dict[str, Any], flag: str) -> dict[str, Any]:
    from distributed import Client

    os.environ[FLAG], start = flag, time.perf_counter()
    quiet = {"dashboard_address": None, "silence_logs": 50, "local_directory": os.path.dirname(flag)}
    with Client(n_workers=2, threads_per_worker=1, **quiet) as client:
        jobs = plan(source, dest, storage_options=options)
        return _report(client.gather(client.map(convert_or_die, jobs, retries=3, pure=False)), start)


def with_ray(source: str, dest: str, options: dict[str, Any], flag: str) -> dict[str, Any]:
    import ray

    from zcrecord import SourceError

    os.environ[FLAG], start = flag, time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    convert = ray.remote(max_retries=3, retry_exceptions=[SourceError])(convert_or_die)
    jobs = plan(source, dest, storage_options=options)
    return _report(ray.get([convert.remote(job) for job in jobs]), start)
