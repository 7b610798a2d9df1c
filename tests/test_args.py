"""Tests that the structs and constants that host and kernels share are the same on both sides.

Knows nothing of what they mean: names come from the Python side, sizes and offsets from the
compiler.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from gpuallreduce import args, jit, memory

STRUCTS: tuple[type[ctypes.Structure], ...] = (
    args.GarHeader,
    args.GarReport,
    args.GarArgs,
    args.GarStridedArgs,
    args.GarProbeResult,
    args.GarProbeArgs,
    args.GarCopyArgs,
    args.GarWrongWord,
    args.GarPatternArgs,
    args.GarHoldArgs,
    args.GarChaseArgs,
    args.GarNodesArgs,
    args.GarLaunch,
)
# C++ name of each constant and what the Python side holds.
CONSTANTS = {
    "kLineBytes": memory.LINE_BYTES,
    "kReportBytes": memory.REPORT_BYTES,
    **{
        "k" + name.title().replace("_", ""): value
        for name, value in vars(args).items()
        if name.isupper() and isinstance(value, int)
    },
}


def facts_of(name: str, struct: type[ctypes.Structure]) -> dict[str, int]:
    """Size, offsets and field sizes of a struct by ctypes, under its C++ name."""
    facts = {f"sizeof {name}": ctypes.sizeof(struct)}
    for field in struct._fields_:
        descriptor = getattr(struct, field[0])
        facts[f"offset {name}.{field[0]}"] = descriptor.offset
        facts[f"sizeof {name}.{field[0]}"] = descriptor.size
    return facts


def python_facts() -> dict[str, int]:
    """Facts of all structs of host devices, and the constants."""
    facts = {f"constant {name}": value for name, value in CONSTANTS.items()}
    for struct in STRUCTS:
        facts |= facts_of(struct.__name__, struct)
    return facts


def compiler_program(facts: dict[str, int], *headers: str) -> str:
    """A C++ program that prints the same facts."""
    lines = []
    for fact in facts:
        kind, name = fact.split(" ")
        struct, _, field = name.partition(".")
        expression = {
            "constant": f"gar::{name}",
            "offset": f"offsetof({struct}, {field})",
            "sizeof": f"sizeof({struct}::{field})" if field else f"sizeof({struct})",
        }[kind]
        lines.append(f'std::printf("{fact}=%llu\\n", (unsigned long long)({expression}));')
    included = "".join(f'#include "{header}"\n' for header in headers)
    return (
        f"#include <cstddef>\n#include <cstdio>\n{included}"
        "int main() {\n" + "\n".join(lines) + "\n}\n"
    )


def compiled(folder: Path, text: str, *flags: str) -> dict[str, int]:
    """What a program of facts prints."""
    source, program = folder / "facts.cpp", folder / "facts"
    source.write_text(text, encoding="utf-8")
    command = [*jit.host_compiler().command, "-std=c++17", f"-I{jit.kernels_folder()}", *flags]
    built = subprocess.run(
        [*command, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in (line.split("=") for line in printed.splitlines())}


@pytest.fixture(scope="module")
def compiler_facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    text = compiler_program(python_facts(), "host.h", "primitives.cuh")
    return compiled(tmp_path_factory.mktemp("facts"), text)


def test_launches_on_gpus_are_laid_out_alike(tmp_path: Path) -> None:
    facts = facts_of("GarArgs", args.GarDeviceArgs)
    text = compiler_program(facts, "primitives.cuh")
    assert compiled(tmp_path, text, "-DGAR_EMULATED") == facts
    assert ctypes.sizeof(args.GarDeviceArgs) <= 4096, "more than a kernel's parameters may hold"


@pytest.mark.parametrize("fact", python_facts())
def test_python_and_the_compiler_agree(fact: str, compiler_facts: dict[str, int]) -> None:
    assert python_facts()[fact] == compiler_facts[fact]


def test_constants_are_those_of_both_sides() -> None:
    assert len(CONSTANTS) >= 9
    text = (jit.kernels_folder() / "primitives.cuh").read_text(encoding="utf-8")
    enumerators = re.findall(r"^enum : uint64_t \{(.*)\};", text, flags=re.MULTILINE)
    names = set(re.findall(r"(k\w+) =", " ".join(enumerators)))
    assert names
    assert names <= set(CONSTANTS)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_fields_are_those_of_the_header_in_its_order(struct: type[ctypes.Structure]) -> None:
    folder: Path = jit.kernels_folder()
    text = (folder / "args.h").read_text() + (folder / "host.h").read_text()
    found = re.search(rf"struct {struct.__name__} \{{\n(.*?)\n\}};", text, flags=re.DOTALL)
    assert found is not None
    code = re.sub(r"//.*", "", found[1])
    assert re.findall(r"(\w+)(?:\[.*\])?;", code) == [field[0] for field in struct._fields_]


def test_no_struct_has_hidden_padding() -> None:
    for struct in (args.GarHeader, args.GarReport, args.GarArgs, args.GarDeviceArgs):
        fields = sum(getattr(struct, field[0]).size for field in struct._fields_)
        assert fields == ctypes.sizeof(struct)


def test_a_report_fits_its_place() -> None:
    assert ctypes.sizeof(args.GarReport) <= memory.REPORT_BYTES
    assert ctypes.sizeof(args.GarHeader) <= memory.LINE_BYTES
