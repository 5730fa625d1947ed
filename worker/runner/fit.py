"""Whether a model can run as a worker was told, as far as its configuration says. No torch: it is asked before ranks
start, and again by each of them."""

from worker.loader.config import CommonConfig, ModelConfig
from worker.loader.errors import ModelConfigError
from worker.loader.source import ModelSource
from worker.runner.config import RunnerConfig


def check_load_format(source: ModelSource, load_format: str) -> None:
    """Raises ModelConfigError."""
    if load_format not in ("auto", "dummy", source.format.value):
        raise ModelConfigError(f"{source.path} is no {load_format} model but a {source.format.value} one")


def check_fit(model: CommonConfig, config: RunnerConfig) -> None:
    """Raises ModelConfigError."""
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ModelConfigError(
            f"max_model_len {config.max_model_len} is more than the model's own {model.max_model_len}"
        )
    if isinstance(model, ModelConfig):
        check_shares(model, config)
        if config.expert_parallel and model.experts is None:
            raise ModelConfigError(f"expert_parallel: {model.architecture} has no experts to spread over ranks")


def check_shares(model: ModelConfig, config: RunnerConfig) -> None:
    """That ranks can share what every layer has; layers of a kind of their own look at what else they have. Raises
    ModelConfigError."""
    num_tp, experts = config.tensor_parallel_size, model.experts
    shared = [(model.num_heads, "attention heads")]
    if experts is None:
        shared.append((model.intermediate_size, "features inside an MLP"))
    elif not config.expert_parallel:
        shared.append((experts.intermediate_size, "features inside an expert"))
    for number, what in shared:
        if number % num_tp:
            raise ModelConfigError(
                f"tensor_parallel_size {num_tp}: the {number} {what} of {model.architecture} do not divide by it"
            )
    num_kv = model.num_kv_heads
    if num_kv % num_tp and num_tp % num_kv:
        raise ModelConfigError(
            f"tensor_parallel_size {num_tp}: the {num_kv} KV heads of {model.architecture} do not divide by it, nor it "
            "by them"
        )
    num_ranks = num_tp * config.dp_size
    if experts is not None and config.expert_parallel and experts.num_experts % num_ranks:
        raise ModelConfigError(
            f"expert_parallel: {experts.num_experts} experts cannot be divided over {num_ranks} ranks, {num_tp} of "
            f"each of {config.dp_size} workers"
        )


def check_devices(num_devices: int, local_rank: int) -> None:
    """Raises ModelConfigError where there is none for that rank of this host."""
    if local_rank >= num_devices:
        raise ModelConfigError(
            f"no CUDA device for rank {local_rank} of this host: {num_devices} are visible, and each rank takes one"
        )
