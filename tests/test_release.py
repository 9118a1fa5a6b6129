"""Facts of a release: version, changelog, declared dependencies, public API, keys of result files, release workflow.

tests/test_package.py builds and installs the wheel. docs/stability.md is the policy that these tests compare with code.
"""

import importlib.metadata
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import alignkit
from alignkit import bisect, cli, drift
from alignkit.bisect.recording import Recording
from alignkit.check import plan
from alignkit.check.run import Compared
from alignkit.megatron import versions as megatron_versions
from alignkit.runtime.families import CPU, FAMILIES
from alignkit.vllm import versions as vllm_versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
POLICY = (ROOT / "docs/stability.md").read_text()
TODAY = {"vllm", "vllm-cpu", "megatron", "report", "watch", "test", "lint", "docs"}
"""Extras of 0.1.0; a release may add extras, but not remove them."""
ON_GPUS = {"vllm"}
"""Extras for machines with a GPU, whose packages the pinned environments lack."""
PYTHONS = ("3.11", "3.12", "3.13")


def pins(*files: str) -> dict[str, str]:
    """Return name -> version specifier of files in requirements/."""
    lines = "\n".join((ROOT / "requirements" / file).read_text() for file in files).splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): str(r.specifier) for r in requirements}


def declared(*extras: str, python: str = "3.12", machine: str = "x86_64") -> list[Requirement]:
    """Return the declared dependencies of extras ("" for the package's own), on Linux."""
    found = []
    for extra in extras:
        for requirement in map(Requirement, EXTRAS[extra] if extra else PROJECT["dependencies"]):
            marks = {"python_version": python, "sys_platform": "linux", "platform_machine": machine}
            if requirement.name == "alignkit":
                found += declared(*requirement.extras, python=python, machine=machine)
            elif requirement.marker is None or requirement.marker.evaluate(marks):
                found.append(requirement)
    return found


def test_version_is_the_same_in_package_metadata_and_changelog():
    assert importlib.metadata.version("alignkit") == alignkit.__version__, "reinstall alignkit: `make setup`"
    newest = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)[1]
    assert newest.split(" - ")[0] == alignkit.__version__


def test_version_is_written_once():
    """pyproject.toml reads the version from the package."""
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    written = [
        file.relative_to(ROOT).as_posix()
        for file in [ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "alignkit").rglob("*.py")]
        if f'"{alignkit.__version__}"' in file.read_text()
    ]
    assert written == ["alignkit/__init__.py"]


def test_changelog_has_releases_in_order_with_known_sections():
    titles = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert titles[0] == "Unreleased"
    releases = [re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", title).groups() for title in titles[1:]]
    versions = [Version(version) for version, _ in releases]
    assert versions == sorted(set(versions), reverse=True) and versions[-1] == Version("0.1.0")
    assert [date for _, date in releases] == sorted((date for _, date in releases), reverse=True)
    order = ["Added", "Changed", "Fixed", "Breaking"]
    for body in re.split(r"^## .*$", CHANGELOG, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", body, re.MULTILINE)
        assert sections == [name for name in order if name in sections]


def test_new_names_of_the_breaking_changes_exist():
    breaking = CHANGELOG.partition("## 0.2.0")[2].partition("### Breaking")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(alignkit\.[^`]*)`.* \| (.*) \|$", breaking, re.MULTILINE)
    assert len(rows) >= 7
    modules = {"alignkit.bisect", "alignkit.runtime.machine", "alignkit.ops.golden"}
    for name in ("forks", "layout", "model", "replicas", "rollout", "routing", "store", "terminal", "train"):
        modules.add(f"alignkit.jobs.{name}")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"alignkit.check.{name}")
    for module in modules:
        assert importlib.util.find_spec(module) is not None, module
        assert module in breaking or module.rpartition(".")[0] in breaking, module
    for gone in ("alignkit.drift.bisect", "alignkit.golden", "alignkit.check.machine"):
        assert gone in breaking and importlib.util.find_spec(gone) is None, gone


@pytest.mark.parametrize("python", PYTHONS)
def test_pinned_versions_satisfy_the_declared_bounds(python):
    """The tests run with the pinned versions, so a bound that excludes one of them is wrong."""
    pinned = pins(f"cpu-py{python.replace('.', '')}.txt", "docs.txt") | {"torch": "==2.13.0"}
    assert "torch==2.13.0" in (ROOT / "Makefile").read_text()
    frameworks = pins("frameworks.txt")
    for requirement in declared("", *(set(EXTRAS) - ON_GPUS), python=python):
        name = canonicalize_name(requirement.name)
        pin = (frameworks if name == "verl" else pinned).get(name)
        assert pin is not None, f"{name} is declared in pyproject.toml, but pinned in no file of requirements/"
        if name == "triton":  # CUDA builds of torch bring another version than CPU builds get
            bounds = [
                {s.operator: s.version for s in specifiers} for specifiers in (SpecifierSet(pin), requirement.specifier)
            ]
            assert bounds[0]["<"] == bounds[1]["<"] and Version(bounds[0][">="]) >= Version(bounds[1][">="])
            continue
        assert re.fullmatch(r"==[^*,]+", pin), f"{name}: must be pinned, got {pin}"
        assert requirement.specifier.contains(pin[2:]), f"{name}: {requirement.specifier} excludes the pinned {pin}"


def test_validated_versions_satisfy_the_declared_bounds():
    declared_here = {r.name: r.specifier for r in declared("")}
    for family in FAMILIES:
        for versions in family.validated:
            for name, version in versions.items():
                assert declared_here[name].contains(version), f"{name} {version} of {family.name}"


def test_engine_extras_accept_the_supported_versions():
    """An extra accepts each minor of vLLM that the adapter supports on its devices, and no other one of the table."""
    for extra, on_gpu in (("vllm", True), ("vllm-cpu", False)):
        specifier = declared(extra)[0].specifier
        for name in vllm_versions.VALIDATED:
            version, _, device = name.partition(" on ")
            assert specifier.contains(version) == ((device == "cuda") == on_gpu), f"{extra} {version}"
    for python in PYTHONS:
        (requirement,) = declared("megatron", python=python)
        assert str(requirement.specifier).removeprefix("==") in megatron_versions.VALIDATED


def test_triton_is_declared_where_it_has_wheels():
    for machine, present in (("x86_64", True), ("aarch64", True), ("ppc64le", False)):
        assert ("triton" in {r.name for r in declared("", machine=machine)}) == present


def test_transformers_is_declared_where_it_is_imported():
    importing = {
        file.relative_to(ROOT / "alignkit").parts[0]
        for file in (ROOT / "alignkit").rglob("*.py")
        if re.search(r"^ *(import|from) transformers\b", file.read_text(), re.MULTILINE)
    }
    # models: a config.json on the Hub, for vLLM's adapter and for verl, which requires transformers itself.
    assert importing == {"bisect", "models"}, "declare transformers for the package that imports it"
    for extra in ("hf", "vllm", "vllm-cpu"):
        assert "transformers" in {r.name for r in declared(extra)}, extra


def test_extras():
    assert set(EXTRAS) >= TODAY | {"verl", "docs", "dev", "hf"}
    assert {r.name for r in declared("dev")} == {r.name for r in declared("test", "lint")}
    assert str(declared("verl")[0].specifier) == pins("frameworks.txt")["verl"]
    texts = [file.read_text() for folder in ("alignkit", "docs") for file in (ROOT / folder).rglob("*.[pm][yd]")]
    named = {name for text in texts for name in re.findall(r"alignkit\[([a-z-]+)\]", text)}
    assert named and named <= set(EXTRAS), named - set(EXTRAS)


def test_python_bounds_are_the_tested_versions():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert tuple(workflow["jobs"]["test"]["strategy"]["matrix"]["python"]) == PYTHONS
    bounds = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert [f"3.{minor}" for minor in range(8, 20) if bounds.contains(f"3.{minor}.0")] == list(PYTHONS)
    classified = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert tuple(classified) == PYTHONS


def test_release_workflow_builds_the_tag_with_nvcc():
    """YAML reads the key `on` as true."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    steps = {name: [step.get("run", "") for step in job["steps"]] for name, job in workflow["jobs"].items()}
    assert "grep ^nvidia- requirements/cpu-py312.txt" in "".join(steps["wheel"])
    nvidia = {name for name in pins("cpu-py312.txt") if name.startswith("nvidia-")}
    assert nvidia >= {"nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-nvvm"}
    assert any("-m build --wheel" in step for step in steps["wheel"])
    assert any("make docs" in step for step in steps["docs"])


def test_policy_lists_the_public_modules():
    """The site requires documentation of every name in docs/hooks.py: PUBLIC."""
    source = (ROOT / "docs/hooks.py").read_text()
    public = set(re.findall(r'^    "(alignkit[.\w]*)",$', source, re.MULTILINE))
    table = POLICY.partition("## Public API")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(alignkit[.\w]*)` \| the names in `__all__`", table, re.MULTILINE))
    assert listed == public and "alignkit.bisect" in public
    for module in public:
        assert importlib.import_module(module).__all__


def test_policy_lists_the_commands():
    table = POLICY.partition("## Commands")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `alignkit (\w+)`", table, re.MULTILINE)) == set(cli.cli.commands)


def keys(file: str) -> set[str]:
    """Return the keys that the policy lists for a file, without the fields of DriftReport."""
    (row,) = re.findall(rf"^\| `{re.escape(file)}`[^|]*\| (.*) \|$", POLICY, re.MULTILINE)
    return set(re.findall(r"`([a-z_]+)`", row)) - {"worst"}


@pytest.fixture
def report():
    return drift.compare_tensors(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.5]]))


def test_policy_lists_the_keys_of_check_json(report):
    row = plan.rows(["bfloat16"], 1, full=False)[0]
    fields = set(report.to_json()) - {"worst"}
    found = set(Compared(row, report, None, None, routing=(0, 1)).to_json())
    assert found - fields == keys("check.json") - {"model"}
    assert fields <= found


def test_policy_lists_the_keys_of_bisect_json():
    side = Recording.__new__(Recording)
    side.engine, side.contract, side.settings, side.weights, side.architecture, side.sequences = "", "", {}, "", {}, []
    comparison = bisect.Comparison([], [], None, [], [], [])
    assert set(bisect.Result(side, side, ("a", "b"), comparison, None, None).to_json()) == keys("bisect.json")


def test_policy_lists_the_keys_of_monitor_records(tmp_path):
    with drift.Monitor(tmp_path, contract=CPU.contract_id, sinks=[]) as monitor:
        monitor.log(0, torch.tensor([[-1.0]]), torch.tensor([[-1.0]]))
    (file,) = tmp_path.glob("monitor-rank*.jsonl")
    (record,) = file.read_text().splitlines()
    policy = keys("monitor-rankNNNNN.jsonl") | {"worst"}
    assert set(json.loads(record)) == policy
