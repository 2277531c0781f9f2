"""Write deploy/grafana and the tables of docs/reference/metrics.md.

python -m tools.monitoring
"""

from tools.monitoring.files import contents


def main() -> None:
    """Write every file."""
    for path, text in contents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
