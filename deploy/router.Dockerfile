# The router: no torch, no GPU. Build from the repository's root:
#   docker build -f deploy/router.Dockerfile -t fissile-router .
FROM python:3.12-slim

RUN useradd --create-home fissile
WORKDIR /opt/fissile
COPY pyproject.toml README.md ./
COPY common common
COPY fissile fissile
COPY router router
# Tokenizers are all the router needs of transformers: no deep-learning framework is installed with it.
RUN pip install --no-cache-dir '.[http]'

USER fissile
EXPOSE 50051 8000 9101
CMD ["python", "-P", "-m", "router", "--host", "0.0.0.0"]
