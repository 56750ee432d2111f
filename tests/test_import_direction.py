"""The house: a part imports only from floors below its own, and files and folders stay small."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vllm_neuron

PACKAGE = Path(vllm_neuron.__file__).parent

# Lowest first. Parts of one floor don't import each other, but for the order that is given inside the lowest.
FLOORS = [
    ["__init__"],
    ["abi"],
    ["errors"],
    ["digests"],
    ["parsers"],
    ["envs"],
    ["metrics", "logs"],
    ["host"],
    ["lowering", "runtime"],
    ["targets", "routes"],
    ["cache", "compilers"],
    ["compile"],
    ["model"],
    ["graphs"],
    ["execute"],
    ["jobs"],
    ["serve"],
    ["cli"],
    ["__main__"],
]
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}

# Who may import these, wherever in a file the import stands.
OWNERS = {
    "vllm": ("model/", "graphs/", "execute/", "jobs/", "serve/", "cli/"),
    "torch_mlir": ("lowering",),
    "jax": ("lowering/xla/",),
    "jaxlib": ("lowering/xla/",),
    "iree": ("compilers/iree", "runtime/iree"),
}

FILES = sorted(PACKAGE.rglob("*.py"))


def relative(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").as_posix()


def part_of(file: Path) -> str:
    return relative(file).split("/")[0]


def imported_modules(tree: ast.Module, package: str) -> set[str]:
    """Every module that a file names in an import statement, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def modules_of(file: Path) -> set[str]:
    package = ".".join(["vllm_neuron", *file.relative_to(PACKAGE).parts[:-1]])
    return imported_modules(ast.parse(file.read_text()), package)


def own_parts(file: Path) -> set[str]:
    """The parts of this package that ``file`` imports."""
    names = [module.split(".") for module in modules_of(file)]
    parts = {name[1] for name in names if name[0] == "vllm_neuron" and len(name) > 1}
    return {part for part in parts if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()}


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_go_down(file: Path) -> None:
    part = part_of(file)
    upward = sorted(other for other in own_parts(file) if other != part and FLOOR_OF[other] >= FLOOR_OF[part])
    assert not upward, f"{relative(file)} is on floor {FLOOR_OF[part]}, and imports {upward}"


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_heavy_libraries_stay_with_their_owners(file: Path) -> None:
    roots = {module.split(".")[0] for module in modules_of(file)}
    for library in roots & set(OWNERS):
        assert relative(file).startswith(OWNERS[library]), f"{relative(file)} imports {library}"


def imported_files() -> dict[str, set[str]]:
    """For each file of the package, the files that it imports, by their names below the package."""
    names = {relative(file): file for file in FILES}
    found: dict[str, set[str]] = {}
    for name, file in names.items():
        modules = {module.removeprefix("vllm_neuron.").replace(".", "/") for module in modules_of(file)}
        # What is imported is a module, or a name in one.
        own = {module if module in names else module.rpartition("/")[0] for module in modules}
        found[name] = own & names.keys() - {name}
    return found


def test_no_circle_between_files() -> None:
    list(TopologicalSorter(imported_files()).static_order())


# Lowest first; the files that stand above the rooms of the cache are not in it.
ROOMS = ["disk", "store", "local", "remote", "manifests"]


def test_rooms_of_the_cache_import_down() -> None:
    for name, imported in imported_files().items():
        for other in imported:
            rooms = [path.split("/")[1] for path in (name, other) if path.startswith("cache/")]
            if len(rooms) == 2 and set(rooms) <= set(ROOMS):
                assert ROOMS.index(rooms[1]) <= ROOMS.index(rooms[0]), f"{name} imports {other}"


def test_every_part_has_a_floor() -> None:
    assert {part_of(file) for file in FILES} <= set(FLOOR_OF)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import vllm_neuron.serve.worker", {"vllm_neuron.serve.worker"}),
        ("def f():\n    from vllm_neuron import jobs", {"vllm_neuron.jobs"}),
        ("if True:\n    from . import local", {"vllm_neuron.cache.local"}),
        ("from ..serve import worker", {"vllm_neuron.serve.worker"}),
        ("from .. import serve", {"vllm_neuron.serve"}),
    ],
)
def test_the_reader_sees_every_form_of_import(source: str, expected: set[str]) -> None:
    assert imported_modules(ast.parse(source), "vllm_neuron.cache") == expected


def test_the_xla_route_can_be_deleted() -> None:
    """Nothing outside its folder names it but the table of routes, in an import or in a string."""
    folder = "vllm_neuron.lowering.xla"
    naming = set()
    for file in (file for file in FILES if not relative(file).startswith("lowering/xla/")):
        tree = ast.parse(file.read_text())
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        if any(folder in str(name) for name in modules_of(file) | strings):
            naming.add(relative(file))
    assert naming == {"routes"}


def test_nothing_reaches_up_by_a_name() -> None:
    """What is imported at run time by a string goes down too; vLLM's and torch's registries take the rest."""
    upward: set[tuple[str, str]] = set()
    for file in FILES:
        part = part_of(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = [above for above in FLOOR_OF if f"vllm_neuron.{above}." in node.value]
                upward.update((relative(file), above) for above in named if FLOOR_OF[above] > FLOOR_OF[part])
    assert not upward


def test_a_file_is_read_in_one_sitting_and_a_folder_at_one_look() -> None:
    long = [relative(file) for file in FILES if len(file.read_text().splitlines()) > 300]
    folders = {file.parent for file in FILES}
    full = [str(folder.relative_to(PACKAGE)) for folder in folders if len(list(folder.glob("*.py"))) > 15]
    assert (long, full) == ([], [])
