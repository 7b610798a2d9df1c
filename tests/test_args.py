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


def python_facts() -> dict[str, int]:
    """Sizes, offsets and field sizes by ctypes, and the constants."""
    facts = {f"constant {name}": value for name, value in CONSTANTS.items()}
    for struct in STRUCTS:
        facts[f"sizeof {struct.__name__}"] = ctypes.sizeof(struct)
        for field in struct._fields_:
            descriptor = getattr(struct, field[0])
            facts[f"offset {struct.__name__}.{field[0]}"] = descriptor.offset
            facts[f"sizeof {struct.__name__}.{field[0]}"] = descriptor.size
    return facts


def compiler_program() -> str:
    """A C++ program that prints the same facts."""
    lines = []
    for fact in python_facts():
        kind, name = fact.split(" ")
        struct, _, field = name.partition(".")
        expression = {
            "constant": f"gar::{name}",
            "offset": f"offsetof({struct}, {field})",
            "sizeof": f"sizeof({struct}::{field})" if field else f"sizeof({struct})",
        }[kind]
        lines.append(f'std::printf("{fact}=%llu\\n", (unsigned long long)({expression}));')
    return (
        '#include <cstddef>\n#include <cstdio>\n#include "host.h"\n#include "primitives.cuh"\n'
        "int main() {\n" + "\n".join(lines) + "\n}\n"
    )


@pytest.fixture(scope="module")
def compiler_facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("facts")
    source, program = folder / "facts.cpp", folder / "facts"
    source.write_text(compiler_program(), encoding="utf-8")
    command = [*jit.host_compiler().command, "-std=c++17", f"-I{jit.kernels_folder()}"]
    built = subprocess.run(
        [*command, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in (line.split("=") for line in printed.splitlines())}


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
    assert re.findall(r"(\w+);", code) == [field[0] for field in struct._fields_]


def test_no_struct_has_hidden_padding() -> None:
    for struct in (args.GarHeader, args.GarReport, args.GarArgs):
        fields = sum(getattr(struct, field[0]).size for field in struct._fields_)
        assert fields == ctypes.sizeof(struct)


def test_a_report_fits_its_place() -> None:
    assert ctypes.sizeof(args.GarReport) <= memory.REPORT_BYTES
    assert ctypes.sizeof(args.GarHeader) <= memory.LINE_BYTES
