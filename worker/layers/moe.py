"""A mixture of experts in place of a gated MLP."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from worker.attention.context import current_context
from worker.kernels.experts import ROUTE_EXPERTS, RouteSpec
from worker.kernels.linear import LINEAR, LinearSpec, PackedWeight
from worker.kernels.weights import Dense
from worker.layers.blocks import GatedMLP
from worker.layers.experts import ExpertsLayout, RoutedExperts, apart
from worker.layers.linear import MergedColumnLinear
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape
from worker.loader.checkpoint import LazyTensor, WeightTarget
from worker.loader.experts import ExpertsConfig
from worker.parallel.exchange import TokenExchange


class Router(WeightedLayer):
    """Chooses each token's experts, on every rank alike."""

    def __init__(self, setup: LayerSetup, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        num_experts, device = config.num_experts, setup.device
        self._dtype = torch.float32 if config.has_float32_router else setup.dtype
        spec = RouteSpec(
            num_experts,
            config.top_k,
            config.is_sigmoid,
            config.is_normalised,
            config.num_groups,
            config.num_top_groups,
            config.scale,
        )
        self._route = setup.kernels.choose(ROUTE_EXPERTS, spec, setup.dtype)
        self._linear = setup.kernels.choose(LINEAR, LinearSpec(hidden_size, num_experts), self._dtype)
        self.weight = torch.empty(num_experts, hidden_size, dtype=self._dtype, device=device)
        self.bias = torch.zeros(num_experts, dtype=self._dtype, device=device) if config.has_bias else None
        self.correction = torch.zeros(num_experts, device=device) if config.has_correction else None
        self._packed: PackedWeight = None

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        names = {"weight": self.weight, "bias": self.bias, "e_score_correction_bias": self.correction}
        return {f"{path}.{name}": partial(self._load, into) for name, into in names.items() if into is not None}

    def weights(self) -> Iterable[Tensor]:
        return [weight for weight in (self.weight, self.bias, self.correction) if weight is not None]

    def _load(self, into: Tensor, tensor: LazyTensor) -> None:
        expect_shape(tensor, tuple(into.shape))
        into.copy_(tensor.read())

    def pack(self) -> int:
        """The plain weight stays for kernels that take the norm before the product, too: it is small."""
        self._packed = self._linear.pack(Dense(self.weight, self.bias))
        return super().pack()

    def forward(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(the norm of residual + x, residual + x, weights [T, k], expert numbers [T, k])"""
        found = None
        if norm.is_of_one_rank:
            found = self._route.of_norm(x, residual, norm.weight, norm.eps, self.weight, self.bias)
        if found is None:
            hidden, residual = norm.add_norm(x, residual)
            return hidden, residual, *self.choose(hidden)
        logits, hidden, residual = found
        return hidden, residual, *self._route(logits, self.correction)

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [T, k], expert numbers [T, k])"""
        return self._route(self._linear(hidden.to(self._dtype), self._packed), self.correction)


class MoeBlock(nn.Module):
    """The sum of a token's experts, weighted by the router, and of the shared ones, where there are some. Returns this
    rank's part of the sum over ranks.

    Names are those of DeepSeek's and GLM's checkpoints: `gate`, `experts`, `shared_experts`, `shared_expert_gate`.
    """

    def __init__(
        self,
        setup: LayerSetup,
        hidden_size: int,
        config: ExpertsConfig,
        layout: ExpertsLayout = apart,
        router: Router | None = None,
    ) -> None:
        """`router`: another one than the plain one."""
        super().__init__()
        self.gate = router or Router(setup, hidden_size, config)
        self.experts = RoutedExperts(setup, hidden_size, config, layout)
        self.shared_experts = GatedMLP(setup, hidden_size, config.shared_size) if config.shared_size else None
        self.shared_gate = None
        if config.has_shared_gate:
            self.shared_gate = MergedColumnLinear(setup, hidden_size, {"shared_expert_gate": (1, 1)})
        self._tp, self._dp = setup.tp, setup.dp
        self._exchange = TokenExchange(setup.dp)

    def forward(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(of norm(residual + x), residual + x)"""
        hidden, residual, weights, ids = self.gate(norm, x, residual)
        if self._dp.size > 1:
            num_exchanged = current_context().num_exchanged
            parts = self.experts(*self._exchange.gather(hidden, weights, ids, num_exchanged), None)
            routed = self._exchange.scatter(parts, len(hidden))
        else:
            place = self._tp.place(*hidden.shape, dtype=hidden.dtype) if self.shared_experts is None else None
            routed = self.experts(hidden, weights, ids, place)
        return routed if self.shared_experts is None else self._shared(hidden).add_(routed), residual

    def _shared(self, hidden: Tensor) -> Tensor:
        """Where a part of a sum may be (`Group.place`)."""
        assert self.shared_experts is not None
        shared = self.shared_experts.down_proj(self.shared_experts.gate_up_proj(hidden))
        return shared if self.shared_gate is None else shared.mul_(self.shared_gate(hidden).sigmoid())
