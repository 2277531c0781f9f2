"""Validate objects of Kubernetes, a JSON array on standard input; print a line for each fault. Run by the check."""

import json
import sys

import kubernetes_validate


def main() -> None:
    """Validate for the version of Kubernetes that is the only argument."""
    for item in json.load(sys.stdin):
        try:
            kubernetes_validate.validate(item, sys.argv[1], strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path))
            print(f"{item.get('kind')} {item.get('metadata', {}).get('name')}: {path}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError as error:
            print(f"{item.get('kind')} {item.get('metadata', {}).get('name')}: {error}")


if __name__ == "__main__":
    main()
