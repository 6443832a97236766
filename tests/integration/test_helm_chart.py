"""The Helm chart, rendered by Helm itself: every manifest is what Kubernetes accepts, and the configuration is one of ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from compactor.config.settings import load_settings
from compactor.features.serve.access import require_safe_listener
from compactor.features.serve.endpoint import parse_nodes
from compactor.web.server import is_host_known
from tests.support.go_tools import Unbuildable, go_tool

pytestmark = pytest.mark.timeout(1_200)  # the first of them waits for Helm to be built
CHART = Path(__file__).parents[2] / "conf" / "helm" / "tiered-compactor"
HELM = "v3.22.0"
VERSIONS = ("1.25", "1.34")
TIER = '[tier]\nurl = "s3://bucket/tier"\n'
MINIMAL = {"config": TIER}
FULL = {
    "config": TIER + '[cleaner]\nmin_cleanable_dirty_ratio = 0.25\n[topics."orders-.*"]\ndelete_retention_ms = 86400000\n',
    "image": {"repository": "registry.example/compactor", "tag": "1.2.3", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "envFrom": [{"secretRef": {"name": "keys"}}],
    "env": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    "secretFiles": "pems",
    "daemon": {
        "replicas": 3,
        "state": {"persistent": True, "storageClassName": "gp3", "size": "50Gi"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "podLabels": {"team": "data"},
        "podAnnotations": {"note": "x"},
    },
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}},
    "service": {"hostNames": ["compactor.example.org"]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}, "runbookUrl": "https://docs.example/operating.md"},
    "dashboard": {"enabled": True},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "podDisruptionBudget": {"enabled": True},
}


SERVE = {"enabled": True, "replicas": 2, "tlsSecret": "tls", "usersSecret": "users"}


OF_THE_OPERATOR = ("ServiceMonitor", "PrometheusRule")
"""Kinds of the Prometheus operator, which Kubernetes does not know."""


@pytest.fixture(scope="module")
def helm() -> Path:
    try:
        return go_tool("helm.sh/helm/v3/cmd/helm", HELM)
    except Unbuildable as why:
        pytest.skip(str(why))


def rendered(helm: Path, folder: Path, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command: list[str | Path] = [helm, "template", "main", CHART, "--values", file, "--kube-version", "1.31.0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("values", [MINIMAL, FULL], ids=["minimal", "full"])
def test_kubernetes_accepts_it(helm: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    ran = rendered(helm, tmp_path, values)
    assert ran.returncode == 0, ran.stderr
    found = [one for one in yaml.safe_load_all(ran.stdout) if one]
    kinds = {one["kind"]: one for one in found if not one["metadata"]["name"].endswith("-dashboard")}
    optional = {"NetworkPolicy", "PodDisruptionBudget", *OF_THE_OPERATOR} if values is FULL else set()
    assert {"ConfigMap", "Service", "ServiceAccount", "StatefulSet", *optional} == set(kinds)
    for manifest in found:
        if manifest["kind"] not in OF_THE_OPERATOR:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)
    pod = kinds["StatefulSet"]["spec"]["template"]["spec"]
    names = {volume["name"] for volume in pod["volumes"]} | {
        claim["metadata"]["name"] for claim in kinds["StatefulSet"]["spec"].get("volumeClaimTemplates", [])
    }
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == names
    assert pod["securityContext"]["runAsNonRoot"]
    assert kinds["Service"]["spec"]["selector"].items() <= kinds["StatefulSet"]["spec"]["template"]["metadata"]["labels"].items()
    file = tmp_path / "tiered-compactor.toml"
    file.write_text(kinds["ConfigMap"]["data"]["tiered-compactor.toml"])
    assert load_settings(str(file), {}).tier.url == "s3://bucket/tier"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": ""}, "config"),
        ({"config": "[cleaner]\nthreads = 2\n"}, "config"),
        ({"daemon": {"replica": 2}}, "replica"),
        ({"daemon": {"state": {"size": "20 GB"}}}, "size"),
        ({"serviceMonitor": {"interval": "often"}}, "interval"),
    ],
)
def test_values_that_are_none_are_refused(helm: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    ran = rendered(helm, tmp_path, {**MINIMAL, **change})
    assert ran.returncode != 0
    assert said in ran.stderr


def test_helm_finds_nothing_to_say(helm: Path, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({**FULL, "serve": SERVE}))
    ran = subprocess.run([helm, "lint", "--strict", CHART, "--values", file], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout


def test_alerts_and_dashboard_of_the_chart_are_those_of_conf_monitoring(helm: Path, tmp_path: Path) -> None:
    found = [one for one in yaml.safe_load_all(rendered(helm, tmp_path, FULL).stdout) if one]
    rules = next(one for one in found if one["kind"] == "PrometheusRule")["spec"]
    written = (CHART.parents[1] / "monitoring" / "alerts.yml").read_text().replace("docs/operating.md", "https://docs.example/operating.md")
    assert rules == yaml.safe_load(written)
    dashboard = next(one for one in found if one["metadata"]["name"].endswith("-dashboard"))
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = json.loads(dashboard["data"]["tiered-compactor.json"])
    assert shown == json.loads((CHART.parents[1] / "monitoring" / "dashboard.json").read_text())


@pytest.mark.parametrize(
    ("cloud", "scheme", "label"), [("aws", "s3", {}), ("google", "gs", {}), ("azure", "az", {"azure.workload.identity/use": "true"})]
)
def test_values_for_a_cloud_give_the_pods_an_identity(helm: Path, tmp_path: Path, cloud: str, scheme: str, label: dict[str, str]) -> None:
    values = yaml.safe_load((CHART.parent / f"values-{cloud}.yaml").read_text())
    ran = rendered(helm, tmp_path, values)
    assert ran.returncode == 0, ran.stderr
    kinds = {one["kind"]: one for one in yaml.safe_load_all(ran.stdout) if one}
    assert kinds["ServiceAccount"]["metadata"]["annotations"] == values["serviceAccount"]["annotations"]
    assert label.items() <= kinds["StatefulSet"]["spec"]["template"]["metadata"]["labels"].items()
    file = tmp_path / "tiered-compactor.toml"
    file.write_text(kinds["ConfigMap"]["data"]["tiered-compactor.toml"])
    assert load_settings(str(file), {}).tier.url.startswith(f"{scheme}://")


def test_a_tier_in_hdfs_is_accepted(helm: Path, tmp_path: Path) -> None:
    assert rendered(helm, tmp_path, {"config": '[tier]\nurl = "hdfs://namenode/tier"\n'}).returncode == 0


@pytest.mark.parametrize(("values", "more"), [(MINIMAL, []), (FULL, ["compactor.example.org"])], ids=["minimal", "full"])
def test_the_pages_answer_to_the_names_of_the_service(helm: Path, tmp_path: Path, values: dict[str, Any], more: list[str]) -> None:
    found = {one["kind"]: one for one in yaml.safe_load_all(rendered(helm, tmp_path, values).stdout) if one}
    service = found["Service"]["metadata"]["name"]
    variables = {each["name"]: each["value"] for each in found["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["env"]}
    (tmp_path / "tiered-compactor.toml").write_text(values["config"])
    settings = load_settings(
        str(tmp_path / "tiered-compactor.toml"), {name: value for name, value in variables.items() if name.startswith("TIERED")}
    )
    inside = [service, f"{service}.default", f"{service}.default.svc", f"{service}.default.svc.cluster.local"]
    assert [*settings.daemon.host_names] == [*inside, *more]
    assert all(is_host_known(f"{name}:8080", settings.daemon.host_names) for name in (*inside, *more))


# ---- the endpoint for Kafka clients ----------------------------------------------------------------------------------------------


def of_the_endpoint(helm: Path, folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Its manifests, by kind. The others are those of a chart without it."""
    found = list(yaml.safe_load_all(rendered(helm, folder, values).stdout))
    others = list(yaml.safe_load_all(rendered(helm, folder, {**values, "serve": {"enabled": False}}).stdout))
    assert [one for one in found if one and one["metadata"]["name"] != "main-tiered-compactor-serve"] == [one for one in others if one]
    return {one["kind"]: one for one in found if one and one not in others}


@pytest.mark.parametrize("values", [MINIMAL, FULL], ids=["minimal", "full"])
def test_kubernetes_accepts_the_endpoint_whose_pods_are_not_the_daemons(helm: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    mine = of_the_endpoint(helm, tmp_path, {**values, "serve": SERVE | {"from": [{"podSelector": {}}], "podLabels": {"team": "data"}}})
    optional = {"NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor"} if values is FULL else set()
    assert set(mine) == {"StatefulSet", "Service", *optional}
    for kind, manifest in mine.items():
        if kind not in OF_THE_OPERATOR:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)
    labels = mine["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    daemon = {one["kind"]: one for one in yaml.safe_load_all(rendered(helm, tmp_path, values).stdout) if one}
    assert not daemon["Service"]["spec"]["selector"].items() <= labels.items()
    assert mine["Service"]["spec"]["selector"].items() <= labels.items()
    pod = mine["StatefulSet"]["spec"]["template"]["spec"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"]
    if values is FULL:
        ports = {rule["ports"][0]["port"]: rule["from"] for rule in mine["NetworkPolicy"]["spec"]["ingress"]}
        assert ports == {"http": FULL["networkPolicy"]["from"], "kafka": [{"podSelector": {}}]}  # type: ignore[index]


@pytest.mark.parametrize("addresses", [[], ["reader-0.example.org:443", "reader-1.example.org:444"]])
def test_each_replica_of_the_endpoint_knows_its_own_address(helm: Path, tmp_path: Path, addresses: list[str]) -> None:
    stateful = of_the_endpoint(helm, tmp_path, {**MINIMAL, "serve": {**SERVE, "addresses": addresses}})["StatefulSet"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    (tmp_path / "tiered-compactor.toml").write_text(TIER)
    program = tmp_path / "tiered-compactor"
    program.write_text('#!/bin/sh\n[ "$*" = serve ] && exec env\n')
    program.chmod(0o755)
    name = stateful["metadata"]["name"]
    for number in range(2):
        pod = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTNAME": f"{name}-{number}"}
        ran = subprocess.run(container["command"], env=variables | pod, capture_output=True, text=True, timeout=60, check=True)
        told = dict(line.split("=", 1) for line in ran.stdout.splitlines() if line.startswith("TIERED_COMPACTOR"))
        settings = load_settings(str(tmp_path / "tiered-compactor.toml"), told).serve
        require_safe_listener(settings, settings.listen.rpartition(":")[0])
        me, nodes = parse_nodes(settings, settings.listen)
        own = [f"{name}-{each}.{name}.default.svc:9192" for each in range(2)]
        assert [f"{node.host}:{node.port}" for node in nodes] == (addresses or own)
        assert me == nodes[number]
        listens = {"kafka": settings.listen, "http": settings.pages_listen}
        assert {port["name"]: f"0.0.0.0:{port['containerPort']}" for port in container["ports"]} == listens


@pytest.mark.parametrize(
    ("change", "said"),
    [({"tlsSecret": ""}, "tlsSecret"), ({"usersSecret": ""}, "usersSecret"), ({"addresses": ["one:1"]}, "1 addresses for 2 replicas")],
)
def test_an_endpoint_without_tls_or_users_is_not_installed(helm: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    ran = rendered(helm, tmp_path, {**MINIMAL, "serve": {**SERVE, **change}})
    assert ran.returncode != 0
    assert said in ran.stderr
