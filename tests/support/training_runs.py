"""One training of a small model in two ways: unsplit in one process, and over ranks inside one of the usual wrappers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import oslo_engine as oslo
import small_models
from oslo_engine.footprint.live_bytes import LiveBytes
from oslo_engine.policy.registry import find_policy
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.rewrite.state import parallel_state
from oslo_engine.topology import Topology

LENGTH = 10


@dataclass(frozen=True)
class Recipe:
    """How to train. ``wrapper``: "none", "ddp", "fsdp2", "zero0" to "zero3"; ``rows``: of a step's batch, over all dp ranks."""

    model: str = "gpt2"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    wrapper: str = "ddp"
    schedule: str = "1f1b"
    autocast: str = ""
    accumulation: int = 1
    clip: float = 0.5
    checkpointing: bool = False
    sequence_parallel: bool = False
    lora: bool = False
    dtype: str = "float32"
    steps: int = 3
    rows: int = 8

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass
class Trained:
    """losses: of each step, mean over dp; norms: before clipping; weights: what this rank holds, whole over dp; shards: of
    adapters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    shards: dict[str, Any] = field(default_factory=dict)
    collectives: dict[str, list[int]] = field(default_factory=dict)
    cpu_s: float = 0.0
    optimizer_bytes: int = 0
    activation_bytes: int = 0


def unsplit(recipe: Recipe) -> tuple[Any, list[str]]:
    """The model before it is split, the same everywhere, and the names of its blocks."""
    cls, config, blocks = getattr(small_models, recipe.model)()
    for option in [option for option in vars(config) if "drop" in option]:
        setattr(config, option, 0.0)
    torch.manual_seed(0)
    model = cls(config).train().to(getattr(torch, recipe.dtype))
    if recipe.dtype == "float64":
        model.config._experts_implementation = "eager"  # the grouped product has no double precision
    if recipe.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, blocks


def batches(recipe: Recipe, step: int) -> list[dict[str, Tensor]]:
    """The batches whose gradients one step adds up."""
    ids = torch.randint(3, small_models.VOCAB, (recipe.rows, LENGTH), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": part, "labels": part} for part in ids.chunk(recipe.accumulation)]


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    # A larger eps: the gradient of a key bias is rounding alone, which AdamW would turn into a step of its own.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


class _InPieces(TorchFunctionMode):
    """Linear layers add up their products in pieces, as another reduction order.

    Args:
        of_weight: into which both of a weight's dimensions are cut: the output and the gradient of the input are sums of so
            many products.
        of_rows: into which the rows of the input are cut, and with them the gradient of the weight.
    """

    def __init__(self, of_weight: int, of_rows: int) -> None:
        super().__init__()
        self._of_weight, self._of_rows = of_weight, of_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is torch.addmm:  # of Transformers' Conv1D
            bias, input, weight = args
            return self._linear(input, weight.T, bias)
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        blocks = [row.tensor_split(self._of_weight, 1) for row in weight.tensor_split(self._of_weight, 0)]
        whole = torch.cat(
            [
                torch.cat(
                    [sum(map(nn.functional.linear, rows.tensor_split(self._of_weight, -1), block)) for block in blocks], -1
                )
                for rows in input.tensor_split(self._of_rows, 0)
            ]
        )
        return whole if bias is None else whole + bias.to(whole.dtype)


def train_unsplit(recipe: Recipe, *, pieces: tuple[int, int] = (1, 1)) -> Trained:
    """
    Args:
        pieces: in which linear layers add up; see ``_InPieces``.
    """
    model, _ = unsplit(recipe)
    if recipe.lora:
        model = with_lora(model, recipe)
    optimizer, trained, started = optimizer_for(trainable(model)), Trained(), time.process_time()
    for step in range(recipe.steps):
        losses = []
        for batch in batches(recipe, step):
            with autocast(recipe), _InPieces(*pieces) if pieces != (1, 1) else nullcontext():
                loss = model(**batch).loss / recipe.accumulation
            loss.backward()
            losses.append(loss.item())
        trained.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)))
        optimizer.step()
        optimizer.zero_grad()
        trained.losses.append(sum(losses))
    trained.cpu_s = time.process_time() - started
    whole = model.get_base_model() if recipe.lora else model
    trained.weights = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    return trained


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def autocast(recipe: Recipe) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=getattr(torch, recipe.autocast)) if recipe.autocast else nullcontext()


LORA_TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "value", "dense"],
    "t5": ["q", "v", "wi", "wo"],
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "mixtral": ["q_proj", "v_proj", "o_proj"],
}


def with_lora(model: Any, recipe: Recipe) -> Any:
    import peft

    # Half of the usual scale: with more, 20 steps at this rate turn a rounding error of the one process into 1e-3.
    config = peft.LoraConfig(
        r=4, lora_alpha=2, target_modules=LORA_TARGETS[recipe.model], fan_in_fan_out=recipe.model == "gpt2"
    )
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:  # as if it had been trained: one half is zero at the beginning
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


def train_rank(recipe: Recipe, *, count: bool = False) -> Trained:
    """What one rank does. A job of the rank pool.

    Args:
        count: count the collectives of the last step.
    """
    model, blocks = unsplit(recipe)
    adapted = with_lora(model, recipe) if recipe.lora else None
    oslo.parallelize(
        adapted or model,
        tp=recipe.tp,
        pp=recipe.pp,
        schedule=recipe.schedule,
        sequence_parallel=recipe.sequence_parallel,
    )
    mpu = model.mpu
    loop = wrapped(adapted or model, model, blocks, recipe)
    rank, trained, started = mpu.get_data_parallel_rank(), Trained(), time.process_time()
    for step in range(recipe.steps):
        if count and step == recipe.steps - 1:
            from oslo_engine.comm.counter import CollectiveCounter

            with CollectiveCounter() as counter:
                loss, norm = loop([_mine(batch, rank, recipe) for batch in batches(recipe, step)])
            trained.collectives = counter.calls
        else:
            loss, norm = loop([_mine(batch, rank, recipe) for batch in batches(recipe, step)])
        trained.losses.append(_mean(loss, mpu.get_data_parallel_group()))
        trained.norms.append(norm)
    trained.cpu_s = time.process_time() - started
    trained.weights = {name: _whole_over_dp(parameter) for name, parameter in model.named_parameters()}
    trained.shards = {tensor.name: tensor.shard for tensor in parallel_state(model).adapters}
    trained.optimizer_bytes = loop.optimizer_bytes()
    if count and recipe.wrapper == "ddp":
        trained.activation_bytes = activation_bytes(model, _mine(batches(recipe, 0)[0], rank, recipe))
    return trained


def activation_bytes(model: Any, batch: dict[str, Tensor]) -> int:
    """The most bytes that are alive at one time of a forward and backward, beside weights, gradients and the batch."""
    live = LiveBytes()
    for measured in (False, True):
        if measured:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            live.leave_out([*model.parameters(), *gradients, *batch.values()])
        with live if measured else nullcontext():
            output = model(**batch)
            for part in output if "_oslo" in vars(model) and parallel_state(model).program is not None else [output]:
                part.loss.backward()
    return live.most


def _mine(batch: dict[str, Tensor], rank: int, recipe: Recipe) -> dict[str, Tensor]:
    return {name: value.chunk(recipe.dp)[rank] for name, value in batch.items()}


def _mean(loss: float, group: Any) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total) / dist.get_world_size(group)


def _whole_over_dp(parameter: Any) -> Tensor:
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


class Loop:
    """A training step as a user writes it: forward, backward, clip, step.

    forward: what is called with a batch. backward: what is called with a loss. update: clips, steps, and gives the norm.
    """

    def __init__(
        self,
        forward: Any,
        recipe: Recipe,
        *,
        backward: Callable[[Tensor], Any] = Tensor.backward,
        update: Callable[[], float],
        between: Callable[[], Any] = lambda: None,
        unsynchronised: Callable[[], AbstractContextManager[Any]] = nullcontext,
        optimizer: Any = None,
        scale: int = 1,
    ) -> None:
        self._forward, self._recipe, self._backward, self._update = forward, recipe, backward, update
        self._between, self._unsynchronised, self._optimizer, self._scale = between, unsynchronised, optimizer, scale

    def __call__(self, parts: list[dict[str, Tensor]]) -> tuple[float, float]:
        total = 0.0
        for number, batch in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else self._unsynchronised():
                for loss in self._losses(batch):
                    self._backward(loss / self._scale)
                    total += loss.item() / self._recipe.accumulation
            if not last:
                self._between()
        return total, self._update()

    def _losses(self, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        with autocast(self._recipe):
            output = self._forward(**batch)
        if self._recipe.pp == 1:
            yield output.loss
        else:
            yield from (micro.loss for micro in output)

    def optimizer_bytes(self) -> int:
        states = getattr(self._optimizer, "state", {}).values()
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def wrapped(outer: Any, model: Any, blocks: list[str], recipe: Recipe) -> Loop:
    """The loop of ``recipe.wrapper``. outer: the model, or what PEFT made of it."""
    if recipe.wrapper.startswith("zero"):
        return _deepspeed(outer, model, recipe)
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    forward = outer
    if recipe.wrapper == "ddp":
        forward = nn.parallel.DistributedDataParallel(outer, process_group=model.mpu.get_data_parallel_group())
        no_sync = forward.no_sync
    elif recipe.wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = parallel_state(model).mesh.device_mesh["dp"]
        for name in blocks:
            if any(True for _ in model.get_submodule(name).parameters()):
                fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_for(trainable(outer))

    def update() -> float:
        norm = oslo.clip_grad_norm_(forward, recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return Loop(forward, recipe, update=update, unsynchronised=no_sync, optimizer=optimizer, scale=recipe.accumulation)


def _deepspeed(outer: Any, model: Any, recipe: Recipe) -> Loop:
    import_deepspeed()
    import deepspeed

    rows = recipe.rows // recipe.accumulation // recipe.dp
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.clip,
        "zero_optimization": {"stage": int(recipe.wrapper[-1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if recipe.autocast == "bfloat16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    optimizer = optimizer_for(trainable(outer))
    engine, *_ = deepspeed.initialize(
        model=outer, model_parameters=trainable(outer), optimizer=optimizer, mpu=model.mpu, config=config
    )

    def update() -> float:
        engine.step()
        return float(engine.get_global_grad_norm() or "nan")  # ZeRO 0 does not tell it

    return Loop(
        engine, replace(recipe, autocast=""), backward=engine.backward, update=update, between=engine.step, optimizer=optimizer
    )


def import_deepspeed() -> None:
    """Import DeepSpeed in a rank: it reads the place of the process from the environment."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}


def differences(recipe: Recipe, reference: Trained, ranks: list[Trained]) -> dict[str, float]:
    """The largest differences from the unsplit training: of a loss (relative), a gradient norm (relative), a weight."""
    model, _ = unsplit(recipe)
    policy = None if recipe.tp * recipe.pp == 1 else find_policy(None, model.config.model_type)
    plan = plan_model(model, policy, Topology(tp=recipe.tp)).plan
    found = {"loss": 0.0, "norm": 0.0, "weight": 0.0}
    for rank, trained in enumerate(ranks):
        assert trained.weights, rank
        found["loss"] = max(found["loss"], _largest(trained.losses, reference.losses))
        if trained.norms and trained.norms[0] == trained.norms[0]:
            found["norm"] = max(found["norm"], _largest(trained.norms, reference.norms))
        for name, value in trained.weights.items():
            whole = reference.weights[name] if name in reference.weights else reference.weights[plan.tensor(name).name]
            shard = trained.shards[name] if name in trained.shards else plan.tensor(name).shard
            expected = whole if shard is None else shard.apply(whole, rank % recipe.tp)
            assert value.shape == expected.shape, name
            found["weight"] = max(found["weight"], float((value - expected).abs().max()))
    return found


def distance(one: Trained, other: Trained) -> dict[str, float]:
    """How far two trainings in one process are from one another, by the same measures."""
    weights = (float((value - other.weights[name]).abs().max()) for name, value in one.weights.items())
    return {"loss": _largest(one.losses, other.losses), "norm": _largest(one.norms, other.norms), "weight": max(weights)}


def spread(trainings: Sequence[Trained]) -> dict[str, float]:
    """The largest distances between any two of them."""
    pairs = [distance(one, other) for one, other in itertools.permutations(trainings, 2)]
    return {name: max(pair[name] for pair in pairs) for name in pairs[0]}


def _largest(values: list[float], wanted: list[float]) -> float:
    assert len(values) == len(wanted)
    return max(abs(value - right) / abs(right) for value, right in zip(values, wanted, strict=True))
