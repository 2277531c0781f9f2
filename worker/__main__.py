"""`python -m sluice.worker` is the `worker` command."""

from sluice.worker.cli import main

if __name__ == "__main__":
    main()
