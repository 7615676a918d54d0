"""GPUs: found on the PCI bus or by nvidia-smi, whether torch can use them, and what is missing if it cannot.

Three things have to meet: a card (the bus tells), its driver (the kernel's module tells), a torch that is built for it (torch
tells, later, as it takes seconds to import). Each is looked for on its own, so that what is missing can be named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lohan.machine.findings import Finding, Level, gib
from lohan.machine.pci import Link, read_link
from lohan.machine.system import System

AREA = "gpu"
NVIDIA, AMD = "10de", "1002"
_MAKERS = {NVIDIA: "NVIDIA", AMD: "AMD", "8086": "Intel"}
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
_SMI = ("nvidia-smi", "--query-gpu=pci.bus_id,name,memory.total,driver_version", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card, as the system tells it."""

    address: str
    """on the PCI bus: 0000:01:00.0"""
    maker: str
    name: str
    memory_bytes: int | None
    driver: str | None
    """version of NVIDIA's; None: not loaded, or of another maker"""
    link: Link | None

    @property
    def is_nvidia(self) -> bool:
        return self.maker == _MAKERS[NVIDIA]


@dataclass(frozen=True, slots=True)
class TorchGpus:
    """What torch makes of them."""

    build: str | None
    """the CUDA (or ROCm) version that torch is built for; None: for the CPU alone"""
    num: int
    """GPUs that it can use"""


def find_gpus(system: System) -> list[Gpu]:
    """NVIDIA's and AMD's cards, and accelerators without a display, in the order of the bus."""
    told = _ask_smi(system)
    driver = _driver(system)
    addresses = dict.fromkeys([*_on_the_bus(system), *told])
    gpus = []
    for address in sorted(addresses):
        folder = f"sys/bus/pci/devices/{address}"
        maker = (system.text(f"{folder}/vendor") or f"0x{NVIDIA}").removeprefix("0x")
        name, memory_bytes, version = told.get(address, (None, None, None))
        name = name or system.field(f"proc/driver/nvidia/gpus/{address}/information", "Model")
        if maker == NVIDIA:
            version = version or driver
        named = name or f"{_MAKERS.get(maker, maker)} {system.text(f'{folder}/device') or 'GPU'}"
        gpus.append(
            Gpu(address, _MAKERS.get(maker, maker), named, memory_bytes, version, read_link(system, address, under_load=False))
        )
    return gpus


def area_of(index: int) -> str:
    return f"{AREA} {index}"


def gpu_findings(area: str, gpu: Gpu) -> Iterator[Finding]:
    """What the system tells of one card."""
    yield Finding(area, "model", f"{gpu.name} ({gpu.address})")
    if gpu.memory_bytes is not None:
        yield Finding(area, "memory", gib(gpu.memory_bytes))
    if not gpu.is_nvidia:
        wrong = f"lohan is made and tested for NVIDIA's GPUs; {gpu.maker}'s may work through a ROCm build of torch, or not."
        yield Finding(area, "driver", f"of {gpu.maker}", Level.NOTE, wrong)
    elif gpu.driver is None:
        yield Finding(
            area,
            "driver",
            "not loaded",
            Level.PROBLEM,
            "The card is there, NVIDIA's kernel driver is not: nothing can compute on it.",
            "Install it (Ubuntu: sudo ubuntu-drivers install; others: the package nvidia-driver) and restart; "
            "in a container: docker run --gpus all, with nvidia-container-toolkit on the host",
        )
    else:
        yield Finding(area, "driver", gpu.driver)


def torch_findings(gpus: Sequence[Gpu], torch: TorchGpus) -> Iterator[Finding]:
    """Whether torch can use what there is."""
    usable = [gpu for gpu in gpus if gpu.is_nvidia and gpu.driver is not None]
    if not gpus and not torch.num:
        yield Finding(AREA, "found", "none", Level.NOTE, "lohan computes on the processor (device=cpu).")
    elif torch.num:
        yield Finding(AREA, "torch", f"built for {torch.build}, uses {torch.num} of {max(len(gpus), torch.num)}")
    elif usable and torch.build is None:
        yield Finding(
            AREA,
            "torch",
            "built without CUDA",
            Level.PROBLEM,
            f"There is {usable[0].name}, but this torch computes on the processor alone.",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128   (or another CUDA that "
            f"driver {usable[0].driver} knows: nvidia-smi shows it)",
        )
    elif usable:
        yield Finding(
            AREA,
            "torch",
            f"built for {torch.build}, finds no GPU",
            Level.PROBLEM,
            f"Driver {usable[0].driver} is too old for CUDA {torch.build}, CUDA_VISIBLE_DEVICES hides the card, or the "
            "container was given no access to /dev/nvidia*.",
            "Update the driver or install torch for an older CUDA; unset CUDA_VISIBLE_DEVICES; docker run --gpus all",
        )


def _on_the_bus(system: System) -> Iterator[str]:
    """Displays and accelerators of makers whose GPUs torch knows: a processor's own graphics are not listed."""
    try:
        folders = sorted(system.path("sys/bus/pci/devices").iterdir())
    except OSError:
        return
    for folder in folders:
        kind, maker = system.text(folder / "class") or "", (system.text(folder / "vendor") or "").removeprefix("0x")
        if (kind.startswith(_DISPLAY) and maker in (NVIDIA, AMD)) or (kind.startswith(_ACCELERATOR) and maker in _MAKERS):
            yield folder.name


def _ask_smi(system: System) -> dict[str, tuple[str, int | None, str]]:
    """By address: name, memory and driver, of GPUs that nvidia-smi knows. On WSL it knows one that no bus shows."""
    told = {}
    for line in (system.ask(_SMI) or "").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            address, name, mib, driver = parts
            told[address[-12:].lower()] = (name, int(mib) * 2**20 if mib.isdecimal() else None, driver)
    return told


def _driver(system: System) -> str | None:
    """The version of NVIDIA's kernel module: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu ...`."""
    words = (system.text("proc/driver/nvidia/version") or "").partition("\n")[0].split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdecimal()), None)
