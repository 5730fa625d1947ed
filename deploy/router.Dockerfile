# The router: no torch, no GPU. Build from the repository's root:
#   docker build -f deploy/router.Dockerfile -t fissile-router .
FROM python:3.12-slim

RUN useradd --create-home fissile
WORKDIR /opt/fissile
COPY pyproject.toml setup.py README.md LICENSE ./
COPY common common
COPY fissile fissile
COPY router router
RUN pip install --no-cache-dir '.[http,tracing]'

ENV FISSILE_ROUTER_HOST=0.0.0.0 \
    FISSILE_ROUTER_HTTP_HOST=0.0.0.0 FISSILE_ROUTER_HTTP_PORT=8000 \
    FISSILE_ROUTER_METRICS_HOST=0.0.0.0 FISSILE_ROUTER_METRICS_PORT=9101
USER fissile
EXPOSE 50051 8000 9101
ENTRYPOINT ["fissile", "router"]
