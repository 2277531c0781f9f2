# One image for worker, recorder, callbacks and gateway, with files in buckets and traces. The CUDA build of torch comes
# with the wheel.
FROM python:3.12-slim

# A C compiler for the CPU kernels, which are compiled into the wheel, and for Triton's launchers at first use.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY sluice sluice
COPY engine engine
COPY gateway gateway
COPY history history
COPY kernels kernels
COPY migrations migrations
COPY producer producer
COPY protocol protocol
COPY worker worker
# On a GPU, these ran (docs/guide/gpu.md#what-you-need); the suite ran with those of constraints.txt.
ARG TORCH=2.11.0
ARG TRITON=3.6.0
RUN sed --regexp-extended "s/^torch==.*/torch==$TORCH/; s/^triton==.*/triton==$TRITON/" constraints.txt > image.txt \
    && pip install --no-cache-dir --constraint image.txt '.[worker,gateway,gateway-s3,otel]'

RUN useradd --create-home sluice
USER sluice
# A new named volume of Docker takes over the folder's owner; other mounts keep theirs, so let user 1000 write there.
RUN mkdir --parents ~/.cache/huggingface ~/.cache/sluice ~/files
# Beside the CPU kernels, so that one volume keeps all that is compiled.
ENV TRITON_CACHE_DIR=/home/sluice/.cache/sluice/triton
STOPSIGNAL SIGTERM
CMD ["worker", "start", "--gpu", "0"]
