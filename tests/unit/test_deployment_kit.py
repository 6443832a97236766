"""What conf/ offers for deployment is read by the tools that it is written for."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pyspark
import pytest
import yaml

from compactor.config.settings import load_settings
from compactor.web.server import UNDER_ANY_NAME, is_host_known

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
CONTAINER = CONF / "container"
COMPOSE = CONTAINER / "compose.yaml"
ENTRYPOINT = CONTAINER / "spark-entrypoint.sh"
KUBERNETES = CONF / "kubernetes" / "recompact.yaml"
TOLD = ("DRIVER_URL", "EXECUTOR_ID", "EXECUTOR_CORES", "APPLICATION_ID", "EXECUTOR_POD_IP", "RESOURCE_PROFILE_ID", "EXECUTOR_POD_NAME")
"""What Spark tells an executor by its environment, after ``SPARK_``."""

CHART = CONF / "helm" / "tiered-compactor"


def tool(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """A program that a package of the development dependencies brings along."""
    name, *arguments = command
    return subprocess.run([Path(sys.executable).parent / name, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_containerfile_is_sound() -> None:
    ran = tool("hadolint", "--no-color", CONTAINER / "Containerfile")
    assert (ran.returncode, ran.stdout) == (0, "")


def test_what_the_image_copies_is_there() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (CONTAINER / "Containerfile").read_text(), re.MULTILINE)
    assert copied
    for sources in copied:
        assert [name for name in sources.split() if not (ROOT / name).exists()] == []


def test_programs_of_the_image_and_of_documents_import_what_exists() -> None:
    texts = [*CONF.rglob("*"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    imports = re.compile(r"from ((?:compactor|bloom|checkpoint)[.\w]*) import ([\w, ]+)")
    lines = [found for file in texts if file.is_file() for found in imports.findall(file.read_text(errors="ignore"))]
    named = {(module, name.split()[0]) for module, names in lines for name in names.split(",")}
    assert ("compactor.cleaner.precompile", "precompile_kernels") in named
    assert [each for each in named if not hasattr(importlib.import_module(each[0]), each[1])] == []


def test_the_compose_file_is_one() -> None:
    ran = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_compose_mounts_files_that_are_there() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    mounted = [each.split(":")[0] for service in services.values() for each in service.get("volumes", [])]
    files = [name for name in mounted if name.startswith(".")]
    assert files
    assert [name for name in files if not (CONTAINER / name).is_file()] == []


def test_the_playground_is_a_configuration() -> None:
    settings = load_settings(str(CONTAINER / "playground.toml"), {})
    assert settings.agent.log_dirs
    bucket = yaml.safe_load(COMPOSE.read_text())["services"]["bucket"]["entrypoint"][-1]
    assert "s3 mb s3://tier " in bucket
    assert settings.tier.url.startswith("s3://tier/")


def test_the_playground_answers_to_the_names_that_compose_and_prometheus_use() -> None:
    settings = load_settings(str(CONTAINER / "playground.toml"), {})
    names = {"daemon": settings.daemon.host_names, "agent": settings.agent.host_names}
    (scrape,) = yaml.safe_load((CONTAINER / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target.partition(":")[0]: target for config in scrape["static_configs"] for target in config["targets"]}
    assert targets.keys() == names.keys()
    assert scrape.get("metrics_path", "/metrics") in UNDER_ANY_NAME
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name, target in targets.items():
        (published,) = services[name]["ports"]
        assert is_host_known(target, names[name])
        assert is_host_known(f"localhost:{published.partition(':')[0]}", ())
        assert not is_host_known(target, ())


def test_the_proxy_of_the_documents_asks_under_a_name_that_its_configuration_has(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "access.md").read_text()
    names = re.findall(r"^    (\[daemon\]\n    host_names = .+)$", text, re.MULTILINE)
    (tmp_path / "tiered-compactor.toml").write_text("\n".join(line.strip() for line in names[0].splitlines()) + "\n")
    settings = load_settings(str(tmp_path / "tiered-compactor.toml"), {})
    (host,) = re.findall(r'^    redirect_url +(?:=) "https://([^/"]+)/', text, re.MULTILINE)
    assert is_host_known(host, settings.daemon.host_names)


def test_the_chart_installs_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]


def manifests() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(KUBERNETES.read_text())}


@pytest.mark.parametrize("version", ["1.25", "1.34"])
def test_kubernetes_takes_what_runs_spark_on_it(version: str) -> None:
    found = manifests()
    assert {"ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "CronJob"} == set(found)
    templates = [yaml.safe_load(found["ConfigMap"]["data"][f"{pod}.yaml"]) for pod in ("driver", "executor")]
    for manifest in (*found.values(), *templates):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_what_runs_spark_on_kubernetes_goes_together() -> None:
    found = manifests()
    files = found["ConfigMap"]["data"]
    properties = dict(line.split(None, 1) for line in files["spark.conf"].splitlines() if not line.startswith("#"))
    submit = found["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    mounted = f"{submit['containers'][0]['volumeMounts'][0]['mountPath']}/"
    named = [value for value in (*properties.values(), *submit["containers"][0]["args"]) if value.startswith(mounted)]
    assert sorted(path.removeprefix(mounted) for path in named) == sorted(files)
    account = found["ServiceAccount"]["metadata"]["name"]
    accounts = [value for name, value in properties.items() if name.endswith("serviceAccountName")]
    assert [submit["serviceAccountName"], *accounts] == [account] * 3
    pods = [submit, *(yaml.safe_load(files[f"{pod}.yaml"])["spec"] for pod in ("driver", "executor"))]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images == {properties["spark.kubernetes.container.image"]}
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
        assert pod["securityContext"]["runAsUser"] == 10001
    for pod in ("driver", "executor"):
        container = yaml.safe_load(files[f"{pod}.yaml"])["spec"]["containers"][0]
        assert container["name"] == properties[f"spark.kubernetes.{pod}.podTemplateContainerName"]
        assert container["envFrom"][0]["secretRef"]["name"] == found["Secret"]["metadata"]["name"]
    script = next(argument for argument in submit["containers"][0]["args"] if argument.startswith("local://"))
    assert script.removeprefix("local://") in (CONTAINER / "Containerfile").read_text()


def test_the_configuration_on_kubernetes_is_one(tmp_path: Path) -> None:
    file = tmp_path / "tiered-compactor.toml"
    file.write_text(manifests()["ConfigMap"]["data"]["tiered-compactor.toml"])
    assert load_settings(str(file), {}).tier.url.startswith("s3://")


def started(tmp_path: Path, *arguments: str, **environ: str) -> list[str]:
    """What the entry point of Spark's image runs. Its programs are stood in for by one that says how it was called."""
    said = tmp_path / "said.json"
    programs = [tmp_path / "bin" / "tini", tmp_path / "java" / "bin" / "java", tmp_path / "spark" / "bin" / "spark-submit"]
    for program in programs:
        program.parent.mkdir(parents=True, exist_ok=True)
        # By way of a shell: a first line cannot name an interpreter whose path has spaces.
        code = f"import json, sys; json.dump(sys.argv[1:], open({str(said)!r}, 'w'))"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
        program.chmod(0o755)
    places = {"PATH": f"{programs[0].parent}:{os.environ['PATH']}", "JAVA_HOME": f"{tmp_path}/java", "SPARK_HOME": f"{tmp_path}/spark"}
    ran = subprocess.run([ENTRYPOINT, *arguments], env={**places, **environ}, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    found: list[str] = json.loads(said.read_text())
    assert found[:2] == ["-s", "--"]
    return found[2:]


def test_the_image_for_spark_starts_what_spark_asks_for(tmp_path: Path) -> None:
    arguments = ("--properties-file", "/opt/spark.properties", "local:///a script")
    driver = started(tmp_path, "driver", *arguments, SPARK_DRIVER_BIND_ADDRESS="10.0.0.1")
    assert driver[0] == f"{tmp_path}/spark/bin/spark-submit"
    assert driver[1:5] == ["--conf", "spark.driver.bindAddress=10.0.0.1", "--deploy-mode", "client"]
    assert driver[5:] == [*arguments]
    about = {f"SPARK_{name}": f"the-{name}" for name in TOLD} | {"SPARK_EXECUTOR_MEMORY": "1g"}
    options = {f"SPARK_JAVA_OPT_{number}": f'-Dnumber{number}="of {number}"' for number in range(11)}
    executor = started(tmp_path, "executor", **about, **options)
    assert executor[0] == f"{tmp_path}/java/bin/java"
    assert executor[2:4] == ["-Xms1g", "-Xmx1g"]
    lines = Path(executor[1].removeprefix("@")).read_text().splitlines()
    assert lines == [rf'"-Dnumber{number}=\"of {number}\""' for number in range(11)]
    assert executor[5] == f"{tmp_path}/spark/conf:{tmp_path}/spark/jars/*"
    assert {value for value in executor if value.startswith("the-")} == {f"the-{name}" for name in TOLD}
    assert started(tmp_path, "plan", "--output", "json") == ["tiered-compactor", "plan", "--output", "json"]
    assert started(tmp_path) == ["tiered-compactor"]


def test_java_reads_the_options_as_they_were(tmp_path: Path) -> None:
    java = shutil.which("java")
    assert java, "Spark's own tests need it, too"
    home, folder = Path(java).resolve().parents[1], tmp_path / "bin"
    folder.mkdir()
    (folder / "tini").write_text('#!/bin/sh\nshift 2\nexec "$1" "$2" -XshowSettings:properties -version\n')
    (folder / "tini").chmod(0o755)
    environ = {f"SPARK_{name}": "x" for name in (*TOLD, "EXECUTOR_MEMORY")}
    environ |= {"SPARK_JAVA_OPT_0": '-Dof.us=a "word" and a \\', "JAVA_HOME": str(home), "SPARK_HOME": "/x"}
    environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    ran = subprocess.run([ENTRYPOINT, "executor"], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert 'of.us = a "word" and a \\\n' in ran.stderr


def test_spark_has_what_it_needs_for_kubernetes() -> None:
    assert list((Path(pyspark.__file__).parent / "jars").glob("spark-kubernetes_*.jar"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", sorted((CONF / "systemd").glob("*.service")), ids=lambda unit: unit.name)
def test_the_unit_is_sound(unit: Path, tmp_path: Path) -> None:
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace("/opt/tiered-compactor/bin/tiered-compactor", "/bin/true"))
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", here], capture_output=True, text=True, timeout=60, check=False)
    assert [line for line in ran.stderr.splitlines() if unit.name in line] == []
    assert ran.returncode == 0
