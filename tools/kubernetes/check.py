"""Check `deploy/kubernetes`: what kustomize builds is what Kubernetes and KEDA accept.

    make check-kubernetes

Objects of Kubernetes are validated strictly by kubernetes-validate: an unknown field is a fault. It lets unknown kinds
pass, so those of KEDA go through the models of `@kubernetes-models/keda`, and, because these let unknown fields pass,
through their types and the TypeScript compiler. An object of any other group is a fault. Nothing is applied: there is
no cluster here.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.kubernetes.environment import Environment, installed

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu", "gpu")
VERSION = "1.30"
"""Oldest version of Kubernetes that the objects are for; the newest is that of kubernetes-validate."""

NEWEST = "1.37"
KEDA = "keda.sh/v1alpha1"
CORE = ("v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "policy/v1")
TYPES = "@kubernetes-models/keda/keda.sh/v1alpha1"

Manifest = Mapping[str, Any]  # Any: YAML is untyped


def build(environment: Environment, folder: Path) -> list[Manifest]:
    """Return what kustomize builds of a folder.

    Raises:
        RuntimeError: it builds nothing; the message is kustomize's.
    """
    code, output = environment.run("kustomize", "build", folder.resolve())
    if code != 0:
        raise RuntimeError(f"kustomize build {folder}: {output.strip()}")
    return [document for document in yaml.safe_load_all(output) if document]


def faults_of(environment: Environment, objects: Sequence[Manifest]) -> Iterator[str]:
    """Yield the errors of objects."""
    core = [document for document in objects if document.get("apiVersion") in CORE]
    for version in (VERSION, NEWEST):
        yield from environment.core_faults(core, version)
    yield from keda_faults(environment, [document for document in objects if document.get("apiVersion") == KEDA])
    for document in objects:
        if document.get("apiVersion") not in (*CORE, KEDA):
            yield f"{document.get('kind')}: nothing validates {document.get('apiVersion')}"


def keda_faults(environment: Environment, objects: Sequence[Manifest]) -> Iterator[str]:
    """Yield the errors of KEDA's objects: first by its schemas, then by its types."""
    if not objects:
        return
    code, output = environment.run("node", "validate.mjs", given=json.dumps(objects))
    yield from output.splitlines() if code == 0 else [output]
    code, output = environment.run("tsc", *_options(_source_of(environment, objects)))
    if code != 0:
        yield from output.splitlines()


def _source_of(environment: Environment, objects: Sequence[Manifest]) -> Path:
    """Write a program that assigns each object to its type: the compiler refuses fields that the type lacks."""
    lines = [f'import type * as keda from "{TYPES}";']
    for number, document in enumerate(objects):
        lines.append(f"export const object{number}: keda.I{document.get('kind')} = {json.dumps(document)};")
    path = environment.folder / "objects.ts"
    path.write_text("\n".join(lines))
    return path


def _options(source: Path) -> tuple[str | Path, ...]:
    return ("--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler", source)


def main() -> None:
    """Check every overlay, print the errors, and end with 1 if there are any."""
    environment, num_faults = installed(), 0
    for overlay in OVERLAYS:
        folder = ROOT / "deploy" / "kubernetes" / overlay
        objects = build(environment, folder)
        faults = list(faults_of(environment, objects))
        num_faults += len(faults)
        print(f"{overlay}: {len(objects)} objects, {len(faults)} faults")
        print("".join(f"  {fault}\n" for fault in faults), end="")
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
