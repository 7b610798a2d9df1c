"""Modules import lower levels only, and CUDA, MPI and plotting stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gpuallreduce

ROOT = Path(gpuallreduce.__file__).parent

# From the lowest level up. A module may import from its own level's lower neighbours and below; a
# name with a dot stands for one module of a package, one without for a module or a whole package.
LEVELS = [
    ["errors", "version"],
    ["types", "args", "jit", "topology", "links", "tracing"],
    ["jit_cuda", "reference", "inputs"],
    ["accuracy", "checks"],
    ["plan"],
    ["algorithms.base"],
    ["algorithms.one_shot", "algorithms.two_shot", "algorithms.ring"],
    ["algorithms"],
    ["tuner", "arrays", "across.chunks", "across.pace"],
    ["simulation"],
    ["memory"],
    ["bootstrap"],
    ["transport", "devices", "symmetric", "fused", "locals"],
    ["transport_cuda", "reach_cuda"],
    ["fabric"],
    ["placement"],
    ["placement_cuda"],
    ["diagnosis"],
    ["orchestrator"],
    ["calls"],
    ["across", "lifetime"],
    ["collectives"],
    ["communicator"],
    ["api"],
    ["__init__"],
    ["validation", "bench"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}

# Packages that cost much or may be missing, and the only places that may import them.
GUARDED = {
    "cupy": ["devices", "fabric.nccl_library", "bench"],
    "cuda": ["jit_cuda", "devices"],
    "pynvml": ["devices.nvml"],
    "mpi4py": ["fabric.mpi_library", "bench"],
    "matplotlib": ["bench"],
    "numba": ["reference", "bench.numba_copy"],
    "rich": ["bench", "validation", "cli"],
    "sklearn": ["bench"],
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path
    bench = ROOT.parent / "bench"
    if bench.is_dir():
        for path in sorted(bench.glob("*.py")):
            found[f"bench.{path.stem}"] = path
    return {name: path for name, path in found.items() if not name.startswith("kernels")}


def level(module: str) -> int:
    parts = module.split(".")
    while parts:
        if ".".join(parts) in LEVEL:
            return LEVEL[".".join(parts)]
        parts.pop()
    raise AssertionError(f"{module} stands on no level of LEVELS: add it")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_go_down(module):
    known = modules()
    for name in imports(modules()[module]):
        if name.split(".")[0] != "gpuallreduce":
            continue
        inner = name.removeprefix("gpuallreduce").lstrip(".")
        while inner and inner not in known:
            inner = inner.rpartition(".")[0]
        target = inner or "__init__"
        same_package = target.split(".")[0] == module.split(".")[0]
        assert same_package or level(target) < level(module), f"{module} imports {name}"


@pytest.mark.parametrize("module", modules())
def test_guarded_packages_are_imported_in_their_places_only(module):
    for name in imports(modules()[module]):
        package = name.split(".")[0]
        if package in GUARDED:
            places = GUARDED[package]
            assert module in places or module.split(".")[0] in places, f"{module} imports {name}"


@pytest.mark.parametrize("module", modules())
def test_every_module_says_what_it_does_and_what_it_must_not_know(module):
    text = ast.get_docstring(ast.parse(modules()[module].read_text()))
    assert text, module
    first = text.splitlines()[0]
    assert first.endswith((".", ":", ";", ",")) or len(text.splitlines()) > 1, module
    assert len(first) <= 120
