"""Run the suite on an engine: `python -m sluice.engine.conformance MODULE:FACTORY`.

FACTORY takes nothing and returns a `Subject`. Prints a line for each behaviour and the resume matrix; exits with 1 if
a behaviour is violated.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from sluice.engine.conformance.behaviours import CHECKS, checks_for
from sluice.engine.conformance.resumption import Resume, resume_matrix
from sluice.engine.conformance.subject import Driver, LeftOut, Subject, Violation

LETTERS = {Resume.BITWISE: "b", Resume.SAME_TOKENS: "t", Resume.REFUSED: "-"}


PASSES, LEFT_OUT = FINE = ("passes", "left out")


def load_factory(name: str) -> Callable[[], Subject]:
    """Import `module:factory`."""
    module, _, factory = name.partition(":")
    return cast("Callable[[], Subject]", getattr(import_module(module), factory))


def run_checks(driver: Driver) -> dict[str, str]:
    """Run the checks; return by name `passes`, `left out`, or the violation."""
    verdicts = dict.fromkeys(CHECKS, LEFT_OUT)
    for name, check in checks_for(driver.subject.refused_options).items():
        try:
            check.run(driver)
            driver.settle()
            verdicts[name] = PASSES
        except LeftOut:
            continue
        except Exception as error:  # noqa: BLE001 - whatever an engine raises, the other checks are made
            verdicts[name] = str(error) if isinstance(error, Violation) else repr(error)
            if (problem := _cleared(driver)) is not None:
                verdicts[name] += f"; the checks after it were not made, as the engine is not idle again: {problem}"
                break
    return verdicts


def _cleared(driver: Driver) -> str | None:
    """Drop everything, and return what keeps the engine from being idle."""
    try:
        driver.engine.drop([request_id for request_id, _ in driver.outputs])
        driver.settle()
    except Exception as error:  # noqa: BLE001 - as above
        return repr(error)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, and print what it found."""
    parser = argparse.ArgumentParser(description="Check an engine against sluice.engine.interface.")
    parser.add_argument("factory", help="MODULE:FACTORY, which returns a sluice.engine.conformance.subject.Subject")
    subject = load_factory(parser.parse_args(arguments).factory)()
    try:
        driver = Driver(subject)
        verdicts = run_checks(driver)
        for name, verdict in verdicts.items():
            _say(verdict, CHECKS[name].sentence)
        try:
            matrix = resume_matrix(driver)
        except Exception as error:  # noqa: BLE001 - as above
            _say(repr(error), "a request continues with the tokens that it would have had")
            return 1
        print("\nresumed after 1, 2, … tokens (b: bitwise, t: same tokens, -: refused)")
        for name, cells in matrix.items():
            print(f"{name:17} {''.join(LETTERS[cell] for cell in cells)}")
        return int(any(verdict not in FINE for verdict in verdicts.values()))
    finally:
        subject.close()


def _say(verdict: str, sentence: str) -> None:
    print(f"{verdict:9} {sentence}" if verdict in FINE else f"VIOLATED  {sentence}\n          {verdict}")


if __name__ == "__main__":
    sys.exit(main())
