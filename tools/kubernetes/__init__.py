"""The check of `deploy/kubernetes`: `make check-kubernetes`."""
