"""`python -m sluice.producer`, the same as the `producer` command."""

from sluice.producer.cli.main import main

if __name__ == "__main__":
    main()
