"""The objects in deploy/kubernetes agree with the programs, and with each other. `make check-kubernetes` validates."""

from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from sluice.gateway.api_keys.key import SCOPES
from sluice.gateway.native.scale import POLICY, SCOPE
from sluice.protocol.scaling.demand import Demand
from sluice.worker.config import load_config
from tests.rules.test_deployment import ROOT, parsed

BASE = ROOT / "deploy" / "kubernetes" / "base"
Object = Any
"""YAML is untyped."""

KUSTOMIZATION: Object = yaml.safe_load((BASE / "kustomization.yaml").read_text())
FILES = sorted(path for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml")
OBJECTS: list[Object] = [one for path in FILES for one in yaml.safe_load_all(path.read_text())]
NAME = "app.kubernetes.io/name"


def named(kind: str, name: str) -> Object:
    """One object."""
    (found,) = [one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def of_kind(kind: str) -> list[Object]:
    """All objects of a kind."""
    return [one for one in OBJECTS if one["kind"] == kind]


def pod_of(workload: Object) -> Object:
    """The pod's spec of a deployment or job."""
    return workload["spec"]["template"]["spec"]


WORKLOADS = [*of_kind("Deployment"), *of_kind("Job")]
CONTAINERS: dict[str, Any] = {
    one["name"]: one
    for load in WORKLOADS
    for part in ("initContainers", "containers")
    for one in pod_of(load).get(part, [])
}
PODS = {load["spec"]["template"]["metadata"]["labels"][NAME]: load for load in WORKLOADS}


class TestGivenTheContainers:
    @pytest.mark.parametrize("name", CONTAINERS)
    def test_when_one_starts_then_its_command_line_is_understood(self, name: str) -> None:
        parsed(CONTAINERS[name]["args"])

    def test_when_a_worker_is_for_a_gpu_then_its_command_line_is_understood(self) -> None:
        (patch,) = yaml.safe_load((BASE.parent / "gpu" / "worker.yaml").read_text())["spec"]["template"]["spec"][
            "containers"
        ]

        assert parsed(patch["args"])["gpu"] == "cuda:0"

    def test_when_all_are_listed_then_each_program_runs(self) -> None:
        commands = {" ".join(one["args"][:2]) for one in CONTAINERS.values()}

        programs = {
            "worker migrate",
            "worker start",
            "worker record",
            "worker callbacks",
            "producer keys",
            "producer serve",
        }
        assert commands == programs

    @pytest.mark.parametrize("name", CONTAINERS)
    def test_when_one_runs_then_it_has_settings_passwords_and_no_privileges(self, name: str) -> None:
        one = CONTAINERS[name]

        of_callbacks = {"secretRef": {"name": "sluice-callbacks", "optional": True}}
        own = [of_callbacks] if name == "callbacks" else []
        assert one["envFrom"] == [{"configMapRef": {"name": "sluice"}}, {"secretRef": {"name": "sluice"}}, *own]
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }

    @pytest.mark.parametrize("name", CONTAINERS)
    def test_when_the_image_is_read_only_then_what_it_writes_lies_in_volumes(self, name: str) -> None:
        mounted = {mount["mountPath"] for mount in CONTAINERS[name]["volumeMounts"]}

        written = {"worker": {"/home/sluice/.cache/huggingface", "/home/sluice/.cache/sluice"}}
        files = {"/home/sluice/files"} if name in ("gateway", "callbacks") else set[str]()
        assert mounted == {"/tmp"} | written.get(name, set()) | files

    def test_when_the_settings_are_read_then_a_worker_understands_them(self) -> None:
        gpu = yaml.safe_load((BASE.parent / "gpu" / "settings.yaml").read_text())["data"]

        config = load_config({**named("ConfigMap", "sluice")["data"], **gpu})

        assert config.metrics.host == "0.0.0.0"
        assert f"{config.metrics.port}" in (BASE / "worker.yaml").read_text()

    @pytest.mark.parametrize(
        ("name", "paths"), [("worker", {"/healthz", "/readyz"}), ("gateway", {"/livez", "/readyz"})]
    )
    def test_when_probes_ask_then_the_program_serves_their_paths(self, name: str, paths: set[str]) -> None:
        one = CONTAINERS[name]
        probes = [one[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]

        assert {probe["path"] for probe in probes} == paths
        assert {probe["port"] for probe in probes} == {port["name"] for port in one["ports"]}


class TestGivenThePods:
    @pytest.mark.parametrize("name", PODS)
    def test_when_one_starts_then_it_gets_no_variables_of_services(self, name: str) -> None:
        """Those of the service `sluice-gateway` begin with SLUICE_, as settings do."""
        assert pod_of(PODS[name])["enableServiceLinks"] is False


class TestGivenTheObjects:
    def test_when_the_folder_is_listed_then_every_file_is_built(self) -> None:
        assert sorted(KUSTOMIZATION["resources"]) == [path.name for path in FILES]

    def test_when_pods_are_selected_then_there_are_such_pods(self) -> None:
        selectors = [one["spec"]["selector"] for kind in ("Deployment", "PodDisruptionBudget") for one in of_kind(kind)]
        named_pods = [selector["matchLabels"][NAME] for selector in selectors]
        named_pods += [one["spec"]["selector"][NAME] for one in of_kind("Service")]
        for policy in of_kind("NetworkPolicy"):
            selector = policy["spec"]["podSelector"]
            named_pods += [name for label, name in selector.get("matchLabels", {}).items() if label == NAME]
            named_pods += [name for rule in selector.get("matchExpressions", []) for name in rule["values"]]

        assert set(named_pods) <= PODS.keys()

    def test_when_volumes_are_mounted_then_they_are_claimed(self) -> None:
        claims = {one["metadata"]["name"] for one in of_kind("PersistentVolumeClaim")}
        volumes = [one for load in WORKLOADS for one in pod_of(load)["volumes"] if "emptyDir" not in one]

        assert {one["persistentVolumeClaim"]["claimName"] for one in volumes} == claims

    def test_when_nobody_is_named_then_nobody_reaches_a_pod(self) -> None:
        default = named("NetworkPolicy", "sluice-default")["spec"]

        assert default["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in default

    def test_when_redis_shares_the_namespace_then_no_policy_keeps_the_pods_from_it(self) -> None:
        default = named("NetworkPolicy", "sluice-default")["spec"]
        [ours] = default["podSelector"]["matchLabels"].items()

        assert ours == ("app.kubernetes.io/part-of", "sluice")
        assert all(ours in load["spec"]["template"]["metadata"]["labels"].items() for load in WORKLOADS)

    def test_when_the_recorder_exports_traces_then_it_reaches_a_collector(self) -> None:
        policy = named("NetworkPolicy", "sluice-traces")["spec"]
        [rule] = policy["egress"]

        assert policy["podSelector"]["matchLabels"] == {NAME: "sluice-recorder"}
        assert rule["ports"] == [{"port": 4318, "protocol": "TCP"}]
        assert rule["to"] == [{"namespaceSelector": {"matchLabels": {"sluice-collector": "true"}}}]


class TestGivenTheScaledObject:
    def test_when_keda_asks_then_the_gateway_serves_the_figure(self) -> None:
        spec = named("ScaledObject", "sluice-worker")["spec"]
        (trigger,) = spec["triggers"]
        url = urlsplit(str(trigger["metadata"]["url"]))
        (service,) = of_kind("Service")

        assert url.hostname == f"{service['metadata']['name']}.{KUSTOMIZATION['namespace']}.svc"
        assert url.port == service["spec"]["ports"][0]["port"]
        assert url.path == f"/queues/{named('ConfigMap', 'sluice')['data']['SLUICE_QUEUE']}/scale"
        assert parse_qs(url.query).keys() <= {parameter.name for parameter in POLICY}
        assert trigger["metadata"]["valueLocation"] in Demand.__dataclass_fields__
        assert int(parse_qs(url.query)["max"][0]) == spec["maxReplicaCount"]

    def test_when_no_job_is_there_then_no_worker_is_left(self) -> None:
        spec = named("ScaledObject", "sluice-worker")["spec"]

        assert spec["minReplicaCount"] == 0
        assert spec["scaleTargetRef"]["name"] == named("Deployment", "sluice-worker")["metadata"]["name"]
        assert "replicas" not in named("Deployment", "sluice-worker")["spec"], "an apply would undo KEDA's number"

    def test_when_it_authenticates_then_the_key_has_the_scope_of_the_route(self) -> None:
        (trigger,) = named("ScaledObject", "sluice-worker")["spec"]["triggers"]
        guide = (ROOT / "docs" / "guide" / "kubernetes.md").read_text()

        (reference,) = named("TriggerAuthentication", trigger["authenticationRef"]["name"])["spec"]["secretTargetRef"]
        assert (trigger["metadata"]["authMode"], reference["parameter"]) == ("bearer", "token")
        assert SCOPE in SCOPES
        assert f"--scopes {SCOPE}" in guide
        assert f"secret generic {reference['name']} --from-literal={reference['key']}=" in guide
