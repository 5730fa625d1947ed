"""Run the tests of this folder against a real service: `python -m compat.run PYTHON [pytest arguments]`.

The service is of this environment; PYTHON is that of the frameworks, where `compat/requirements.txt` is installed. One
worker with SmolLM2, which knows no tools, and a chat template that tells it of them.
"""

import os
import subprocess
import sys
from pathlib import Path

from fissile.cli.cluster import ClusterConfig, running_cluster

FOLDER = Path(__file__).resolve().parent
WORKER_ARGUMENTS = (
    "--chat-template", str(FOLDER / "hermes.jinja"), "--served-model-name", "smollm2,gpt-4o",
    "--max-model-len", "4096", "--kv-cache-gib", "0.5", "--num-threads", "1",
)  # fmt: skip
API_KEY = "compat"


def main(python: str, *arguments: str) -> int:
    config = ClusterConfig(1, 0, "smollm2", WORKER_ARGUMENTS, http_port=0, api_key=API_KEY)
    with running_cluster(config, lambda _name, _line: None) as cluster:
        # Nothing of this may ask a network: prices of models, telemetry.
        environment = os.environ | {
            "OPENAI_BASE_URL": f"{cluster.http_address}/v1",
            "OPENAI_API_KEY": API_KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LANGSMITH_TRACING": "false",
        }
        command = [python, "-P", "-m", "pytest", "-c", str(FOLDER / "pytest.ini"), *(arguments or (str(FOLDER),))]
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
