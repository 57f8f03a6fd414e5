"""The machine that a tuned graph was made for: ONNX Runtime's build, provider, operating system, CPU features.

A tuned graph has weights in the layout that ONNX Runtime's kernels choose for this CPU. Packed weights have a key, a
hash of the bytes that the kernel packs on this machine: where the key differs, ONNX Runtime packs that weight itself,
so answers stay right. Convolution weights in blocks of channels (NCHWc) have no key: the kernels use blocks of the size
of their CPU (AVX2: 8, AVX512: 16), and with another size the answers are wrong without an error. **Therefore a target
fits only where all its features are equal**; a CPU with more of them has other blocks. A model of one node shows the
size of ONNX Runtime's blocks.

Features are read from /proc/cpuinfo on Linux, and compared with numpy's table, which asks the processor: in an emulator
the two differ; then only numpy's count, and the feature `emulation` is added. /proc/cpuinfo does not list AVX-VNNI-INT8
and AVX-NE-CONVERT, which processors with `avx_vnni` may have; there the processor's model counts as a feature. On arm64
the implementer and part of every kind of core count: ONNX Runtime corrects features by part, and packs for SME by the
length of vectors. On Windows and macOS numpy's table counts, and the name of the processor, as the table lacks most
features newer than AVX512.

Tested on Linux x86_64, on processors and in qemu; Linux arm64 from texts of /proc/cpuinfo. Not tested: Windows, macOS,
other processors.

Source: ONNX Runtime 1.32, `onnxruntime/core/mlas/lib/platform.cpp` (kernels, NchwcBlockSize, by CPUID leaves 1 and 7,
XCR0), `core/common/cpuid_info.cc` (features, hybrid and narrow cores, exceptions by part in pytorch/cpuinfo),
`core/mlas/lib/kleidiai/` (SME, SME2). Linux, `arch/x86/kvm/reverse_cpuid.h`, for what /proc/cpuinfo does not list.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import platform
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from zcrecord.errors import FormatError, printable

CONVENTION = 1  # of module, graph and payloads of a tuning; another number is another way to write them

_CPUINFO = Path("/proc/cpuinfo")
_LONGEST = 8192  # characters of an encoded target
_MOST_FEATURES = 256
_WORD = re.compile(r"[ -~]{1,100}")  # printable ASCII
_DAMAGED = "the target of a tuning {fault}; the archive is damaged, copy it again or tune it again"

# The model of one node, "ReorderInput", of 1 x 4 x 1 x 1 floats "x" to "y": NCHW to blocks of channels.
_REORDER = (
    b'\x08\x08:V\n)\n\x01x\x12\x01y"\x0cReorderInput:\x13com.microsoft.nchwc\x12\x01g'
    b"Z\x1b\n\x01x\x12\x16\n\x14\x08\x01\x12\x10\n\x02\x08\x01\n\x02\x08\x04\n\x02\x08\x01\n\x02\x08\x01"
    b"b\t\n\x01y\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11B\x17\n\x13com.microsoft.nchwc\x10\x01"
)

# Names as in /proc/cpuinfo.
_X86 = re.compile(
    r"sse2|pni|ssse3|sse4_1|avx|f16c|fma|avx2|avx_vnni|avx_vnni_int8|avx_ne_convert"
    r"|avx512f|avx512cd|avx512bw|avx512dq|avx512vl|avx512_vnni|avx512_bf16|avx512_fp16|(avx10|amx)_\w+"
)
_ARM = re.compile(r"asimd|neon|fphp|asimdhp|asimddp|i8mm|bf16|(sve|sme)\w*")
_MODEL_LINES = "cpu", "cpu model", "isa", "machine", "model name", "uarch"  # of other processors
_FEATURE_LINES = "flags", "features"

# The same features by their names in numpy's table. It has other names for those of arm64 that matter, or lacks them.
_NUMPY_X86 = {"SSE3": "pni", "SSE41": "sse4_1", "FMA3": "fma"}
_NUMPY_X86 |= {name: name.lower() for name in ("SSE2", "SSSE3", "AVX", "F16C", "AVX2")}
_NUMPY_X86 |= {f"AVX512{end}": f"avx512{end.lower()}" for end in ("F", "CD", "BW", "DQ", "VL")}
_NUMPY_X86 |= {f"AVX512{end}": f"avx512_{end.lower()}" for end in ("VNNI", "BF16", "FP16")}
_NUMPY_ARM = {name: name.lower() for name in ("ASIMD", "FPHP", "ASIMDHP", "ASIMDDP", "SVE")}


@dataclass(frozen=True, slots=True)
class TuningTarget:
    """The ONNX Runtime and the machine that a graph was tuned for. Equal targets have equal layouts.

    Attributes:
        onnxruntime: the full version, as `onnxruntime.__version__`.
        build: its commit and a checksum of its build's description, since another build of a version may lack kernels;
            "unknown" without a description.
        provider: the execution provider, as "CPUExecutionProvider".
        machine: operating system and instruction set, as "linux-x86_64".
        cpu: the processor's features that kernels depend on, sorted: flags as in /proc/cpuinfo, and where flags are not
            enough the processor's model, as "model:GenuineIntel-6-143" or "part:0x41-0xd40".
        nchwc_block: channels in a block of convolution weights; 0 if this ONNX Runtime has no such layout.
        convention: that of the tuned graph and its payloads.
    """

    onnxruntime: str
    build: str
    provider: str
    machine: str
    cpu: tuple[str, ...]
    nchwc_block: int
    convention: int = CONVENTION

    def encode(self) -> str:
        """Encode it as one line of JSON, in ASCII; equal targets give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> TuningTarget:
        """Decode the text of `encode`; FormatError for any other text."""
        if len(text) > _LONGEST:
            raise FormatError(_DAMAGED.format(fault=f"has {len(text)} characters, at most {_LONGEST} are allowed"))
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(_DAMAGED.format(fault=f"is not JSON ({printable(str(error), 80)})")) from error
        fault = _fault(values)
        if fault is None:
            target = cls(**{**values, "cpu": tuple(values["cpu"])})
            if target.encode() == text:
                return target
            fault = "is not written as `TuningTarget.encode` does"
        raise FormatError(_DAMAGED.format(fault=fault))

    def words(self) -> str:
        """Return the target as one line in words."""
        cpu = f"CPU with {', '.join(self.cpu)}" if self.cpu else "any CPU"
        blocks = f", blocks of {self.nchwc_block} channels" if self.nchwc_block else ""
        return f"onnxruntime {self.onnxruntime} (build {self.build}), {self.provider}, {self.machine}, {cpu}{blocks}"

    def misfit(self, here: TuningTarget) -> str | None:
        """Return the reason why a graph tuned for this target must not run on `here`; None if it may."""
        if self.convention != here.convention:
            return f"made by convention {self.convention} of tuning, this zcrecord has {here.convention}"
        release = f"onnxruntime {self.onnxruntime}"
        for own, other, words in (
            (self.machine, here.machine, self.machine),
            (self.provider, here.provider, self.provider),
            (self.onnxruntime, here.onnxruntime, release),
            (self.build, here.build, f"build {self.build} of {release}"),
        ):
            if own != other:
                return f"made for {words}, this is {other}"
        lacking, new = sorted({*self.cpu} - {*here.cpu}), sorted({*here.cpu} - {*self.cpu})
        if lacking or new:
            features = {verb: printable(", ".join(names), 200) for verb, names in (("lacks", lacking), ("has", new))}
            return ", and ".join(f"the CPU {verb} {text}" for verb, text in features.items() if text)
        if self.nchwc_block != here.nchwc_block:
            return f"made for blocks of {self.nchwc_block} channels in convolutions, here they have {here.nchwc_block}"
        return None


def this_target(ort: Any, provider: str = "CPUExecutionProvider") -> TuningTarget:
    """Return the target of this process; the first call runs a session of one node, in about a millisecond."""
    machine, cpuinfo = platform.machine() or "unknown", ""
    with contextlib.suppress(OSError):
        cpuinfo = _CPUINFO.read_text(errors="replace", encoding="utf-8")
    name = "" if cpuinfo else _processor_name()  # it starts a process on Linux
    return TuningTarget(
        onnxruntime=str(ort.__version__),
        build=_build(ort),
        provider=provider,
        machine=f"{sys.platform}-{machine}".lower(),
        cpu=_cpu_features(machine, cpuinfo, _numpy_cpu_features(), name),
        nchwc_block=_nchwc_block(ort),
    )


@functools.lru_cache
def _nchwc_block(ort: Any) -> int:
    """Return the channels to which ONNX Runtime pads four, which is one block; 0 if it has no kernel for blocks."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal errors alone: to fail is an answer here
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(_REORDER, options, providers=["CPUExecutionProvider"])
        return int(session.run(None, {"x": np.zeros((1, 4, 1, 1), np.float32)})[0].shape[1])
    except Exception:  # its errors have no common class
        return 0


def _build(ort: Any) -> str:
    """Return the `build` of a TuningTarget."""
    describe = getattr(ort, "get_build_info", None)
    if describe is None:
        return "unknown"
    description = str(describe())
    commit = re.search(r"git-commit-id=(\w{1,40})", description)
    return f"{commit[1] if commit else 'unknown'}-{zlib.crc32(description.encode()):08x}"


def _numpy_cpu_features() -> Mapping[str, bool]:
    """Return numpy's CPU features, True for those that this processor has; empty if this numpy has no such table."""
    try:
        return dict(importlib.import_module("numpy._core._multiarray_umath").__cpu_features__)
    except (ImportError, AttributeError):
        return {}


def _processor_name() -> str:
    """Return the processor's name from the operating system; "" without one."""
    if sys.platform == "darwin":  # platform.processor() is "arm" for all of Apple's
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError):
            if name := subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip():
                return name
    return platform.processor()


def _cpu_features(machine: str, cpuinfo: str, table: Mapping[str, bool], name: str) -> tuple[str, ...]:
    """Return the features that kernels depend on, sorted; the module's docstring has the rules."""
    processors = _processors(cpuinfo)
    is_x86 = machine.lower() in ("x86_64", "amd64", "i386", "i686", "x86")
    is_arm = machine.lower() in ("aarch64", "arm64")
    numpy_names = _NUMPY_X86 if is_x86 else _NUMPY_ARM if is_arm else {}
    in_numpy = {feature: bool(table[key]) for key, feature in numpy_names.items() if key in table}
    numpy_features = {feature for feature, is_present in in_numpy.items() if is_present}
    if not processors:
        return _encodable(numpy_features | ({f"model:{name}"} if name else set()))
    texts = (" ".join(p.get(key, "").lower() for key in _FEATURE_LINES) for p in processors)
    flags = set.intersection(*(set(text.split()) for text in texts))
    models: set[str] = set()
    if is_x86:
        flags = set(filter(_X86.fullmatch, flags))
        if "avx_vnni" in flags:
            keys = "vendor_id", "cpu family", "model"
            models = {f"model:{'-'.join(p.get(key, '?') for key in keys)}" for p in processors}
    elif is_arm:
        flags = set(filter(_ARM.fullmatch, flags))
        models = {f"part:{p.get('cpu implementer', '?')}-{p.get('cpu part', '?')}" for p in processors}
    else:
        models = {f"model:{p[key]}" for p in processors for key in _MODEL_LINES if p.get(key)}
    if numpy_features != flags & in_numpy.keys():
        return _encodable(numpy_features | {"emulation"})
    return _encodable(flags | models)


def _processors(cpuinfo: str) -> list[dict[str, str]]:
    """Return the lines of /proc/cpuinfo by key, in lower case, of one processor of each kind."""
    kinds = {}
    for block in re.split(r"\n[ \t]*\n", cpuinfo):
        pairs = [line.partition(":") for line in block.splitlines()]
        lines = {key.strip().lower(): value.strip() for key, colon, value in pairs if colon}
        if any(key in lines for key in (*_FEATURE_LINES, *_MODEL_LINES)):
            kinds[tuple(lines.get(key, "") for key in (*_FEATURE_LINES, "cpu part", "model"))] = lines
    return list(kinds.values())


def _encodable(features: Iterable[str]) -> tuple[str, ...]:
    """Return features sorted, within the limits of `decode`: long ones, and too many, as a checksum."""
    printable_features = sorted({_shorten(re.sub(r"[^ -~]", "?", feature)) for feature in features})
    if len(printable_features) > _MOST_FEATURES:
        return (_shorten(" ".join(printable_features)),)
    return tuple(printable_features)


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:80]}...{zlib.crc32(text.encode()):08x}"


def _fault(values: Any) -> str | None:
    """Return the first fault of a target's JSON value; None if it has none."""
    if not isinstance(values, dict) or set(values) != {field.name for field in fields(TuningTarget)}:
        return "does not have exactly the fields " + ", ".join(field.name for field in fields(TuningTarget))
    for name, least in (("convention", 1), ("nchwc_block", 0)):
        if type(values[name]) is not int or not least <= values[name] < 1 << 31:
            return f"has a {name} that is no number from {least} to 2^31 - 1"
    for name in ("onnxruntime", "build", "provider", "machine"):
        if not isinstance(values[name], str) or not _WORD.fullmatch(values[name]):
            return f"has no 1 to 100 printable ASCII characters as {name}"
    cpu = values["cpu"]
    if not isinstance(cpu, list) or len(cpu) > _MOST_FEATURES:
        return f"has no list of at most {_MOST_FEATURES} features as cpu"
    if not all(isinstance(feature, str) and _WORD.fullmatch(feature) for feature in cpu):
        return "has a CPU feature that is not 1 to 100 printable ASCII characters"
    if cpu != sorted(set(cpu)):
        return "has CPU features that are not sorted, or twice"
    return None
