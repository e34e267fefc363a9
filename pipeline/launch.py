"""Launch files: how many processes train a head, and what Accelerate and DeepSpeed do in each of them.

A launch file is an Accelerate configuration (recipes/launch/), read twice: by `accelerate launch`, which
starts the workers, and by `make_accelerator` inside them, which says what a file cannot say for both a CPU
and CUDA. On a CPU the ranks talk over gloo; a file with `use_cpu: true` would switch DeepSpeed off.

    accelerate launch --config_file recipes/launch/zero2.yaml -m MODULE ARGS
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, GradientAccumulationPlugin, InitProcessGroupKwargs
from drafthead.data.errors import InputError
from torch import Tensor, nn

LAUNCH_FILES = Path(__file__).resolve().parents[1] / "recipes" / "launch"
DEFAULT_PORT = 29500
Precision = Literal["bf16", "fp32"]
# DeepSpeed 0.19 calls them at every step
DEPRECATED_COLLECTIVES = "ignore::FutureWarning:torch.distributed.c10d_logger"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What we read of a launch file."""

    path: Path
    distributed_type: str
    """`NO`, `MULTI_GPU` (one replica a process, on a CPU too) or `DEEPSPEED`."""
    num_processes: int
    """Of all machines, on CPUs; on CUDA there is one process per visible device."""
    num_machines: int
    deepspeed_config: dict[str, Any]
    """Fields of `accelerate.DeepSpeedPlugin`."""


def read_launch(name: str) -> Launch:
    """Read recipes/launch/`name`.yaml.

    Raises:
        InputError: There is no such launch; the message lists those there are.
    """
    path = LAUNCH_FILES / f"{name}.yaml"
    known = sorted(file.stem for file in LAUNCH_FILES.glob("*.yaml"))
    if name not in known:
        raise InputError(f"run.launch={name}: no such launch; give one of {', '.join(known)}")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Launch(
        path=path,
        distributed_type=values["distributed_type"],
        num_processes=values["num_processes"],
        num_machines=values["num_machines"],
        deepspeed_config=values.get("deepspeed_config", {}),
    )


def launch_command(launch: str, module: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Say how to start `module` under a launch file.

    Returns:
        The command, and the variables to lay over the environment.

    Raises:
        InputError: No such launch, or one of several machines that does not know the first one's address.
    """
    config = read_launch(launch)
    if config.distributed_type == "NO":
        return [sys.executable, "-m", module, *arguments], {}
    machines = read_machines(config)
    each = torch.cuda.device_count() or max(1, config.num_processes // config.num_machines)
    command = [sys.executable, "-m", "drafthead.pipeline.ranks", "launch"]
    command += ["--config_file", str(config.path), "--num_processes", str(each * machines.count)]
    command += machines.flags()
    command += ["-m", module, *arguments]
    return command, _worker_environment(each)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """How many machines train together, and where the first one, which this is, listens."""

    count: int = 1
    address: str | None = None
    port: int = 0
    """0: any that is free."""

    def flags(self) -> list[str]:
        """Of `accelerate launch`."""
        port = ["--main_process_port", str(self.port)]
        if self.address is None:
            return port
        return ["--num_machines", str(self.count), "--machine_rank", "0", "--main_process_ip", self.address, *port]


def read_machines(config: Launch) -> Machines:
    """Read what a launch file of several machines leaves open from the environment.

    Raises:
        InputError: The first machine's address is missing, or a number is none.
    """
    if config.num_machines == 1:
        return Machines()
    name = config.path.stem
    address = os.environ.get("MAIN_PROCESS_IP", "")
    if not address:
        raise InputError(
            f"run.launch={name}: set MAIN_PROCESS_IP to an address of this machine, the first of several, and start "
            f"the workers of the others as docs/multi-node.md says"
        )
    numbers = {"NUM_MACHINES": config.num_machines, "MAIN_PROCESS_PORT": DEFAULT_PORT}
    for variable, default in numbers.items():
        text = os.environ.get(variable, str(default))
        if not text.isdecimal() or int(text) < 1:
            raise InputError(f"{variable}={text}: give a number from 1")
        numbers[variable] = int(text)
    return Machines(count=numbers["NUM_MACHINES"], address=address, port=numbers["MAIN_PROCESS_PORT"])


def _worker_environment(num_processes: int) -> dict[str, str]:
    binaries = os.path.join(sys.prefix, "bin")
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    return {
        # DeepSpeed builds its CPU ops with the environment's ninja, which is on PATH only when activated
        "PATH": os.pathsep.join([binaries, os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads)),
        # true would make Accelerate ignore DeepSpeed without a word
        "ACCELERATE_USE_CPU": "false",
        # torch rebuilds ops whose path changed: checkouts that share its folder would build in turns
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_ops")),
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), DEPRECATED_COLLECTIVES])),
    }


SHARED_MEMORY_OP = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()
"""


def build_ops(launch: str) -> None:
    """Build DeepSpeed's shared-memory op for CPU ranks once, before there are ranks that would build it together.

    Ranks that meet at a fresh build abort now and then. A machine without a compiler finds out here for nothing: the
    ranks say so themselves.
    """
    if read_launch(launch).distributed_type != "DEEPSPEED" or torch.cuda.is_available():
        return
    environment = {**os.environ, **_worker_environment(1), "DS_ACCELERATOR": "cpu"}
    if not (Path(environment["TORCH_EXTENSIONS_DIR"]) / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").exists():
        subprocess.run([sys.executable, "-c", SHARED_MEMORY_OP], env=environment, capture_output=True, check=False)


def make_accelerator(launch: str, *, precision: Precision, accumulation: int, max_grad_norm: float) -> Accelerator:
    """Make the `Accelerator` of this worker; call it once, before any other use of torch.distributed.

    The loop is the same under every launch, and N accumulated micro batches on R ranks give the step of one
    big batch:

        model, optimizer = accelerator.prepare(model, optimizer)   # one call; the optimiser is torch.optim's
        for micro_batch in micro_batches:                          # exactly `accumulation` of them
            with accelerator.accumulate(model):
                loss = model(...) / num_supervised * loss_scale(accelerator)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()

    where model(...) is the SUM of the loss over this micro batch and `num_supervised` counts the whole step:
    all ranks, all micro batches. `loss_scale` undoes both averages (see there).

    Under DeepSpeed `backward` does everything: it marks the boundary (`sync_gradients`), and at the boundary
    it averages over ranks, clips with the norm given HERE and takes the optimiser's step; `step` and
    `zero_grad` do nothing and `clip_grad_norm_` only returns the norm (before clipping). So the learning rate
    (`optimizer.param_groups[i]["lr"]`) must be set before `backward`, never between it and `step`, and
    nothing may change gradients after `backward`.

    Everything of the loss that needs bfloat16 belongs into the model's `forward`: the autocast covers that
    call only. Parameters, gradients and the optimiser's state stay float32 under every launch, so inputs need
    no cast. Under `zero3` parameters exist only inside the wrapped model's forward: call the wrapped model,
    on all ranks alike, and read weights with `full_weights`; its hooks see tensors, tuples and dicts of them,
    not the fields of a dataclass.

    DeepSpeed on more than one CPU rank builds a small communication op at the first start and needs a C++
    compiler for it; so does `zero2_offload` anywhere. One process and `ddp` need none.

    Raises:
        InputError: Unknown launch, or this process was not started by `launch_command`.
    """
    config = read_launch(launch)
    distributed = config.distributed_type != "NO"
    if distributed and "RANK" not in os.environ:
        raise InputError(f"run.launch={launch}: this worker was started alone; start it with `drafthead run`")
    on_cpu = not torch.cuda.is_available()
    deepspeed = config.distributed_type == "DEEPSPEED"
    return Accelerator(
        # Without `cpu` Accelerate starts gloo but wraps nothing: each rank would train a head of its own.
        # With it DeepSpeed is ignored.
        cpu=on_cpu and not deepspeed,
        mixed_precision="bf16" if precision == "bf16" and not deepspeed else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
        deepspeed_plugin=_deepspeed_plugin(config, precision, accumulation, max_grad_norm) if deepspeed else None,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if distributed and on_cpu else [],
    )


def _deepspeed_plugin(config: Launch, precision: Precision, accumulation: int, max_grad_norm: float) -> DeepSpeedPlugin:
    plugin = DeepSpeedPlugin(
        **config.deepspeed_config,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=max_grad_norm,
    )
    # Without a DataLoader nobody else states it; only DeepSpeed's own sample counts depend on it
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    if precision == "bf16":
        # torch's autocast as under the other launches, not DeepSpeed's bf16 mode (bfloat16 parameters);
        # the empty list keeps gradients and gathered parameters float32
        plugin.deepspeed_config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    return plugin


def loss_scale(accelerator: Accelerator) -> int:
    """Factor of a loss that was already divided by the count of the whole step: ranks x accumulation.

    DDP and DeepSpeed average gradients over ranks, and `backward` divides by the accumulation.
    """
    return int(accelerator.num_processes * accelerator.gradient_accumulation_steps)


def full_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Gather the head's weights on the main process (empty elsewhere); all ranks must call it."""
    weights: dict[str, Tensor] | None = accelerator.get_state_dict(model)
    if not accelerator.is_main_process or weights is None:
        return {}
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}
