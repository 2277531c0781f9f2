"""`make check-kubernetes`: the check accepts what kustomize builds, and refuses what Kubernetes or KEDA would."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tools.kubernetes.check import OVERLAYS, ROOT, build, faults_of
from tools.kubernetes.environment import Environment, installed

pytestmark = [pytest.mark.clients, pytest.mark.long]

Manifest = dict[str, Any]  # Any: YAML is untyped


@pytest.fixture(scope="module")
def environment() -> Environment:
    """The tools, installed once."""
    return installed()


@pytest.fixture(scope="module")
def built(environment: Environment) -> dict[str, Manifest]:
    """What kustomize builds for GPUs, by kind and name."""
    objects = [dict(one) for one in build(environment, ROOT / "deploy" / "kubernetes" / "gpu")]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in objects}


Change = Callable[[Any], None]
"""Breaks an object."""


def change(path: str, value: object) -> Change:
    """Set a field by its path."""
    *parents, last = path.split(".")

    def apply(part: Any) -> None:
        for parent in parents:
            part = part[int(parent) if isinstance(part, list) else parent]
        part[last] = value

    return apply


def drop(name: str) -> Change:
    """Remove a field of the spec."""
    return lambda whole: whole["spec"].pop(name)


def rename(old: str, new: str) -> Change:
    """Misspell a field of the spec."""
    return lambda whole: whole["spec"].update({new: whole["spec"].pop(old)})


class TestGivenTheOverlays:
    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_when_one_is_built_then_nothing_is_wrong(self, environment: Environment, overlay: str) -> None:
        objects = build(environment, ROOT / "deploy" / "kubernetes" / overlay)

        assert list(faults_of(environment, objects)) == []
        assert {one["metadata"]["namespace"] for one in objects} == {"sluice"}

    def test_when_it_is_for_gpus_then_a_worker_asks_for_one(self, built: dict[str, Manifest]) -> None:
        (worker,) = built["Deployment/sluice-worker"]["spec"]["template"]["spec"]["containers"]

        assert worker["args"] == ["worker", "start", "--gpu", "0", "--no-recorder"]
        assert worker["resources"]["limits"] == {"nvidia.com/gpu": "1"}
        assert built["ConfigMap/sluice"]["data"].keys() >= {"SLUICE_MODEL", "SLUICE_QUEUE"}


class TestGivenABrokenObject:
    @pytest.mark.parametrize(
        ("name", "break_it", "words"),
        [
            ("ScaledObject/sluice-worker", drop("scaleTargetRef"), "scaleTargetRef"),
            ("ScaledObject/sluice-worker", drop("triggers"), "triggers"),
            ("ScaledObject/sluice-worker", rename("minReplicaCount", "minReplicas"), "minReplicas"),
            ("ScaledObject/sluice-worker", change("spec.minReplicaCount", "none"), "integer"),
            ("ScaledObject/sluice-worker", change("spec.triggers.0.metadata.targetValue", 1), "string"),
            ("ScaledObject/sluice-worker", change("kind", "ScaledObjekt"), "ScaledObjekt"),
            ("ScaledObject/sluice-worker", change("apiVersion", "keda.sh/v2"), "nothing validates"),
            ("TriggerAuthentication/sluice-scaler", rename("secretTargetRef", "secret"), "secret"),
            ("Deployment/sluice-gateway", drop("selector"), "selector"),
            ("Deployment/sluice-gateway", rename("replicas", "replica"), "replica"),
            ("NetworkPolicy/sluice-default", change("spec.policyTypes", "Ingress"), "policyTypes"),
        ],
    )  # fmt: skip
    def test_when_it_is_checked_then_the_fault_is_named(
        self, environment: Environment, built: dict[str, Manifest], name: str, break_it: Change, words: str
    ) -> None:  # fmt: skip
        broken = deepcopy(built[name])
        break_it(broken)

        faults = list(faults_of(environment, [broken]))

        assert any(words in fault for fault in faults), faults

    def test_when_a_file_is_missing_then_kustomize_says_which(self, environment: Environment, tmp_path: Path) -> None:
        (tmp_path / "kustomization.yaml").write_text("resources: [nowhere.yaml]\n")

        with pytest.raises(RuntimeError, match=r"nowhere\.yaml"):
            build(environment, tmp_path)
