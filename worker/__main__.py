"""`python -m worker` is the `worker` command."""

from worker.cli import main

if __name__ == "__main__":
    main()
