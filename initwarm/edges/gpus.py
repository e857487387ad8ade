"""Which GPUs this process would see, asked of NVML, so that neither torch nor CUDA is loaded to learn it.

Nothing is defaulted: where NVML refuses to answer, the count is None and the survey says what stood in the way. The
library is opened, asked and shut down again; no CUDA context is made and no device stays open.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

Capability = tuple[int, int]

_NOT_SUPPORTED = 3
_NOT_FOUND = 6
_DRIVER_NOT_LOADED = 9
_UUID_BYTES = 96
_HINT = (
    "If this container should have GPUs, compare its nvidia.com/gpu limit or resource claim, its runtimeClassName, "
    "NVIDIA_VISIBLE_DEVICES and the CDI devices that its runtime injects."
)


@dataclass(frozen=True)
class GpuSurvey:
    """The GPUs that CUDA would show to a process with this environment.

    Args:
        count: number of visible devices; None where it could not be learnt, which is not the same as 0.
        capabilities: the compute capability of each of them, (major, minor); empty where not all are certain.
        problem: why something above is missing or 0, in full sentences; None where nothing is.
    """

    count: int | None
    capabilities: tuple[Capability, ...]
    problem: str | None


@dataclass(frozen=True)
class _Device:
    handle: ctypes.c_void_p
    uuid: str
    capability: Capability


class _NvmlError(Exception):
    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function} answered {text!r} (code {code})")
        self.code = code


class _Nvml:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvmlErrorString.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            raise _NvmlError(function, code, (self._library.nvmlErrorString(code) or b"").decode(errors="replace"))

    def devices(self) -> list[_Device]:
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._device(index) for index in range(count.value)]

    def _device(self, index: int) -> _Device:
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self.call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        return _Device(handle, uuid.value.decode(errors="replace"), self.capability(handle))

    def capability(self, handle: ctypes.c_void_p) -> Capability:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def is_partitioned(self, handle: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        except _NvmlError as error:
            if error.code == _NOT_SUPPORTED:
                return False
            raise
        return current.value == 1

    def has_partition(self, handle: ctypes.c_void_p) -> bool:
        slots = ctypes.c_uint()
        self.call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(slots))
        return any(self._has_partition_at(handle, slot) for slot in range(slots.value))

    def _has_partition_at(self, handle: ctypes.c_void_p, slot: int) -> bool:
        try:
            found = ctypes.c_void_p()
            self.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(slot), ctypes.byref(found))
        except _NvmlError as error:
            if error.code == _NOT_FOUND:
                return False
            raise
        return True

    def parent_of_partition(self, uuid: str) -> ctypes.c_void_p:
        partition, parent = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), ctypes.byref(partition))
        self.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", partition, ctypes.byref(parent))
        return parent


def visible_gpus(environ: Mapping[str, str]) -> GpuSurvey:
    """Survey the GPUs of this machine that CUDA_VISIBLE_DEVICES leaves to a process with this environment.

    No NVML library, or no driver under it, is 0 GPUs. Any other refusal is a count of None.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return GpuSurvey(0, (), f"NVML, which comes with the NVIDIA driver, cannot be loaded: {error}. {_HINT}")
    try:
        with _initialised(library) as nvml:
            return _survey(nvml, variable, environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")
    except _NvmlError as error:
        if error.code == _DRIVER_NOT_LOADED:
            return GpuSurvey(0, (), f"No NVIDIA driver is loaded: {error}. {_HINT}")
        return GpuSurvey(None, (), f"NVML did not say which GPUs there are: {error}. Give --nproc-per-node a number.")
    except AttributeError as error:
        return GpuSurvey(None, (), f"NVML is too old to be asked: {error}. Give --nproc-per-node a number.")


@contextmanager
def _initialised(library: ctypes.CDLL) -> Iterator[_Nvml]:
    nvml = _Nvml(library)
    nvml.call("nvmlInit_v2")
    try:
        yield nvml
    finally:
        library.nvmlShutdown()


def _survey(nvml: _Nvml, variable: str | None, is_bus_order: bool) -> GpuSurvey:
    if variable is not None and variable.startswith("MIG-"):
        return _survey_partition(nvml, variable)
    devices = nvml.devices()
    ordinals = select_devices(variable, [device.uuid for device in devices])
    if not ordinals:
        return GpuSurvey(0, (), _why_none(variable, len(devices)))
    chosen = [devices[ordinal] for ordinal in ordinals]
    partitioned = [device for device in chosen if nvml.is_partitioned(device.handle)]
    if partitioned:
        return _survey_partitioned(nvml, chosen, partitioned)
    by_index = variable is not None and not variable.startswith("GPU-")
    if by_index and not is_bus_order and len({device.capability for device in devices}) > 1:
        problem = (
            f"CUDA_VISIBLE_DEVICES={variable!r} counts GPUs of several kinds from the fastest, and NVML by bus, so "
            "their compute capabilities are not certain. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs."
        )
        return GpuSurvey(len(chosen), (), problem)
    return GpuSurvey(len(chosen), tuple(device.capability for device in chosen), None)


def _survey_partition(nvml: _Nvml, variable: str) -> GpuSurvey:
    """CUDA shows one MIG device to a process, the first one listed."""
    uuid = variable.split(",")[0]
    try:
        parent = nvml.parent_of_partition(uuid)
    except _NvmlError as error:
        if error.code != _NOT_FOUND:
            raise
        return GpuSurvey(0, (), f"CUDA_VISIBLE_DEVICES names {uuid}, and there is no such MIG device: {error}.")
    return GpuSurvey(1, (nvml.capability(parent),), None)


def _survey_partitioned(nvml: _Nvml, chosen: Sequence[_Device], partitioned: Sequence[_Device]) -> GpuSurvey:
    first = partitioned[0]
    if len(chosen) > 1:
        problem = (
            f"GPU {first.uuid} is partitioned (MIG) and is one of {len(chosen)} visible GPUs, of which CUDA shows a "
            "process a part only. Name the device to use in CUDA_VISIBLE_DEVICES."
        )
        return GpuSurvey(None, (), problem)
    if not nvml.has_partition(first.handle):
        return GpuSurvey(0, (), f"GPU {first.uuid} is in MIG mode, and none of its partitions is visible. {_HINT}")
    return GpuSurvey(1, (first.capability,), None)


def _why_none(variable: str | None, present: int) -> str:
    if present and variable is not None:
        return f"CUDA_VISIBLE_DEVICES={variable!r} hides all of the {present} GPUs here. Unset it, or name a GPU in it."
    return f"NVML sees no GPU. {_HINT}"


def select_devices(variable: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Ordinals of the devices that a value of CUDA_VISIBLE_DEVICES without MIG devices leaves visible, in its order.

    An entry is an index or the start of one device's UUID. The first invalid entry ends the list, a repeated one
    empties it; unset shows all devices, an empty string none.

    Source:
        torch.cuda._parse_visible_devices and _transform_uuid_to_ordinals, torch 2.14, which follow CUDA.
    """
    if variable is None:
        return tuple(range(len(uuids)))
    if variable.startswith("GPU-"):
        entries = list(itertools.takewhile(lambda entry: entry.startswith("GPU-"), variable.split(",")))
        named = [_ordinal_of_uuid(entry, uuids) for entry in entries]
    else:
        entries = []
        named = [_leading_number(entry.strip()) for entry in variable.split(",")]
    chosen = list(_until_none(named))
    if len(set(chosen)) < len(chosen) or len(set(entries)) < len(entries):
        return ()
    return tuple(itertools.takewhile(lambda ordinal: ordinal < len(uuids), chosen))


def _until_none(ordinals: Iterable[int | None]) -> Iterator[int]:
    for ordinal in ordinals:
        if ordinal is None:
            return
        yield ordinal


def _ordinal_of_uuid(prefix: str, uuids: Sequence[str]) -> int | None:
    matches = [ordinal for ordinal, uuid in enumerate(uuids) if uuid.startswith(prefix)]
    return matches[0] if len(matches) == 1 else None


def _leading_number(entry: str) -> int | None:
    """The number an entry starts with, as strtoul reads it; None for a negative one and for none."""
    digits = re.match(r"\+?([0-9]{1,9})", entry)
    return int(digits[1]) if digits else None


def arch_list(capabilities: Sequence[Capability], cuda_version: tuple[int, int] | None = None) -> str | None:
    """The value of FLASHINFER_CUDA_ARCH_LIST under which FlashInfer targets what it would find on these devices.

    Entries carry no suffix, since FlashInfer adds the one that fits the version of its own toolkit; so the list is the
    same for all versions of it. The exception is 12.x, for which FlashInfer *fails to import* under a list if the
    toolkit is older than 12.9, and merely warns without one.

    Args:
        capabilities: of all visible devices, in any order.
        cuda_version: of the toolkit that FlashInfer uses (nvcc, else torch's); None if that is not known.

    Returns:
        Entries separated by one space, or None where no list is safe: FlashInfer must then look for itself, which
        initialises CUDA while it is imported.

    Source:
        flashinfer.compilation_context.CompilationContext, 0.6.18.post1, 0.7.2.post1 and 0.7.4.
    """
    has_family_12 = any(major == 12 for major, _ in capabilities)
    if not capabilities or (has_family_12 and (cuda_version is None or cuda_version < (12, 9))):
        return None
    return " ".join(f"{major}.{minor}" for major, minor in sorted(set(capabilities)))
