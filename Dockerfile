# One image for worker, recorder, callbacks and gateway, with files in buckets and traces. The CUDA build of torch comes
# with the wheel.
FROM python:3.12-slim

# A C compiler for the CPU kernels, which are compiled into the wheel, and for Triton's launchers at first use.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY sluice sluice
COPY engine engine
COPY kernels kernels
COPY migrations migrations
COPY producer producer
COPY worker worker
RUN pip install --no-cache-dir --constraint constraints.txt '.[worker,gateway,gateway-s3,otel]'

RUN useradd --create-home sluice
USER sluice
# Volumes that are mounted here take over the folders' owner.
RUN mkdir --parents ~/.cache/huggingface ~/files
STOPSIGNAL SIGTERM
CMD ["worker", "start", "--gpu", "0"]
