"""All that needs a GPU, in one run of less than six minutes: python -m benchmarks.gpu_check

1. Every kernel against fp64: types, odd and long rows, one element, strides. Dropout's masks against those of the reference.
2. Fused GPT-2 and Llama against the plain ones in fp32: logits, loss, every gradient.
3. A training step of each, plain, fused, with torch's attention kernel and with torch.compile: milliseconds and peak memory.
4. Generation of each, plain and fused, with n-grams blocked by Transformers' processor and by the kernel: tokens a second.
5. Kernels beside plain torch, torch.compile and Liger at two shapes: benchmarks.kernels.

Parts that would pass the budget are left out, and said to be. Written: kernels.csv, models.csv (appended) and pictures in
benchmarks/results. The exit code is 1 if anything computed a wrong number. Nothing is downloaded; weights are random.
``TRITON_INTERPRET=1 python -m benchmarks.gpu_check --small`` tries the script where there is no GPU; its times say nothing.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import CASES, random
from benchmarks.kernels import DTYPES, RESULTS, append, copy_bandwidth, draw, error_of, here, measure, run_case, show

# Relative to the largest value: the rounding of the result and of what gradients are computed from.
TOLERANCE = {"fp32": 3e-5, "bf16": 2e-2, "fp16": 3e-3}
SHAPES = [(1, 8), (37, 129), (5, 4096), (3, 20000)]
MODEL_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3


@dataclass(frozen=True)
class Sizes:
    hidden: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    rows: int
    length: int
    new_tokens: int


LARGE = {
    "gpt2": Sizes(1024, 4096, 12, 16, 50304, 8, 512, 64),
    "llama": Sizes(2048, 5632, 8, 16, 32000, 4, 1024, 64),
}
TINY = {name: Sizes(32, 64, 1, 4, 64, 2, 8, 3) for name in LARGE}


@dataclass(frozen=True)
class ModelRow:
    """One line of models.csv. per_second: tokens."""

    date: str
    gpu: str
    torch: str
    triton: str
    transformers: str
    model: str
    what: str
    provider: str
    ms: float
    per_second: float
    peak_mib: float


class Check:
    """One run: its device, its clock, and what went wrong."""

    def __init__(self, *, small: bool, budget_s: float, output: Path) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.small, self.budget_s, self.output = small, budget_s, output
        self.started = time.monotonic()
        self.faults: list[str] = []
        self.left_out: list[str] = []
        self.models: list[ModelRow] = []

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether a part of about so many seconds still fits; notes it where not."""
        if time.monotonic() - self.started + seconds <= self.budget_s:
            return True
        self.left_out.append(what)
        print(f"left out, no time: {what}", flush=True)
        return False

    def judge(self, what: str, figure: float, limit: float) -> None:
        right = figure <= limit
        print(f"{'ok  ' if right else 'WRONG'} {what}: {figure:.2e} (limit {limit:.0e})", flush=True)
        if not right:
            self.faults.append(what)

    # ------------------------------------------------------------------ 1

    def kernels_are_right(self) -> None:
        for case in CASES:
            if not case.exact:
                continue
            for dtype_name, dtype in DTYPES.items():
                worst, where = 0.0, ""
                for rows, length in SHAPES[:2] if self.small else SHAPES:
                    if case.name == "rotary" and length < 2:
                        continue
                    inputs = case.make(rows, length, dtype, self.device)
                    for given, layout in ((inputs, "plain"), (tuple(map(_strided, inputs)), "strided")):
                        try:
                            error = error_of(case.ours, case, given)
                        except Exception as problem:  # reported as a fault of this kernel
                            error, layout = float("inf"), f"{layout}, {type(problem).__name__}: {problem}"
                        if not error <= worst:
                            worst, where = error, f"{rows}x{length} {layout}"
                self.judge(f"{case.name} {dtype_name} ({where})", worst, TOLERANCE[dtype_name])

    def masks_are_those_of_the_reference(self) -> None:
        from oslo_engine.kernels.bias_dropout_residual import bias_dropout_residual, kept

        x = random(37, 130, dtype=torch.float32, device=self.device)
        seed = torch.tensor(1234567, device=self.device)
        y = bias_dropout_residual(x, None, None, 0.3, True, seed)
        mask = kept(x.shape, seed.cpu(), 0.3, 0).to(self.device)
        self.judge("dropout, mask", float(((y != 0) != mask).sum()), 0)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        self.judge("dropout, mask of the gradient", float(((gradient != 0) != mask).sum()), 0)

    # ------------------------------------------------------------------ 2 to 4

    def models_are_right(self) -> None:
        for name in LARGE:
            model = build(name, TINY[name] if self.small else _shortened(LARGE[name]), self.device, torch.float32, "eager")
            batch = batch_for(model, TINY[name] if self.small else _shortened(LARGE[name]), self.device)
            allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
            plain = _step(model, batch)
            model.fuse()
            print(model.fusion_report, flush=True)
            fused = _step(model, batch)
            torch.backends.cuda.matmul.allow_tf32 = allowed
            self.judge(f"{name} fused, logits", _difference(fused[0], plain[0]), MODEL_LIMIT)
            self.judge(f"{name} fused, loss", _difference(fused[1], plain[1]), MODEL_LIMIT)
            largest = max(float(each.abs().max()) for each in plain[2].values())
            worst = max(
                float((fused[2][key] - each).abs().max()) / max(float(each.abs().max()), 1e-3 * largest)
                for key, each in plain[2].items()
            )
            self.judge(f"{name} fused, gradients", worst, GRADIENT_LIMIT)

    def models_are_timed(self) -> None:
        for name, sizes in (TINY if self.small else LARGE).items():
            for provider in ("eager", "eager fused", "sdpa", "sdpa fused"):
                if self.has_time(12, f"{name}, {provider}"):
                    self._time_model(name, sizes, provider)
            if not self.small and self.has_time(75, f"{name}, training step, sdpa compile"):
                self._time_training(name, sizes, "sdpa compile")

    def _time_model(self, name: str, sizes: Sizes, provider: str) -> None:
        self._time_training(name, sizes, provider)
        model = self._model(name, sizes, provider).eval()
        prompt = batch_for(model, sizes, self.device)["input_ids"][:, : sizes.length // 4]
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        fused = provider.endswith("fused")
        asked = {"max_new_tokens": sizes.new_tokens, "min_new_tokens": sizes.new_tokens, "do_sample": False, "pad_token_id": 0}
        for what, more in _ways_to_generate(fused):
            ms, peak = self._measured(lambda: model.generate(**inputs, **asked, **more), rounds=1)  # noqa: B023
            self._note(name, what, provider, ms, sizes.rows * sizes.new_tokens, peak)

    def _time_training(self, name: str, sizes: Sizes, provider: str) -> None:
        model: Any = self._model(name, sizes, provider).train()
        batch = batch_for(model, sizes, self.device)
        called = torch.compile(model) if provider.endswith("compile") else model

        def step() -> None:
            called(**batch, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)

        ms, peak = self._measured(step, rounds=3)
        self._note(name, "training step", provider, ms, sizes.rows * sizes.length, peak)

    def _model(self, name: str, sizes: Sizes, provider: str) -> Any:
        attention, _, how = provider.partition(" ")
        model = build(name, sizes, self.device, torch.bfloat16, attention)
        return model.fuse() if how == "fused" else model

    def _measured(self, function: Callable[[], Any], rounds: int) -> tuple[float, float]:
        ms = measure(function, self.device, rounds=rounds, warm=2)
        if self.device.type != "cuda":
            return ms, float("nan")
        torch.cuda.reset_peak_memory_stats()
        function()
        return ms, torch.cuda.max_memory_allocated() / 2**20

    def _note(self, model: str, what: str, provider: str, ms: float, tokens: int, peak: float) -> None:
        row = ModelRow(**here(), model=model, what=what, provider=provider, ms=ms, per_second=1000 * tokens / ms, peak_mib=peak)
        print(f"{model:6} {what:32} {provider:14} {ms:10.2f} ms {row.per_second:12.0f} tokens/s {peak:8.0f} MiB", flush=True)
        self.models.append(row)

    # ------------------------------------------------------------------ 5

    def kernels_are_timed(self) -> None:
        rows = []
        for number, length in [(8, 64)] if self.small else [(8192, 4096), (16384, 8192)]:
            copy = copy_bandwidth(number * length, torch.bfloat16, self.device)
            for case in CASES[:3] if self.small else CASES:
                if self.has_time(10, f"{case.name} at {number}x{length}"):
                    done = run_case(case, number, length, "bf16", self.device, compiled=not self.small, copy=copy)
                    show(done)
                    rows += done
        if rows:
            append(rows, self.output / RESULTS.name)
            draw(rows, self.output / RESULTS.with_suffix(".png").name)

    def save(self) -> None:
        path = self.output / "models.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.is_file()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(ModelRow)])
            if new:
                writer.writeheader()
            for row in self.models:
                told = asdict(row).items()
                writer.writerow({key: f"{value:.5g}" if isinstance(value, float) else value for key, value in told})


def _ways_to_generate(fused: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "generate", {}
    yield "generate, n-grams blocked", {"no_repeat_ngram_size": 3}
    if fused:
        yield "generate, n-grams by kernel", {"no_repeat_ngram_size": 3, "fused_no_repeat_ngram_blocking": True}


def _strided(value: Any) -> Any:
    """The same numbers in every second element of memory."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    wide = torch.empty(*value.shape, 2, dtype=value.dtype, device=value.device)
    return wide[..., 0].copy_(value.detach()).detach().requires_grad_(value.requires_grad)


def _shortened(sizes: Sizes) -> Sizes:
    """For fp32, where only the numbers count."""
    return Sizes(sizes.hidden, sizes.inner, 2, sizes.heads, 4096, 2, 256, 8)


def build(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype, attention: str) -> Any:
    """A model of random weights that differ everywhere, dropout off."""
    import oslo_engine as oslo

    if name == "gpt2":
        config = oslo.GPT2Config(
            vocab_size=sizes.vocabulary,
            n_embd=sizes.hidden,
            n_inner=sizes.inner,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_positions=2 * sizes.length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        cls = oslo.GPT2LMHeadModel
    else:
        config = oslo.LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.inner,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads // 2,
            max_position_embeddings=2 * sizes.length,
        )
        cls = oslo.LlamaForCausalLM
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    return model.to(device, dtype)


def batch_for(model: Any, sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def _step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.train().zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    gradients = {name: copy.copy(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), output.loss.detach(), gradients


def _difference(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes and models, to try the script without a GPU")
    parser.add_argument("--budget", type=float, default=330, help="seconds that no new part is begun after")
    parser.add_argument("--output", type=Path, default=RESULTS.parent, help="folder of the tables and pictures")
    options = parser.parse_args()
    import transformers

    check = Check(small=options.small, budget_s=options.budget, output=options.output)
    transformers.logging.set_verbosity_error()
    print(here(), flush=True)
    check.kernels_are_right()
    check.masks_are_those_of_the_reference()
    check.models_are_right()
    check.models_are_timed()
    check.kernels_are_timed()
    check.save()
    seconds = time.monotonic() - check.started
    print(f"{len(check.faults)} wrong, {len(check.left_out)} left out, {seconds:.0f} s", *check.faults, sep="\n  ")
    sys.exit(1 if check.faults else 0)


if __name__ == "__main__":
    main()
